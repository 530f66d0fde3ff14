"""Topics on the in-memory broker to which sinks and handlers publish."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from typing import Any

from keyshard import KeyShardSink, Message
from keyshard.broker.memory import MemoryBroker
from tests.support.handled_topic import HandledTopic
from tests.support.memory_topic import MemoryTopic
from tests.support.stored_topic import messages_at

PARTITIONS = 3
"""Partitions of a topic to which sinks publish."""


class OutputTopic(MemoryTopic):
    """A cluster with a topic :attr:`out` that holds outputs."""

    out: str

    def hold(self) -> None:
        for where in self.cluster.partitions(self.out):
            self.cluster.hold_writes(where)

    def release(self) -> None:
        for where in self.cluster.partitions(self.out):
            self.cluster.release_writes(where)

    def stored(self, topic: str | None = None) -> list[Message]:
        with closing(MemoryBroker(self.cluster)) as broker:
            return messages_at(broker, self.cluster.partitions(topic or self.out))

    def by_key(self, topic: str | None = None) -> dict[str | None, list[bytes | None]]:
        found: defaultdict[str | None, list[bytes | None]] = defaultdict(list)
        for one in self.stored(topic):
            found[one.key].append(one.value)
        return dict(found)


class SinkTopic(OutputTopic):
    """A deduplicated topic, sinks of it, and what is stored in it.

    Args:
        partitions: Those of the topic.
        options: Those of all sinks.
    """

    def __init__(self, partitions: int = PARTITIONS, **options: Any) -> None:
        super().__init__(partitions)
        self.out = self.topic
        self.cluster.deduplicate(self.out)
        self.sinks: list[KeyShardSink] = []
        self._options = {"sink_id": "s", "service_url": self.url} | options

    def sink(self, **options: Any) -> KeyShardSink:
        self.sinks.append(KeyShardSink(self.out, **self._options | options))
        return self.sinks[-1]

    def close(self) -> None:
        for sink in self.sinks:
            sink._state.close()


class Copied(HandledTopic, OutputTopic):
    """A topic, and one to which handlers publish."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.cluster.create_topic("copies", PARTITIONS)
        self.sink = KeyShardSink(
            self.out, sink_id="copies", service_url=self.url, linger_ms=1, send_timeout_ms=2_000
        )
