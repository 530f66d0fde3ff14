"""Checkers of what workers do: who owns which range, who works on which key, who acknowledges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from keyshard.core.ring.key_slot import possible_slots
from keyshard.testing.verify.history import Event, Name, parse_range
from keyshard.testing.verify.history_view import HistoryView, Host, is_row
from keyshard.testing.verify.ownership import Owners
from keyshard.testing.verify.verdict import Findings, Verdict

_OF_HANDLERS = frozenset({"started", "completed", "failed"})


def mutual_exclusion(events: Sequence[Event]) -> Verdict:
    """At any time one handler works on a key of a topic partition, and on each message of it.

    A handler runs from ``started`` to ``completed``, ``failed`` or the ``crashed`` of its worker.
    A worker may work on several rows of one batch at once. Of messages without a key, a worker
    works on each once at a time.
    """
    found = Findings("one handler per key", "handlers that started", "no handler started")
    running = _Running()
    for event in HistoryView.of(events):
        if event.kind == "crashed":
            running.crash(event)
        elif event.kind in _OF_HANDLERS and event.has_message:
            if event.kind != "started":
                running.end(event)
                continue
            found.checked += 1
            same, other = running.start(event)
            if same is not None:
                of = "without a key" if event.key is None else f"of key {event.key!r}"
                found.violation(
                    f"{event.worker} started a message {of} while it worked on that message",
                    *(same, event),
                )
            elif other is not None:
                found.violation(
                    f"key {event.key!r} was started by {event.worker} while {other.worker} worked "
                    "on it",
                    *(other, event),
                )
    return found.verdict()


class _Running:
    """Handlers that run; an event costs the same however many there are."""

    def __init__(self) -> None:
        self._of_key: defaultdict[Name, dict[Name, dict[Name, Event]]] = defaultdict(dict)
        """By key, and by what may run together: rows of one batch with one worker."""
        self._of_worker: defaultdict[str | None, dict[tuple[Name, Name, Name], None]] = defaultdict(
            dict
        )
        self._places: dict[Name, tuple[Name, Name, Name]] = {}

    def start(self, event: Event) -> tuple[Event | None, Event | None]:
        """A handler starts; which runs for the same message with the same worker, and which other
        one may not run beside it."""
        mine: Name = (event.worker, *event.stored)
        together: Name = mine if event.batch is None else (event.worker, event.batch)
        of_key = self._of_key[event.routing_name if event.key is not None else mine]
        before = self._places.get(mine)
        same = None
        if before is not None:
            same = self._of_key[before[0]][before[1]][mine]
            # A batch that runs again may begin before the end of its last run is noticed.
            same = None if event.batch is not None and same.batch == event.batch else same
        other_name = next((name for name in of_key if name != together), None)
        other = None if other_name is None else next(iter(of_key[other_name].values()))
        self.end(event)
        key = event.routing_name if event.key is not None else mine
        self._of_key[key].setdefault(together, {})[mine] = event
        self._places[mine] = place = key, together, mine
        self._of_worker[event.worker][place] = None
        return same, other

    def end(self, event: Event) -> None:
        """A handler ended."""
        place = self._places.get((event.worker, *event.stored))
        if place is not None:
            self._end(event.worker, place)

    def crash(self, event: Event) -> None:
        """A worker is gone, or all are."""
        if event.worker is None:
            self._of_key.clear()
            self._of_worker.clear()
            self._places.clear()
            return
        for place in list(self._of_worker.get(event.worker, ())):
            self._end(event.worker, place)

    def _end(self, worker: str | None, place: tuple[Name, Name, Name]) -> None:
        key, together, mine = place
        del self._places[mine]
        del self._of_worker[worker][place]
        if not self._of_worker[worker]:
            del self._of_worker[worker]
        of_key = self._of_key[key]
        del of_key[together][mine]
        if not of_key[together]:
            del of_key[together]
        if not of_key:
            del self._of_key[key]


def ack_after_checkpoint(events: Sequence[Event]) -> Verdict:
    """An entry is acknowledged only when every message of it that came is done.

    In batches: when it lies in a batch whose checkpoint came before; with handlers: when they have
    completed. An acknowledgement of an entry that nobody was given is a violation too.
    """
    view = HistoryView.of(events)
    found = Findings(
        "acknowledged after the checkpoint",
        "acknowledgements",
        "nothing was acknowledged, or nothing says when a message was done",
    )
    if view.host is Host.DELIVERIES:
        return found.verdict()
    came: defaultdict[Name | None, set[int | None]] = defaultdict(set)
    """Indices of the messages of an entry that came."""
    undone: defaultdict[Name | None, dict[Name, Event]] = defaultdict(dict)
    """Messages of an entry that came and are not done."""
    done: set[Name] = set()
    commits = {id(commit.event): commit for commit in view.commits}
    for event in view:
        entry = event.entry_name
        if event.kind in {"delivered", "started", "completed"} and event.ledger is not None:
            came[entry].add(event.index)
            if event.stored not in done:
                undone[entry].setdefault(event.stored, event)
        if event.kind == "completed" and view.host is Host.HANDLERS:
            done.add(event.stored)
            undone[entry].pop(event.stored, None)
        elif id(event) in commits:
            for row in commits[id(event)].rows:
                done.add(row.stored)
                undone[row.entry_name].pop(row.stored, None)
        elif event.kind == "acked":
            found.checked += 1
            name = f"{event.topic} {event.partition}/{event.ledger}:{event.entry}"
            if event.index is None:
                is_known = bool(came.get(entry))
                early = next(iter(undone[entry].values()), None)
            else:
                is_known = event.index in came[entry]
                early = undone[entry].get(event.stored)
            if not is_known:
                found.violation(f"{name} was acknowledged and never delivered", event)
            elif early is not None:
                found.violation(f"{name} was acknowledged before it was done", early, event)
    return found.verdict()


def ring_coverage(events: Sequence[Event]) -> Verdict:
    """No slot has two owners at any time, and the ring is covered once it has settled.

    Settled: after the last ``range_gained`` of a topic partition (of all, when the events name
    none). Ranges that were given up after that are a stop; a range whose owner crashed must have
    been gained by somebody. An owner's epoch is above that of the owner before.
    """
    found = Findings("ring covered without overlap", "changes of owners", "no range was gained")
    owners = Owners()
    for event in HistoryView.of(events):
        if event.kind in {"range_gained", "range_lost"}:
            found.checked += 1
        for why, offending in owners.follow(event):
            found.violation(why, *offending)
    for why, offending in owners.gaps():
        found.violation(why, *offending)
    return found.verdict()


def routing(events: Sequence[Event]) -> Verdict:
    """A message comes to the range that its key hashes into, and to the worker that owns it.

    The second only for messages that are no rows of a batch, and where the history says who owns
    which range.
    """
    found = Findings(
        "routed by key",
        "deliveries with a key and a range or an owner",
        "no delivery names a key and a range, and no range was gained",
    )
    owners = Owners()
    slots: dict[str, tuple[int, ...]] = {}
    for event in HistoryView.of(events):
        if event.kind in {"range_gained", "range_lost", "crashed"}:
            owners.follow(event)
            continue
        if event.kind not in {"delivered", "started"} or event.key is None:
            continue
        owned = not is_row(event) and event.batch is None and event.worker is not None
        if event.range is None and not (owned and owners.known):
            continue
        found.checked += 1
        # Two for a key that may have been set as bytes: the history does not tell.
        possible = slots.get(event.key)
        if possible is None:
            possible = slots[event.key] = possible_slots(event.key)
        if event.range is not None:
            hash_range = parse_range(event.range)
            possible = tuple(slot for slot in possible if slot in hash_range)
        if not possible:
            slot = possible_slots(event.key)[0]
            found.violation(f"slot {slot} of key {event.key!r} is not in {event.range}", event)
        elif owned and not any(owners.own(event, slot) for slot in possible):
            found.violation(
                f"slot {possible[0]} of key {event.key!r} was not owned by {event.worker}", event
            )
    return found.verdict()
