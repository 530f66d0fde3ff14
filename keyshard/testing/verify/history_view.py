"""A history with what several checkers need to know of it, worked out once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple, overload

from keyshard.testing.verify.history import FAULTS, Event, Name


class Host(Enum):
    """What kind of program consumed, and so when a message counts as done."""

    BATCHES = "a message is done when a batch that holds it is checkpointed"
    HANDLERS = "a message is done when its handler completed"
    DELIVERIES = "a message is done when it was delivered"


@dataclass(slots=True)
class BatchRun:
    """One run of a batch: the rows it handed out, in this order."""

    rows: list[Event] = field(default_factory=list)
    complete: bool = False
    """Whether it is known to have handed out every row."""


@dataclass(slots=True)
class Commit:
    """A batch whose checkpoint became durable, with the rows of its last run before that."""

    event: Event
    rows: list[Event]


class Arrival(NamedTuple):
    """How often faults had come when the broker delivered a message."""

    first: int
    latest: int
    """The same, the last time: what a program holds already comes to it again and is dropped."""


class Seen(NamedTuple):
    """One time that user code got a message."""

    event: Event
    faults: int
    """Faults before it."""
    arrival: Arrival | None
    """How it came since user code got it before; ``None``: not again, so it is another attempt."""
    is_letter: bool
    """Whether it rested as a dead letter, and somebody let it out."""


class HistoryView(Sequence[Event]):
    """Events in the order in which they were written.

    Args:
        events: The history.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    @classmethod
    def of(cls, events: Sequence[Event]) -> HistoryView:
        """The view itself, or a new one."""
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
    def host(self) -> Host:
        """A history that names batches is one of batches; else one with handlers is of handlers."""
        handlers = False
        for event in self._events:
            if event.batch is not None:
                return Host.BATCHES
            handlers = handlers or event.kind in {"started", "completed"}
        return Host.HANDLERS if handlers else Host.DELIVERIES

    @cached_property
    def sent(self) -> list[Event]:
        """Messages that were published."""
        return [event for event in self._events if event.kind == "sent"]

    @cached_property
    def faults(self) -> list[Event]:
        """What may cause duplicates."""
        return [event for event in self._events if event.kind in FAULTS]

    @cached_property
    def runs(self) -> dict[str, list[BatchRun]]:
        """Runs of each batch."""
        return self._batches[0]

    @cached_property
    def commits(self) -> list[Commit]:
        """Batches whose checkpoint became durable, in that order, each once."""
        return self._batches[1]

    @cached_property
    def seen(self) -> list[Event]:
        """Each time user code got a message: a row, a handler's start, else a delivery."""
        if self.host is Host.BATCHES:
            return [event for event in self._events if is_row(event)]
        if self.host is Host.DELIVERIES:
            return [event for event in self._events if event.kind == "delivered"]
        started = [event for event in self._events if event.kind == "started"]
        return started or [event for event in self._events if event.kind == "completed"]

    def seen_between_faults(self) -> Iterator[tuple[Event, int]]:
        """:attr:`seen`, each with the number of faults before it."""
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
        """:attr:`seen`, each with how it came.

        A history that does not say what the broker delivered calls each a new arrival.
        """
        told = self.host is Host.HANDLERS and any(one.kind == "delivered" for one in self._events)
        arrivals: dict[Name, Arrival] = {}
        resting = _Resting()
        seen = iter(self.seen)
        following = next(seen, None)
        faults = 0
        for event in self._events:
            if event is following:
                now = None if told else Arrival(faults, faults)
                arrival = arrivals.pop(event.stored, now)
                is_letter = event.kind == "started" and resting.has(event.stored)
                yield Seen(event, faults, arrival, is_letter)
                following = next(seen, None)
            elif event.kind in FAULTS:
                faults += 1
            elif told and event.kind == "delivered":
                first = arrivals.get(event.stored, Arrival(faults, faults)).first
                arrivals[event.stored] = Arrival(first, faults)
            resting.pass_by(event)

    @cached_property
    def left_out(self) -> set[Name]:
        """Stored messages that the broker delivered after user code got them last; where the
        history does not say what it delivered, all."""
        result: set[Name] = set()
        for event in self._events:
            if event.kind == "delivered":
                result.add(event.stored)
            elif event.kind == "started" and event.has_message:
                result.discard(event.stored)
        told = any(event.kind == "delivered" for event in self._events)
        return result if told else {event.stored for event in self.seen}

    @cached_property
    def parked(self) -> set[Name]:
        """Stored messages that may have rested, and come again when somebody lets them out."""
        started: set[Name] = set()
        result: set[Name] = set()
        for event in self._events:
            if event.kind == "started" and event.has_message:
                started.add(event.stored)
            elif event.kind == "failed" or (
                event.kind == "completed" and event.has_message and event.stored not in started
            ):
                result.add(event.stored)
        return result

    @cached_property
    def done(self) -> dict[Name, Event]:
        """Per message, by name: the event that first made it done."""
        result: dict[Name, Event] = {}
        if self.host is Host.BATCHES:
            for commit in self.commits:
                for row in commit.rows:
                    result.setdefault(row.message, commit.event)
            return result
        kind = "completed" if self.host is Host.HANDLERS else "delivered"
        for event in self._events:
            if event.kind == kind:
                result.setdefault(event.message, event)
        return result

    @cached_property
    def _batches(self) -> tuple[dict[str, list[BatchRun]], list[Commit]]:
        runs: dict[str, list[BatchRun]] = {}
        commits: dict[str, Commit] = {}
        for event in self._events:
            if event.batch is None:
                continue
            of_batch = runs.setdefault(event.batch, [])
            if event.kind == "started" and not event.has_message:
                of_batch.append(BatchRun())
                continue
            if not of_batch:
                of_batch.append(BatchRun())
            if is_row(event):
                of_batch[-1].rows.append(event)
            elif event.kind == "completed" and not event.has_message:
                of_batch[-1].complete = True
            elif event.kind == "checkpointed" and event.batch not in commits:
                of_batch[-1].complete = True
                commits[event.batch] = Commit(event, list(of_batch[-1].rows))
        return runs, list(commits.values())


