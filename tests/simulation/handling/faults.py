"""Faults of a program with handlers and their steps, planned from the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from tests.simulation.faults import GOES_SHARE, drawn


class Step(str, Enum):
    """Moments in the life of a program, in any of its threads."""

    STARTING = "starting"
    """A new process begins."""
    HALF = "half an entry"
    """A part of an entry was received, and the client has the rest."""
    HANDLING = "handling"
    """The handler, or the program of a batch, begins with a message."""
    FAILING = "failing"
    """The handler is about to raise."""
    LETTER = "letter"
    """A dead letter is about to be sent."""
    STORED = "stored"
    """It is stored, and not confirmed yet."""
    READING = "reading"
    """A Reader of the dead-letter topic reads."""
    REPLAYING = "replaying"
    """The handler begins with a dead letter."""
    MARKER = "marker"
    """The marker of a replayed dead letter is about to be sent."""
    RELEASED = "released"
    """It is stored, and not confirmed yet."""
    SAVING = "saving"
    """A checkpoint is about to be stored."""
    SAVED = "saved"
    """It is stored; nothing of it is acknowledged yet."""
    MOVING = "moving"
    """Ranges are about to move."""
    STOPPING = "stopping"
    """The run was asked to end."""


class Kind(str, Enum):
    """Kinds of faults, and of actions of an operator at a bad moment."""

    KILL = "kill"
    """The process dies."""
    STOP = "stop"
    """The run is asked to end, from any thread, and is started again."""
    FORGETFUL_STOP = "stop, forget"
    """The same, and the broker is killed before the next start: it forgets acknowledgements."""
    BROKER = "broker crash"
    """The broker is killed, forgets acknowledgements, and is back after a while."""
    CONSUMERS = "consumers cut"
    """Some consumers lose their connection."""
    BLINK = "reconnect"
    """Consumers lose their connection and have it again before anybody empties their queues."""
    PRODUCER = "producer cut"
    """Producers of the dead-letter topic lose their connection."""
    READER = "reader cut"
    """Readers of the dead-letter topic lose their connection."""
    UNCONFIRMED = "unconfirmed"
    """A sent message is stored, and its confirmation is lost."""
    ACKS = "lost acks"
    """Acknowledgements that the client holds are lost with its connections."""
    TWICE = "duplicates"
    """The broker redelivers unacknowledged entries."""
    UNLOAD = "unload"
    """A topic partition moves to another broker."""
    UNPARK = "unpark"
    """An operator unparks all keys."""
    RESCALE = "rescale"
    """Ranges move to another number of owners."""
    BALANCE = "balance"
    """Ranges move to equal loads."""
    UNSAVED = "unsaved"
    """The checkpoint cannot be stored."""
    SPLIT = "split"
    """A segment of a scalable topic is split."""
    MERGE = "merge"
    """Two segments are merged."""
    COLLECT = "segment deleted"
    """The broker deletes sealed segments that no registered subscription needs."""
    GOES = "topic deleted"
    """A scalable topic is deleted by force, and created again."""


_ONLY_AT = {
    Kind.UNCONFIRMED: {Step.STORED, Step.RELEASED},
    Kind.READER: {Step.READING},
    Kind.UNSAVED: {Step.SAVING},
}
_NOT_AT_START = {
    Kind.STOP, Kind.CONSUMERS, Kind.BLINK, Kind.ACKS, Kind.TWICE, Kind.UNLOAD, Kind.PRODUCER,
    Kind.UNPARK, Kind.RESCALE, Kind.BALANCE, Kind.FORGETFUL_STOP,
}  # fmt: skip


_VISITS = {Step.STARTING: (1, 1), Step.STOPPING: (1, 1), Step.HALF: (3, 12)}


def _possible(kind: Kind, step: Step) -> bool:
    if step is Step.STARTING and kind in _NOT_AT_START:
        return False
    if step is Step.STOPPING and kind in (Kind.STOP, Kind.FORGETFUL_STOP):
        return False
    return step in _ONLY_AT.get(kind, {step})


Cell = tuple[Kind, Step]
_OF_SEGMENTS = frozenset({Kind.SPLIT, Kind.MERGE, Kind.COLLECT})
_ALL = tuple((kind, step) for kind in Kind for step in Step if _possible(kind, step))
SEGMENT_CELLS: Sequence[Cell] = tuple(cell for cell in _ALL if cell[0] is not Kind.GOES)
"""Every fault with every step in which it can happen, for scalable topics that are never
deleted."""
GOES_CELLS: Sequence[Cell] = tuple(cell for cell in _ALL if cell[0] is Kind.GOES)
"""Steps in which a scalable topic can be deleted."""
CELLS: Sequence[Cell] = tuple(cell for cell in SEGMENT_CELLS if cell[0] not in _OF_SEGMENTS)
"""The same, for persistent topics; seed after seed has another first fault."""


@dataclass(slots=True)
class Fault:
    """One fault of a run."""

    kind: Kind
    step: Step
    visit: int
    """It happens when the step begins for at least this time."""
    begun: bool = False


def plan(seed: int, random: Random, possible: Sequence[Cell] = CELLS) -> list[Fault]:
    """Faults of a run: the first one by the seed's number, so that none is left to chance."""
    cells = [possible[seed % len(possible)]]
    cells += [random.choice(possible) for _ in range(random.randrange(4))]
    if any(step is Step.STOPPING for _, step in cells):
        cells.append((Kind.STOP, random.choice((Step.HANDLING, Step.FAILING))))
    return [Fault(kind, step, random.randint(*_VISITS.get(step, (1, 4)))) for kind, step in cells]


def deletion(seed: int) -> list[Fault]:
    """The deletion of a scalable topic, if a run has it, drawn from a random stream of its own."""
    random = Random(f"{seed}:new topic")
    if random.random() >= GOES_SHARE:
        return []
    kind, step = random.choice(GOES_CELLS)
    return [Fault(kind, step, random.randint(*_VISITS.get(step, (1, 4))))]


Reached = Counter[tuple[Kind, Step]]
"""How often each fault hit each step."""


def table(reached: Reached, possible: Collection[Cell] = CELLS) -> str:
    """The counts, as a table for people; ``-`` where a fault cannot happen."""
    return drawn(reached, Step, possible, column=9)


def events(reached: Reached) -> int:
    """Number of faults."""
    return sum(reached.values())


def missing(reached: Reached, possible: Collection[Cell] = CELLS) -> list[str]:
    """Faults and steps that never met."""
    return [f"{kind.value} at {step.value}" for kind, step in possible if not reached[kind, step]]
