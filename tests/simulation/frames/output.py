"""The connection of a writing task that speaks frames."""

from __future__ import annotations

from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.producer import WireProducer
from keyshard.core.position.entry import TopicPartition
from tests.simulation.frames.client import FramedClient
from tests.simulation.pipeline.output import OutputClient


class FramedOutputClient(FramedClient, OutputClient):
    """A connection over frames: each frame is a step of it."""

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> WireProducer:
        self.producers += 1
        return self._wire.entry_producer(topic_partition, how)

    def cut(self) -> None:
        random = self.cluster.random
        for session in [one for one in self.cluster.sessions if one.client is self]:
            if random.random() < 0.5:
                session.cut()
            else:
                session.end_publishers(lambda _: True)
