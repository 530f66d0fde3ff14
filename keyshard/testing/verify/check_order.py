"""Checks that each event of a history has its cause before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from keyshard.testing.verify.check_messages import text_of
from keyshard.testing.verify.history import Event, Name
from keyshard.testing.verify.history_view import HistoryView, is_row
from keyshard.testing.verify.verdict import Findings, Verdict


def possible_order(events: Sequence[Event]) -> Verdict:
    """Check that no event comes before the event that must cause it.

    - If a message is ``completed`` or ``failed``, a handler of the same worker is running it.
    - If a message is ``started``, it was ``delivered`` or ``parked`` before. This is checked only
      if the history has deliveries by the broker.
    - A batch is ``started`` before its rows and its ``checkpointed``. Each ``completed`` of a batch
      ends a run of its own.
    - A range is ``range_gained`` by a worker before it is ``range_lost``. The worker may lose it
      twice.
    """
    view = HistoryView.of(events)
    found = Findings("each event has its cause", "events with a cause", "no event needs another")
    has_deliveries = any(one.kind == "delivered" and one.batch is None for one in view)
    handlers, batches, ranges = _Handlers(has_deliveries=has_deliveries), _Batches(), _Ranges()
    for event in view:
        if event.kind == "crashed":
            handlers.crash(event.worker)
        elif event.kind in _OF_RANGES:
            _judge(found, event, ranges.follow(event), needs=event.kind == "range_lost")
        elif event.batch is not None and (is_row(event) or not event.has_message):
            _judge(found, event, batches.follow(event), needs=event.kind != "started")
        elif event.kind in _OF_HANDLERS:
            _judge(found, event, handlers.follow(event), needs=event.kind in _ENDS)
    return found.verdict()


_OF_RANGES = frozenset({"range_gained", "range_lost"})
_ENDS = frozenset({"completed", "failed"})
_OF_HANDLERS = frozenset({"delivered", "started", "parked", *_ENDS})


def _judge(found: Findings, event: Event, why: str | None, *, needs: bool) -> None:
    found.checked += needs or why is not None
    if why is not None:
        found.violation(why, event)


class _Handlers:
    """Messages that were delivered or parked, and messages that handlers are running."""

    def __init__(self, *, has_deliveries: bool) -> None:
        self._has_deliveries = has_deliveries
        self._came: set[Name] = set()
        """Delivered and parked messages, by both names: an event may lack the message id."""
        self._started: set[Name] = set()
        self._running: defaultdict[str | None, set[Name]] = defaultdict(set)
        """Messages that handlers are running, by worker."""

    def crash(self, worker: str | None) -> None:
        if worker is None:
            self._running.clear()
        self._running.pop(worker, None)

    def follow(self, event: Event) -> str | None:
        """Take the next event of a message; return why it is impossible."""
        name, kind = event.stored, event.kind
        if kind in {"delivered", "parked"}:
            if self._has_deliveries:
                self._came.add(name)
                if event.seq is not None:
                    self._came.add(event.message)
            if kind == "parked":
                self._running[event.worker].discard(name)
            return None
        if kind == "started":
            self._started.add(name)
            self._running[event.worker].add(name)
            if not self._has_deliveries or name in self._came or event.message in self._came:
                return None
            return f"{text_of(event)} was started, but never delivered"
        running = self._running[event.worker]
        if name in running:
            running.discard(name)
            return None
        if name not in self._started:
            return f"{text_of(event)} was {kind}, but never started"
        return f"{text_of(event)} was {kind} by {event.worker}, of which no handler had it"


class _Batches:
    """Runs of batches."""

    def __init__(self) -> None:
        self._running: dict[str, bool] = {}
        """Whether the newest run is running, for each batch that has started."""

    def follow(self, event: Event) -> str | None:
        """Take the next event of a batch; return why it is impossible."""
        batch, kind = event.batch or "", event.kind
        if kind == "started":
            self._running[batch] = True
            return None
        if batch not in self._running:
            return f"batch {batch} was {kind}, but never started"
        if kind != "completed":
            return None
        was_running, self._running[batch] = self._running[batch], False
        return None if was_running else f"a run of batch {batch} was completed twice"


class _Ranges:
    """Ranges that workers have gained."""

    def __init__(self) -> None:
        self._gained: set[tuple[str | None, Name]] = set()

    def follow(self, event: Event) -> str | None:
        """Take the next gain or loss; return why it is impossible."""
        name = event.worker, (event.topic, event.partition, event.range)
        if event.kind == "range_gained":
            self._gained.add(name)
            return None
        return None if name in self._gained else f"{event.worker} lost {event.range} without a gain"
