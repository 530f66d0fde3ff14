"""The record of a run: the history that the checkers judge, and a trace for people."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from keyshard.broker.memory import Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.testing.verify.history import Event
from tests.helpers import present
from tests.simulation.owed import Debts, Place
from tests.simulation.scheduler import Scheduler


class OwnedRange(Protocol):
    """A consumer, as far as events name it."""

    @property
    def topic_partition(self) -> TopicPartition: ...

    @property
    def hash_range(self) -> HashRange: ...

    @property
    def worker(self) -> str: ...


def value_of(key: str, seq: int) -> bytes:
    """Payload of a message."""
    return f"{key}:{seq}".encode()


def parse_value(value: bytes | None) -> tuple[str | None, int]:
    """Key, if there is one, and sequence number of a payload."""
    key, _, seq = present(value).decode().rpartition(":")
    return key or None, int(seq)


class Record:
    """Collects events and trace lines, with the virtual time."""

    def __init__(self, scheduler: Scheduler, trace_max: int | None) -> None:
        self._scheduler = scheduler
        self.events: list[Event] = []
        self.trace: deque[str] = deque(maxlen=trace_max)
        self._ends: dict[tuple[str | None, int | None], int] = {}
        self._deletions: Counter[TopicPartition] = Counter()

    def note(self, text: str) -> None:
        """A line for people."""
        task = self._scheduler.current
        self.trace.append(f"{self._scheduler.now_s:9.4f} {task.name if task else '-':32} {text}")

    def add(self, kind: str, **fields: Any) -> None:
        """One event."""
        self.events.append(Event(t=round(self._scheduler.now_s, 6), kind=kind, **fields))

    def sent(self, where: TopicPartition, entry_id: EntryId, messages: Sequence[Message]) -> None:
        for index, message in enumerate(messages):
            key, seq = parse_value(message.value)
            self.add(
                "sent", topic=where.topic, partition=where.partition, ledger=entry_id.ledger,
                entry=entry_id.entry, index=index, key=key, seq=seq,
            )  # fmt: skip

    def delivered(self, owned_range: OwnedRange, blocks: Iterable[EntryBlock]) -> None:
        where = owned_range.topic_partition
        for block in blocks:
            for index, value in zip(block.indices, block.values, strict=True):
                key, seq = parse_value(value)
                self.add(
                    "delivered", topic=where.topic, partition=where.partition,
                    ledger=block.id.ledger, entry=block.id.entry, index=index, key=key, seq=seq,
                    range=str(owned_range.hash_range), worker=owned_range.worker,
                )  # fmt: skip

    def acked(self, owned_range: OwnedRange, entries: Iterable[EntryId]) -> None:
        where = owned_range.topic_partition
        for entry_id in entries:
            self.add(
                "acked", topic=where.topic, partition=where.partition, ledger=entry_id.ledger,
                entry=entry_id.entry, worker=owned_range.worker,
            )  # fmt: skip

    def gained(self, owned_range: OwnedRange) -> None:
        self._range("range_gained", owned_range)

    def lost(self, owned_range: OwnedRange) -> None:
        self._range("range_lost", owned_range)

    def rows(self, batch: str, part: int, worker: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows of one partition of a run of a batch."""
        for row in rows:
            key, seq = parse_value(row["value"])
            ledger, entry, index = map(int, row["__messageId"].split(":"))
            self.add(
                "delivered", topic=row["__topic"], partition=row["__partition"], ledger=ledger,
                entry=entry, index=index, key=key, seq=seq, batch=batch, part=part, worker=worker,
            )  # fmt: skip

    def ended(self, where: Iterable[TopicPartition]) -> None:
        """Topic partitions are deleted; others under their names may follow."""
        for one in where:
            self._ends[one.topic, one.partition] = len(self.events)
            self._deletions[one] += 1

    def deletions(self, where: TopicPartition) -> int:
        """How many topic partitions under this name were deleted."""
        return self._deletions[where]

    def set_cursor(self, debts: Debts) -> None:
        """A client sets a cursor: messages that lay before the start may be owed now.

        Args:
            debts: Tells where the source began until now.
        """
        self.events[:] = [
            one
            for one in self.events
            if one.kind != "acked"
            or not debts.is_given_up(Place(one.topic, one.partition, one.ledger, one.entry, 0))
        ]

    def judged(
        self, debts: Debts, existing: Iterable[TopicPartition], until: int | None = None
    ) -> list[Event]:
        """The events that a checker may judge.

        It leaves out these events:

        - deliveries of messages that were rightly lost, and rows of a run that a crash ended
          before its topic was deleted;
        - acknowledgements of messages that were given up;
        - foreign acknowledgements that the broker forgot again;
        - owners of a deleted topic partition, because no other owner follows.

        Args:
            debts: Tells what was lost.
            existing: Topic partitions that were not deleted at the end.
            until: How many events count; all by default.
        """
        lost = debts.lost
        names = {(one.topic, one.partition) for one in existing}

        # If a broker forgets a foreign acknowledgement, its message comes after others of its key.
        crashed = any(event.kind == "crashed" and event.worker == "broker" for event in self.events)
        late = crashed or debts.unsubscribed
        skipped = debts.skipped_entries if late else set()
        gained: set[tuple[object, ...]] = set()

        def counts(at: int, event: Event) -> bool:
            where = (event.topic, event.partition)
            if (*where, event.ledger, event.entry) in skipped:
                return False
            if event.kind in ("range_gained", "range_lost"):
                if where not in names or at < self._ends.get(where, 0):
                    return False
                owner = (where, event.range, event.worker)
                if event.kind == "range_gained":
                    gained.add(owner)
                return owner in gained  # An owner from before the deletion may end after it.
            if event.kind == "acked":
                place = Place(event.topic, event.partition, event.ledger, event.entry, 0)
                return not debts.is_given_up(place)
            if event.kind == "sent" or (event.kind == "delivered" and event.batch is None):
                return event.stored not in lost
            return event.batch is None or where not in self._ends or event.stored not in lost

        return [event for at, event in enumerate(self.events[:until]) if counts(at, event)]

    def _range(self, kind: str, owned_range: OwnedRange) -> None:
        where = owned_range.topic_partition
        self.add(
            kind, topic=where.topic, partition=where.partition, range=str(owned_range.hash_range),
            worker=owned_range.worker,
        )  # fmt: skip

    def history(self) -> str:
        """The events as JSON lines."""
        return "".join(f"{event.to_json()}\n" for event in self.events)
