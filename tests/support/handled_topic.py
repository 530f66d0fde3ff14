"""A topic on the in-memory broker, and the messages that its handlers got."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import tenacity

from keyshard import KeyShardSource, Message, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.errors import NotRunningError
from tests.helpers import present
from tests.support.memory_topic import MemoryTopic, Run

AT_ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(3))


class HandledTopic(MemoryTopic):
    """A topic with two partitions, and the messages that its handler saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str | None, list[bytes]] = defaultdict(list)
        self.errors: list[BaseException] = []

    def publish(self, keys: int, per_key: int) -> int:
        messages = [Stored(b"%d" % n, key=f"key-{k}") for n in range(per_key) for k in range(keys)]
        self.cluster.publish(self.topic, *messages)
        return len(messages)

    def note(self, message: Message) -> None:
        self.seen[message.routing_key].append(present(message.value))

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    def running(self, source: KeyShardSource, handle: Callable[..., Any], **options: Any) -> Run:
        return Run(source, handle, options, self.errors)


def ended(source: KeyShardSource) -> bool:
    """Whether nothing runs a source any more."""
    try:
        source.status()
    except NotRunningError:
        return True
    return False
