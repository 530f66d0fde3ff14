"""The verdict on a run, and its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from keyshard.testing.verify.checkers import Verdict, check
from keyshard.testing.verify.history import Event, Name
from keyshard.testing.verify.history_view import HistoryView, HostKind
from tests.support.deadlines import deadline

BROKER = "broker"
"""Its name in the history."""
LIVENESS_S = deadline(120)
"""Once the faults have stopped, everything is done in this time, seconds. The client waits up to
60 s before it tries to connect again."""

_UNCHECKED = {
    HostKind.BATCHES: {"one handler per key"},
    HostKind.HANDLERS: {"exactly once into the checkpoint", "re-runs are equal"},
}
"""Checkers that have nothing to check."""
_ARRIVED_S = 0.5
_WRONGS_MAX = 20


@dataclass(frozen=True, slots=True)
class Report:
    """The faults of a run and their outcome."""

    seed: int
    subject: str
    workers: str
    """The place of the program's consumers."""
    transport: str
    """The transport."""
    brokers: int
    seconds: float
    faults: dict[str, int]
    """Faults of each kind that were injected."""
    verdicts: list[Verdict] = field(repr=False)
    messages: int
    """Messages that the broker confirmed."""
    unconfirmed: int
    """Messages that it refused: nobody knows whether they are stored, so they count nowhere."""
    of_bytes: int
    """Messages of the Java client with keys of bytes."""
    misrouted: int
    """Messages of which the source said that they came to a range that is not theirs."""
    rows: int
    """Rows in committed batches, or messages whose handler returned."""
    batches: int
    batches_run_again: int
    dead_letters: int
    """Messages of handlers that were parked, each once."""
    rescales: int
    """Number of injected faults among the planned ones; others coincided with a fault."""
    unparked: int
    """Number of unparked keys."""
    starts: int
    """Starts of the program."""
    gave_up: int
    """Starts or runs of it that ended because the broker was away or still knew the one before."""
    redelivered: int
    """Messages that the broker delivered again."""
    redeliveries_dropped: int
    """Those that were already in a batch, as far as killed processes could report."""
    problems: list[str]
    """Errors beside the verdicts."""

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


def unchecked(verdicts: Sequence[Verdict], host: HostKind = HostKind.BATCHES) -> list[str]:
    """Checkers that had nothing to check and should have."""
    return [one.name for one in verdicts if not one.checked and one.name not in _UNCHECKED[host]]


def text_of(verdicts: Sequence[Verdict], problems: Sequence[str] = ()) -> str:
    """Return verdicts and problems, line by line."""
    lines = []
    for verdict in verdicts:
        lines.append(f"{'ok ' if verdict.holds else 'BAD'} {verdict.name} - {verdict.message}")
        lines += [f"       {event.to_json()}" for event in verdict.offending]
    return "\n".join([*lines, *(f"BAD {problem}" for problem in problems)])


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


def handled_and_parked(events: Sequence[Event]) -> tuple[set[Name], set[Name]]:
    """Messages whose handler returned, and messages that were stored as dead letters."""
    handled: set[Name] = set()
    parked: set[Name] = set()
    for event in events:
        if event.kind == "completed" and event.has_message:
            handled.add(event.stored)
        elif event.kind == "parked":
            parked.add(event.stored)
    return handled, parked


def wrongs_of_handlers(events: Sequence[Event], *, checkpoint: bool) -> list[str]:
    """Return the broken promises about dead letters: to the checkers, each ends its message.

    Every message is handled in the end. With a checkpoint, no message of an acknowledged entry
    comes again, unless it was parked. The newest message of each key is the last one to start.
    """
    handled, parked = handled_and_parked(events)
    wrongs = []
    acknowledged: set[Name | None] = set()
    last: dict[Name, Event] = {}
    highest: dict[Name, int] = {}
    messages: set[Name] = set()
    for event in events:
        if event.kind == "acked":
            acknowledged.add(event.entry_name)
        elif event.kind == "started" and event.has_message:
            messages.add(event.stored)
            if event.seq is not None:
                last[event.routing_name] = event
                seen = highest.get(event.routing_name, event.seq)
                highest[event.routing_name] = max(seen, event.seq)
            again = event.entry_name in acknowledged and event.stored not in parked
            if checkpoint and again:
                wrongs.append(f"handled again though it is in a checkpoint: {event.to_json()}")
    wrongs += [f"parked or begun, and never handled: {name}" for name in messages | parked
               if name not in handled]  # fmt: skip
    if checkpoint:
        wrongs += [
            f"a key ended with an old message: {event.to_json()}, the newest is {highest[name]}"
            for name, event in last.items()
            if event.seq != highest[name]
        ]
    return wrongs[:_WRONGS_MAX]


def figures(events: Sequence[Event]) -> dict[str, int]:
    """Rows, batches and batches that ran again, over a whole history."""
    view = HistoryView(events)
    handled, dead_letters = handled_and_parked(events)
    return {
        "messages": len(view.sent),
        "rows": sum(len(commit.rows) for commit in view.commits) or len(handled),
        "dead_letters": len(dead_letters),
        "batches": len(view.commits),
        "batches_run_again": sum(len(runs) > 1 for runs in view.runs.values()),
        "redelivered": redelivered(events),
    }


def _is_delivery(event: Event) -> bool:
    return event.kind == "delivered" and event.batch is None
