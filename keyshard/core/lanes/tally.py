"""What became of messages since the start of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from keyshard.core.dead_letter.letters import LetterKind
from keyshard.core.lanes.timings import Timings


class Counters(TypedDict):
    """The counts of :class:`Tally`, as plain JSON values."""

    completed: int
    failedAttempts: int
    rejected: int
    parked: int
    deadLettered: int
    observerErrors: int


@dataclass(slots=True)
class Tally:
    """Counts of one run. Not thread-safe: the owner changes it under one lock."""

    completed: int = 0
    """Messages whose handler returned."""
    failed_attempts: int = 0
    """Attempts that raised."""
    rejected: int = 0
    """Messages that a handler, or the policy for messages without a key, rejected."""
    parked: int = 0
    """Messages of parked keys that went to the dead-letter topic."""
    dead_lettered: int = 0
    """Messages written to the dead-letter topic, for whatever reason."""
    observer_errors: int = 0
    """Calls of observers that raised."""
    timings: Timings = field(default_factory=Timings)
    """Of attempts."""

    def attempt(self, seconds: float, *, failed: bool) -> None:
        """Count one attempt of the handler."""
        self.timings.add(seconds)
        if failed:
            self.failed_attempts += 1
        else:
            self.completed += 1

    def letter(self, kind: LetterKind) -> None:
        """Count a message that was written to the dead-letter topic."""
        self.dead_lettered += 1
        self.rejected += kind is LetterKind.REJECTED
        self.parked += kind is LetterKind.PARKED

    def counters(self) -> Counters:
        """The counts as plain JSON values."""
        return {
            "completed": self.completed,
            "failedAttempts": self.failed_attempts,
            "rejected": self.rejected,
            "parked": self.parked,
            "deadLettered": self.dead_lettered,
            "observerErrors": self.observer_errors,
        }
