"""A handler over a source, and its history; on the in-memory broker or a real one."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from keyshard import Message
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.broker.port import Broker
from keyshard.coordinator.rescale import RescaleReport
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import Recorder
from keyshard.testing.verify.workloads import parse_value
from tests.helpers import DEADLINE_S, present, wait_until
from tests.support.deadlines import joined
from tests.support.memory_topic import Run
from tests.support.recorded_source import RecordedSource, held


class NumberedMessages:
    """One topic of three partitions on the in-memory broker, and the messages of its keys."""

    def __init__(self, entries_per_ledger: int) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=entries_per_ledger)
        self.topic = self.cluster.create_topic("orders", partitions=3)
        self.per_key: Counter[str] = Counter()
        self.stopping = threading.Event()
        self._producer: threading.Thread | None = None

    def publish(self, *keys: str) -> None:
        """Publish one message of each key."""
        for key in keys:
            value = f"{key}:{self.per_key[key]}:".encode()
            self.cluster.publish(self.topic, self.message(value, key))
            self.per_key[key] += 1

    def message(self, value: bytes, key: str) -> Stored:
        return Stored(value, key=key)

    def has_room(self) -> bool:
        """Whether more may be published in the background now."""
        return True

    def keep_publishing(self, keys: int = 60) -> None:
        """Publish in the background until :meth:`stop_publishing`."""
        names = [f"k{number}" for number in range(keys)]

        def run() -> None:
            while not self.stopping.is_set():
                if self.has_room():
                    self.publish(*names)
                threading.Event().wait(0.002)

        self._producer = threading.Thread(target=run, name="producer", daemon=True)
        self._producer.start()

    def stop_publishing(self) -> None:
        self.stopping.set()
        if self._producer is not None:
            joined(self._producer, DEADLINE_S)


class RecordedRun(Run):
    """A handler that runs over a source in a thread, and its history.

    Args:
        handle: The handler.
        connect: Makes a connection to the broker.
        topic: Full topic name.
        options: Those of the run.
        before: The run before a restart; its history continues.
        settings: Fields of the source.
    """

    def __init__(
        self, handle: Callable[[Message], Any], connect: Callable[[], Broker], topic: str,
        options: dict[str, Any], *, before: RecordedRun | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.events: list[Event] = [] if before is None else before.events
        self.recorder = Recorder(self, "host")
        given: dict[str, Any] = {
            "subscription": "keyshard", "parallelism": 4, "starting_position": "earliest",
        } | settings  # fmt: skip
        source = RecordedSource(topic, **given)
        epochs = max((event.epoch or 0 for event in self.events), default=-1) + 1
        source.record(connect, self.recorder, epochs)
        self.handled: defaultdict[str, list[int]] = (
            defaultdict(list) if before is None else before.handled
        )
        self._lock = threading.Lock()
        super().__init__(source, handle, {"observers": [self.recorder, self]} | options)
        self.thread.start()
        self.wait_started()
        assert self.error is None, self.error

    @property
    def count(self) -> int:
        """Messages handled."""
        with self._lock:
            return sum(map(len, self.handled.values()))

    def more(self, messages: int = 200) -> None:
        """Wait until more messages are handled."""
        target = self.count + messages
        wait_until(lambda: self.error or self.count >= target)
        assert self.error is None, self.error

    def rescale(self, count: int | None = None, *, balance: bool = False) -> RescaleReport:
        return self.source.rescale(count, balance=balance)

    def judge(self, per_key: Mapping[str, int]) -> None:
        """End, and let every checker judge, given how many messages of each key were sent."""
        self.end()
        assert self.error is None
        self.recorder.sent(self.topic, per_key)
        assert held(self.events) >= {
            "no loss", "order per key", "bounded duplicates", "one handler per key",
            "acknowledged after the checkpoint", "ring covered without overlap", "routed by key",
        }  # fmt: skip
        assert self.handled == {key: list(range(count)) for key, count in per_key.items()}

    # -- a history, and the observer of the run ---------------------------------------------------

    def write_all(self, events: Iterable[Event]) -> None:
        self.events.extend(events)

    def started(self, message: Message) -> None:
        """The recorder notes it."""

    def completed(self, message: Message, seconds: float) -> None:  # noqa: ARG002
        key, seq = parse_value(present(message.value))
        with self._lock:
            self.handled[key].append(seq)

    def failed(self, message: Message, *_: object) -> None:
        """The recorder notes it."""


class RecordedHandler(NumberedMessages, RecordedRun):
    """A recorded run on the in-memory broker."""

    def __init__(
        self, handle: Callable[[Message], Any], *, options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        NumberedMessages.__init__(self, entries_per_ledger=100)
        self.connections: list[MemoryBroker] = []
        RecordedRun.__init__(self, handle, self._connect, self.topic, options or {}, **settings)

    def _connect(self) -> MemoryBroker:
        self.connections.append(MemoryBroker(self.cluster))
        return self.connections[-1]

    def has_room(self) -> bool:
        return self.per_key.total() < self.count + 2_000

    def backlog(self) -> int:
        """Messages that are not acknowledged."""
        where = self.cluster.partitions(self.topic)
        return sum(self.cluster.backlog(one, "keyshard") for one in where)

    def end(self) -> None:
        self.stop_publishing()
        super().end()

    def check(self) -> None:
        """Let everything be handled and acknowledged, and let every checker judge."""
        self.stop_publishing()
        wait_until(lambda: self.count == self.per_key.total() and self.backlog() == 0)
        self.judge(self.per_key)
