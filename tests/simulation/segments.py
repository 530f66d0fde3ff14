"""Scalable topics of a run, whose segments split and merge, and are deleted once they are drained.

They are drawn from random streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from keyshard.broker.memory import MemoryCluster
from keyshard.broker.reports import SegmentWatch
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_segments import TopicSegment
from tests.simulation.scheduler import Process, Scheduler

VERSION = "5.0.1"
"""Release of the brokers; earlier ones have no scalable topics."""
FIRST_MAX = 3
"""Segments of a new topic, at most."""
OPEN_MAX = 6
"""Open segments of a topic, at most."""
PAUSE_S = (0.3, 1.0, 4.0)
"""Mean times between two changes by the brokers; a run has one of them, seconds."""
COLLECTS_S = (0.5, 3.0, 60.0)
"""Times between two looks of the broker for drained segments; a run has one of them, seconds."""


class Segments:
    """The scalable topics of a run.

    Args:
        seed: Decides all random draws.
        cluster: The broker's side.
        note: Called with a text for people about each change.
        may_collect: Whether all sources have registered their subscriptions. Before that, brokers
            delete messages of sealed segments that are in no promise.
        subscription: Subscription of the sources.
        lives: Tells how often their process began.
    """

    def __init__(
        self,
        seed: int,
        cluster: MemoryCluster,
        note: Callable[[str], None],
        may_collect: Callable[[], bool],
        *,
        subscription: str,
        lives: Callable[[], int],
    ) -> None:
        self._random = Random(f"{seed}:segments")
        self._topics = cluster.scalable
        self._note = note
        self._may_collect = may_collect
        self._subscription = subscription
        self._lives = lives
        self.names: list[str] = []
        """The topics."""
        self.missing: set[str] = set()
        """Topics that are deleted now."""
        self.deleted: dict[str, int] = {}
        """Topics that were deleted, and the lives of the sources then; some exist again."""
        self._pause_s = self._random.choice(PAUSE_S)
        self._collects_s = self._random.choice(COLLECTS_S)

    def create(self, name: str) -> str:
        """Create a topic, and return its full name."""
        topic = f"topic://public/default/{name}"
        self.names.append(self._topics.create(topic, self._random.randint(1, FIRST_MAX)))
        return topic

    def create_again(self, topic: str) -> None:
        """Create a topic that was deleted."""
        segments = self._random.randint(1, FIRST_MAX)
        self._note(f"{topic} is created again with {segments} segments")
        self._topics.create(topic, segments)
        self.deleted[topic] = self._lives()
        self.missing.discard(topic)

    def delete(self, topic: str) -> None:
        """Delete a topic by force."""
        self._note(f"{topic} is deleted")
        self.missing.add(topic)
        self.deleted[topic] = self._lives()
        self._topics.delete(topic)

    def partitions(self, topic: str) -> list[TopicPartition]:
        """All segments of a topic that are not deleted."""
        return [] if topic in self.missing else list(self._topics.graph(topic).partitions)

    def open_ones(self, topic: str) -> list[TopicPartition]:
        """The segments of a topic that messages are published to."""
        return [self._topics.graph(topic).partition(one.number) for one in self._open(topic)]

    # -- changes: each returns whether there was something to change ------------------------------

    def split(self) -> bool:
        """Split a segment of a topic."""
        topic = self._random.choice(self.names)
        found = [one for one in self._open(topic) if one.first_hash < one.last_hash]
        if not self._is_known(topic) or not found or len(self._open(topic)) >= OPEN_MAX:
            return False
        number = self._random.choice(found).number
        self._note(f"segment {number} of {topic} is split: {self._topics.split(topic, number)}")
        return True

    def merge(self) -> bool:
        """Merge two adjacent segments of a topic."""
        topic = self._random.choice(self.names)
        found = self._open(topic)
        if not self._is_known(topic) or len(found) < 2:
            return False
        at = self._random.randrange(len(found) - 1)
        pair = found[at].number, found[at + 1].number
        self._note(f"segments {pair} of {topic} are merged: {self._topics.merge(topic, *pair)}")
        return True

    def collect(self) -> bool:
        """Delete segments that are drained, as a broker does every minute."""
        if not self._may_collect():
            return False
        gone = {
            topic: self._topics.collect(topic)
            for topic in self.names
            if topic not in self.missing and self._is_registered(topic)
        }
        for topic, numbers in gone.items():
            if numbers:
                self._note(f"segments {numbers} of {topic} are deleted")
        return any(gone.values())

    def live(
        self, scheduler: Scheduler, process: Process, changes: Callable[[], bool],
        lives: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Split and merge by load, and delete drained segments, also while no process consumes.

        Args:
            scheduler: Runs it.
            process: Owns its threads.
            changes: Whether segments still split and merge.
            lives: Whether drained segments are still deleted.
        """

        def change() -> None:
            while changes():
                scheduler.sleep(self._random.expovariate(1 / self._pause_s))
                if changes():
                    self._random.choice((self.split, self.split, self.merge))()

        def collect() -> None:
            while lives():
                scheduler.sleep(self._collects_s)
                self.collect()

        scheduler.spawn(process, "load balancer", change)
        scheduler.spawn(process, "collector", collect)

    def _is_registered(self, topic: str) -> bool:
        """Whether the sources have registered their subscription."""
        return topic not in self.deleted or self._topics.is_registered(topic, self._subscription)

    def _is_known(self, topic: str) -> bool:
        """Whether the sources know the newest topic of a name.

        A source that ran when it was created may know the deleted one for a minute, and receives
        without an order from segments of the same names.
        """
        return self._lives() > self.deleted.get(topic, -1)

    def _open(self, topic: str) -> Sequence[TopicSegment]:
        """Open segments, by their hashes."""
        if topic in self.missing:
            return []
        found = [one for one in self._topics.graph(topic).segments.values() if not one.is_sealed]
        return sorted(found, key=lambda one: one.first_hash)


class LateWatch:
    """A watch of a client: it knows a graph when the report of it arrives.

    Args:
        inner: The watch at the broker.
    """

    def __init__(self, inner: SegmentWatch) -> None:
        self._inner = inner
        self.graph = inner.graph

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    def arrive(self) -> None:
        """A report arrives."""
        self.graph = self._inner.graph

    def close(self) -> None:
        self._inner.close()
