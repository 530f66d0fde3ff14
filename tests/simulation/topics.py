"""The topics of a run: one that lasts, and others that come and go while the query runs."""

from __future__ import annotations

from random import Random

from keyshard.broker.memory import MemoryCluster
from keyshard.core.position.entry import TopicPartition
from tests.simulation.owed import Debts
from tests.simulation.record import Record

PATTERN = "orders|brief-.*"
"""Matches all of them, and no dead-letter topic."""
BRIEF_MAX = 16
"""Short-lived topics at once."""


class Topics:
    """Creates topics, and deletes all but one of them.

    Args:
        cluster: The broker's side.
        record: Records ended topic partitions.
        debts: Drops messages of deleted topics.
        random: Decides.
    """

    def __init__(
        self, cluster: MemoryCluster, record: Record, debts: Debts, random: Random
    ) -> None:
        self._cluster = cluster
        self._record = record
        self._debts = debts
        self._random = random
        self._numbers = 0
        self.lasting = ""
        """The topic that is never deleted."""
        self.brief: list[str] = []
        """Short-lived topics that exist."""
        self.deleted: set[str] = set()
        """Topics that were deleted once; some exist again."""
        self.returns = 0
        """How often the lasting topic was created again."""

    def create(self, partitions: int, brief: int) -> None:
        """Create the topics of the start."""
        self.lasting = self._cluster.create_topic("orders", partitions=partitions)
        for _ in range(brief):
            self.come()

    def create_again(self, cluster_partitions: dict[str, int]) -> None:
        """Create the earlier topics again after a wipe."""
        for topic, partitions in cluster_partitions.items():
            self._cluster.create_topic(topic, partitions)

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of topic partitions; 0 for a topic that is not partitioned."""
        found = {one: self._cluster.partitions(one) for one in [self.lasting, *self.brief]}
        return {one: 0 if where[0].partition < 0 else len(where) for one, where in found.items()}

    def come(self) -> bool:
        """Create a short-lived topic, sometimes one that was deleted; whether there is room."""
        if len(self.brief) >= BRIEF_MAX:
            return False
        again = sorted(self.deleted - set(self.brief))
        names = self._cluster.topics()
        # The rest of a topic after a reconnect would become a part of the new one.
        again = [one for one in again if not any(name.startswith(one) for name in names)]
        if again and self._random.random() < 0.5:
            name = self._random.choice(again)
        else:
            self._numbers += 1
            name = f"brief-{self._numbers}."
        self.brief.append(self._cluster.create_topic(name, self._random.choice((0, 1, 2, 4))))
        return True

    def go(self) -> bool:
        """Delete a short-lived topic and its uncommitted messages; returns whether there is one."""
        if not self.brief:
            return False
        topic = self.brief.pop(self._random.randrange(len(self.brief)))
        partitions = self._cluster.partitions(topic)
        self._record.ended(partitions)
        self._debts.forgive(partitions)
        self.deleted.add(topic)
        self._cluster.delete_topic(topic)
        return True

    def revive(self, topic: str) -> None:
        """Create a missing topic, as a producer does.

        An empty one without partitions looks like what a reconnect left, and the source removes it.
        """
        if topic not in self._cluster.topics():
            self._cluster.create_topic(topic)

    def some(self) -> str:
        """One to publish to."""
        return self._random.choice([self.lasting, *self.brief])

    def open_ones(self) -> list[TopicPartition]:
        """Those to which something may be published."""
        return self.partitions()

    def partitions(self) -> list[TopicPartition]:
        """All topic partitions that exist and were not brought back by a reconnect."""
        topics = [self.lasting, *self.brief]
        return [where for topic in topics for where in self._cluster.partitions(topic)]
