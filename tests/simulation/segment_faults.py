"""Faults of the worlds with scalable topics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation import faults
from tests.simulation.handling import faults as handling_faults


@dataclass(frozen=True)
class SegmentFaults:
    """The faults of one world, as those of other worlds in their modules."""

    CELLS: Sequence[Any]
    """Every fault with every step in which it can happen."""
    drawn: Callable[[Any, Collection[Any]], str]
    unmet: Callable[[Any, Collection[Any]], list[str]]
    events: Callable[[Any], int]

    def table(self, reached: Any) -> str:
        """The counts, as a table for people."""
        return self.drawn(reached, self.CELLS)

    def missing(self, reached: Any) -> list[str]:
        """Faults and steps that never met."""
        return self.unmet(reached, self.CELLS)


OF_QUERY = SegmentFaults(
    (*faults.SEGMENT_CELLS, *faults.GOES_CELLS), faults.table, faults.missing, faults.events
)
OF_HANDLERS = SegmentFaults(
    (*handling_faults.SEGMENT_CELLS, *handling_faults.GOES_CELLS),
    handling_faults.table, handling_faults.missing, handling_faults.events,
)  # fmt: skip
