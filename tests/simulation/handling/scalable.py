"""The world of programs with handlers, with scalable topics; some are deleted and created again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

from keyshard.broker.memory import Batching
from keyshard.broker.scalable_topics import LOOK_AGAIN_S
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_segments import topic_of
from tests.simulation.handling.faults import SEGMENT_CELLS, Fault, deletion
from tests.simulation.handling.program import Program
from tests.simulation.handling.shape import Shape
from tests.simulation.handling.world import HandlerWorld
from tests.simulation.network import Admin
from tests.simulation.segments import OPEN_MAX, VERSION, Segments
from tests.simulation.world import TRACE_MAX


class ScalableHandlerWorld(HandlerWorld):
    """A run of programs with handlers.

    A source has an admin interface, but none that tells entries which never come.
    """

    cells = SEGMENT_CELLS
    version = VERSION

    def __init__(self, seed: int, *, trace_max: int | None = TRACE_MAX) -> None:
        super().__init__(seed, trace_max=trace_max)
        if deletion(seed):
            # Messages of a topic that is created again wait until the source notices it.
            self.trial.drawn = False

    def shaped(self, drawn: Shape) -> Shape:
        topics = (OPEN_MAX,) * len(drawn.topics)
        # Without a checkpoint, a restart repeats handled messages of entries of several keys.
        mixed = Batching.MIXED if drawn.checkpoint else drawn.batching
        batching = Random(f"{self.seed}:batching").choice((drawn.batching, mixed))
        return dataclasses.replace(
            drawn, topics=topics, neighbour=False, admin=False, batching=batching
        )

    def more_faults(self) -> list[Fault]:
        return deletion(self.seed)

    @property
    def settle_s(self) -> float:
        """A broker does not report that a topic was deleted."""
        assert self.segments is not None
        return super().settle_s + LOOK_AGAIN_S * bool(self.segments.deleted)

    def all_topics_exist(self) -> bool:
        assert self.segments is not None
        return not self.segments.missing

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic with its messages; those that are not done are not owed any more."""
        assert self.segments is not None
        partitions, debts = self.partitions(topic), self.starts.debts
        if not partitions:
            return False
        (program,) = self.programs
        # Dead letters of segments that were deleted before are replayed without an owner.
        sent = {TopicPartition(name.topic, name.partition) for name in self._sent}
        earlier = {where for where in sent if topic_of(where) == topic}
        program.record.ended(earlier.union(partitions))
        program.disturbed()
        debts.unsubscribed = True
        for name in self._sent | self.anomalies.refused:
            where, entry_id = TopicPartition(name.topic, name.partition), EntryId(*name.id[:2])
            if topic_of(where) != topic:
                continue
            # Done ones may run again until they are acknowledged, also after the deletion. Dead
            # letters of segments that were deleted before may be replayed, too.
            acked = where not in partitions or self._is_acked(where, entry_id)
            if name not in program.promises.finished or not acked:
                debts.skip(where, entry_id, [name.id.batch_index])
        last = max(max(self.cluster.log(where).ledger_sizes) for where in partitions)
        program.promises.deleted(topic, last)
        self.segments.delete(topic)
        return True

    def _is_acked(self, where: TopicPartition, entry_id: EntryId) -> bool:
        (program,) = self.programs
        subscription = self.cluster.subscriptions(where).get(program.name)
        ordinal = self.cluster.log(where).ordinal(entry_id)
        assert ordinal is not None
        return subscription is not None and subscription.cursor.is_acked(ordinal)

    def create_topics(self) -> list[str]:
        (program,) = self.programs
        segments = self.segments = Segments(
            self.seed, self.cluster, self.note, lambda: not program.is_new,
            subscription=program.name, lives=lambda: program.lives,
        )  # fmt: skip
        segments.live(
            self.scheduler, self.process, lambda: self.injector.enabled, lambda: not self.done
        )
        return [segments.create(f"orders-{number}") for number in range(len(self.shape.topics))]

    def partitions(self, topic: str) -> Sequence[TopicPartition]:
        assert self.segments is not None
        return self.segments.partitions(topic)

    def open_ones(self, topic: str) -> Sequence[TopicPartition]:
        assert self.segments is not None
        return self.segments.open_ones(topic)

    def admin(self, program: Program) -> Admin:
        return Admin(program.network)

    def selection(self, url: str) -> dict[str, Any]:
        return {"topics": self.topics, "admin_url": url}
