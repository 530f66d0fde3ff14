"""A source with handlers on the in-memory broker, whose status a test watches."""

from __future__ import annotations

import threading
from typing import Any

import tenacity

from keyshard import Message, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import NotRunningError
from keyshard.observe.status_types import RangeStatus, Status
from tests.helpers import key_in, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic, Run

RANGES = 4
KEYS = [key_in(hash_range) for hash_range in split_ring(RANGES)]
FAILING = RetryPolicy(wait=tenacity.wait_fixed(60), stop=tenacity.stop_never)


class Job:
    """A source of four ranges over two topic partitions, running in a thread."""

    def __init__(self) -> None:
        made = MemoryTopic()
        self.url, self.cluster, self.topic = made.url, made.cluster, made.topic
        self.release = threading.Event()
        self.hung: list[Message] = []
        self.handled: list[Message] = []
        self.source = made.source(subscription="jobs", parallelism=RANGES, admin_url=made.url)
        self.run: Run | None = None

    def handle(self, message: Message) -> None:
        """Hangs on the value ``hang``, raises on ``fail``."""
        if message.value == b"hang":
            self.hung.append(message)
            assert self.release.wait(deadline(60))
        if message.value == b"fail" and not self.release.is_set():
            raise ValueError("not now")
        self.handled.append(message)

    def publish(self, *values: tuple[str, bytes]) -> None:
        self.cluster.publish(self.topic, *(Stored(value, key=key) for key, value in values))

    def start(self, **options: Any) -> None:
        self.run = run = Run(self.source, self.handle, options)
        run.thread.start()
        wait_until(lambda: run.error or self.shown())
        assert run.error is None, run.error

    def shown(self) -> bool:
        try:
            return self.status()["state"] == "running"
        except NotRunningError:
            return False

    def status(self) -> Status:
        return self.source.status()

    def range(self, index: int) -> RangeStatus:
        return self.status()["ranges"][index]

    def stop(self) -> None:
        self.release.set()
        if self.run is not None:
            self.run.end()
