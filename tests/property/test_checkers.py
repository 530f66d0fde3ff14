"""A right history passes every checker; one thing done wrong in it is caught."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.checkers import check, rerun_equality
from keyshard.testing.verify.history import Event
from tests.helpers import present
from tests.support.histories import batch_host, handlers

Events = list[Event]


def places(events: Events, *kinds: str, message: bool = True) -> list[int]:
    """Return the indices of events of some kinds, with or without a message."""
    return [
        at
        for at, event in enumerate(events)
        if event.kind in kinds and (event.seq is not None) is message
    ]


def last_run(events: Events, batch: str) -> list[int]:
    """Return the indices of the rows of committed batches."""
    start = max(at for at in places(events, "started", message=False) if events[at].batch == batch)
    return [at for at in places(events, "delivered") if at > start and events[at].batch == batch]


def some_batch(events: Events, chance: random.Random, rows_min: int = 1) -> list[int]:
    batches = sorted({event.batch for event in events if event.batch})
    runs = [last_run(events, batch) for batch in batches]
    return chance.choice([run for run in runs if len(run) >= rows_min])


def without(events: Events, at: int) -> Events:
    return events[:at] + events[at + 1 :]


def with_one_more(events: Events, at: int, event: Event) -> Events:
    return [*events[:at], event, *events[at:]]


def row_dropped(events: Events, chance: random.Random) -> Events:
    return without(events, chance.choice(some_batch(events, chance)))


def row_repeated(events: Events, chance: random.Random) -> Events:
    at = chance.choice(some_batch(events, chance))
    return with_one_more(events, at, events[at])


def row_repeated_in_a_later_batch(events: Events, chance: random.Random) -> Events:
    first, *_, last = (last_run(events, f"b{i}") for i in range(len(batches_of(events))))
    row = events[chance.choice(first)]
    return with_one_more(events, last[0], replace(row, batch=events[last[0]].batch))


def batches_of(events: Events) -> set[str]:
    return {event.batch for event in events if event.batch}


def rows_of_a_key_swapped(events: Events, chance: random.Random) -> Events:
    run = some_batch(events, chance, rows_min=2)
    pairs = [
        (a, b) for a in run for b in run if a < b and events[a].key == events[b].key
    ]  # An entry holds two messages of a key.
    a, b = chance.choice(pairs)
    changed = list(events)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def checkpoint_dropped(events: Events, chance: random.Random) -> Events:
    return without(events, chance.choice(places(events, "checkpointed", message=False)))


def acked_before_its_checkpoint(events: Events, chance: random.Random) -> Events:
    at = chance.choice(places(events, "acked", message=False))
    before = max(i for i in places(events, "checkpointed", message=False) if i < at)
    return with_one_more(without(events, at), before, events[at])


def checkpoint_late(events: Events, chance: random.Random) -> Events:
    at = places(events, "checkpointed", message=False)[-1]
    return with_one_more(without(events, at), at, replace(events[at], t=events[at].t + 100))


def row_of_a_broken_off_run_replaced(events: Events, chance: random.Random) -> Events:
    committed = {at for batch in batches_of(events) for at in last_run(events, batch)}
    broken_off = [at for at in places(events, "delivered") if at not in committed]
    assume(broken_off)
    at = chance.choice(broken_off)
    return with_one_more(without(events, at), at, in_next_part(events[at]))


def without_what_ended(events: Events) -> Events:
    """Only the runs that were broken off: none is known to be complete."""
    committed = {at for batch in batches_of(events) for at in last_run(events, batch)}
    ends = set(places(events, "completed", "checkpointed", message=False))
    return [event for at, event in enumerate(events) if at not in committed | ends]


def row_in_two_broken_off_runs(events: Events, chance: random.Random) -> tuple[Events, int]:
    """Broken-off runs alone, and where one has a row that another one has, too."""
    events = without_what_ended(events)
    rows = places(events, "delivered")
    times = Counter((events[at].batch, events[at].stored) for at in rows)
    twice = [at for at in rows if times[events[at].batch, events[at].stored] > 1]
    assume(twice)
    return events, chance.choice(twice)


def in_next_part(event: Event) -> Event:
    return replace(event, part=present(event.part) + 1)


def row_of_one_of_two_broken_off_runs_moved(events: Events, chance: random.Random) -> Events:
    events, at = row_in_two_broken_off_runs(events, chance)
    return with_one_more(without(events, at), at, in_next_part(events[at]))


def row_of_one_of_two_broken_off_runs_renamed(events: Events, chance: random.Random) -> Events:
    events, at = row_in_two_broken_off_runs(events, chance)
    other = replace(events[at], seq=10**6, entry=10**6)
    return with_one_more(without(events, at), at, other)


def other_range(events: Events, chance: random.Random) -> Events:
    at = chance.choice(places(events, "delivered"))
    wrong = [str(one) for one in split_ring(3) if key_slot(present(events[at].key)) not in one]
    return with_one_more(without(events, at), at, replace(events[at], range=chance.choice(wrong)))


def last_gain_dropped(events: Events, chance: random.Random) -> Events:
    # The ranges of a start, without the last of them.
    return without(events, places(events, "range_gained", message=False)[-1])


def completion_dropped(events: Events, chance: random.Random) -> Events:
    return without(events, chance.choice(places(events, "completed")))


def start_dropped(events: Events, chance: random.Random) -> Events:
    """Drop the last start of a message that a handler completed."""
    end = chance.choice(places(events, "completed"))
    starts = [at for at in places(events, "started") if events[at].stored == events[end].stored]
    return without(events, starts[-1])


def delivery_dropped(events: Events, chance: random.Random) -> Events:
    """Drop all deliveries of a message that a handler started."""
    name = events[chance.choice(places(events, "started"))].stored
    return [one for one in events if one.kind != "delivered" or one.stored != name]


def message_given_to_two_workers(events: Events, chance: random.Random) -> Events:
    at = chance.choice(places(events, "started"))
    return with_one_more(events, at + 1, replace(events[at], worker="other"))


def handlers_in_another_order(events: Events, chance: random.Random) -> Events:
    starts = places(events, "started")
    pairs = [
        (a, b)
        for a in starts
        for b in starts
        if events[a].key == events[b].key and present(events[a].seq) + 1 == events[b].seq
    ]
    a, b = chance.choice(pairs)
    first, second = events[a], events[b]
    names = {first.seq: second, second.seq: first}
    moved = ("entry", "index", "seq")
    return [
        replace(event, **{name: getattr(names[event.seq], name) for name in moved})
        if event.kind != "sent" and event.key == first.key and event.seq in names
        else event
        for event in events
    ]


def started_again_and_again(events: Events, chance: random.Random) -> Events:
    at = chance.choice(places(events, "completed"))
    allowed = 1 + sum(event.kind in {"crashed", "failed"} for event in events)
    again = replace(events[at], kind="started")
    return [*events[: at + 1], *[again] * allowed, *events[at + 1 :]]


def two_owners(events: Events, chance: random.Random) -> Events:
    at = places(events, "range_gained", message=False)[-1]
    return with_one_more(events, at + 1, replace(events[at], worker="other"))


def older_epoch(events: Events, chance: random.Random) -> Events:
    gains = [at for at in places(events, "range_gained", message=False) if events[at].epoch]
    at = gains[-1]
    return with_one_more(events, at + 1, replace(events[at], epoch=present(events[at].epoch) - 1))


MUTATIONS: list[tuple[Callable[[int], Events], Callable[[Events, random.Random], Events], str]] = [
    (batch_host, row_dropped, "no loss"),
    (batch_host, row_repeated, "exactly once into the checkpoint"),
    (batch_host, row_repeated_in_a_later_batch, "exactly once into the checkpoint"),
    (batch_host, rows_of_a_key_swapped, "order per key"),
    (batch_host, checkpoint_dropped, "acknowledged after the checkpoint"),
    (batch_host, acked_before_its_checkpoint, "acknowledged after the checkpoint"),
    (batch_host, checkpoint_late, "done in time after the faults"),
    (batch_host, row_of_a_broken_off_run_replaced, "re-runs are equal"),
    (batch_host, row_of_one_of_two_broken_off_runs_moved, "re-runs are equal"),
    (batch_host, row_of_one_of_two_broken_off_runs_renamed, "re-runs are equal"),
    (batch_host, other_range, "routed by key"),
    (batch_host, last_gain_dropped, "ring covered without overlap"),
    (handlers, completion_dropped, "no loss"),
    (handlers, completion_dropped, "acknowledged after the checkpoint"),
    (handlers, message_given_to_two_workers, "one handler per key"),
    (handlers, message_given_to_two_workers, "routed by key"),
    (handlers, handlers_in_another_order, "order per key"),
    (handlers, started_again_and_again, "bounded duplicates"),
    (handlers, two_owners, "ring covered without overlap"),
    (handlers, older_epoch, "ring covered without overlap"),
    (handlers, other_range, "routed by key"),
    (handlers, start_dropped, "each event has its cause"),
    (handlers, delivery_dropped, "each event has its cause"),
]


@given(seed=st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_runs_that_were_broken_off_are_equal_though_none_contains_another(seed: int) -> None:
    verdict = rerun_equality(without_what_ended(batch_host(seed)))
    assert verdict.holds, verdict.message


@pytest.mark.parametrize(
    ("make", "mutate", "promise"),
    MUTATIONS,
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@given(seed=st.integers(0, 10**9))
@settings(max_examples=12, deadline=None)
def test_one_thing_done_wrong_is_caught(
    make: Callable[[int], Events],
    mutate: Callable[[Events, random.Random], Events],
    promise: str,
    seed: int,
) -> None:
    events = make(seed)
    assert all(verdict.holds for verdict in check(events))
    wrong = mutate(events, random.Random(seed))
    failed = {verdict.name for verdict in check(wrong) if not verdict.holds}
    assert promise in failed
