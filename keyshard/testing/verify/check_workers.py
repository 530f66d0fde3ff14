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
    """At any time one handler works on a key of a topic partition.

    A handler runs from ``started`` to ``completed``, ``failed`` or the ``crashed`` of its worker.
    A worker may work on several rows of one batch at once.
    """
    found = Findings("one handler per key", "handlers of messages with a key", "no handler started")
    running: defaultdict[Name, dict[tuple[str | None, Name], Event]] = defaultdict(dict)
    for event in HistoryView.of(events):
        if event.kind == "crashed":
            _end_handlers(running, event)
        elif event.kind in _OF_HANDLERS and event.key is not None and event.has_message:
            of_key = running[event.routing_name]
            mine = (event.worker, event.stored)
            if event.kind == "started":
                found.checked += 1
                for name, other in of_key.items():
                    together = event.batch is not None and event.batch == other.batch
                    if name != mine and not (together and event.worker == other.worker):
                        found.violation(
                            f"key {event.key!r} was started by {event.worker} while "
                            f"{other.worker} worked on it",
                            *(other, event),
                        )
                of_key[mine] = event
            else:
                of_key.pop(mine, None)
                if not of_key:
                    del running[event.routing_name]
    return found.verdict()


def _end_handlers(running: dict[Name, dict[tuple[str | None, Name], Event]], crash: Event) -> None:
    for of_key in running.values():
        for name in [name for name in of_key if crash.worker in {None, name[0]}]:
            del of_key[name]


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
    messages: defaultdict[Name | None, list[Event]] = defaultdict(list)
    done: set[Name] = set()
    commits = {id(commit.event): commit for commit in view.commits}
    for event in view:
        if event.kind in {"delivered", "started", "completed"} and event.ledger is not None:
            messages[event.entry_name].append(event)
        if event.kind == "completed" and view.host is Host.HANDLERS:
            done.add(event.stored)
        elif id(event) in commits:
            done.update(row.stored for row in commits[id(event)].rows)
        elif event.kind == "acked":
            found.checked += 1
            of_entry = messages.get(event.entry_name, [])
            if event.index is not None:
                of_entry = [one for one in of_entry if one.index == event.index]
            name = f"{event.topic} {event.partition}/{event.ledger}:{event.entry}"
            early = [one for one in of_entry if one.stored not in done]
            if not of_entry:
                found.violation(f"{name} was acknowledged and never delivered", event)
            elif early:
                found.violation(f"{name} was acknowledged before it was done", early[0], event)
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
