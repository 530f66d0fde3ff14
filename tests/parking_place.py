"""A source on the in-memory broker whose handler fails for some keys, and its dead-letter topic."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tenacity

from helpers import wait_until
from keyshard import KeyShardSource, Message, Reject, RetryPolicy
from keyshard.arrow.messages import messages_of
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.config.source import SourceConfig
from keyshard.core.dead_letter.letters import Letter, Marker, parse
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import KeyShardError, NotRunningError
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import sent_events

TWO_ATTEMPTS = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(2))


class Place:
    """A topic with two partitions; values are sequence numbers per key.

    Args:
        name: Of the in-memory cluster.
    """

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self.cluster = MemoryCluster.named(name)
        self.topic = self.cluster.create_topic("orders", partitions=2)
        self.dead_letters = TopicPartition(f"{self.topic}-keyshard-DLQ")
        self.broken: set[str | None] = set()
        """Keys for which the handler raises."""
        self.rejected: set[bytes] = set()
        """Values that the handler rejects."""
        self.handled: defaultdict[str | None, list[int]] = defaultdict(list)
        self.tried: defaultdict[str | None, list[int]] = defaultdict(list)
        self.published: defaultdict[str, int] = defaultdict(int)

    def publish(self, *keys: str, ordering_key: str | None = None) -> None:
        """One message for each key."""
        for key in keys:
            value = b"%d" % self.published[key]
            self.published[key] += 1
            self.cluster.publish(
                self.topic, Stored(value, key, ordering_key, {"trace": f"{key}-{value.decode()}"})
            )

    def handle(self, message: Message) -> None:
        key, number = message.routing_key, int(message.value)
        self.tried[key].append(number)
        if message.value in self.rejected:
            raise Reject("not an order")
        if key in self.broken:
            raise ValueError(f"cannot handle {key}")
        self.handled[key].append(number)

    def run(self, handle: Any = None, **options: Any) -> Run:
        """Start a source over it in a thread."""
        return Run(self, handle or self.handle, options)

    def backlog(self, subscription: str = "keyshard") -> int:
        where = self.cluster.partitions(self.topic)
        return sum(self.cluster.backlog(one, subscription) for one in where)

    def stored(self) -> list[Message]:
        """Everything in the dead-letter topic, which the first letter creates."""
        if self.dead_letters.topic not in self.cluster.topics():
            return []
        log = self.cluster.log(self.dead_letters)
        entries = [log.get(ordinal) for ordinal in range(log.first, len(log))]
        return [
            message
            for entry in entries
            if entry is not None
            for message in messages_of(self.dead_letters, entry.block())
        ]

    def letters(self) -> list[Letter]:
        found = map(parse, self.stored())
        return [one for one in found if isinstance(one, Letter)]

    def markers(self) -> list[Marker]:
        return [one for one in map(parse, self.stored()) if isinstance(one, Marker)]

    def resting(self, where: TopicPartition | None = None) -> int:
        """Entries that the subscription of the dead-letter topic, or of another, keeps."""
        where = where or self.dead_letters
        if where.topic not in self.cluster.topics():
            return 0
        return self.cluster.backlog(where, "keyshard-parked")


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

    def check(self, place: Place) -> None:
        """Let the checkers judge that everything published is done, in order, and once."""
        sent = sent_events(place.topic, place.published, 0.0)
        verdicts = check([*sent, *self._events])
        broken = [verdict for verdict in verdicts if not verdict.holds]
        assert not broken, broken
        names = {verdict.name for verdict in verdicts if verdict.checked}
        assert names >= {"no loss", "order per key", "bounded duplicates", "one handler per key"}

    def _write(self, kind: str, message: Message) -> None:
        where = message.message_id
        self._events.append(
            Event(
                0.0, kind, topic=message.topic, partition=message.partition, ledger=where.ledger,
                entry=where.entry, index=where.batch_index, key=message.routing_key,
                seq=int(message.value), worker="host",
            )
        )  # fmt: skip


class Run:
    """A running source; stopped at the end of the block."""

    def __init__(self, place: Place, handle: Any, options: dict[str, Any]) -> None:
        self.error: KeyShardError | None = None
        # run() has an option workers of its own, which is meant here.
        names = {field.name for field in fields(SourceConfig)} - {"workers"}
        settings = {name: options.pop(name) for name in names & options.keys()}
        given = {
            "subscription": "keyshard", "parallelism": 3, "starting_position": "earliest",
            "service_url": place.url,
        }  # fmt: skip
        if "topics_pattern" not in settings:
            given["topics"] = place.topic
        self.source = KeyShardSource(**(given | settings))
        self._options = {"lanes": 4, "retry": TWO_ATTEMPTS} | options

        def run() -> None:
            try:
                self.source.run(handle, **self._options)
            except KeyShardError as exc:
                self.error = exc

        self.thread = threading.Thread(target=run, daemon=True)

    def __enter__(self) -> Run:
        self.thread.start()
        wait_until(self._started)
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            self.source.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _started(self) -> bool:
        try:
            self.source.unpark("no such key")
        except NotRunningError:
            return self.error is not None
        return True


def numbers(values: Sequence[Letter]) -> list[int]:
    """Sequence numbers of some letters."""
    return [int(letter.message.value) for letter in values]


def broken_for_b(message: Message) -> None:
    """A handler that a process can load; it fails for the key ``b``."""
    if message.key == "b":
        raise ValueError("cannot handle b")
