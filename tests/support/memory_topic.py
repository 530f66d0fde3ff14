"""A topic on the in-memory broker, and sources that run handlers over it in threads."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.core.position.entry import EntryId
from keyshard.errors import BrokerError, NotRunningError
from tests.helpers import keys_of, wait_until
from tests.support.deadlines import deadline, joined

SUBSCRIPTION = "keyshard"
_numbers = itertools.count()


class MemoryTopic:
    """A topic on its own cluster; sources find it by its URL.

    Args:
        partitions: 0 makes a topic without partitions.
        options: Those of the cluster.
    """

    def __init__(self, partitions: int = 2, **options: Any) -> None:
        name = f"test-{os.getpid()}-{next(_numbers)}"
        self.url = f"memory://{name}"
        self.cluster = MemoryCluster.named(name, **options)
        self.topic = self.cluster.create_topic("orders", partitions)
        self.where = self.cluster.partitions(self.topic)

    def source(self, **changes: Any) -> KeyShardSource:
        """A source over it with four ranges, from the earliest message."""
        given: dict[str, Any] = {
            "topics": self.topic, "subscription": SUBSCRIPTION, "parallelism": 4,
            "starting_position": "earliest", "service_url": self.url,
        }  # fmt: skip
        return KeyShardSource(**(given | changes))

    def backlog(self, subscription: str = SUBSCRIPTION) -> int:
        """Messages not acknowledged; -1 before the subscription exists."""
        try:
            return sum(self.cluster.backlog(where, subscription) for where in self.where)
        except BrokerError:
            return -1


class NumberedTopic(MemoryTopic):
    """A topic with numbered messages of four keys, each an entry.

    Args:
        partitions: 1, or 0 for a topic without partitions.
        options: Those of the cluster.
    """

    keys = tuple(keys_of(4))

    def __init__(self, partitions: int = 0, **options: Any) -> None:
        super().__init__(partitions, **options)
        (self.at,) = self.where
        self.ids: list[EntryId] = []

    def publish(self, count: int, *, encrypted: bool = False) -> None:
        for number in range(len(self.ids), len(self.ids) + count):
            message = Message(b"%d" % number, key=self.keys[number % 4])
            ((_, entry_id),) = self.cluster.publish(self.at, message, encrypted=encrypted)
            self.ids.append(entry_id)


class Run:
    """A source that runs a handler in a thread; stopped at the end of the block.

    Args:
        source: The source.
        handle: The handler.
        options: Those of ``source.run``.
        errors: Gets the error that ends the run.
    """

    end_s = deadline(30)
    """Longest wait for the end of the run, seconds."""

    def __init__(
        self, source: KeyShardSource, handle: Any, options: dict[str, Any],
        errors: list[BaseException] | None = None,
    ) -> None:  # fmt: skip
        self.source = source
        self.errors: list[BaseException] = [] if errors is None else errors
        self._handler, self._options = handle, options
        self.thread = threading.Thread(target=self._run, daemon=True)

    def consume(self) -> None:
        """Run in the thread."""
        self.source.run(self._handler, **self._options)

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run."""
        return self.errors[0] if self.errors else None

    def __enter__(self) -> Run:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stop the run, if it still runs."""
        wait_until(lambda: not self.thread.is_alive() or self._stopped())
        joined(self.thread, self.end_s)

    def wait_started(self) -> None:
        """Wait until the source runs or has ended."""
        wait_until(lambda: self.errors or self._runs())

    def _run(self) -> None:
        try:
            self.consume()
        except BaseException as exc:  # noqa: BLE001 - judged by the test
            self.errors.append(exc)

    def _runs(self) -> bool:
        try:
            return self.source._active().rescaler is not None
        except NotRunningError:
            return False

    def _stopped(self) -> bool:
        try:
            self.source.stop()
        except NotRunningError:  # It does not run yet, or no more.
            return False
        return True
