"""The run that the status, the metrics and the control socket show."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.rescale import Rescaler
from keyshard.observe.handler_view import HandlerView

if TYPE_CHECKING:
    from keyshard.dead_letters.parking import ParkedKeys
    from keyshard.observe.dead_letter_requests import RunningDeadLetters


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The run that the status shows."""

    config: SourceConfig
    coordinator: Coordinator
    handling: HandlerView
    """Facts about its messages."""
    executor: str
    workers: Callable[[], int]
    """Returns how many handlers can run now: threads or processes, or 1 for an event loop."""
    workers_max: int | None
    """The same for any number of ranges; ``None``: only lanes limit."""
    stopping: Callable[[], bool]
    rescaler: Callable[[], Rescaler | None]
    """Returns ``None`` during the start, and if the ranges are fixed."""
    kind: str = "handlers"
    """``handlers``, ``batches``, ``ray``, ``stream`` or ``spark``."""
    fixed: bool = False
    """Whether the ranges cannot move while it runs."""
    turned_s: Callable[[], float] = time.monotonic
    """Returns the time of the last turn of the run's loop, monotonic seconds."""
    parked: Callable[[], ParkedKeys | None] = lambda: None
    """Returns ``None`` during the start, and if the run parks nothing."""
    dead_letters: Callable[[], RunningDeadLetters] | None = None
    """Returns the dead letters of the run, once it has started; ``None`` if the run parks
    nothing."""

    @property
    def has_handlers(self) -> bool:
        """Whether it runs handlers in lanes, and so knows the messages of each range."""
        return self.kind == "handlers"

    @property
    def paused(self) -> bool:
        """Whether it receives nothing until it is resumed."""
        return self.coordinator.paused

    @property
    def phase(self) -> str:
        """``starting``, ``running`` or ``stopping``."""
        if self.stopping():
            return "stopping"
        return "running" if self.has_started else "starting"

    @property
    def has_started(self) -> bool:
        """Whether the start is over."""
        return self.coordinator.started if self.fixed else self.rescaler() is not None
