"""The verdict on a run, and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from keyshard.verify.checkers import Verdict, check
from keyshard.verify.history import Event, Name
from keyshard.verify.history_view import HistoryView

BROKER = "broker"
"""Its name in the history."""
LIVENESS_S = 120.0
"""Once the faults have stopped, everything is done in this time, seconds. The client waits up to
60 s before it tries to connect again."""

_NEEDS_HANDLERS = "one handler per key"
_ARRIVED_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """What was done and what came of it."""

    seed: int
    seconds: float
    faults: dict[str, int]
    """Faults of each kind that were injected."""
    verdicts: list[Verdict] = field(repr=False)
    messages: int
    """Messages that the broker confirmed."""
    unconfirmed: int
    """Messages that it refused: nobody knows whether they are stored, so they count nowhere."""
    of_bytes: int
    """Of the messages, those of the Java client whose keys are bytes."""
    misrouted: int
    """Messages of which the source said that they came to a range that is not theirs."""
    rows: int
    """Rows in committed batches."""
    batches: int
    batches_run_again: int
    starts: int
    """Starts of the stream."""
    gave_up: int
    """Starts or runs of it that ended because the broker was away or still knew the one before."""
    redelivered: int
    """Messages that the broker delivered again."""
    redeliveries_dropped: int
    """Of those, what lay in a batch already, as far as killed processes could still tell."""
    problems: list[str]
    """What is wrong beside the verdicts."""

    @property
    def violations(self) -> int:
        """Violations over all checkers."""
        return sum(verdict.violations for verdict in self.verdicts)

    @property
    def holds(self) -> bool:
        """Whether every promise was checked and holds, and nothing else is wrong."""
        return not self.violations and not self.problems

    def to_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "holds": self.holds,
            **asdict(self),
            "violations": self.violations,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
        }


def unchecked(verdicts: Sequence[Verdict]) -> list[str]:
    """Checkers that had nothing to check and should have; an embedded stream has no handlers."""
    return [one.name for one in verdicts if not one.checked and one.name != _NEEDS_HANDLERS]


def judge(events: Sequence[Event]) -> list[Verdict]:
    """The verdict of every checker."""
    return check(events, liveness_s=LIVENESS_S)


def redelivered(events: Sequence[Event]) -> int:
    """Messages that came from the broker again, each time counted."""
    times = Counter(event.stored for event in events if _is_delivery(event))
    return sum(times.values()) - len(times)


def forgotten(events: Sequence[Event]) -> list[int]:
    """For each death of the broker: entries that it delivered again though it knew better.

    They were acknowledged half a second or more before it, so that the broker had heard of it.
    """
    acknowledged: dict[Name, float] = {}
    result: list[int] = []
    waiting: set[Name] = set()
    for event in events:
        name = event.entry_name
        if event.kind == "crashed" and event.worker == BROKER:
            waiting = {one for one, t in acknowledged.items() if t < event.t - _ARRIVED_S}
            result.append(0)
        elif event.kind == "acked" and name is not None:
            acknowledged.setdefault(name, event.t)
        elif _is_delivery(event) and name in waiting:
            waiting.discard(name)
            result[-1] += 1
    return result


def figures(events: Sequence[Event]) -> dict[str, int]:
    """Rows, batches and batches that ran again, over a whole history."""
    view = HistoryView(events)
    return {
        "messages": len(view.sent),
        "rows": sum(len(commit.rows) for commit in view.commits),
        "batches": len(view.commits),
        "batches_run_again": sum(len(runs) > 1 for runs in view.runs.values()),
        "redelivered": redelivered(events),
    }


def _is_delivery(event: Event) -> bool:
    return event.kind == "delivered" and event.batch is None
