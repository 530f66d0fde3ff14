"""Makes the planned faults happen to programs with handlers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, ClassVar

from tests.simulation.handling.faults import Fault, Kind, Reached, Step, plan
from tests.simulation.network import Consumer
from tests.simulation.scheduler import Process
from tests.simulation.segments import Segments

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld

AGAIN_MAX = 20
"""Entries of a topic partition that are delivered twice at most."""
AWAY_S = (0.05, 2.0)
"""Time that a broker or a connection is away, seconds."""
BUSY_S = (0.05, 0.5)
"""Time that a broker answers nothing and delivers, seconds."""


class Injector:
    """The faults of one run.

    Args:
        world: The run.
        random: Plans them, and decides their targets.
    """

    def __init__(self, world: HandlerWorld, random: Random) -> None:
        self._world = world
        self._random = random
        self.faults: list[Fault] = [*plan(world.seed, random, world.cells), *world.more_faults()]
        self.reached: Reached = Reached()
        """How often each fault hit each step."""
        self.stopping: set[Process] = set()
        """Processes that were asked to end."""
        self.enabled = True
        """Whether faults may begin."""
        self._visits = dict.fromkeys(Step, 0)

    @property
    def all_begun(self) -> bool:
        """Whether nothing is left to happen."""
        return all(fault.begun for fault in self.faults)

    def at(self, program: Program, step: Step) -> None:
        """A step begins; may end the process that takes it."""
        self._visits[step] += 1
        for fault in self.faults:
            if fault.begun or not self.enabled or fault.step is not step:
                continue
            if self._visits[step] >= fault.visit:
                fault.begun = True
                if self._ACTIONS[fault.kind](self, program):
                    self._hit(program, fault.kind, step)
                else:
                    # There was nothing to hit; the next visit may bring something.
                    fault.begun = False

    def _hit(self, program: Program, kind: Kind, step: Step) -> None:
        program.record.note(f"FAULT {kind.value} at {step.value}")
        self.reached[kind, step] += 1
        if kind is Kind.KILL:
            assert program.process is not None
            program.end(program.process, killed=True)

    def _spawn(self, action: Callable[[], None], process: Process | None = None) -> None:
        self._world.scheduler.spawn(process or self._world.process, "fault", action)

    # -- faults: each returns whether it hit anything ---------------------------------------------

    def _kill(self, program: Program) -> bool:
        return program.process is not None and not program.process.dead

    def _stop(self, program: Program) -> bool:
        process = program.process
        if process is None or process in self.stopping:
            return False
        self.stopping.add(process)
        if program.stop():
            return True
        self.stopping.discard(process)
        return False

    def _forgetful_stop(self, program: Program) -> bool:
        program.forgets = self._stop(program) or program.forgets
        return program.forgets

    def _broker(self, program: Program) -> bool:  # noqa: ARG002
        return self._world.crash_broker(self._random.uniform(*AWAY_S))

    def _consumers(self, program: Program) -> list[Consumer]:
        client = program.client
        return [] if client is None else [one for one in client.consumers if one.is_live]

    def _cut_consumers(self, program: Program) -> bool:
        found = self._consumers(program)
        share = self._random.sample(found, self._random.randint(1, len(found))) if found else []
        return bool(share) and program.network.lose(share)

    def _blink(self, program: Program) -> bool:
        network = program.network
        if not network.up or not network.blink(self._consumers(program)):
            return False
        # The broker is busy: requests wait.
        network.up = False

        def answers() -> None:
            self._world.scheduler.sleep(self._random.uniform(*BUSY_S))
            network.up = True

        self._spawn(answers)
        return True

    def _cut_producer(self, program: Program) -> bool:
        client = program.client
        writers = [] if client is None else client.dead_letter_writers
        for writer in writers:
            writer.cut(self._random.uniform(*AWAY_S))
        return bool(writers)

    def _cut_reader(self, program: Program) -> bool:
        client = program.client
        readers = [] if client is None else client.dead_letter_readers
        for reader in readers:
            reader.lose()
        return bool(readers)

    def _unconfirmed(self, program: Program) -> bool:
        client = program.client
        writers = [] if client is None else client.dead_letter_writers
        for writer in writers:
            writer.unconfirmed = True
        return bool(writers)

    def _acks(self, program: Program) -> bool:
        client = program.client
        if client is None or not self._consumers(program):
            return False
        client.loses_acks = True
        program.disturbed()

        def cut() -> None:
            self._world.scheduler.sleep(self._random.uniform(0.1, 1.0))
            client.loses_acks = False
            program.network.lose(client.consumers)

        self._spawn(cut)
        return True

    def _twice(self, program: Program) -> bool:
        cluster = self._world.cluster
        again = 0
        for where in self._world.topic_partitions():
            subscription = cluster.subscriptions(where).get(program.name)
            if subscription is not None:
                log = cluster.log(where)
                newest = range(max(log.first, len(log) - AGAIN_MAX), len(log))
                # Acknowledged messages come again only if a broker forgets them.
                unacked = [one for one in newest if not subscription.cursor.is_acked(one)]
                again += cluster.deliver_again(where, program.name, *map(log.id, unacked))
        return again > 0

    def _unload(self, program: Program) -> bool:
        found = self._consumers(program)
        if not found:
            return False
        where = self._random.choice(found).topic_partition
        hit = program.network.lose([one for one in found if one.topic_partition == where])
        self._world.cluster.unload(where)
        return hit

    def _unpark(self, program: Program) -> bool:
        keys = program.parked()
        if keys:
            self._spawn(lambda: program.unpark(*keys), program.process)
        return bool(keys)

    def _rescale(self, program: Program) -> bool:
        ranges = self._random.choice((1, 2, 4, 7))
        self._spawn(lambda: program.rescale(ranges), program.process)
        return True

    def _balance(self, program: Program) -> bool:
        self._spawn(lambda: program.rescale(None), program.process)
        return True

    def _unsaved(self, program: Program) -> bool:
        program.unsaved = True
        return True

    def _split(self, program: Program) -> bool:  # noqa: ARG002
        return self._segments.split()

    def _merge(self, program: Program) -> bool:  # noqa: ARG002
        return self._segments.merge()

    def _collect(self, program: Program) -> bool:  # noqa: ARG002
        return self._segments.collect()

    def _goes(self, program: Program) -> bool:  # noqa: ARG002
        topic = self._random.choice(self._world.topics)
        if not self._world.delete_topic(topic):
            return False

        def come() -> None:
            self._world.scheduler.sleep(self._random.uniform(0.0, AWAY_S[1]))
            self._segments.create_again(topic)

        self._spawn(come)
        return True

    @property
    def _segments(self) -> Segments:
        assert self._world.segments is not None, "only scalable topics have segments"
        return self._world.segments

    _ACTIONS: ClassVar = {
        Kind.KILL: _kill, Kind.STOP: _stop, Kind.FORGETFUL_STOP: _forgetful_stop,
        Kind.BROKER: _broker, Kind.CONSUMERS: _cut_consumers, Kind.BLINK: _blink,
        Kind.PRODUCER: _cut_producer, Kind.READER: _cut_reader,
        Kind.UNCONFIRMED: _unconfirmed, Kind.ACKS: _acks,
        Kind.TWICE: _twice, Kind.UNLOAD: _unload, Kind.UNPARK: _unpark, Kind.RESCALE: _rescale,
        Kind.BALANCE: _balance, Kind.UNSAVED: _unsaved,
        Kind.SPLIT: _split, Kind.MERGE: _merge, Kind.COLLECT: _collect, Kind.GOES: _goes,
    }  # fmt: skip