class _Resting:
    """Messages that rest as dead letters, event by event.

    One becomes a letter where it is ``completed`` and no handler has it, and is none any more when
    a handler completes it.
    """

    def __init__(self) -> None:
        self._resting: set[Name] = set()
        self._running: dict[Name, str | None] = {}
        """By which worker."""
        self._of_worker: dict[str | None, set[Name]] = {}
        """The same, by worker."""

    def has(self, name: Name) -> bool:
        """Whether a message rests."""
        return name in self._resting

    def pass_by(self, event: Event) -> None:
        """The next event."""
        if event.kind == "crashed":
            if event.worker is None:
                self._running.clear()
                self._of_worker.clear()
            for name in self._of_worker.pop(event.worker, ()):
                del self._running[name]
        elif not event.has_message:
            return
        elif event.kind == "started":
            self._ends(event.stored)
            self._running[event.stored] = event.worker
            self._of_worker.setdefault(event.worker, set()).add(event.stored)
        elif event.kind == "failed":
            self._ends(event.stored)
        elif event.kind == "completed":
            name = event.stored
            is_run = name in self._running and self._ends(name) == event.worker
            (self._resting.discard if is_run else self._resting.add)(name)

    def _ends(self, name: Name) -> str | None:
        """No handler has a message any more; which worker's had it."""
        if name not in self._running:
            return None
        worker = self._running.pop(name)
        self._of_worker[worker].discard(name)
        return worker


def is_row(event: Event) -> bool:
    """Whether the event is a row of a batch."""
    return event.kind == "delivered" and event.batch is not None
