"""After the faults: poison keys, hung handlers and outages, while all else is calm.

No other fault comes meanwhile, so the keys that never fail have their own deadline. Trials are
drawn from their own random stream, so that they change no other decision of a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from keyshard.core.lanes.circuit_breaker import KEYS_MIN
from tests.simulation.handling.promises import Name

if TYPE_CHECKING:
    from tests.simulation.handling.program import Program
    from tests.simulation.handling.world import HandlerWorld

SHARE = 0.2
"""Share of the runs that have a trial."""
FILLS = 0.3
"""Share of the trials of poison keys in which these fill the window."""
HEALTHY_S = 5.0
"""Longest time from the publishing of a message of a key that never fails until it is handled,
seconds."""
PARK_S = 30.0
"""Longest time until all poison keys are parked, seconds; about twice what all retries of the
default policy take."""
MADE_ROOM_S = 120.0
"""Longest time until a few keys are parked that fill the window, seconds: twice ``STUCK_S``, and
twice the retries of the default policy one round of probes after another."""
RECOVERY_S = 15.0
"""Longest time from the end of an outage until its messages are handled, seconds: the longest pause
of the circuit breaker, and a half."""
LOOK_S = 0.2
"""Time between two messages of keys that never fail, seconds."""


@dataclass(slots=True)
class _Hung:
    """Attempts of one program that hang."""

    left: int = 0
    """How many may still begin."""
    keys: set[str] = field(default_factory=set)
    """Keys with a hung attempt."""
    running: int = 0
    """Attempts that hang now."""


class Trial:
    """The trial of one run, if it has one.

    Args:
        world: Where it happens.
    """

    def __init__(self, world: HandlerWorld) -> None:
        self._world = world
        random = self._random = Random(f"{world.seed}:trial")
        shape = world.shape
        drawn = random.random() < SHARE
        self.drawn = drawn and not shape.batches and shape.on_failure != "stop"
        """Whether there is one."""
        self._outage = random.random() < 0.3
        self._healthy = [f"g{at}" for at in range(random.choice((1, 3, 8)))]
        # If poison keys fill the broker's limit, no other key is received.
        share, room = self._share_and_room(sum(shape.topics))
        self._repeats = 1 if room < KEYS_MIN * 3 else random.choice((1, 3))
        keys = random.choice((1, KEYS_MIN - 1, KEYS_MIN, 12, 40))
        keys = max(1, min(keys, room // self._repeats))
        fills = random.random() < FILLS and 3 * share < 2 * shape.unacked_limits.per_consumer
        fills = fills and not self._outage and shape.on_failure == "park"
        self._fills = fills or not room
        """Whether poison keys fill the window, so that they must make room for others."""
        if fills:
            keys = random.choice((KEYS_MIN, 9))
            self._repeats = 2 * share * sum(shape.topics) // keys + 1
        elif shape.rate is not None:
            # Under a rate limit, healthy keys wait for poison keys. With KEYS_MIN poison keys, all
            # keys tried lately fail, and the circuit breaker opens.
            keys = min(keys, KEYS_MIN - 1)
        self._poison = [f"p{at}" for at in range(keys)]
        self._hang_s = random.choice((0.0, 5.0, 30.0))
        # A lane and a worker are left for the other keys.
        places = min(shape.lanes, shape.workers or shape.lanes, max(1, room)) - 1
        self._hangs = random.randint(0, places) if self._hang_s else 0
        self._stops = random.random() < 0.2
        self._failing: set[str] = set()
        self._hung: dict[Program, _Hung] = {one: _Hung() for one in world.programs}
        self._published: dict[Name, tuple[str, float]] = {}

    def attempt(self, program: Program, key: str | None) -> bool:
        """Begin an attempt of a handler. Return whether it must fail."""
        if key not in self._failing:
            return False
        hung = self._hung[program]
        if hung.left and key not in hung.keys:
            hung.left -= 1
            hung.keys.add(key)
            program.record.note(f"the handler hangs for {self._hang_s} s")
            hung.running += 1
            try:
                self._world.scheduler.sleep(self._hang_s)
            finally:
                hung.running -= 1
        return key in self._failing

    def hangs(self, program: Program) -> bool:
        """Whether a handler of a program hangs now."""
        return self._hung[program].running > 0

    def run(self) -> None:
        """Publish to poison keys and to healthy ones, or let all fail for a while."""
        world = self._world
        self._fit()
        world.note(f"TRIAL {'outage' if self._outage else 'poison'}, {len(self._poison)} keys")
        for hung in self._hung.values():
            hung.left = self._hangs
        self._failing = {*self._poison, *(self._healthy if self._outage else ())}
        self._publish(self._poison * self._repeats)
        if self._outage:
            self._run_outage()
        else:
            # Where keys do not park, every message of a key takes all retries.
            times = 1 if world.shape.on_failure == "park" else self._repeats
            self._go_on(self._poison_rests, PARK_S * times, "until all poison keys are parked")
        if self._hangs and self._stops:
            for program in world.programs:
                program.stop()
        self._failing = set()
        for program in world.programs:
            program.record.add("faults_stopped")
        if self._outage or self._stops:
            return
        for program in world.programs:
            program.unpark(*program.parked())
        self._go_on(self._nothing_rests, PARK_S, "until all parked keys are let out")

    def _share_and_room(self, partitions: int) -> tuple[int, int]:
        """Return the rows of each topic partition, and the poison among them that delays no key."""
        shape = self._world.shape
        share = shape.options["window_rows_max"] // partitions
        return share, min(share, shape.unacked_limits.per_consumer) // 2

    def _fit(self) -> None:
        """Poison no more than there is room for: sealed segments have a share until deleted."""
        if self._fills:
            return
        exist = max(sum(self._world.shape.topics), len(self._world.topic_partitions()))
        _, room = self._share_and_room(exist)
        self._fills = not room
        del self._poison[max(1, room) :]
        self._repeats = min(self._repeats, max(1, room // len(self._poison)))

    def _run_outage(self) -> None:
        world = self._world
        self._publish(self._healthy)
        end_s = world.scheduler.now_s + self._random.uniform(1.0, 8.0)
        while world.scheduler.now_s < end_s:
            world.look()
        self._failing = set()
        end_s = world.scheduler.now_s + RECOVERY_S
        while late := [one for program in world.programs for one in self._late(program, 0.0)]:
            if world.scheduler.now_s > end_s:
                world.breaks(f"{late[0]} is not handled {RECOVERY_S:.0f} s after an outage")
            world.look()

    def _poison_rests(self, program: Program) -> bool:
        """Whether no poison key waits for a retry."""
        return not [
            name
            for name, (key, _) in self._published.items()
            if key in self._failing
            and key not in self._hung[program].keys
            and name not in program.promises.finished
            and not program.promises.rests(name, key)
        ]

    def _nothing_rests(self, program: Program) -> bool:
        return not program.promises.unfinished()

    def _go_on(self, is_done: Callable[[Program], bool], within_s: float, what: str) -> None:
        """Publish messages of keys that never fail, and judge how long they take."""
        world = self._world
        longest_s = HEALTHY_S
        if self._fills:
            longest_s = within_s = MADE_ROOM_S * len(self._poison)
        end_s = world.scheduler.now_s + within_s
        openings = {program: program.openings for program in world.programs}
        while not all(map(is_done, world.programs)):
            if world.scheduler.now_s > end_s:
                world.breaks(f"more than {within_s:.0f} s {what}")
            self._publish([self._random.choice(self._healthy)])
            until_s = world.scheduler.now_s + LOOK_S
            while world.scheduler.now_s < until_s:
                world.look()
            for program in world.programs:
                if program.openings != openings[program] and not self._fills:
                    world.breaks(f"{program.name}: poison keys opened the circuit breaker")
                if late := self._late(program, longest_s):
                    world.breaks(f"{late[0]} never fails, and waits for {longest_s:.0f} s")

    def _late(self, program: Program, seconds: float) -> list[str]:
        """Messages of keys that do not fail that were published so long ago and are not done."""
        before_s = self._world.scheduler.now_s - seconds
        return [
            f"{program.name}: {key} at {name.partition}/{name.id}"
            for name, (key, at_s) in self._published.items()
            if at_s < before_s
            and key not in self._failing
            and key not in self._hung[program].keys
            and name not in program.promises.finished
            and not program.promises.rests(name, key)
        ]

    def _publish(self, keys: list[str]) -> None:
        world = self._world
        for name, key in world.publish(self._random.choice(world.topics), keys):
            self._published[name] = key, world.scheduler.now_s
