"""Entries that are encrypted or corrupt, in runs whose query skips them.

They are drawn from their own random stream, so that other draws of a seed stay the same.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import EntryId, TopicPartition

if TYPE_CHECKING:
    from tests.simulation.world import World

SHARE = 0.15
"""Share of the runs with such entries."""
AMONG = 0.15
"""How often one lies among the messages of a producer."""
KINDS = ("encrypted", "corrupt")


class Refused:
    """Those of one run.

    Args:
        world: Where they are published.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"{world.seed}:refused")
        self._drawn = self._random.random() < SHARE
        self.entries: set[tuple[TopicPartition, EntryId]] = set()

    def options(self) -> dict[str, str]:
        """The options of the source."""
        return {f"on_{kind}": "skip" for kind in KINDS} if self._drawn else {}

    def among(self) -> None:
        """Publish one sometimes: it is acknowledged, but not owed."""
        world, random = self._world, self._random
        if not self._drawn or world.wiped is not None or random.random() >= AMONG:
            return
        where, kind = random.choice(world.topics.open_ones()), random.choice(KINDS)
        key = f"k{random.randrange(world.shape.keys)}"
        world.topics.revive(where.topic)
        published = world.cluster.publish(
            where, *[Message(b"refused", key=key)] * random.choice((1, 1, 3)),
            batching=Batching.BY_KEY, encrypted=kind == "encrypted", corrupt=kind == "corrupt",
        )  # fmt: skip
        for at, entry_id in published:
            world.debts.hidden(at, [entry_id])
            self.entries.add((at, entry_id))
            world.record.note(f"FAULT {kind} entry {entry_id} of {at}")
