"""A topic on the in-memory broker, sources over it that run in threads, and what handlers saw."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import tenacity

from helpers import wait_until
from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.errors import BrokerError

AT_ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(3))


class Place:
    """A topic with two partitions, a source over it, and what its handler saw."""

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self.cluster = MemoryCluster.named(name)
        self.topic = self.cluster.create_topic("orders", partitions=2)
        self.where = self.cluster.partitions(self.topic)
        self.seen: dict[str | None, list[bytes]] = defaultdict(list)
        self.errors: list[BaseException] = []

    def source(self, **changes: Any) -> KeyShardSource:
        given = {
            "subscription": "keyshard", "parallelism": 4, "starting_position": "earliest",
            "service_url": self.url,
        }  # fmt: skip
        return KeyShardSource(self.topic, **(given | changes))

    def publish(self, keys: int, per_key: int) -> int:
        messages = [Stored(b"%d" % n, key=f"key-{k}") for n in range(per_key) for k in range(keys)]
        self.cluster.publish(self.topic, *messages)
        return len(messages)

    def note(self, message: Message) -> None:
        self.seen[message.routing_key].append(message.value)

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    def backlog(self) -> int:
        """Messages not acknowledged; -1 before the subscription exists."""
        try:
            return sum(self.cluster.backlog(where, "keyshard") for where in self.where)
        except BrokerError:
            return -1

    def running(self, source: KeyShardSource, handle: Callable[..., Any], **options: Any) -> Run:
        return Run(self, source, handle, options)


class Run:
    """A source that runs in a thread; stopped at the end of the block."""

    def __init__(self, place: Place, source: KeyShardSource, handle: Any, options: Any) -> None:
        self.source, self._place = source, place

        def run() -> None:
            try:
                source.run(handle, **options)
            except BaseException as exc:  # noqa: BLE001 - told to the test
                place.errors.append(exc)

        self.thread = threading.Thread(target=run)

    def __enter__(self) -> Run:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive():
            wait_until(lambda: not self.thread.is_alive() or self._stopped())
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _stopped(self) -> bool:
        try:
            self.source.stop()
        except Exception:  # noqa: BLE001 - it does not run yet, or no more
            return False
        return True
