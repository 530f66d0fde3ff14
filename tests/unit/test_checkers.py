"""Each checker passes a correct history and names the events of a violation."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import HistoryError
from keyshard.testing.verify import checkers
from keyshard.testing.verify.checkers import Verdict, check
from keyshard.testing.verify.history import Event
from tests.support.broken_histories import (
    BROKEN,
    HIGH,
    LOW,
    Change,
    commit,
    done_too_late,
    handled_again,
    lost,
    message,
    parked_and_handled_again,
    rests_and_is_forgotten,
    twice_without_a_fault,
)
from tests.support.histories import TOPIC, Script, batch_host, handlers, run


@pytest.mark.parametrize("make", [batch_host, handlers])
@pytest.mark.parametrize("seed", range(20))
def test_a_program_that_keeps_every_promise_passes(
    make: Callable[[int], list[Event]], seed: int
) -> None:
    verdicts = check(make(seed))
    assert [verdict for verdict in verdicts if not verdict.holds] == []
    assert len({verdict.name for verdict in verdicts}) == 11


def test_unchecked_promises_are_reported() -> None:
    script = Script()
    script.add("delivered", message(0))
    for verdict in check(script.events):
        assert verdict.holds
        if verdict.name not in {"order per key", "bounded duplicates"}:
            assert verdict.checked == 0
            assert verdict.message.startswith("Nothing to check: ")
    script = Script()
    script.add("crashed", worker="w")
    with pytest.raises(HistoryError, match="contains no events to check"):
        check(script.events)
    with pytest.raises(HistoryError, match="contains no events to check"):
        check([])


def judge(checker: str, script: Script) -> Verdict:
    verdict = getattr(checkers, checker)(script.events)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    ("checker", "change"),
    [(name, change) for name, changes in BROKEN.items() for change in changes],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_promise_is_found_and_shown(checker: str, change: Change) -> None:
    script = Script()
    offending = change(script)
    verdict = judge(checker, script)
    assert not verdict.holds
    assert verdict.violations == 1, verdict.message
    assert verdict.offending == tuple(offending)
    assert verdict.message.startswith("1 violation in ")
    assert verdict.message.endswith(".")
    assert verdict in check(script.events)


def test_every_checker_has_a_broken_history() -> None:
    public = {name for name in checkers.__all__ if name.islower()} - {"check"}
    assert set(BROKEN) == public


# Correct histories that look like a violation.


def stored_twice_by_the_producer(script: Script) -> str:
    rows = [message(seq, entry=entry) for entry, seq in enumerate([5, 6, 5, 6, 7])]
    commit(script, 0, *rows[:3])
    commit(script, 1, *rows[3:])
    return "key_order exactly_once"


def delivered_twice_by_the_producer(script: Script) -> str:
    for number, seq in enumerate([5, 6, 5, 6, 7]):
        script.add("delivered", message(seq, entry=number))
    return "key_order bounded_duplicates"


def again_after_a_fault(script: Script) -> str:
    for seq in (0, 1):
        script.add("delivered", message(seq))
    script.add("disconnected")
    for seq in (0, 1, 2):
        script.add("delivered", message(seq))
    return "key_order bounded_duplicates"


def again_behind_what_waited_when_the_broker_forgot(script: Script) -> str:
    """Found by the simulation, seed 917176806: a process that ended had acknowledged 0 and 1."""
    for seq in (0, 1):
        script.add("started", message(seq), worker="first")
    script.add("started", message(2), worker="second")
    script.add("crashed", worker="broker")
    for seq in (3, 0, 1, 2, 3):
        script.add("started", message(seq), worker="second")
    return "key_order bounded_duplicates"


def again_behind_an_attempt_of_what_was_in_hand(script: Script) -> str:
    """Found by the simulation, seed 917175287.

    The broker forgets acknowledgements, so the next run gets these messages again.
    """
    for seq in (0, 1, 2):
        script.add("delivered", message(seq), worker="first")
        script.add("started", message(seq), worker="first")
    script.add("crashed", worker="broker")
    script.add("failed", message(2), worker="first")
    script.add("started", message(2), worker="first")
    for seq in (0, 1, 2):
        script.add("delivered", message(seq), worker="second")
        script.add("started", message(seq), worker="second")
    return "key_order bounded_duplicates"


def again_behind_what_came_again_before_the_broker_forgot(script: Script) -> str:
    for seq in (0, 1):
        script.add("delivered", message(seq), worker="first")
        script.add("started", message(seq), worker="first")
    script.add("crashed", worker="first")
    script.add("delivered", message(1), worker="second")
    script.add("crashed", worker="broker")
    for seq in (0, 1):
        script.add("delivered", message(seq), worker="second")
    for seq in (1, 0):
        script.add("started", message(seq), worker="second")
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_of_the_same_entry(script: Script) -> str:
    """Found by the simulation, seed 917177868: a key is unparked before its entry comes again."""
    for kind, seq in [("started", 0), ("completed", 0), ("started", 1), ("failed", 1)]:
        script.add(kind, message(seq), worker="first")
    script.add("crashed", worker="first")
    for seq in (0, 1):
        script.add("delivered", message(seq), worker="second")
    for seq in (1, 0):
        script.add("started", message(seq), worker="second")
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_that_was_let_out_meanwhile(script: Script) -> str:
    """Found by the simulation, seed 227192123412295: later entries come after a key is unparked."""
    rests_and_is_forgotten(script)
    handled_again(script, 0)
    handled_again(script, 2, delivered=False)
    for seq in (1, 2):
        handled_again(script, seq)
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_that_failed_again_meanwhile(script: Script) -> str:
    """Found by the simulation ``handlers-frames``, seed 290712540811683.

    The replayed dead letter 2 fails once before message 1 is handled again.
    """
    rests_and_is_forgotten(script)
    handled_again(script, 0)
    # Delivered before the attempt begins: the dead letter was in the lane already.
    script.add("delivered", message(1), worker="second")
    for kind in ("started", "failed"):
        script.add(kind, message(2), worker="second")
    handled_again(script, 1, delivered=False)
    handled_again(script, 2, delivered=False)
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_that_does_not_come_again(script: Script) -> str:
    """Found by the simulation, seed 16487916614727: only older messages lacked acknowledgement."""
    rests_and_is_forgotten(script)
    handled_again(script, 0)
    handled_again(script, 2, delivered=False)
    for seq in (1, 3):
        handled_again(script, seq)
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_of_a_process_that_was_killed(script: Script) -> str:
    """A process is killed while its handler has message 2. The next process parks the message."""
    rests_and_is_forgotten(script, is_dead_letter=False)
    script.add("started", message(2), worker="second")
    script.add("crashed", worker="second")
    script.add("parked", message(2), worker="second")
    script.add("crashed", worker="broker")
    handled_again(script, 0)
    handled_again(script, 2, delivered=False)
    for seq in (1, 2):
        handled_again(script, seq)
    return "key_order bounded_duplicates"


def again_behind_a_dead_letter_in_a_key_that_was_parked_meanwhile(script: Script) -> str:
    """Found by the simulation ``handlers-segments-frames``, seed 46.

    Message 0 is redelivered while message 2 rests, so it is parked too. Message 1 lies in a later
    segment, and is redelivered after the key is unparked.
    """
    rests_and_is_forgotten(script)
    parked_and_handled_again(script, 0)
    handled_again(script, 2, delivered=False)
    for seq in (1, 2):
        handled_again(script, seq)
    return "key_order bounded_duplicates"


def one_key_in_two_partitions(script: Script) -> str:
    script.add("started", message(1, partition=0), worker="a")
    script.add("started", message(0, partition=1), worker="b")
    return "key_order mutual_exclusion"


def rows_of_a_batch_at_once(script: Script) -> str:
    for seq in (0, 1):
        script.add("started", message(seq), worker="a", batch="b0")
    return "mutual_exclusion"


def next_worker_after_crash_and_failure(script: Script) -> str:
    script.add("started", message(0), worker="a")
    script.add("crashed", worker="a")
    script.add("started", message(0), worker="b")
    script.add("failed", message(0), worker="b")
    script.add("started", message(0), worker="c")
    script.add("crashed")
    script.add("started", message(0), worker="d")
    return "mutual_exclusion bounded_duplicates"


def broken_off_run(script: Script) -> str:
    run(script, 0, [message(0, part=0), message(0, key="b", part=1)])
    script.add("crashed", worker="host")
    commit(script, 0, message(0, part=0), message(1, part=0), message(0, key="b", part=1))
    return "rerun_equality"


def runs_broken_off_in_different_parts(script: Script) -> str:
    """Found by the simulation, seed 77001184: two runs of a batch were killed.

    1. Two tasks begin. The first run has a row of part 2 when it is killed.
    2. The second run has two rows of part 0, and none of part 2, when it is killed.
    3. The third run ends with the rows of both.
    """
    one, two = message(0, key="b", part=0), message(1, key="b", part=0)
    three = message(2, part=2)
    run(script, 0, [three])
    script.add("crashed", worker="host")
    run(script, 0, [one, two])
    script.add("crashed", worker="host")
    commit(script, 0, one, two, three)
    return "rerun_equality"


def runs_broken_off_and_never_ended(script: Script) -> str:
    one, two = message(0, key="b", part=0), message(1, key="b", part=0)
    three = message(2, part=2)
    run(script, 0, [three, one])
    run(script, 0, [one, two])
    run(script, 0, [])
    return "rerun_equality"


def range_regained_by_its_owner(script: Script) -> str:
    for _ in range(2):
        script.add("range_gained", worker="a", range="0-65535", epoch=1)
    script.add("range_lost", worker="a", range="0-65535")
    return "ring_coverage"


def range_of_a_crashed_worker_taken_over(script: Script) -> str:
    script.add("range_gained", worker="a", range="0-65535", epoch=1)
    script.add("crashed", worker="a")
    for worker, hash_range in (("b", LOW), ("c", HIGH)):
        script.add("range_gained", worker=worker, range=hash_range, epoch=2)
    return "ring_coverage"


@pytest.mark.parametrize(
    "change",
    [
        stored_twice_by_the_producer,
        delivered_twice_by_the_producer,
        again_after_a_fault,
        again_behind_what_waited_when_the_broker_forgot,
        again_behind_an_attempt_of_what_was_in_hand,
        again_behind_a_dead_letter_of_the_same_entry,
        again_behind_what_came_again_before_the_broker_forgot,
        again_behind_a_dead_letter_that_was_let_out_meanwhile,
        again_behind_a_dead_letter_that_failed_again_meanwhile,
        again_behind_a_dead_letter_that_does_not_come_again,
        again_behind_a_dead_letter_of_a_process_that_was_killed,
        again_behind_a_dead_letter_in_a_key_that_was_parked_meanwhile,
        one_key_in_two_partitions,
        rows_of_a_batch_at_once,
        next_worker_after_crash_and_failure,
        broken_off_run,
        runs_broken_off_in_different_parts,
        runs_broken_off_and_never_ended,
        range_regained_by_its_owner,
        range_of_a_crashed_worker_taken_over,
    ],
)
def test_allowed_options_pass(change: Callable[[Script], str]) -> None:
    script = Script()
    for checker in change(script).split():
        verdict = judge(checker, script)
        assert verdict.holds, verdict.message
        assert verdict.checked


def test_messages_of_a_key_are_in_order_across_segments_of_a_scalable_topic() -> None:
    parent, child = (f"segment://public/default/orders/0000-ffff-{number}" for number in (0, 1))
    script = Script()
    first, second = (message(0, topic=parent), message(1, topic=child))
    commit(script, 0, first)
    commit(script, 1, second)
    assert judge("key_order", script).holds
    script = Script()
    commit(script, 0, second)
    commit(script, 1, first)
    assert not judge("key_order", script).holds


def test_without_sequence_numbers_segments_have_no_common_order() -> None:
    parent, child = (f"segment://public/default/orders/0000-ffff-{number}" for number in (0, 1))
    script = Script()
    commit(script, 0, message(0, topic=parent, entry=9) | {"seq": None})
    commit(script, 1, message(1, topic=child, entry=0) | {"seq": None})
    assert judge("key_order", script).holds


def test_limits_can_be_given() -> None:
    script = Script()
    twice_without_a_fault(script)
    assert checkers.bounded_duplicates(script.events, deliveries_max=2).holds
    script = Script()
    done_too_late(script)
    assert checkers.liveness(script.events, liveness_s=62).holds


def test_the_time_of_handlers_of_a_key_is_not_time_that_its_messages_wait() -> None:
    script = Script()
    for seq in (0, 1):
        script.add("sent", message(seq))
    script.add("started", message(0), worker="w")
    script.now += 30
    script.add("faults_stopped")
    for seq in (0, 1):
        if seq:
            script.add("started", message(seq), worker="w")
        script.now += 70
        script.add("completed", message(seq), worker="w")
    assert judge("liveness", script).holds
    assert checkers.liveness(script.events, liveness_s=0.1).holds
    script.add("sent", message(2))
    script.now += 61
    script.add("started", message(2), worker="w")
    script.add("completed", message(2), worker="w")
    verdict = judge("liveness", script)
    assert verdict.violations == 1
    assert "handlers of its key ran for 0.0 s of that" in verdict.message


def test_violations_are_counted_and_the_first_are_shown() -> None:
    script = Script()
    for seq in range(10_000):
        script.add("sent", message(seq))
    verdict = checkers.no_loss(script.events)
    assert (verdict.checked, verdict.violations) == (10_000, 10_000)
    assert verdict.offending == tuple(script.events[:6])
    assert verdict.message.startswith("10,000 violations in 10,000 messages sent; the first: ")


def test_a_verdict_is_plain_json() -> None:
    script = Script()
    lost(script)
    found = checkers.no_loss(script.events).to_dict()
    offending = found.pop("offending")
    assert found == {
        "name": "no loss",
        "holds": False,
        "checked": 2,
        "violations": 1,
        "message": (
            f"1 violation in 2 messages sent; the first: {TOPIC} key 'a' seq 1 at 0/1:1:0 was "
            "sent, but never done."
        ),
    }
    assert offending == [{"t": 0.002, "kind": "sent", **message(1)}]


def test_events_of_another_kind_do_not_count() -> None:
    script = Script()
    commit(script, 0, message(0))
    keyless = replace(script.events[1], key=None)
    assert checkers.key_order([keyless, *script.events[2:]]).checked == 0


# -- one message twice at once, and large histories -----------------------------------------------


@pytest.mark.parametrize("key", ["k0", None])
@pytest.mark.parametrize("fault", ["crashed", "disconnected"])
def test_a_message_that_a_worker_starts_twice_at_once_is_found_after_any_fault(
    fault: str, key: str | None
) -> None:
    """Issue: after a fault, one worker could work on one message twice at the same time."""
    one = {**message(0), "key": key}
    script = Script()
    script.add("sent", one)
    script.add("started", one, worker="w")
    script.add(fault, worker="broker")
    again = script.add("started", one, worker="w")
    script.add("completed", one, worker="w")
    verdict = judge("mutual_exclusion", script)
    assert verdict.violations == 1
    assert again in verdict.offending


def test_a_message_may_start_again_after_its_worker_crashed() -> None:
    script = Script()
    script.add("started", message(0), worker="w")
    script.add("crashed", worker="w")
    script.add("started", message(0), worker="w")
    script.add("failed", message(0), worker="w")
    script.add("started", message(0), worker="w")
    assert judge("mutual_exclusion", script).holds


def entry(number: int, index: int = 0, key: str | None = None) -> dict[str, object]:
    return {
        "topic": TOPIC, "partition": 0, "ledger": 1, "entry": number, "index": index,
        "key": key or f"k{number}", "seq": number,
    }  # fmt: skip


def crashes_and_gains(script: Script, count: int) -> None:
    """A worker crashes again and again, and another one gains its range."""
    ring = [str(one) for one in split_ring(8)]
    for number in range(count // 2):
        hash_range = ring[number % 8]
        script.add("range_gained", range=hash_range, worker=f"w{number}", epoch=number)
        if number >= 8:
            script.add("crashed", worker=f"w{number - 7}")


def rescales(script: Script, count: int) -> None:
    """In each turn, every range of the ring is gained and then lost, one at a time."""
    ranges = max(4, round((count / 4) ** 0.5))
    for turn in range(2 * ranges):
        ring = [str(one) for one in split_ring(ranges + turn % 2)]
        for number, hash_range in enumerate(ring):
            script.add("range_gained", range=hash_range, worker=f"w{number}", epoch=turn)
        for number, hash_range in enumerate(ring):
            script.add("range_lost", range=hash_range, worker=f"w{number}")


def ranges_at_once(script: Script, count: int) -> None:
    """A worker gains many ranges, and then gets as many messages."""
    ring = [str(one) for one in split_ring(min(65_536, count // 2))]
    for hash_range in ring:
        script.add("range_gained", range=hash_range, worker="w", epoch=0)
    for number in range(count // 2):
        script.add("delivered", entry(number), worker="w")


def handlers_beside_crashes(script: Script, count: int) -> None:
    """Handlers of many keys run while another worker crashes again and again."""
    for number in range(count // 2):
        script.add("started", entry(number), worker="busy")
        script.add("crashed", worker="weak")


def rows_of_one_key(script: Script, count: int) -> None:
    """A worker works on all rows of a batch at once, and they have one key."""
    for number in range(count):
        script.add("started", entry(number, key="hot"), worker="w", batch="0")


def one_large_entry(script: Script, count: int) -> None:
    """Messages of one entry are acknowledged one by one, and again after each crash."""
    for number in range(count // 4):
        one = {**entry(7, number), "seq": number, "key": "hot"}
        script.add("started", one, worker="w")
        script.add("completed", one, worker="w")
        of_entry = {name: one[name] for name in ("topic", "partition", "ledger", "entry")}
        script.add("acked", of_entry, worker="w", index=number)
        script.add("acked", of_entry, worker="w")


def batches_that_run_again(script: Script, count: int) -> None:
    """A batch of many parts begins again and again."""
    for number in range(count // 3):
        script.add("delivered", entry(number), worker="w", batch="0", part=number)
    for _ in range(count // 3):
        script.add("crashed", worker="w")
        script.add("started", batch="0")


@pytest.mark.parametrize(
    "write",
    [
        crashes_and_gains, rescales, ranges_at_once, handlers_beside_crashes, rows_of_one_key,
        one_large_entry, batches_that_run_again,
    ],
)  # fmt: skip
def test_the_time_of_a_check_grows_with_the_history_and_not_with_its_square(
    write: Callable[[Script, int], None],
) -> None:
    """Issue: 11,012 events with 1,000 crashes took 191 s."""
    # 8 times as many events: 8 times as long is linear, 64 is quadratic. Other work disturbs.
    assert any(cpu_s(write, 16_000) < 24 * cpu_s(write, 2_000) for _ in range(3))


def cpu_s(write: Callable[[Script, int], None], count: int) -> float:
    """Return the shortest processor time of three checks, seconds."""
    script = Script()
    write(script, count)
    times = []
    for _ in range(3):
        began_s = time.thread_time()
        check(script.events)
        times.append(time.thread_time() - began_s)
    return min(times)
