"""Checkers of messages: loss, order, duplicates, batches that run again."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from keyshard.testing.verify.history import Event, Name
from keyshard.testing.verify.history_view import HistoryView, HostKind, RecordedRun
from keyshard.testing.verify.verdict import Findings, Verdict

_ENDS = frozenset({"completed", "failed", "parked"})
"""Kinds that end a handler."""
LIVENESS_S = 60.0
"""Default time in which everything must be done after the last fault, seconds."""


def no_loss(events: Sequence[Event]) -> Verdict:
    """Check that every sent message is done at the end; see :class:`.history_view.HostKind`."""
    view = HistoryView.of(events)
    found = Findings("no loss", "messages sent", "no message was sent")
    done = view.done
    for event in view.sent:
        found.checked += 1
        if event.message not in done:
            found.violation(f"{text_of(event)} was sent, but never done", event)
    return found.verdict()


def key_order(events: Sequence[Event]) -> Verdict:
    """Check that messages of a key in a topic partition reach user code in the order of ``seq``.

    Messages without ``seq`` are compared by message id.

    With batches, the order covers all committed batches, in the order of their checkpoints. All
    rows of a key in a batch must be in one part.

    With handlers or deliveries:

    - A message that comes for the first time never comes after a later message of its key.
    - After each fault, a key may start again from an earlier message, once.
    - An unparked dead letter may run between older messages that are redelivered after a fault. If
      the dead letter is redelivered too, it must run again after them.
    - A redelivered message of a parked key becomes a dead letter too. A key may start again with
      it.
    """
    view = HistoryView.of(events)
    found = Findings("order per key", "messages with a key", "no message with a key was consumed")
    if view.host is HostKind.BATCHES:
        _order_of_commits(view, found)
    else:
        _order_of_deliveries(view, found)
    return found.verdict()


def _order_of_commits(view: HistoryView, found: Findings) -> None:
    last: dict[Name, Event] = {}
    stored_twice = _StoredTwice(view)
    for commit in view.commits:
        first_of_key: dict[Name, Event] = {}
        for row in commit.rows:
            if row.key is None:
                continue
            found.checked += 1
            routing_name = row.routing_name
            first = first_of_key.setdefault(routing_name, row)
            if first.part != row.part:
                found.violation(
                    f"key {row.key!r} is in the parts {first.part} and {row.part} of batch "
                    f"{row.batch}",
                    *(first, row),
                )
            before = last.get(routing_name)
            if before is None or _order(row) >= _order(before):
                last[routing_name] = row
            elif row not in stored_twice:
                found.violation(f"{text_of(row)} came after {text_of(before)}", before, row)


def _order_of_deliveries(view: HistoryView, found: Findings) -> None:
    last: dict[Name, Event] = {}
    highest: dict[Name, Event] = {}
    faults_of: dict[Name, int] = {}
    """Number of faults before the last delivery of a message to user code."""
    used: dict[Name, int] = {}
    """Number of faults before the delivery by the broker with which a key started again last. It
    may reach user code late: another message of the key is being handled, or waits, when a broker
    forgets acknowledgements."""
    stored_twice = _StoredTwice(view)
    dead_letters = _LettersBetween()
    for event, faults, arrival, is_dead_letter in view.seen_with_arrivals():
        if event.key is None:
            continue
        found.checked += 1
        routing_name, order = event.routing_name, _order(event)
        faults_then = faults_of.get(event.stored)
        faults_of[event.stored] = faults
        before, top = last.get(routing_name, event), highest.get(routing_name, event)
        last[routing_name] = event
        then, back = used.get(routing_name, 0), order < _order(before)
        came_again = faults_then is not None and (
            (arrival.latest if arrival else faults) > max(faults_then, then)
        )
        starts_again = back and came_again and arrival is not None
        ahead = dead_letters.ahead_of(event, is_dead_letter=is_dead_letter and not starts_again)
        if order >= _order(top):
            highest[routing_name] = event
        elif faults_then is None and event not in stored_twice:
            found.violation(
                f"{text_of(event)} came for the first time after {text_of(top)}", top, event
            )
            continue
        if faults_then is None:
            continue
        if back and not came_again:
            dead_letters.owe(ahead, event)
            if not ahead:
                found.violation(f"{text_of(event)} came after {text_of(before)}", before, event)
        if arrival is not None and event.stored not in view.parked:
            used[routing_name] = max(then, arrival.first)
        elif back:
            used[routing_name] = arrival.latest if arrival else faults
    for dead_letter, older in dead_letters.owed.values():
        if dead_letter.stored in view.left_out:
            found.violation(
                f"{text_of(dead_letter)} came before {text_of(older)}, and did not run again "
                "after it",
                *(dead_letter, older),
            )


def exactly_once(events: Sequence[Event]) -> Verdict:
    """Check that every sent message is in exactly one committed batch, as one row."""
    view = HistoryView.of(events)
    found = Findings(
        "exactly once into the checkpoint",
        "rows of committed batches",
        "the history has no batches",
    )
    if view.host is not HostKind.BATCHES:
        return found.verdict()
    rows: dict[Name, Event] = {}
    for commit in view.commits:
        for row in commit.rows:
            found.checked += 1
            first = rows.get(row.stored)
            if first is None:
                rows[row.stored] = row
            else:
                found.violation(
                    f"{text_of(row)} is in batch {first.batch} and in batch {row.batch}", first, row
                )
    for event in view.sent:
        if event.message not in view.done:
            found.violation(f"{text_of(event)} is in no committed batch", event)
    return found.verdict()


def bounded_duplicates(events: Sequence[Event], deliveries_max: int | None = None) -> Verdict:
    """Check that user code gets a message at most once, plus once for each earlier fault.

    Args:
        events: The history.
        deliveries_max: Most deliveries of a message, regardless of faults. ``None``: 1, plus 1 for
            each earlier ``crashed`` or ``disconnected``, and for each ``failed`` of the message.
    """
    view = HistoryView.of(events)
    found = Findings("bounded duplicates", "deliveries to user code", "nothing was consumed")
    failures = Counter(event.stored for event in view if event.kind == "failed")
    times: Counter[Name] = Counter()
    for event, faults in view.seen_between_faults():
        found.checked += 1
        name = event.stored
        times[name] += 1
        allowed = 1 + faults + failures[name] if deliveries_max is None else deliveries_max
        if times[name] > allowed:
            found.violation(
                f"{text_of(event)} was delivered {times[name]} times, but {allowed} times are "
                "allowed",
                event,
            )
    return found.verdict()


def liveness(events: Sequence[Event], liveness_s: float = LIVENESS_S) -> Verdict:
    """Check that everything sent is done in time after the last fault.

    Only one handler at a time works on a key. While it works on the message or on earlier ones, the
    message does not wait for the source, so that time does not count.

    Args:
        events: The history.
        liveness_s: Longest time, seconds, from the last fault or ``faults_stopped``, or from the
            sending if that is later.
    """
    view = HistoryView.of(events)
    found = Findings(
        "done in time after the faults",
        "messages sent",
        "there was no fault, no faults_stopped, or no sent message",
    )
    times = [event.t for event in view.faults]
    times += [event.t for event in view if event.kind == "faults_stopped"]
    if not times:
        return found.verdict()
    quiet = max(times)
    done = view.done
    busy = _BusyKeys(view)
    for event in view.sent:
        found.checked += 1
        end = done.get(event.message)
        since = max(quiet, event.t)
        if end is None:
            found.violation(f"{text_of(event)} was never done", event)
        elif end.t > since + liveness_s:
            busy_s = busy.between(end.routing_name, since, end.t)
            if end.t > since + liveness_s + busy_s:
                found.violation(
                    f"{text_of(event)} was done {end.t - since:.1f} s later; handlers of its key "
                    f"ran for {busy_s:.1f} s of that",
                    *(event, end),
                )
    return found.verdict()


class _BusyKeys:
    """When handlers of each key ran: from ``started`` to ``completed``, ``failed`` or ``parked``.

    Time of handlers that a crash ended does not count, nor that of messages without a key.
    """

    def __init__(self, view: HistoryView) -> None:
        self._view = view

    def between(self, key: Name, begin_s: float, end_s: float) -> float:
        """Return how long handlers of a key ran between two times, seconds."""
        return self._until(key, end_s) - self._until(key, begin_s)

    def _until(self, key: Name, time_s: float) -> float:
        begins, ends, totals = self._spans.get(key, ([], [], [0.0]))
        count = bisect_right(begins, time_s)
        return totals[count] - (max(0.0, ends[count - 1] - time_s) if count else 0.0)

    @cached_property
    def _spans(self) -> dict[Name, tuple[list[float], list[float], list[float]]]:
        """By key: begins and ends of its handlers, and the total time of the first ones."""
        running: dict[Name, Event] = {}
        spans: defaultdict[Name, tuple[list[float], list[float], list[float]]] = defaultdict(
            lambda: ([], [], [0.0])
        )
        for event in self._view:
            if event.kind == "crashed":
                running = {key: one for key, one in running.items() if one.worker != event.worker}
            elif event.key is None or event.batch is not None:
                continue
            elif event.kind == "started":
                running[event.routing_name] = event
            elif event.kind in _ENDS:
                start = running.pop(event.routing_name, None)
                if start is not None and start.stored == event.stored:
                    begins, ends, totals = spans[event.routing_name]
                    begins.append(start.t)
                    ends.append(event.t)
                    totals.append(totals[-1] + event.t - start.t)
        return spans


def rerun_equality(events: Sequence[Event]) -> Verdict:
    """Check that a batch that runs again has the same rows in the same parts in the same order.

    Tasks read the parts of a batch concurrently, so an aborted run may end at another row in each
    part. Neither of two aborted runs need contain the other.

    - If a run is complete, the rows of each part of every other run must be the beginning of that
      part in the complete run.
    - If no run is complete, they must be the beginning of the longest run of that part. No row may
      be in one part in one run, and in another part in another run.
    """
    view = HistoryView.of(events)
    found = Findings("re-runs are equal", "runs of batches compared", "no batch ran twice")
    for batch, runs in view.runs.items():
        if len(runs) < 2:
            continue
        found.checked += len(runs) - 1
        complete = next((run for run in runs if run.complete), None)
        if complete is None:
            whole = _longest(runs)
            _check_parts(found, batch, whole)
        else:
            whole = _parts(complete)
        for run in runs:
            _compare(found, batch, run, whole)
    return found.verdict()


_Parts = dict[int | None, list[Event]]
"""Rows of a run, or of all runs of a batch, by part."""


def _longest(runs: Iterable[RecordedRun]) -> _Parts:
    """Return the longest run of each part: in correct runs, all others are beginnings of it."""
    whole: _Parts = {}
    for run in runs:
        for part, rows in _parts(run).items():
            if len(rows) > len(whole.get(part, ())):
                whole[part] = rows
    return whole


def _check_parts(found: Findings, batch: str, whole: _Parts) -> None:
    homes: dict[Name, Event] = {}
    for rows in whole.values():
        for row in rows:
            first = homes.setdefault(row.stored, row)
            if first.part != row.part:
                found.violation(
                    f"batch {batch} has {text_of(row)} in part {first.part} in one run and in part "
                    f"{row.part} in another",
                    *(first, row),
                )
                return


def _compare(found: Findings, batch: str, run: RecordedRun, whole: _Parts) -> None:
    parts = _parts(run)
    # An aborted run may lack whole parts.
    for part in sorted(parts.keys() | whole.keys() if run.complete else parts, key=str):
        left, right = parts.get(part, []), whole.get(part, [])
        for a, b in zip(left, right, strict=False):
            if (a.stored, a.message) != (b.stored, b.message):
                found.violation(
                    f"batch {batch} has {text_of(a)} in part {part} in one run, and {text_of(b)} "
                    "at its position in another",
                    *(a, b),
                )
                return
        if len(left) > len(right) or (run.complete and len(left) < len(right)):
            more = left[len(right) :] or right[len(left) :]
            found.violation(
                f"batch {batch} has {text_of(more[0])} in part {part} in one run, but not in "
                "another",
                more[0],
            )
            return


def _parts(run: RecordedRun) -> _Parts:
    result: _Parts = {}
    for row in run.rows:
        result.setdefault(row.part, []).append(row)
    return result


class _LettersBetween:
    """Unparked dead letters between redelivered older messages of their key.

    A user who unparks a key cannot know the messages that a broker will redeliver. So a key has
    progressed as far as the last message that was not a dead letter, or with which it started
    again after a fault. Dead letters may run before older messages. If they are redelivered too,
    they must run again after those messages.
    """

    def __init__(self) -> None:
        self._last: dict[Name, Event] = {}
        self._ahead: dict[Name, list[Event]] = {}
        """Dead letters since the message in ``_last``, by key."""
        self.owed: dict[Name, tuple[Event, Event]] = {}
        """Dead letters that must run again, each with the older message that ran after it."""

    def ahead_of(self, event: Event, *, is_dead_letter: bool) -> list[Event]:
        """Return the dead letters of the key that ran before a message and are newer than it.

        They ran since the last message of the key that was not a dead letter. The result is empty
        if the message is not newer than that one, or is a dead letter itself.
        """
        name, order = event.routing_name, _order(event)
        self.owed.pop(event.stored, None)
        if is_dead_letter:
            self._ahead.setdefault(name, []).append(event)
            return []
        last, self._last[name] = self._last.get(name), event
        ahead = self._ahead.pop(name, [])
        if last is None or order <= _order(last):
            return []
        return [one for one in ahead if _order(one) > order]

    def owe(self, dead_letters: Iterable[Event], older: Event) -> None:
        """Note that dead letters must run again after an older message."""
        self.owed |= {dead_letter.stored: (dead_letter, older) for dead_letter in dead_letters}


class _StoredTwice:
    """Messages that a producer sent again and the broker stored twice.

    The second copy has an old ``seq`` in a later entry, which is not an error of the consumer. The
    first copies are found at the first use, because few histories need them.
    """

    def __init__(self, view: HistoryView) -> None:
        self._view = view
        self._first: dict[Name, Event] | None = None

    def __contains__(self, event: Event) -> bool:
        if event.seq is None or event.ledger is None:
            return False
        if self._first is None:
            self._first = {}
            for other in self._view.seen:
                first = self._first.setdefault(other.message, other)
                if _position(other) < _position(first):
                    self._first[other.message] = other
        first = self._first.get(event.message, event)
        return first.routing_name == event.routing_name and _position(first) < _position(event)


def _order(event: Event) -> tuple[int, int, int]:
    """Return the order of an event along its key: ``seq``, or else the message id."""
    return _position(event) if event.seq is None else (event.seq, 0, 0)


def _position(event: Event) -> tuple[int, int, int]:
    return (event.ledger or 0, event.entry or 0, event.index or 0)


def text_of(event: Event) -> str:
    """Return the name of the message of an event, for a violation."""
    name = [] if event.key is None else [f"key {event.key!r}"]
    name += [] if event.seq is None else [f"seq {event.seq}"]
    if event.ledger is not None:
        name.append(f"at {event.partition}/{event.ledger}:{event.entry}:{event.index}")
    return f"{event.topic} " + " ".join(name)
