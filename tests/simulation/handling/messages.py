"""The outcome of each message at the handler of a run, drawn from the seed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from keyshard import Reject, RetryLater
from tests.simulation.handling.shape import Shape


class Unprintable(Exception):  # noqa: N818 - named by what it is
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class NoText(Exception):  # noqa: N818
    """An error without a text."""

    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307 - so it is


class Stubborn(BaseException):
    """An error that is no ``Exception``, like the interrupts of some libraries."""


_ORDINARY: tuple[Callable[[], BaseException], ...] = (
    lambda: ValueError("cannot"),
    lambda: OSError(5, "the database is away"),
    lambda: RetryLater(0.05),
    lambda: RetryLater(0.3, "not yet"),
    AssertionError,
)
_HOSTILE: tuple[Callable[[], BaseException], ...] = (
    Unprintable,
    NoText,
    Stubborn,
    KeyboardInterrupt,
    lambda: SystemExit(3),
    GeneratorExit,
    StopIteration,
    asyncio.CancelledError,
    lambda: RetryLater(math.nan),
    lambda: RetryLater(0.1, ValueError("a reason")),  # type: ignore[arg-type]
    lambda: ValueError("\ud800"),
    lambda: ValueError("x" * 100_000),
)
_REJECTS: tuple[Callable[[], BaseException], ...] = (Reject, lambda: Reject("no order"))
_HOSTILE_REJECTS: tuple[Callable[[], BaseException], ...] = (
    lambda: Reject(ValueError("why")),  # type: ignore[arg-type]
    lambda: Reject(Unprintable()),  # type: ignore[arg-type]
    lambda: Reject(b"bytes"),  # type: ignore[arg-type]
)


@dataclass(slots=True)
class Fate:
    """The outcome of one message."""

    seconds: float
    """How long the handler works on it, seconds; 0 for no time at all."""
    fails: int = 0
    """Attempts that will fail yet."""
    error: Callable[[], BaseException] = ValueError
    rejected: bool = False
    returns: bool = False
    """Whether the handler returns the error instead of raising it."""


INSTANT = 0.5
"""Share of the programs whose handlers take no time, so that they get messages in bulk."""
HANGS_S = 0.36
"""Shortest time that a handler of such a program takes, if it takes any, seconds."""


class Fates:
    """The outcomes of all messages of one program. They outlive its processes, as a database does.

    Args:
        seed: The seed of the run, and the program.
        shape: How many fail.
    """

    def __init__(self, seed: str, shape: Shape) -> None:
        self._seed = seed
        self._shape = shape
        self._of: dict[tuple[Any, ...], Fate] = {}
        self._healed = False
        self._instant = Random(f"{seed}:instant").random() < INSTANT

    def heal(self) -> None:
        """Let no further message fail; rejected ones stay rejected."""
        self._healed = True
        for fate in self._of.values():
            fate.fails = 0

    def of(self, topic: str, partition: int, key: str | None, seq: int) -> Fate:
        """Fate of a message."""
        name = topic, partition, key, seq
        fate = self._of.get(name)
        if fate is None:
            fate = self._of[name] = self._draw(Random(f"{self._seed}:{name}"))
            if self._healed:
                fate.fails = 0
        return fate

    def _draw(self, random: Random) -> Fate:
        shape = self._shape
        slow = random.random() < shape.slow
        fate = Fate(random.random() * (0.4 if slow else 0.01) if random.random() < 0.5 else 0.0)
        if self._instant and fate.seconds < HANGS_S:
            fate.seconds = 0.0
        errors, rejects = _ORDINARY, _REJECTS
        if shape.hostile and random.random() < 0.5:
            errors, rejects = _HOSTILE, _HOSTILE_REJECTS
        roll = random.random()
        if roll < shape.rejected:
            fate.rejected, fate.error = True, random.choice(rejects)
        elif roll < shape.rejected + shape.failing:
            fate.error = random.choice(errors)
            # Fewer than the attempts: it is tried again. More: its key parks, perhaps twice.
            fate.fails = random.randint(1, 2 * shape.attempts + 1)
        fate.returns = random.random() < 0.2
        return fate
