"""The state of a range, its blocking key, and the time until the watchdog names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keyshard.core.health import (
    REMIND_S,
    STALL_S,
    HeldUp,
    KeyFacts,
    Pause,
    RangeFacts,
    RangeState,
    Stall,
    StallKind,
    Watchdog,
    most_blocking,
    state_of,
)

HUNG = KeyFacts("k", "1:2:0", attempts=2, running_s=STALL_S)
RETRYING = KeyFacts("k", "1:2:0", attempts=3, retry_in_s=4.0, error="ValueError('no')")


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (RangeFacts(0), RangeState.IDLE),
        (RangeFacts(0, waiting=1), RangeState.RUNNING),
        (RangeFacts(0, in_flight=1), RangeState.RUNNING),
        (RangeFacts(0, paused=True), RangeState.PAUSED),
        (RangeFacts(0, waiting=3, paused=True), RangeState.PAUSED),
        (RangeFacts(0, waiting=3, in_flight=2, paused=True), RangeState.RUNNING),
        (RangeFacts(0, waiting=3, ready=1, paused=True), RangeState.RUNNING),
        (RangeFacts(0, waiting=3, blocking=RETRYING), RangeState.BLOCKED),
        (RangeFacts(0, waiting=3, ready=1, blocking=RETRYING), RangeState.RUNNING),
        (RangeFacts(0, waiting=3, in_flight=1, blocking=RETRYING), RangeState.RUNNING),
        (RangeFacts(0, waiting=3, draining=True, blocking=RETRYING), RangeState.DRAINING),
        (RangeFacts(0, draining=True, disconnected=("t",)), RangeState.DISCONNECTED),
    ],
)
def test_the_state_of_a_range(facts: RangeFacts, state: RangeState) -> None:
    assert state_of(facts, stalled=False) is state
    assert state_of(facts, stalled=True) is RangeState.STALLED


def test_the_blocking_key_ran_longest_or_failed_most() -> None:
    young = KeyFacts("young", "1:0:0", running_s=1.0)
    assert most_blocking([]) is None
    assert most_blocking([RETRYING, KeyFacts("x", "1:1:0", attempts=1)]) is RETRYING
    assert most_blocking([RETRYING, young]) is young
    assert most_blocking([young, HUNG, RETRYING]) is HUNG


def test_a_handler_that_does_not_return_is_named_though_other_keys_continue() -> None:
    watchdog = Watchdog()
    assert watchdog.look(0.0, [RangeFacts(3, in_flight=2, handled=1)]) == []
    (stall,) = watchdog.look(
        STALL_S, [RangeFacts(3, waiting=5, in_flight=2, handled=9, blocking=HUNG)]
    )
    assert stall.index == 3
    assert stall.since_s == 0.0
    assert f"has not returned for {STALL_S} s" in stall.reason
    assert "key 'k', message 1:2:0, attempt 3" in stall.reason


def test_a_handler_that_usually_takes_long_is_named_only_after_twice_its_usual_time() -> None:
    watchdog = Watchdog()
    usual_s = 20.0
    for now in range(0, 40, 2):
        key = KeyFacts("k", "1:2:0", running_s=float(now))
        facts = RangeFacts(0, waiting=3, ready=1, in_flight=1, blocking=key)
        assert watchdog.look(float(now), [facts], usual_s=usual_s) == []
    key = KeyFacts("k", "1:2:0", running_s=40.0)
    facts = RangeFacts(0, waiting=3, ready=1, in_flight=1, blocking=key)
    (stall,) = watchdog.look(40.0, [facts], usual_s=usual_s)
    assert "has not returned for 40.0 s" in stall.reason


def test_a_dead_letter_that_is_not_confirmed_is_named_however_long_handlers_take() -> None:
    key = KeyFacts("k", "1:2:0", running_s=STALL_S, parking=True)
    assert Watchdog().look(STALL_S, [RangeFacts(0, in_flight=1, blocking=key)], usual_s=60.0)


def test_rows_that_wait_for_a_retry_are_named_however_long_handlers_take() -> None:
    watchdog = Watchdog()
    facts = RangeFacts(0, waiting=4, blocking=RETRYING)
    watchdog.look(0.0, [facts], usual_s=60.0)
    assert watchdog.look(STALL_S, [facts], usual_s=60.0)


def test_a_pause_of_all_handlers_is_named_as_the_reason() -> None:
    watchdog = Watchdog()
    facts = RangeFacts(0, waiting=4, ready=2)
    pause = Pause(StallKind.CIRCUIT, "most keys fail")
    watchdog.look(0.0, [facts], usual_s=60.0, pause=pause)
    (stall,) = watchdog.look(STALL_S, [facts], usual_s=60.0, pause=pause)
    assert stall.kind is StallKind.CIRCUIT
    assert stall.reason.endswith("handlers are paused: most keys fail")


def test_rows_without_progress_are_named_with_their_reason() -> None:
    watchdog = Watchdog()
    facts = RangeFacts(0, waiting=4, blocking=RETRYING)
    assert watchdog.look(0.0, [facts]) == []
    assert watchdog.look(STALL_S - 0.1, [facts]) == []
    (stall,) = watchdog.look(STALL_S, [facts])
    assert "4 messages wait" in stall.reason
    assert "retry in 4.0 s after ValueError('no')" in stall.reason


def test_rows_that_no_worker_takes_are_named() -> None:
    watchdog = Watchdog()
    watchdog.look(0.0, [RangeFacts(0, waiting=4, ready=2)])
    (stall,) = watchdog.look(STALL_S, [RangeFacts(0, waiting=4, ready=2)])
    assert stall.reason.endswith("no worker is free")


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (RangeFacts(0, in_flight=1, blocking=HUNG), StallKind.HANDLER),
        (RangeFacts(0, in_flight=1, blocking=replace(HUNG, parking=True)), StallKind.DEAD_LETTER),
        (RangeFacts(0, in_flight=1, blocking=replace(HUNG, publishing=True)), StallKind.OUTPUTS),
        (RangeFacts(0, disconnected=("t",)), StallKind.DISCONNECTED),
        (RangeFacts(0, waiting=4, blocking=RETRYING), StallKind.RETRIES),
        (RangeFacts(0, waiting=4, in_flight=1, blocking=replace(HUNG, running_s=0.1)),
         StallKind.RETRIES),
        (RangeFacts(0, waiting=4, in_flight=1, blocking=replace(HUNG, running_s=1, attempts=0)),
         StallKind.HANDLER),
        (RangeFacts(0, waiting=4, ready=2), StallKind.WORKERS),
        (RangeFacts(0, waiting=4, draining=True), StallKind.DRAINING),
        (RangeFacts(0, waiting=4), StallKind.UNKNOWN),
    ],
)  # fmt: skip
def test_a_stall_has_the_kind_of_its_reason(facts: RangeFacts, kind: StallKind) -> None:
    watchdog = Watchdog()
    watchdog.look(0.0, [facts])
    watchdog.look(STALL_S, [facts])
    assert watchdog.stalls[0].kind is kind


def test_progress_and_idleness_start_the_time_again() -> None:
    watchdog = Watchdog()
    watchdog.look(0.0, [RangeFacts(0, waiting=4, handled=0)])
    watchdog.look(STALL_S - 1, [RangeFacts(0, waiting=4, handled=1)])
    assert watchdog.look(STALL_S + 1, [RangeFacts(0, waiting=4, handled=1)]) == []
    watchdog.look(STALL_S + 2, [RangeFacts(0, handled=1)])
    assert watchdog.look(2 * STALL_S + 1, [RangeFacts(0, waiting=1, handled=1)]) == []
    assert watchdog.stalls == {}


def test_a_consumer_that_stays_away_is_named_with_its_topic_partitions() -> None:
    watchdog = Watchdog()
    away = RangeFacts(1, disconnected=("a", "b", "c", "d"))
    assert watchdog.look(0.0, [away, RangeFacts(2)]) == []
    (stall,) = watchdog.look(STALL_S, [away, RangeFacts(2)])
    assert stall.reason == "its consumer is not connected to a, b, c and 1 more"
    assert watchdog.look(STALL_S + 1, [RangeFacts(1), RangeFacts(2)]) == []
    assert watchdog.stalls == {}
    assert watchdog.look(STALL_S + 2, [away]) == [], "a reconnect in between starts the time anew"


def test_a_stall_is_named_once_and_again_after_a_while() -> None:
    watchdog = Watchdog()
    facts = [RangeFacts(0, waiting=1), RangeFacts(1)]
    watchdog.look(0.0, facts)
    named = [now for now in range(1, 200) if watchdog.look(float(now), facts)]
    assert named == [int(STALL_S + reminder * REMIND_S) for reminder in range(4)]
    assert set(watchdog.stalls) == {0}


def test_a_range_that_is_gone_after_a_rescale_is_forgotten() -> None:
    watchdog = Watchdog()
    watchdog.look(0.0, [RangeFacts(0, waiting=1)])
    assert watchdog.look(STALL_S, [RangeFacts(0, waiting=1)])
    assert watchdog.look(STALL_S + 1, [RangeFacts(7)]) == []
    assert watchdog.stalls == {}


HELD_UP = [
    HeldUp(StallKind.UNDELIVERED, 3.0, "the broker delivers none of t-0"),
    HeldUp(StallKind.LOOK_AHEAD, 4.0, "the broker reads none of t-1"),
]


def after(s: float, *facts: RangeFacts, held_up: list[HeldUp] = HELD_UP) -> dict[int, Stall]:
    """The stalls after a time in which ranges do not change."""
    watchdog = Watchdog()
    watchdog.look(90.0, facts, held_up=held_up)
    watchdog.look(90.0 + s, facts, held_up=held_up)
    return watchdog.stalls


def test_a_range_that_only_waits_for_a_broker_that_delivers_nothing_stalls() -> None:
    assert after(STALL_S - 0.1, RangeFacts(0)) == {}
    stalls = after(STALL_S, RangeFacts(0), RangeFacts(1))
    assert stalls.keys() == {0, 1}
    assert (stalls[0].kind, stalls[0].since_s) == (StallKind.UNDELIVERED, 3.0)
    assert stalls[0].reason.startswith(
        "the broker delivers none of t-0 (and nothing of 1 more topic"
    )
    second = after(STALL_S, RangeFacts(0), held_up=HELD_UP[1:])
    assert second[0].reason == "the broker reads none of t-1"
    assert after(STALL_S, RangeFacts(0), held_up=[]) == {}


@pytest.mark.parametrize(
    "facts",
    [
        RangeFacts(0, in_flight=1),
        RangeFacts(0, paused=True),
        RangeFacts(0, draining=True),
    ],
)
def test_a_range_that_waits_for_something_else_does_not_stall_by_the_broker(
    facts: RangeFacts,
) -> None:
    stall = after(STALL_S, facts).get(0)
    assert stall is None or stall.kind is StallKind.UNKNOWN


@pytest.mark.parametrize(
    "between", [RangeFacts(0, in_flight=1), RangeFacts(0, waiting=1, ready=1), RangeFacts(0)]
)
def test_a_range_that_handles_messages_of_other_topic_partitions_does_not_stall(
    between: RangeFacts,
) -> None:
    watchdog = Watchdog()
    for number in range(20):
        now_s = number * STALL_S / 2
        watchdog.look(now_s, [RangeFacts(0, handled=number)], held_up=HELD_UP)
        assert watchdog.stalls == {}
        now_s += STALL_S / 4
        watchdog.look(now_s, [replace(between, handled=number)], held_up=HELD_UP)
        assert watchdog.stalls == {}


def test_a_stall_of_the_broker_that_comes_and_goes_is_reported_once_a_minute() -> None:
    watchdog, reports = Watchdog(), []
    for second in range(600):
        now = RangeFacts(0, handled=second // 10)
        reports += watchdog.look(float(second), [now], held_up=HELD_UP)
    assert len(reports) == 600 / REMIND_S
    watchdog.look(600.0, [RangeFacts(0)])
    later = [replace(HELD_UP[0], since_s=600.0)]
    watchdog.look(601.0, [RangeFacts(0)], held_up=later)
    assert len(watchdog.look(601.0 + STALL_S, [RangeFacts(0)], held_up=later)) == 1, "another one"


def test_the_reason_of_a_range_comes_before_that_of_the_broker() -> None:
    stalls = after(STALL_S, RangeFacts(0, disconnected=("t-0",)))
    assert stalls[0].kind is StallKind.DISCONNECTED
