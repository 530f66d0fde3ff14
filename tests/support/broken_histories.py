"""Histories that break one promise each, and the events that show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.history import Event
from tests.support.histories import TOPIC, Script, run

Change = Callable[[Script], Sequence[Event]]
"""Breaks a promise in a history; returns the events that show it."""


def message(seq: int, key: str = "a", partition: int = 0, **fields: Any) -> dict[str, Any]:
    named = {"topic": TOPIC, "partition": partition, "key": key, "seq": seq}
    return {**named, "ledger": 1, "entry": seq, "index": 0, **fields}


def entry(seq: int) -> dict[str, Any]:
    return {"topic": TOPIC, "partition": 0, "ledger": 1, "entry": seq}


def commit(script: Script, batch: int, *rows: dict[str, Any]) -> None:
    run(script, batch, rows)
    script.add("completed", batch=f"b{batch}")
    script.add("checkpointed", batch=f"b{batch}")


def rests_and_is_forgotten(script: Script, *, is_dead_letter: bool = True) -> None:
    """Handlers get 0 and 1 done, 2 becomes a dead letter, and the broker forgets all of them."""
    for seq in (0, 1, 2):
        script.add("delivered", message(seq), worker="first")
        script.add("started", message(seq), worker="first")
        script.add("completed" if seq < 2 else "failed", message(seq), worker="first")
    if is_dead_letter:
        script.add("parked", message(2), worker="first")
    script.add("crashed", worker="broker")


def handled_again(script: Script, seq: int, *, delivered: bool = True) -> Event:
    """A handler of the next process completes a message.

    Args:
        script: The history.
        seq: Number of the message.
        delivered: Whether the broker redelivers it before; a dead letter is replayed without that.
    """
    if delivered:
        script.add("delivered", message(seq), worker="second")
    started = script.add("started", message(seq), worker="second")
    script.add("completed", message(seq), worker="second")
    return started


def parked_and_handled_again(script: Script, seq: int) -> Event:
    """The next process parks a redelivered message of a parked key, and then replays it."""
    script.add("delivered", message(seq), worker="second")
    script.add("parked", message(seq), worker="second")
    return handled_again(script, seq, delivered=False)


def lost(script: Script) -> Sequence[Event]:
    sent = script.add("sent", message(0))
    missed = script.add("sent", message(1))
    assert sent
    commit(script, 0, message(0))
    return [missed]


def lost_with_its_batch(script: Script) -> Sequence[Event]:
    missed = script.add("sent", message(0))
    run(script, 0, [message(0)])
    script.add("completed", batch="b0")
    return [missed]


def lost_in_the_last_run(script: Script) -> Sequence[Event]:
    missed = script.add("sent", message(0))
    run(script, 0, [message(0)])
    commit(script, 0)
    return [missed]


def lost_by_a_handler(script: Script) -> Sequence[Event]:
    missed = script.add("sent", message(0))
    script.add("started", message(0), worker="w")
    return [missed]


def row_after_its_checkpoint(script: Script) -> Sequence[Event]:
    missed = script.add("sent", message(0))
    commit(script, 0)
    script.add("delivered", message(0), batch="b0")
    return [missed]


def inverted_in_a_batch(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0), message(2), message(1))
    return script.events[2:4]


def inverted_between_batches(script: Script) -> Sequence[Event]:
    commit(script, 0, message(1))
    commit(script, 1, message(0))
    return [script.events[1], script.events[5]]


def inverted_without_sequence_numbers(script: Script) -> Sequence[Event]:
    commit(script, 0, {**message(2), "seq": None}, {**message(1), "seq": None})
    return script.events[1:3]


def key_in_two_parts(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0, part=1), message(1, part=2))
    return script.events[1:3]


def handlers_inverted(script: Script) -> Sequence[Event]:
    return [script.add("started", message(seq), worker="w") for seq in (1, 0)]


def handlers_go_back_without_a_fault(script: Script) -> Sequence[Event]:
    first = [script.add("started", message(seq), worker="w") for seq in (0, 1, 0)]
    return first[1:]


def handlers_go_back_twice_after_one_fault(script: Script) -> Sequence[Event]:
    for seq in (0, 1, 2):
        script.add("started", message(seq), worker="w")
    script.add("crashed", worker="broker")
    return [script.add("started", message(seq), worker="w") for seq in (3, 1, 0)][1:]


def handlers_begin_again_in_another_order(script: Script) -> Sequence[Event]:
    for seq in (0, 1, 2):
        script.add("started", message(seq), worker="w")
    script.add("crashed", worker="broker")
    return [script.add("started", message(seq), worker="w") for seq in (2, 1)]


def handlers_go_back_in_what_the_broker_delivered_again(script: Script) -> Sequence[Event]:
    for seq in (0, 1, 2):
        script.add("delivered", message(seq), worker="w")
        script.add("started", message(seq), worker="w")
    script.add("crashed", worker="broker")
    for seq in (1, 2):
        script.add("delivered", message(seq), worker="w")
    return [script.add("started", message(seq), worker="w") for seq in (2, 1)]


def handlers_go_back_to_what_came_after_the_fault(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="w")
    script.add("crashed", worker="broker")
    return [script.add("started", message(seq), worker="w") for seq in (1, 2, 1)][1:]


def handlers_end_with_what_is_older_than_a_dead_letter(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script)
    handled_again(script, 0)
    dead_letter = handled_again(script, 2, delivered=False)
    older = handled_again(script, 1)
    script.add("delivered", message(2), worker="second")
    return [dead_letter, older]


def handlers_end_with_what_is_older_where_no_delivery_is_told(script: Script) -> Sequence[Event]:
    """The same, in a history that does not say what the broker delivered."""
    rests_and_is_forgotten(script)
    script.events = [event for event in script.events if event.kind != "delivered"]
    shown = [handled_again(script, seq, delivered=False) for seq in (0, 2, 1)]
    return shown[1:]


def handlers_end_with_what_is_older_in_a_parked_key(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script)
    parked_and_handled_again(script, 0)
    dead_letter = handled_again(script, 2, delivered=False)
    older = handled_again(script, 1)
    script.add("delivered", message(2), worker="second")
    return [dead_letter, older]


def handlers_start_a_parked_key_again_twice_after_one_fault(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script)
    handled_again(script, 1)
    return [handled_again(script, 2, delivered=False), parked_and_handled_again(script, 0)]


def handlers_go_back_behind_a_letter_twice_after_one_fault(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script)
    handled_again(script, 1)
    shown = [handled_again(script, 2, delivered=False), handled_again(script, 0)]
    handled_again(script, 2)
    return shown


def handlers_go_back_behind_what_is_a_letter_no_more(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script)
    handled_again(script, 0)
    handled_again(script, 2, delivered=False)
    handled_again(script, 1)
    return [handled_again(script, 2), handled_again(script, 1)]


def handlers_go_back_behind_an_attempt_that_is_no_dead_letter(script: Script) -> Sequence[Event]:
    rests_and_is_forgotten(script, is_dead_letter=False)
    handled_again(script, 0)
    shown = [handled_again(script, 2), handled_again(script, 1)]
    handled_again(script, 2)
    return shown


def new_message_after_a_later_one_in_spite_of_a_fault(script: Script) -> Sequence[Event]:
    top = script.add("delivered", message(1))
    script.add("crashed", worker="w")
    return [top, script.add("delivered", message(0))]


def in_two_batches(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0))
    commit(script, 1, message(0))
    return [script.events[1], script.events[5]]


def twice_in_a_batch(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0), message(0))
    return script.events[1:3]


def in_no_batch(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0))
    return [script.add("sent", message(1))]


def acked_before_the_checkpoint(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0)])
    acked = script.add("acked", entry(0))
    script.add("checkpointed", batch="b0")
    return [script.events[1], acked]


def acked_with_half_its_messages_done(script: Script) -> Sequence[Event]:
    row = script.add("delivered", message(1, entry=0, index=1), worker="w")
    commit(script, 0, message(0))
    return [row, script.add("acked", entry(0))]


def acked_before_its_handler_completed(script: Script) -> Sequence[Event]:
    started = script.add("started", message(0), worker="w")
    acked = script.add("acked", entry(0))
    script.add("completed", message(0), worker="w")
    return [started, acked]


def acked_and_never_delivered(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0))
    return [script.add("acked", entry(1))]


def one_index_acked_too_early(script: Script) -> Sequence[Event]:
    script.add("completed", message(0, entry=0, index=0))
    script.add("acked", entry(0), index=0)
    started = script.add("started", message(1, entry=0, index=1))
    return [started, script.add("acked", entry(0), index=1)]


def twice_without_a_fault(script: Script) -> Sequence[Event]:
    script.add("delivered", message(0))
    return [script.add("delivered", message(0))]


def thrice_with_one_fault(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="w")
    script.add("disconnected")
    script.add("started", message(0), worker="w")
    return [script.add("started", message(0), worker="w")]


def rerun_with_another_row(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0), message(1)])
    commit(script, 0, message(0), message(2))
    return [script.events[2], script.events[5]]


def rerun_in_another_order(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0), message(1)])
    commit(script, 0, message(1), message(0))
    return [script.events[1], script.events[4]]


def rerun_in_another_part(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0, part=0)])
    script.add("crashed", worker="host")
    commit(script, 0, message(0, part=1))
    return [script.events[1]]


def rerun_lacks_a_row_of_a_partial_run(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0), message(1)])
    commit(script, 0, message(0))
    return [script.events[2]]


def reruns_broken_off_with_different_rows(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0, part=0), message(2, key="b", part=1)])
    run(script, 0, [message(1, part=0)])
    return [script.events[4], script.events[1]]


def reruns_broken_off_with_a_row_in_two_parts(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0, part=0)])
    run(script, 0, [message(0, part=1)])
    return [script.events[1], script.events[3]]


def rerun_broken_off_unlike_all_but_the_shortest(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0), message(1), message(2)])
    run(script, 0, [message(0)])
    run(script, 0, [message(0), message(3)])
    return [script.events[8], script.events[2]]


def rerun_unlike_the_complete_run_after_one_like_it(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0), message(1)])
    run(script, 0, [message(1), message(0)])
    commit(script, 0, message(0), message(1))
    return [script.events[4], script.events[7]]


def rerun_has_more_than_a_complete_run(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0)])
    script.add("completed", batch="b0")
    commit(script, 0, message(0), message(1))
    return [script.events[5]]


LOW, HIGH = (str(one) for one in split_ring(2))
assert key_slot("a") in split_ring(2)[0], "the key of these messages lies in the lower half"


def two_owners(script: Script) -> Sequence[Event]:
    held = script.add("range_gained", worker="a", range="0-65535")
    return [held, script.add("range_gained", worker="b", range=HIGH)]


def two_owners_of_one_topic_partition(script: Script) -> Sequence[Event]:
    script.add("range_gained", worker="c", range="0-65535", topic=TOPIC, partition=1)
    where: dict[str, Any] = {"topic": TOPIC, "partition": 0}
    held = script.add("range_gained", worker="a", range="0-65535", **where)
    return [held, script.add("range_gained", worker="b", range="0-65535", **where)]


def ring_with_a_gap(script: Script) -> Sequence[Event]:
    script.add("range_gained", worker="a", range=LOW)
    last = script.add("range_gained", worker="b", range="40000-65535")
    script.add("range_lost", worker="a", range=LOW)
    return [last]


def range_of_a_crashed_worker_left_alone(script: Script) -> Sequence[Event]:
    script.add("range_gained", worker="a", range=LOW)
    left = script.add("range_gained", worker="b", range=HIGH)
    script.add("crashed", worker="b")
    return [left]


def old_epoch(script: Script) -> Sequence[Event]:
    script.add("range_gained", worker="a", range="0-65535", epoch=2)
    first = script.events[-1]
    script.add("range_lost", worker="a", range="0-65535", epoch=2)
    return [first, script.add("range_gained", worker="b", range="0-65535", epoch=2)]


def outside_the_range(script: Script) -> Sequence[Event]:
    script.add("delivered", message(0), range=LOW)
    return [script.add("delivered", message(1), range=HIGH)]


def row_outside_the_range(script: Script) -> Sequence[Event]:
    return [script.add("delivered", message(1), range=HIGH, batch="b0", part=0)]


def not_by_the_owner(script: Script) -> Sequence[Event]:
    script.add("range_gained", worker="a", range="0-65535")
    script.add("range_lost", worker="a", range="0-65535")
    script.add("range_gained", worker="b", range="0-65535")
    script.add("started", message(0), worker="b")
    return [script.add("started", message(0), worker="a")]


def two_workers_on_a_key(script: Script) -> Sequence[Event]:
    held = script.add("started", message(0), worker="a")
    script.add("crashed", worker="c")
    return [held, script.add("started", message(1), worker="b")]


def one_worker_twice_on_a_key(script: Script) -> Sequence[Event]:
    return [script.add("started", message(seq), worker="a") for seq in (0, 1)]


def the_same_message_by_two_workers(script: Script) -> Sequence[Event]:
    return [script.add("started", message(0), worker=worker) for worker in ("a", "b")]


def done_too_late(script: Script) -> Sequence[Event]:
    sent = script.add("sent", message(0))
    script.add("faults_stopped")
    script.now += 61
    commit(script, 0, message(0))
    return [sent, script.events[-1]]


def handled_too_late(script: Script) -> Sequence[Event]:
    """Of 90 s, handlers of its key ran for 20 s, and one of another key for all of it."""
    sent = script.add("sent", message(1))
    script.add("faults_stopped")
    script.add("started", message(9, key="b"), worker="w")
    for seq, waits_s in ((0, 0), (1, 70)):
        script.now += waits_s
        script.add("started", message(seq), worker="w")
        script.now += 10
        script.add("completed", message(seq), worker="w")
    late = script.events[-1]
    script.add("completed", message(9, key="b"), worker="w")
    return [sent, late]


def never_done(script: Script) -> Sequence[Event]:
    sent = script.add("sent", message(0))
    script.add("crashed", worker="host")
    run(script, 0, [message(0)])
    return [sent]


def completed_and_never_started(script: Script) -> Sequence[Event]:
    script.add("sent", message(0))
    script.add("delivered", message(0), worker="w")
    return [script.add("completed", message(0), worker="w")]


def completed_twice(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="w")
    script.add("completed", message(0), worker="w")
    return [script.add("completed", message(0), worker="w")]


def completed_before_it_started(script: Script) -> Sequence[Event]:
    early = script.add("completed", message(0), worker="w")
    script.add("started", message(0), worker="w")
    return [early]


def completed_by_another_worker(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="first")
    return [script.add("completed", message(0), worker="second")]


def completed_by_a_crashed_worker(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="w")
    script.add("crashed", worker="w")
    return [script.add("completed", message(0), worker="w")]


def completed_after_it_failed(script: Script) -> Sequence[Event]:
    script.add("started", message(0), worker="w")
    script.add("failed", message(0), worker="w")
    return [script.add("completed", message(0), worker="w")]


def failed_and_never_started(script: Script) -> Sequence[Event]:
    return [script.add("failed", message(0), worker="w")]


def started_and_never_delivered(script: Script) -> Sequence[Event]:
    script.add("delivered", message(0), worker="w")
    script.add("started", message(0), worker="w")
    return [script.add("started", message(1), worker="w")]


def started_before_it_was_delivered(script: Script) -> Sequence[Event]:
    early = script.add("started", message(0), worker="w")
    script.add("delivered", message(0), worker="w")
    return [early]


def row_of_a_batch_that_never_started(script: Script) -> Sequence[Event]:
    commit(script, 0, message(0))
    return [script.add("delivered", message(1), batch="b1")]


def batch_completed_twice(script: Script) -> Sequence[Event]:
    run(script, 0, [message(0)])
    script.add("completed", batch="b0")
    return [script.add("completed", batch="b0")]


def checkpoint_of_a_batch_that_never_started(script: Script) -> Sequence[Event]:
    return [script.add("checkpointed", batch="b0")]


def range_lost_and_never_gained(script: Script) -> Sequence[Event]:
    script.add("range_gained", range="0-65535", worker="first")
    return [script.add("range_lost", range="0-65535", worker="second")]


BROKEN: dict[str, list[Change]] = {
    "no_loss": [
        lost,
        lost_with_its_batch,
        lost_in_the_last_run,
        lost_by_a_handler,
        row_after_its_checkpoint,
    ],
    "key_order": [
        inverted_in_a_batch,
        inverted_between_batches,
        inverted_without_sequence_numbers,
        key_in_two_parts,
        handlers_inverted,
        handlers_go_back_without_a_fault,
        handlers_go_back_twice_after_one_fault,
        handlers_begin_again_in_another_order,
        handlers_go_back_in_what_the_broker_delivered_again,
        handlers_go_back_to_what_came_after_the_fault,
        handlers_end_with_what_is_older_than_a_dead_letter,
        handlers_end_with_what_is_older_where_no_delivery_is_told,
        handlers_end_with_what_is_older_in_a_parked_key,
        handlers_start_a_parked_key_again_twice_after_one_fault,
        handlers_go_back_behind_a_letter_twice_after_one_fault,
        handlers_go_back_behind_what_is_a_letter_no_more,
        handlers_go_back_behind_an_attempt_that_is_no_dead_letter,
        new_message_after_a_later_one_in_spite_of_a_fault,
    ],
    "exactly_once": [in_two_batches, twice_in_a_batch, in_no_batch],
    "ack_after_checkpoint": [
        acked_before_the_checkpoint,
        acked_with_half_its_messages_done,
        acked_before_its_handler_completed,
        acked_and_never_delivered,
        one_index_acked_too_early,
    ],
    "bounded_duplicates": [twice_without_a_fault, thrice_with_one_fault],
    "rerun_equality": [
        rerun_with_another_row,
        rerun_in_another_order,
        rerun_in_another_part,
        rerun_lacks_a_row_of_a_partial_run,
        reruns_broken_off_with_different_rows,
        reruns_broken_off_with_a_row_in_two_parts,
        rerun_broken_off_unlike_all_but_the_shortest,
        rerun_unlike_the_complete_run_after_one_like_it,
        rerun_has_more_than_a_complete_run,
    ],
    "ring_coverage": [
        two_owners,
        two_owners_of_one_topic_partition,
        ring_with_a_gap,
        range_of_a_crashed_worker_left_alone,
        old_epoch,
    ],
    "routing": [outside_the_range, row_outside_the_range, not_by_the_owner],
    "mutual_exclusion": [
        two_workers_on_a_key,
        one_worker_twice_on_a_key,
        the_same_message_by_two_workers,
    ],
    "liveness": [done_too_late, handled_too_late, never_done],
    "possible_order": [
        completed_and_never_started,
        completed_twice,
        completed_before_it_started,
        completed_by_another_worker,
        completed_by_a_crashed_worker,
        completed_after_it_failed,
        failed_and_never_started,
        started_and_never_delivered,
        started_before_it_was_delivered,
        row_of_a_batch_that_never_started,
        batch_completed_twice,
        checkpoint_of_a_batch_that_never_started,
        range_lost_and_never_gained,
    ],
}
