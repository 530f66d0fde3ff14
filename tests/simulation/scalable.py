"""The world of queries, with a scalable topic: its segments split and merge, and are deleted.

Sometimes the topic itself is deleted and created again.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

from keyshard.broker.memory import Batching, MemoryCluster
from keyshard.broker.scalable_topics import LOOK_AGAIN_S
from keyshard.core.position.entry import TopicPartition
from tests.simulation.faults import SEGMENT_CELLS, Fault, deletion
from tests.simulation.network import Admin
from tests.simulation.owed import Debts
from tests.simulation.record import Record
from tests.simulation.segments import VERSION, Segments
from tests.simulation.shape import SUBSCRIPTION, Shape
from tests.simulation.topics import Topics
from tests.simulation.world import World

ADMIN = "http://simulated:8080"


class SegmentTopics(Topics):
    """One scalable topic.

    Args:
        segments: The scalable topics of the run.
        cluster: The broker's side.
        record: Records ended topic partitions.
        debts: Drops messages of deleted topics.
        random: Decides.
    """

    def __init__(
        self, segments: Segments, cluster: MemoryCluster, record: Record, debts: Debts,
        random: Random,
    ) -> None:  # fmt: skip
        super().__init__(cluster, record, debts, random)
        self._segments = segments

    def create(self, partitions: int, brief: int) -> None:  # noqa: ARG002
        self.lasting = self._segments.create("orders")

    def some(self) -> str:
        return self.lasting

    def revive(self, topic: str) -> None:  # noqa: ARG002
        """Create the topic if it is missing."""
        if not self.partitions():
            self.come()

    def come(self) -> bool:
        """Create the deleted topic again."""
        if self.partitions():
            return False
        self._segments.create_again(self.lasting)
        self.returns += 1
        return True

    def go(self) -> bool:
        """Delete the topic with its uncommitted messages."""
        partitions = self.partitions()
        self._record.ended(partitions)
        self._debts.forgive(partitions)
        self.deleted.update(one.topic for one in partitions)
        if partitions:
            self._segments.delete(self.lasting)
        return bool(partitions)

    def partitions(self) -> list[TopicPartition]:
        return self._segments.partitions(self.lasting)

    def open_ones(self) -> list[TopicPartition]:
        return self._segments.open_ones(self.lasting)


class ScalableWorld(World):
    """A run of the query.

    Its source has an admin interface, but none that tells entries which other clients acknowledge.
    """

    cells = SEGMENT_CELLS
    version = VERSION

    def shaped(self, drawn: Shape) -> Shape:
        # Producers of Pulsar 5 batch keys of different ranges.
        batching = Random(f"{self.seed}:batching").choice((drawn.batching, Batching.MIXED))
        return dataclasses.replace(drawn, brief=0, bounded=False, admin=False, batching=batching)

    def more_faults(self) -> list[Fault]:
        return deletion(self.seed)

    @property
    def settle_s(self) -> float:
        """A broker does not report that a topic was deleted."""
        return super().settle_s + LOOK_AGAIN_S * bool(self.topics.deleted)

    def make_topics(self) -> Topics:
        segments = self.segments = Segments(
            self.seed, self.cluster, self.record.note, lambda: bool(self.storage.commits),
            subscription=SUBSCRIPTION, lives=lambda: self.lives,
        )  # fmt: skip
        segments.live(
            self.scheduler, self.process, lambda: self.injector.enabled, lambda: not self._done
        )
        return SegmentTopics(
            segments, self.cluster, self.record, self.debts, Random(f"{self.seed}:topics")
        )

    def admin(self) -> Admin:
        return Admin(self.network)

    def options(self) -> dict[str, Any]:
        found = super().options() | {"admin_url": ADMIN}
        if Random(f"{self.seed}:waits").random() < 0.5:
            # A batch that waits for rows may have those of a segment and of its successors.
            rows = found.get("batch_rows_max") or 1_000
            found |= {"batch_rows_min": rows, "batch_delay_max_ms": 2_000}
        return found
