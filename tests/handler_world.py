"""A handler over the in-memory broker, with the history of what it did."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from helpers import wait_until
from keyshard import KeyShardSource, Message
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.errors import KeyShardError, NotRunningError
from keyshard.runtime.coordinator import Coordinator
from keyshard.runtime.rescale import RescaleReport
from keyshard.verify.checkers import Verdict, check
from keyshard.verify.history import Event
from keyshard.verify.recorder import Recorder


class RecordedSource(KeyShardSource):
    """A source whose broker writes a history."""

    def record(self, cluster: MemoryCluster, recorder: Recorder) -> None:
        object.__setattr__(self, "_recorded", (cluster, recorder))

    def coordinator(self) -> Coordinator:
        cluster, recorder = self.__dict__["_recorded"]
        made = Coordinator(self, lambda: recorder.broker(MemoryBroker(cluster), lambda: made.epoch))
        object.__setattr__(self, "_made", made)
        return made


class HandlerWorld:
    """One topic with three partitions and a source whose handler runs in a thread.

    Args:
        handle: The handler.
        settings: Fields of the source; those of the run are in ``options``.
    """

    def __init__(
        self, handle: Callable[[Message], Any], *, options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.cluster = MemoryCluster(entries_per_ledger=100)
        self.topic = self.cluster.create_topic("orders", partitions=3)
        self.events: list[Event] = []
        self.recorder = Recorder(self, "host")
        given = {"parallelism": 4, "starting_position": "earliest"} | settings
        self.source = RecordedSource(self.topic, **given)
        self.source.record(self.cluster, self.recorder)
        self.per_key: Counter[str] = Counter()
        self.handled: defaultdict[str, list[int]] = defaultdict(list)
        self.error: KeyShardError | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._producer: threading.Thread | None = None
        options = options or {}

        def run() -> None:
            try:
                self.source.run(handle, observers=[self], **options)
            except KeyShardError as exc:
                self.error = exc

        self._thread = threading.Thread(target=run, name="run", daemon=True)
        self._thread.start()
        wait_until(self._runs)

    def _runs(self) -> bool:
        try:
            self.source.rescale(self.source.parallelism)
        except NotRunningError:
            assert self.error is None
            return False
        return True

    # -- a history, and the observer of the run ---------------------------------------------------

    def write_all(self, events: Iterable[Event]) -> None:
        self.events.extend(events)

    def started(self, message: Message) -> None:
        self._write("started", message)

    def completed(self, message: Message, seconds: float) -> None:  # noqa: ARG002
        key, _, rest = message.value.decode().partition(":")
        self._write("completed", message)
        with self._lock:
            self.handled[key].append(int(rest.rstrip(":")))

    def failed(self, message: Message, *_: object) -> None:
        self._write("failed", message)

    def _write(self, kind: str, message: Message) -> None:
        key, _, rest = message.value.decode().partition(":")
        self.events.append(
            Event(
                0.0, kind, topic=message.topic, partition=message.partition,
                ledger=message.message_id.ledger, entry=message.message_id.entry,
                index=message.message_id.batch_index, key=key, seq=int(rest.rstrip(":")),
                worker="host",
            )
        )  # fmt: skip

    # -- the test's side --------------------------------------------------------------------------

    def publish(self, *keys: str) -> None:
        for key in keys:
            value = f"{key}:{self.per_key[key]}:".encode()
            self.cluster.publish(self.topic, Stored(value, key=key))
            self.per_key[key] += 1

    def keep_publishing(self, keys: int = 60) -> None:
        """Publish in the background until :meth:`end`."""
        names = [f"k{number}" for number in range(keys)]

        def run() -> None:
            while not self._stopping.is_set():
                if sum(self.per_key.values()) < self.count + 2_000:
                    self.publish(*names)
                threading.Event().wait(0.002)

        self._producer = threading.Thread(target=run, name="producer", daemon=True)
        self._producer.start()

    @property
    def count(self) -> int:
        """Messages handled."""
        with self._lock:
            return sum(map(len, self.handled.values()))

    def more(self, messages: int = 200) -> None:
        """Wait until more messages are handled."""
        target = self.count + messages
        wait_until(lambda: self.count >= target)

    def backlog(self) -> int:
        where = self.cluster.partitions(self.topic)
        return sum(self.cluster.backlog(one, "keyshard") for one in where)

    def rescale(self, count: int | None = None, *, balance: bool = False) -> RescaleReport:
        return self.source.rescale(count, balance=balance)

    def end(self) -> None:
        """Stop publishing and the run."""
        self._stopping.set()
        if self._producer is not None:
            self._producer.join(10)
        if self._thread.is_alive():
            self.source.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def check(self) -> dict[str, Verdict]:
        """Let everything be handled and acknowledged, end, and let every checker judge."""
        self._stopping.set()
        if self._producer is not None:
            self._producer.join(10)
        wait_until(lambda: self.count == sum(self.per_key.values()) and self.backlog() == 0)
        self.end()
        assert self.error is None
        self.recorder.sent(self.topic, self.per_key)
        verdicts = {verdict.name: verdict for verdict in check(self.events)}
        broken = [verdict for verdict in verdicts.values() if not verdict.holds]
        assert not broken, broken
        checked = {name for name, verdict in verdicts.items() if verdict.checked}
        assert checked >= {
            "no loss", "order per key", "bounded duplicates", "one handler per key",
            "acknowledged after the checkpoint", "ring covered without overlap", "routed by key",
        }  # fmt: skip
        assert self.handled == {key: list(range(n)) for key, n in self.per_key.items()}
        return verdicts
