"""Faults of a run and their steps, planned from the seed before the run begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from tests.simulation.spark import Step


class Kind(str, Enum):
    """Kinds of faults."""

    DRIVER = "driver crash"
    """The process with coordinator and workers is killed."""
    OTHER_N = "other N"
    """The same, and it starts again with another number of ranges."""
    STOP = "driver stopped"
    """The process is asked to end, gives its ranges back, and is killed if that takes long."""
    WORKER = "worker crash"
    """The consumers of one receive thread lose their connection."""
    BROKER = "broker crash"
    """The broker is killed, forgets acknowledgements, and is back after a while."""
    ACKS = "lost acks"
    """Acknowledgements that the client holds are lost with its connections."""
    FORGETS = "forgotten acks"
    """The broker is killed, and forgets nearly all that was ever acknowledged."""
    FOREIGN = "foreign acks"
    """Another client acknowledges entries, or parts of them, on the subscription."""
    WIPED = "wiped broker"
    """The cluster loses everything and is created again, with the same topics and ids."""
    TWICE = "duplicates"
    """The broker redelivers unacknowledged entries."""
    UNLOAD = "unload"
    """A topic partition moves to another broker."""
    GROWTH = "growth"
    """The topic gets another partition."""
    COMES = "new topic"
    """A topic is created that the pattern matches, perhaps one that was deleted before."""
    GOES = "topic deleted"
    """A topic is deleted by force, with all that it holds."""
    UNCOVERED = "uncovered"
    """One range has no owner for seconds."""
    SLOW = "slow range"
    """One range is rarely received from, for seconds."""
    POISON = "poison row"
    """User code fails on a row, or in the sink."""
    MEMORY = "full window"
    """The memory budget is so small that the window is always full."""
    SPLIT = "split"
    """A segment of a scalable topic is split."""
    MERGE = "merge"
    """Two segments are merged."""
    COLLECT = "segment deleted"
    """The broker deletes sealed segments that no registered subscription needs."""


CRASHES = frozenset({Kind.DRIVER, Kind.OTHER_N})
"""Kinds that kill the process."""
TOPICS = frozenset({Kind.COMES, Kind.GOES})
"""Kinds that need topics which come and go."""
OF_SEGMENTS = frozenset({Kind.SPLIT, Kind.MERGE, Kind.COLLECT})
"""Kinds that need a scalable topic."""
NOT_OF_SEGMENTS = frozenset({Kind.GROWTH, Kind.WIPED, *TOPICS})
"""Kinds that need persistent topics."""
GOES_SHARE = 0.3
"""Share of the runs in which a scalable topic is deleted and created again."""
WITHIN_BATCH = (Step.LOGGED, Step.PLANNED, Step.READING, Step.SINKING, Step.SUNK)
"""Steps in which a batch is planned and not committed."""


def _possible(kind: Kind, step: Step) -> bool:
    if kind is Kind.POISON:
        return step in (Step.READING, Step.SINKING)
    return kind is not Kind.MEMORY or step is not Step.STARTING


Cell = tuple[Kind, Step]
_ALL = tuple((kind, step) for kind in Kind for step in Step if _possible(kind, step))
CELLS: Sequence[Cell] = tuple(cell for cell in _ALL if cell[0] not in OF_SEGMENTS)
"""Every fault with every step in which it can happen; seed after seed has another first fault."""
SEGMENT_CELLS: Sequence[Cell] = tuple(cell for cell in _ALL if cell[0] not in NOT_OF_SEGMENTS)
"""The same, for a scalable topic that is never deleted."""
GOES_CELLS: Sequence[Cell] = tuple(cell for cell in _ALL if cell[0] is Kind.GOES)
"""Steps in which a scalable topic can be deleted; it is created again."""


@dataclass(slots=True)
class Fault:
    """One fault of a run."""

    kind: Kind
    step: Step
    visit: int
    """It happens when the step begins for at least this time."""
    delay_s: float
    """Time after the beginning of the step, seconds."""
    begun: bool = False


def plan(seed: int, random: Random, possible: Sequence[Cell] = CELLS) -> list[Fault]:
    """Faults of a run: the first one by the seed's number, so that none is left to chance."""
    cells = [possible[seed % len(possible)]]
    cells += [random.choice(possible) for _ in range(random.randrange(4))]
    faults: list[Fault] = []
    for number, (kind, step) in enumerate(cells):
        if kind is Kind.FORGETS and step in (Step.STARTING, Step.REPLAYING):
            # Something is acknowledged before that.
            before = Step.COMMITTED if step is Step.STARTING else random.choice(WITHIN_BATCH)
            faults.append(Fault(Kind.DRIVER, before, 4, 0.0))
        elif step is Step.REPLAYING and not any(
            fault.kind in CRASHES and fault.step in WITHIN_BATCH for fault in faults
        ):
            faults.append(Fault(Kind.DRIVER, random.choice(WITHIN_BATCH), 1, 0.0))
        late = number > 0 and random.random() < 0.5
        faults.append(
            Fault(
                kind, step,
                visit=1 if step in (Step.STARTING, Step.REPLAYING) else random.randint(1, 4),
                delay_s=random.random() * 0.05 if late else 0.0,
            )
        )  # fmt: skip
    return faults


