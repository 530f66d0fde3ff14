"""The world of programs with handlers, with scalable topics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

from keyshard.broker.memory import Batching
from keyshard.core.position.entry import TopicPartition
from tests.simulation.handling.faults import SEGMENT_CELLS
from tests.simulation.handling.program import Program
from tests.simulation.handling.shape import Shape
from tests.simulation.handling.world import HandlerWorld
from tests.simulation.network import Admin
from tests.simulation.segments import OPEN_MAX, VERSION, Segments


class ScalableHandlerWorld(HandlerWorld):
    """A run of programs with handlers.

    A source has an admin interface, but none that tells entries which never come.
    """

    cells = SEGMENT_CELLS
    version = VERSION

    def shaped(self, drawn: Shape) -> Shape:
        topics = (OPEN_MAX,) * len(drawn.topics)
        # Without a checkpoint, a restart repeats handled messages of entries of several keys.
        mixed = Batching.MIXED if drawn.checkpoint else drawn.batching
        batching = Random(f"{self.seed}:batching").choice((drawn.batching, mixed))
        return dataclasses.replace(
            drawn, topics=topics, neighbour=False, admin=False, batching=batching
        )

    def create_topics(self) -> list[str]:
        segments = self.segments = Segments(self.seed, self.cluster, self.note, self._have_begun)
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

    def _have_begun(self) -> bool:
        return not any(one.is_new for one in self.programs)
