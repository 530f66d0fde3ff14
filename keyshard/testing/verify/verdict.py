"""Verdicts of checkers."""

from __future__ import annotations

from dataclasses import dataclass, field

from keyshard.testing.verify.history import Event

OFFENDING_MAX = 6
"""Most events that a verdict shows."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one promise holds in a history."""

    name: str
    """The promise."""
    holds: bool
    """Whether there is no violation; also true, with ``checked`` 0, if nothing could be checked."""
    checked: int
    """Number of checked things; ``message`` names their kind."""
    violations: int
    offending: tuple[Event, ...] = field(repr=False)
    """Events of the first violations, grouped by violation."""
    message: str
    """One sentence: what was checked, or the first violation, or why nothing could be checked."""

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values; the offending events as in a history."""
        return {
            "name": self.name,
            "holds": self.holds,
            "checked": self.checked,
            "violations": self.violations,
            "message": self.message,
            "offending": [event.to_dict() for event in self.offending],
        }


class Findings:
    """Counts what a checker checks, and keeps the first violations.

    Args:
        name: The promise.
        what: The counted things, in the plural.
        nothing: Why there may be nothing to check: the events that the history lacks.
    """

    def __init__(self, name: str, what: str, nothing: str) -> None:
        self._name = name
        self._what = what
        self._nothing = nothing
        self._offending: list[Event] = []
        self._first = ""
        self.checked = 0
        self.violations = 0

    def violation(self, why: str, *events: Event) -> None:
        """Note one violation.

        Args:
            why: A sentence without its full stop.
            events: The events that show it; at least one.
        """
        self.violations += 1
        self._first = self._first or why
        if len(self._offending) + len(events) <= OFFENDING_MAX:
            self._offending += events

    def verdict(self) -> Verdict:
        """Return the verdict, after the last event."""
        if self.violations:
            count = f"{self.violations:,} violation{'s' * (self.violations > 1)}"
            message = f"{count} in {self.checked:,} {self._what}; the first: {self._first}."
        elif self.checked:
            message = f"{self.checked:,} {self._what}."
        else:
            message = f"Nothing to check: {self._nothing}."
        return Verdict(
            self._name,
            not self.violations,
            self.checked,
            self.violations,
            tuple(self._offending),
            message,
        )
