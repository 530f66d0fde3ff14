"""A history with derived facts that several checkers need, computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, overload

from keyshard.testing.verify.history import FAULTS, Event, Name

DONE = frozenset({"completed", "parked"})
"""Kinds that make a message done, in a program with handlers."""
_OF_HANDLERS = frozenset({"started", *DONE})


class HostKind(Enum):
    """Kind of the consuming program; it defines when a message counts as done."""

    BATCHES = "a message is done when a batch with it is checkpointed"
    HANDLERS = "a message is done when its handler completed, or when it is a dead letter"
    DELIVERIES = "a message is done when it was delivered"


@dataclass(slots=True)
class RecordedRun:
    """One run of a batch: its rows, in the order in which it handed them out."""

    rows: list[Event] = field(default_factory=list)
    complete: bool = False
    """Whether it is known to have delivered every row."""


@dataclass(slots=True)
class Commit:
    """A batch with a durable checkpoint, and the rows of its last run before that."""

    event: Event
    rows: list[Event]


class Arrival(NamedTuple):
    """Deliveries of a message by the broker since user code got it last."""

    first: int
    """Number of faults before the first delivery."""
    latest: int
    """Number of faults before the last one: a program drops redeliveries of a message it holds."""


class Seen(NamedTuple):
    """One delivery of a message to user code."""

    event: Event
    faults: int
    """Number of earlier faults."""
    arrival: Arrival | None
    """Deliveries by the broker since user code got it before; ``None``: none, so it is a retry."""
    is_dead_letter: bool
    """Whether it is an unparked dead letter."""


class HistoryView(Sequence[Event]):
    """Events in the order of writing.

    Args:
        events: The history.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @classmethod
    def of(cls, events: Sequence[Event]) -> HistoryView:
        """Return the view itself, or a new one."""
        return events if isinstance(events, cls) else cls(events)

    @overload
    def __getitem__(self, at: int) -> Event: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Event]: ...

    def __getitem__(self, at: int | slice) -> Event | Sequence[Event]:
        return self._events[at]

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    @cached_property
    def host(self) -> HostKind:
        """Batches if the history names batches, else handlers if it has any, else deliveries."""
        handlers = False
        for event in self._events:
            if event.batch is not None:
                return HostKind.BATCHES
            handlers = handlers or event.kind in _OF_HANDLERS
        return HostKind.HANDLERS if handlers else HostKind.DELIVERIES

    @cached_property
    def sent(self) -> list[Event]:
        """Published messages."""
        return [event for event in self._events if event.kind == "sent"]

    @cached_property
    def faults(self) -> list[Event]:
        """Events that may cause duplicates."""
        return [event for event in self._events if event.kind in FAULTS]

    @cached_property
    def runs(self) -> dict[str, list[RecordedRun]]:
        """Runs of each batch."""
        return self._batches[0]

    @cached_property
    def commits(self) -> list[Commit]:
        """Batches with a durable checkpoint, in the order of the checkpoints, each once."""
        return self._batches[1]

    @cached_property
    def seen(self) -> list[Event]:
        """Each delivery to user code: a row, a handler's start, or else a delivery."""
        if self.host is HostKind.BATCHES:
            return [event for event in self._events if is_row(event)]
        if self.host is HostKind.DELIVERIES:
            return [event for event in self._events if event.kind == "delivered"]
        started = [event for event in self._events if event.kind == "started"]
        return started or [event for event in self._events if event.kind == "completed"]

    def seen_between_faults(self) -> Iterator[tuple[Event, int]]:
        """Yield :attr:`seen`, each with the number of earlier faults."""
        seen = iter(self.seen)
        following = next(seen, None)
        faults = 0
        for event in self._events:
            if event is following:
                yield event, faults
                following = next(seen, None)
            elif event.kind in FAULTS:
                faults += 1

    def seen_with_arrivals(self) -> Iterator[Seen]:
        """Yield :attr:`seen`, each with its deliveries by the broker.

        If the history does not contain deliveries, each one counts as a new delivery.
        """
        has_deliveries = self.host is HostKind.HANDLERS and any(
            one.kind == "delivered" for one in self._events
        )
        arrivals: dict[Name, Arrival] = {}
        resting = _Resting()
        seen = iter(self.seen)
        following = next(seen, None)
        faults = 0
        for event in self._events:
            if event is following:
                now = None if has_deliveries else Arrival(faults, faults)
                arrival = arrivals.pop(event.stored, now)
                is_dead_letter = event.kind == "started" and resting.has(event.stored)
                yield Seen(event, faults, arrival, is_dead_letter)
                following = next(seen, None)
            elif event.kind in FAULTS:
                faults += 1
            elif has_deliveries and event.kind == "delivered":
                first = arrivals.get(event.stored, Arrival(faults, faults)).first
                arrivals[event.stored] = Arrival(first, faults)
            resting.pass_by(event)

    @cached_property
    def left_out(self) -> set[Name]:
        """Stored messages that no handler started after their last delivery by the broker.

        If the history does not contain deliveries, all messages that reached user code.
        """
        result: set[Name] = set()
        for event in self._events:
            if event.kind == "delivered":
                result.add(event.stored)
            elif event.kind == "started" and event.has_message:
                result.discard(event.stored)
        has_deliveries = any(event.kind == "delivered" for event in self._events)
        return result if has_deliveries else {event.stored for event in self.seen}

    @cached_property
    def parked(self) -> set[Name]:
        """Stored messages that may have been dead letters, and run again when they are unparked."""
        return {event.stored for event in self._events if event.kind in {"failed", "parked"}}

    @cached_property
    def done(self) -> dict[Name, Event]:
        """The event that first made each message done, by the name of the message."""
        result: dict[Name, Event] = {}
        if self.host is HostKind.BATCHES:
            for commit in self.commits:
                for row in commit.rows:
                    result.setdefault(row.message, commit.event)
            return result
        kinds = DONE if self.host is HostKind.HANDLERS else {"delivered"}
        for event in self._events:
            if event.kind in kinds:
                result.setdefault(event.message, event)
        return result

    @cached_property
    def _batches(self) -> tuple[dict[str, list[RecordedRun]], list[Commit]]:
        runs: dict[str, list[RecordedRun]] = {}
        commits: dict[str, Commit] = {}
        for event in self._events:
            if event.batch is None:
                continue
            of_batch = runs.setdefault(event.batch, [])
            if event.kind == "started" and not event.has_message:
                of_batch.append(RecordedRun())
                continue
            if not of_batch:
                of_batch.append(RecordedRun())
            if is_row(event):
                of_batch[-1].rows.append(event)
            elif event.kind == "completed" and not event.has_message:
                of_batch[-1].complete = True
            elif event.kind == "checkpointed" and event.batch not in commits:
                of_batch[-1].complete = True
                commits[event.batch] = Commit(event, list(of_batch[-1].rows))
        return runs, list(commits.values())


class _Resting:
    """Messages that are dead letters at the current event.

    A message becomes a dead letter when it is ``parked``. It stops being one when a handler
    completes it.
    """

    def __init__(self) -> None:
        self._resting: set[Name] = set()

    def has(self, name: Name) -> bool:
        return name in self._resting

    def pass_by(self, event: Event) -> None:
        """Take the next event."""
        if event.kind == "parked":
            self._resting.add(event.stored)
        elif event.kind == "completed" and event.has_message:
            self._resting.discard(event.stored)


def is_row(event: Event) -> bool:
    """Whether the event is a row of a batch."""
    return event.kind == "delivered" and event.batch is not None
