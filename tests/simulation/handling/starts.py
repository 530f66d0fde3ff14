"""Starting positions after the earliest message, for a program with handlers.

Drawn from a random stream of its own, so that other draws of a seed stay the same.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from keyshard.broker.memory import Batching, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.testing.verify.history import Event
from tests.simulation.handling.promises import Name
from tests.simulation.owed import Debts, Place
from tests.simulation.starts import (
    BEFORE_MAX,
    KILLS_MAX,
    RESETS,
    SHARE,
    Positions,
    entries_of,
)

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld


class Starts:
    """The start of the program of one run.

    Args:
        world: Where it begins.
    """

    def __init__(self, world: HandlerWorld) -> None:
        self._world = world
        self._random = Random(f"{world.seed}:starts")
        # A pattern finds topics without a given position: those of dead letters.
        possible = world.shape.admin and not world.shape.neighbour
        self._inside = possible and self._random.random() < SHARE
        self._kills = self._random.randint(0, KILLS_MAX)
        self.debts = Debts()
        """Messages that the program need not handle."""
        self._positions = Positions(self._random, self.debts)

    def prepare(self) -> None:
        """Publish messages, and draw the start of the program among them."""
        if not self._inside:
            return
        world, random = self._world, self._random
        for _ in range(random.randint(0, BEFORE_MAX)):
            keys = [f"k{random.randrange(world.shape.keys)}"] * random.randint(1, 6)
            world.publish(random.choice(world.topics), keys, Batching.BY_KEY)
            if random.random() < 0.2:
                where = random.choice(world.topic_partitions())
                aborted = world.cluster.publish_aborted(where, Message(b"aborted", key="k0"))
                self.debts.hidden(where, aborted)
        self._positions.draw(world.cluster, world.topic_partitions())
        world.scheduler.spawn(world.process, "fault", self._kill_early)

    def options(self) -> dict[str, Any]:
        """Return the options of the source of the next life.

        They may change once its subscriptions exist.
        """
        if not self._inside:
            return {}
        world, (program,) = self._world, self._world.programs
        random = Random(f"{world.seed}:options:{program.lives}")
        made = self._positions.exist(world.cluster, program.name)
        earliest = made and random.random() < 0.5
        start = self._positions.text(world.topic_partitions())
        return {
            "admin_url": f"memory://{program.name}",
            "starting_position": "earliest" if earliest else start,
        }

    def is_owed(self, name: Name) -> bool:
        """Whether a message is the program's, and was not deleted before it was done."""
        place = Place(name.topic, name.partition, *name.id)
        return place not in self.debts.before and place not in self.debts.forgiven

    def lies_before(self, name: Name) -> bool:
        """Whether a message is not the program's."""
        return Place(name.topic, name.partition, *name.id) in self.debts.before

    def judged(self, program: Program) -> list[Event]:
        """The events that a checker may judge."""
        return program.record.judged(self.debts, self._all())

    def between_lives(self, program: Program) -> None:
        """Another client sets a cursor, while no consumer is connected and no message is done."""
        world, random = self._world, self._random
        if not self._inside or program.lives == 0 or not program.is_new:
            return
        where = random.choice(world.topic_partitions())
        subscription = world.cluster.subscriptions(where).get(program.name)
        if random.random() >= RESETS or subscription is None:
            return
        visible = [one for one in entries_of(world.cluster, where) if not one.hidden]
        if subscription.connected or not visible:
            return
        entry = random.choice(visible)
        program.record.note(f"FAULT the cursor of {where} is set to {entry.id}")
        program.disturbed()
        program.record.set_cursor(self.debts)
        self._positions.set_cursor(world.cluster, where, program.name, entry.id)

    def _all(self) -> list[TopicPartition]:
        return [where for parts in self._world.cluster.topics().values() for where in parts]

    def _kill_early(self) -> None:
        """Kill processes between their subscriptions and the first message that is done."""
        world, (program,) = self._world, self._world.programs
        while self._kills and world.injector.enabled and program.is_new:
            process = program.process
            exists = [program.name in world.cluster.subscriptions(where)
                      for where in world.topic_partitions()]  # fmt: skip
            if process is None or process.dead or not any(exists):
                world.scheduler.sleep(0.002)
                continue
            self._kills -= 1
            world.scheduler.sleep(self._random.random() * 0.1)
            if program.process is process and not process.dead:
                program.record.note("FAULT killed early")
                program.end(process, killed=True)
