"""A source on the in-memory broker whose handler fails for some keys, and its dead-letter topic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tenacity

from keyshard import Message, Reject, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.columns.messages import messages_of
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter import DeadLetter, DoneMarker, parse
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import KeyShardError
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import sent_events
from tests.helpers import present, wait_until
from tests.support.memory_topic import MemoryTopic, Run
from tests.support.recorded_source import held

TWO_ATTEMPTS = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))
EXECUTORS = ["threads", "async"]
OTHER = "persistent://public/default/other"
BOTH = ("persistent://public/default/orders", OTHER)


class ParkingTopic(MemoryTopic):
    """A topic with two partitions; values are sequence numbers per key."""

    def __init__(self) -> None:
        super().__init__()
        self.dead_letter_partition = TopicPartition(f"{self.topic}-keyshard-DLQ")
        self.broken: set[str | None] = set()
        """Keys for which the handler raises."""
        self.failing: set[int] = set()
        """Sequence numbers for which it raises."""
        self.rejected: set[bytes] = set()
        """Values that the handler rejects."""
        self.handled: defaultdict[str | None, list[int]] = defaultdict(list)
        self.tried: defaultdict[str | None, list[int]] = defaultdict(list)
        self.published: defaultdict[str, int] = defaultdict(int)

    def publish(self, *keys: str, ordering_key: str | None = None) -> None:
        """Publish one message of each key."""
        for key in keys:
            value = b"%d" % self.published[key]
            self.published[key] += 1
            self.cluster.publish(
                self.topic, Stored(value, key, ordering_key, {"trace": f"{key}-{value.decode()}"})
            )

    def handle(self, message: Message) -> None:
        key, number = message.routing_key, int(present(message.value))
        self.tried[key].append(number)
        if message.value in self.rejected:
            raise Reject("not an order")
        if key in self.broken or number in self.failing:
            raise ValueError(f"cannot handle {key}")
        self.handled[key].append(number)

    def run(self, handle: Any = None, **options: Any) -> ParkingRun:
        """Return a block in which a source of the topic runs.

        Args:
            handle: The handler; :meth:`handle` by default.
            options: Options of the source or of its ``run()``.
        """
        # This is the option ``workers`` of run().
        names = {field.name for field in fields(SourceConfig)} - {"workers"}
        settings = {name: options.pop(name) for name in names & options.keys()}
        if "topics_pattern" in settings:
            settings.setdefault("topics", ())
        source = self.source(**({"parallelism": 3} | settings))
        options = {"lanes": 4, "retry": TWO_ATTEMPTS} | options
        return ParkingRun(source, handle or self.handle, options)

    def stored(self) -> list[Message]:
        """Return all dead letters; the first one creates the topic."""
        if self.dead_letter_partition.topic not in self.cluster.topics():
            return []
        log = self.cluster.log(self.dead_letter_partition)
        entries = [log.get(ordinal) for ordinal in range(log.first, len(log))]
        return [
            message
            for entry in entries
            if entry is not None
            for message in messages_of(self.dead_letter_partition, entry.block())
        ]

    def dead_letters(self) -> list[DeadLetter]:
        found = map(parse, self.stored())
        return [one for one in found if isinstance(one, DeadLetter)]

    def markers(self) -> list[DoneMarker]:
        return [one for one in map(parse, self.stored()) if isinstance(one, DoneMarker)]

    def resting(self, where: TopicPartition | None = None) -> int:
        """Entries that the subscription of the dead-letter topic, or of another, keeps."""
        where = where or self.dead_letter_partition
        if where.topic not in self.cluster.topics():
            return 0
        return self.cluster.backlog(where, "keyshard-parked")


class ParkingRun(Run):
    """A run whose block begins when the source runs."""

    def __enter__(self) -> ParkingRun:
        super().__enter__()
        self.wait_started()
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        assert self.error is None or isinstance(self.error, KeyShardError), repr(self.error)


class Record:
    """An observer that writes a history for the checkers."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def started(self, message: Message) -> None:
        self._write("started", message)

    def completed(self, message: Message, _seconds: float) -> None:
        self._write("completed", message)

    def failed(self, message: Message, _seconds: float, _error: BaseException) -> None:
        self._write("failed", message)

    def check(self, orders: ParkingTopic) -> None:
        """Let the checkers judge that everything published is done, in order, and once."""
        sent = sent_events(orders.topic, orders.published, 0.0)
        names = {"no loss", "order per key", "bounded duplicates", "one handler per key"}
        assert held([*sent, *self._events]) >= names

    def _write(self, kind: str, message: Message) -> None:
        where = message.message_id
        self._events.append(
            Event(
                0.0, kind, topic=message.topic, partition=message.partition, ledger=where.ledger,
                entry=where.entry, index=where.batch_index, key=message.routing_key,
                seq=int(present(message.value)), worker="host",
            )
        )  # fmt: skip


def numbers(values: Sequence[DeadLetter]) -> list[int]:
    """Sequence numbers of some dead letters."""
    return [int(present(dead_letter.message.value)) for dead_letter in values]


def broken_for_b(message: Message) -> None:
    """A handler that a process can load; it fails for the key ``b``."""
    if message.key == "b":
        raise ValueError("cannot handle b")


def handler(parking: ParkingTopic, executor: str) -> object:
    async def handle(message: Message) -> None:
        parking.handle(message)

    return handle if executor == "async" else parking.handle


def park_keys(parking: ParkingTopic, run: ParkingRun) -> None:
    """Park a key of each of two topics; three keys would look like an outage."""
    parking.broken = {"a", "c"}
    parking.publish(*"aa")
    parking.cluster.publish(OTHER, Stored(b"0", key="c"))
    wait_until(lambda: run.source.status()["parkedKeys"] == 2 and len(parking.dead_letters()) == 3)
    parking.broken.clear()
