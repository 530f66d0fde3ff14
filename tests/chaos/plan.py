"""The order and times of faults: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from keyshard.workers.worker import LEASE_S
from tests.chaos import handlers, stream

PARTITIONS = 2
"""Partitions of the topic at first."""
PARTITIONS_MAX = 6
"""Partitions are added up to here."""
RANGES = (3, 8)
"""Fewest and most ranges that a start of the program takes."""

# The broker closes a connection that was silent for two of these; the client's own is 30 s.
KEEP_ALIVE_S = 4
_FREEZE_S = (2.2 * KEEP_ALIVE_S, 3 * KEEP_ALIVE_S)
_SHORT_S = (2.0, 6.0)
_BEYOND_THE_CLIENT_S = (32.0, 45.0)
# A worker that was stopped for longer than its lease was replaced before it goes on.
_WITHIN_THE_LEASE_S = (0.2 * LEASE_S, 0.8 * LEASE_S)
_BEYOND_THE_LEASE_S = (1.2 * LEASE_S, 2 * LEASE_S)

WORKERS = ("embedded", "processes:2")
"""Places of the program's consumers."""


class Kind(Enum):
    """Kinds of faults, and their targets."""

    STREAM_KILLED = "program killed"
    STREAM_STOPPED = "program stopped and continued"
    BROKER_KILLED = "broker killed"
    BROKER_STOPPED = "broker stopped and continued"
    CONNECTIONS_CUT = "connections cut"
    CONNECTIONS_STALLED = "connections stalled"
    TOPIC_UNLOADED = "topic unloaded"
    PARTITIONS_ADDED = "partitions added"
    RESTARTED = "program ended and started again"
    RESCALED = "rescaled"
    UNPARKED = "keys unparked"
    WORKER_KILLED = "worker process killed"
    WORKER_STOPPED = "worker process stopped and continued"
    BROKER_SHUT_DOWN = "broker shut down in order and started again"
    BUNDLE_MOVED = "bundle moved to another broker"
    BUNDLE_SPLIT = "bundle split"
    BOOKIE_KILLED = "bookie killed and started again"


_OF_HANDLERS = frozenset({Kind.RESTARTED, Kind.RESCALED, Kind.UNPARKED})
_OF_WORKERS = frozenset({Kind.WORKER_KILLED, Kind.WORKER_STOPPED})
_OF_CLUSTERS = frozenset(
    {Kind.BROKER_SHUT_DOWN, Kind.BUNDLE_MOVED, Kind.BUNDLE_SPLIT, Kind.BOOKIE_KILLED}
)


class Subject(Enum):
    """The program under test."""

    STREAM = "stream"
    HANDLERS = "handlers"

    @property
    def module(self) -> str:
        """The command of the program."""
        return f"tests.chaos.{self.value}"

    def kinds(self, workers: str, brokers: int = 1) -> list[Kind]:
        """Return the faults for a program with these workers, on a number of brokers."""
        others = set() if self is Subject.HANDLERS else _OF_HANDLERS
        if workers == "embedded":
            others = others | _OF_WORKERS
        if brokers == 1:
            others = others | _OF_CLUSTERS
        return [kind for kind in Kind if kind not in others]

    @property
    def steps(self) -> list[Enum]:
        """Steps at which it may be killed."""
        return list(stream.Step if self is Subject.STREAM else handlers.Step)

    @property
    def first_step(self) -> Enum:
        """The step of the first kill."""
        return stream.Step.READING if self is Subject.STREAM else handlers.Step.HANDLED


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and the wait before it."""

    kind: Kind
    after_s: float | None
    """Pause before it, seconds; ``None``: when the program has committed again. A kill comes when
    both are over."""
    lasts_s: float = 0.0
    """Duration of a stop or stall, seconds."""
    step: Enum | None = None
    """The program is killed at this step; ``None``: at any time."""
    ranges: int = RANGES[0]
    """Ranges of the program's next start, or from now on."""
    workers_too: bool = False
    """A program that is stopped has its workers stopped with it, and they go on first."""


def faults(
    seed: int, subject: Subject = Subject.STREAM, workers: str = "embedded", brokers: int = 1
) -> Iterator[list[Fault]]:
    """Yield rounds without end. Each has every kind at least once, in a drawn order.

    The first round has only short faults. Its first kill of the program comes inside a batch or a
    handler.
    """
    chooser = random.Random(seed)
    partitions = PARTITIONS
    steps: list[Enum | None] = [subject.first_step]
    first = True
    while True:
        kinds = [*subject.kinds(workers, brokers), Kind.STREAM_KILLED, Kind.CONNECTIONS_CUT]
        if partitions >= PARTITIONS_MAX:
            kinds.remove(Kind.PARTITIONS_ADDED)
        partitions += 1
        chooser.shuffle(kinds)
        drawn = []
        for kind in kinds:
            step = None
            if kind is Kind.STREAM_KILLED:
                if not steps:
                    steps = [*subject.steps, None]
                    chooser.shuffle(steps)
                step = steps.pop()
            fault = Fault(
                kind,
                after_s=chooser.choice((None, chooser.uniform(0.0, 1.5))),
                lasts_s=_duration_s(kind, chooser, long=not first),
                step=step,
                ranges=chooser.randint(*RANGES),
                workers_too=workers != "embedded" and chooser.random() < 0.5,
            )
            drawn.append(fault)
        yield drawn
        first = False


def _duration_s(kind: Kind, chooser: random.Random, *, long: bool) -> float:
    if kind is Kind.STREAM_STOPPED:
        return chooser.uniform(*_FREEZE_S)
    if kind is Kind.WORKER_STOPPED:
        within = chooser.random() < 0.3
        return chooser.uniform(*(_WITHIN_THE_LEASE_S if within else _BEYOND_THE_LEASE_S))
    if kind is Kind.BOOKIE_KILLED:
        return chooser.uniform(*_SHORT_S)
    if kind in {Kind.BROKER_STOPPED, Kind.CONNECTIONS_STALLED}:
        beyond = long and chooser.random() < 0.3
        return chooser.uniform(*(_BEYOND_THE_CLIENT_S if beyond else _SHORT_S))
    return 0.0
