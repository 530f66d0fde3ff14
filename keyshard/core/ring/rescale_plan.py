"""What another number of ranges would change: which slots move, and what the source can reach."""

from __future__ import annotations

from dataclasses import dataclass

from keyshard.core.ring.assignment import Assignment, fewest_moved, moved_slots, reassign
from keyshard.core.ring.hash_range import RING_SIZE, HashRange


@dataclass(frozen=True, slots=True)
class Move:
    """A stretch of the ring that changes its range."""

    hash_range: HashRange
    source: int
    """Index of the range that has it now."""
    target: int
    """Index of the range that takes it."""


@dataclass(frozen=True, slots=True)
class RescalePlan:
    """Moves from one number of ranges to another."""

    before: Assignment
    after: Assignment
    moves: tuple[Move, ...]

    @classmethod
    def make(cls, before: Assignment, count: int) -> RescalePlan:
        """Plan ``count`` ranges from what is owned now; nothing is done.

        Raises:
            ConfigError: ``count`` is not 1 to 65,536.
        """
        after = reassign(before, count)
        moves: list[Move] = []
        old, new = _by_slot(before), _by_slot(after)
        while old and new:
            (had, source), (has, target) = old[-1], new[-1]
            end = min(had.end, has.end)
            if source != target:
                moves.append(Move(HashRange(max(had.start, has.start), end), source, target))
            for ranges in (old, new):
                if ranges[-1][0].end == end:
                    ranges.pop()
        return cls(before, after, tuple(moves))

    @property
    def moved_fraction(self) -> float:
        """Part of the ring that changes its range, 0 to 1."""
        return moved_slots(self.before, self.after) / RING_SIZE

    @property
    def optimum_fraction(self) -> float:
        """Part of the ring that must move, however it is done, for ranges of equal size."""
        return fewest_moved(self.before, len(self.after)) / RING_SIZE


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that handlers can do, whatever the broker delivers."""

    keys: int
    """Keys worked on at the same time."""
    rows_per_s: float | None
    """Messages per second; ``None`` when the time of the handler is not known."""
    limited_by: str
    """``lanes`` or ``workers``."""

    @classmethod
    def of(
        cls, ranges: int, lanes: int, handler_s: float | None, workers: int | None = None
    ) -> Ceiling:
        """The ceiling of so many ranges.

        Args:
            ranges: Number of ranges.
            lanes: Keys worked on at the same time in a range.
            handler_s: Mean time of the handler, seconds, where it is known.
            workers: Handlers that may run at the same time; ``None``: as many as there are lanes.
        """
        keys = ranges * lanes
        limited_by = "lanes"
        if workers is not None and workers < keys:
            keys, limited_by = workers, "workers"
        return cls(keys, keys / handler_s if handler_s else None, limited_by)


def _by_slot(assignment: Assignment) -> list[tuple[HashRange, int]]:
    """Ranges with their owners, the last slots first."""
    owned = [
        (hash_range, owner) for owner, ranges in enumerate(assignment) for hash_range in ranges
    ]
    return sorted(owned, reverse=True)
