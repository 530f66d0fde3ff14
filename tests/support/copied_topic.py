"""A topic on the in-memory broker, and one to which its handlers publish."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing

from keyshard import KeyShardSink, Message
from keyshard.broker.memory import MemoryBroker
from tests.support.handled_topic import HandledTopic
from tests.support.stored_topic import messages_at


class Copied(HandledTopic):
    """A topic, and one to which handlers publish."""

    def __init__(self) -> None:
        super().__init__()
        self.out = self.cluster.create_topic("copies", 3)
        self.sink = KeyShardSink(
            self.out, sink_id="copies", service_url=self.url, linger_ms=1, send_timeout_ms=2_000
        )

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
