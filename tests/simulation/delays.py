"""Delayed messages of a run: each has a key of its own, because others of its key overtake it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from keyshard.config import source
from keyshard.consumers import intake
from tests.simulation.scheduler import Scheduler

TICK_S = 0.2
"""Time between two looks of the broker at messages that may be due, seconds."""
DELAY_S = 3.0
"""Mean delay of a message, seconds."""
BYTES_MAX = (400, 700, 1_500)
"""Sizes of a checkpoint that few gaps fill."""
ROOM_AGAIN_S = 1.0
"""Time between two looks for missing entries, seconds; short, because runs are."""


@contextmanager
def small_checkpoints() -> Iterator[None]:
    """Allow checkpoints that a few gaps fill."""
    limits, again_s = source._LIMITS, intake.ROOM_AGAIN_S
    source._LIMITS = tuple((name, 1, high) for name, _, high in limits)  # type: ignore[assignment]
    intake.ROOM_AGAIN_S = ROOM_AGAIN_S
    try:
        yield
    finally:
        source._LIMITS, intake.ROOM_AGAIN_S = limits, again_s


class Delays:
    """Draws delayed messages, and sometimes a checkpoint that has no room for their gaps.

    Args:
        seed: Decides.
        scheduler: Has the time.
        lasting_gaps: Whether gaps may stay for good. They would fill a small checkpoint.
    """

    def __init__(self, seed: int, scheduler: Scheduler, *, lasting_gaps: bool) -> None:
        self._random = Random(f"{seed}:delays")
        self._scheduler = scheduler
        self.share = self._random.choice((0.0, 0.0, 0.3, 0.8))
        """Share of rounds in which another delayed message is published."""
        tight = self.share and self._random.random() < 0.5 and not lasting_gaps
        self.options: dict[str, Any] = (
            {"checkpoint_bytes_max": self._random.choice(BYTES_MAX)} if tight else {}
        )
        """Options of the source."""
        self._count = 0

    def among(self, publish: Callable[[str, float], object]) -> None:
        """Publish some delayed messages.

        Args:
            publish: Called with the key and the delay of a message, seconds.
        """
        while self._random.random() < self.share:
            publish(f"late-{self._count}", self._random.expovariate(1 / DELAY_S))
            self._count += 1

    def pass_time(self, send_due: Callable[[], None], is_done: Callable[[], bool]) -> None:
        """Let the broker send what is due, until the run is done."""
        while not is_done():
            send_due()
            self._scheduler.sleep(TICK_S)
