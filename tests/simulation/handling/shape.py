"""The shape of a run with handlers: sizes and options, drawn from its seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from random import Random
from typing import Any

import tenacity

from keyshard import RetryPolicy
from keyshard.broker.memory import Batching, LookAhead, UnackedLimits
from keyshard.config.handlers import NullKeys, OnFailure
from tests.simulation.handling.faults import Step

PARKING = {
    Step.LETTER, Step.STORED, Step.READING, Step.REPLAYING, Step.MARKER, Step.RELEASED,
}  # fmt: skip
"""Steps of programs that park keys."""


_BATCHING = (Batching.NONE, Batching.BY_KEY)


def _raises(_state: tenacity.RetryCallState) -> float:
    raise ValueError("no wait")


def _nan(_state: tenacity.RetryCallState) -> float:
    return math.nan


def _negative(_state: tenacity.RetryCallState) -> float:
    return -1.0


def _none(_state: tenacity.RetryCallState) -> None:
    """Return None instead of a time, as a faulty wait strategy does."""


_HOSTILE_WAITS: tuple[Callable[[tenacity.RetryCallState], Any], ...] = (
    _raises, _nan, _negative, _none,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes and options of one run; small, so that limits are met and boundaries are many."""

    topics: tuple[int, ...]
    """Topic partitions of each topic."""
    batches: bool
    """Whether the program iterates over ``batches()`` instead of giving a handler."""
    neighbour: bool
    """Whether a second source consumes by a pattern beside it."""
    checkpoint: bool
    ranges: int
    lanes: int
    workers: int | None
    rate: tuple[float, int] | None
    """Rate limit and burst of the handler."""
    on_failure: OnFailure
    null_keys: NullKeys
    attempts: int
    """Attempts until a message is given up."""
    wait: Any
    """Wait strategy between attempts."""
    slow: float
    """Share of the messages that take long."""
    failing: float
    """Share of the messages that fail at first."""
    rejected: float
    """Share of the messages that are rejected."""
    hostile: bool
    """Whether errors raise when they are inspected."""
    keys: int
    keyless: float
    messages_min: int
    batching: Batching
    entries_per_ledger: int
    look_ahead: LookAhead
    unacked_limits: UnackedLimits
    cursor_write_ms: int
    admin: bool
    """Whether the source may ask the admin interface."""
    operated: bool
    """Whether an operator unparks and rescales sometimes."""
    options: dict[str, Any]
    """Options of the source."""

    @classmethod
    def of(cls, random: Random, steps: Set[Step], rates: Random) -> Shape:
        """Draw one in which faults can meet their steps.

        Args:
            random: Decides.
            steps: Steps that faults must be able to meet.
            rates: Decides about the rate limit.
        """
        halves = Step.HALF in steps
        parking = not PARKING.isdisjoint(steps)
        batches = not parking and Step.FAILING not in steps and random.random() < 0.15
        neighbour = not batches and random.random() < 0.05
        hostile = random.random() < 0.2
        failing: list[OnFailure] = ["park", "park", "dead_letter", "stop"]
        null_keys: list[NullKeys] = ["spread", "serialise", "reject"]
        on_failure = "park" if parking else random.choice(failing)
        waits = [tenacity.wait_none(), tenacity.wait_fixed(0.2), tenacity.wait_random(0.0, 0.5)]
        return cls(
            topics=tuple(random.randint(1, 3) for _ in range(random.choice((1, 1, 2)))),
            batches=batches,
            neighbour=neighbour,
            checkpoint=not steps.isdisjoint({Step.SAVING, Step.SAVED}) or random.random() < 0.5,
            ranges=random.choice((1, 2, 3, 5)),
            lanes=random.choice((1, 2, 4)),
            workers=random.choice((None, None, 1, 3)),
            rate=rates.choice((None, None, None, (12.0, 1), (30.0, 4))),
            on_failure=on_failure,
            null_keys=random.choice(null_keys),
            attempts=random.choice((1, 2, 3)),
            wait=random.choice(_HOSTILE_WAITS if hostile and random.random() < 0.3 else waits),
            # Messages in flight come again before an entry that a reconnect split.
            slow=0.6 if halves else 0.05,
            failing=0.15 if parking else random.choice((0.02, 0.15)),
            rejected=random.choice((0.0, 0.04)),
            hostile=hostile,
            keys=2 if halves else random.choice((2, 5, 12)),
            keyless=random.choice((0.0, 0.0, 0.1)),
            messages_min=random.choice((40, 100)),
            batching=Batching.BY_KEY if halves else random.choice(_BATCHING),
            entries_per_ledger=random.choice((7, 30, 1_000)),
            look_ahead=random.choice((LookAhead(), LookAhead(), LookAhead(10, 40))),
            unacked_limits=random.choice((UnackedLimits(), UnackedLimits(40, 60))),
            cursor_write_ms=random.choice((0, 1_000, 60_000)),
            admin=neighbour or random.random() < 0.5,
            operated=random.random() < 0.7,
            options={
                "window_rows_max": random.choice((8, 60, 400)),
                "receive_threads": random.choice((1, 2)),
                "receiver_queue_size": 1 if halves else random.choice((1, 3, 20)),
                "discovery_interval_ms": random.choice((200, 1_000)),
                "settle_after_ms": random.choice((2_000, 20_000, 300_000)),
            },
        )

    @property
    def retry(self) -> RetryPolicy:
        return RetryPolicy(wait=self.wait, stop=tenacity.stop_after_attempt(self.attempts))