def deletion(seed: int) -> list[Fault]:
    """The deletion of a scalable topic, if a run has it, drawn from a random stream of its own."""
    random = Random(f"{seed}:new topic")
    if random.random() >= GOES_SHARE:
        return []
    kind, step = random.choice(GOES_CELLS)
    visit = 1 if step in (Step.STARTING, Step.REPLAYING) else random.randint(1, 4)
    fault = Fault(kind, step, visit, delay_s=random.choice((0.0, 0.05)) * random.random())
    crash = Fault(Kind.DRIVER, random.choice(WITHIN_BATCH), 1, 0.0)
    return [crash, fault] if step is Step.REPLAYING else [fault]


Reached = Counter[tuple[Kind, Step]]
"""How often each fault hit each step."""


def table(reached: Reached, possible: Collection[Cell] = CELLS) -> str:
    """The counts, as a table for people; ``-`` where a fault cannot happen."""
    return drawn(reached, Step, possible, column=11)


def drawn(
    reached: Counter[Any],
    steps: Iterable[Any],
    possible: Collection[tuple[Any, Any]],
    *,
    column: int,
) -> str:
    """A table of any world's faults by its steps, with columns of a width."""
    kinds, steps = list(dict.fromkeys(kind for kind, _ in possible)), list(steps)
    width = max(len(kind.value) for kind in kinds)
    lines = [" " * width + "".join(f" {step.value:>{column}}" for step in steps)]
    for kind in kinds:
        cells = (
            f"{reached[kind, step] if (kind, step) in possible else '-':>{column}}"
            for step in steps
        )
        lines.append(f"{kind.value:{width}} " + " ".join(cells))
    return "\n".join(lines)


def events(reached: Reached) -> int:
    """Number of faults; a full window is a state, not an event."""
    return sum(count for (kind, _), count in reached.items() if kind is not Kind.MEMORY)


def missing(reached: Reached, possible: Collection[Cell] = CELLS) -> list[str]:
    """Faults and steps that never met."""
    return [f"{kind.value} at {step.value}" for kind, step in possible if not reached[kind, step]]


# -- Troubles of a world, which are faults beside those that meet steps ----------------------------


def table_with(reached: Counter[Any], troubles: Iterable[Any]) -> str:
    """The counts, as a table and a list of the troubles for people."""
    troubles = list(troubles)
    width = max(len(trouble.value) for trouble in troubles)
    lines = (f"{trouble.value:{width}} {reached[trouble, None]:>9}" for trouble in troubles)
    return "\n".join([table(reached), *lines])


def unmet(reached: Counter[Any], troubles: Iterable[Any]) -> list[str]:
    """Troubles that never came."""
    return [trouble.value for trouble in troubles if not reached[trouble, None]]
