"""The state of a range, its blocking key, and the time until the watchdog names it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from keyshard.core.range_watchdog import (
    REMIND_S,
    STALL_S,
    ActorFacts,
    KeyFacts,
    Pause,
    RangeFacts,
    RangeState,
    RangeWatchdog,
    StallKind,
    actor_stall,
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
def test_the_state_of_a_range_follows_from_its_facts(facts: RangeFacts, state: RangeState) -> None:
    assert state_of(facts, stalled=False) is state
    assert state_of(facts, stalled=True) is RangeState.STALLED


def test_the_blocking_key_ran_longest_or_failed_most() -> None:
    young = KeyFacts("young", "1:0:0", running_s=1.0)
    assert most_blocking([]) is None
    assert most_blocking([RETRYING, KeyFacts("x", "1:1:0", attempts=1)]) is RETRYING
    assert most_blocking([RETRYING, young]) is young
    assert most_blocking([young, HUNG, RETRYING]) is HUNG


def test_a_handler_that_does_not_return_is_named_though_other_keys_continue() -> None:
    watchdog = RangeWatchdog()
    assert watchdog.look(0.0, [RangeFacts(3, in_flight=2, handled=1)]) == []
    (stall,) = watchdog.look(
        STALL_S, [RangeFacts(3, waiting=5, in_flight=2, handled=9, blocking=HUNG)]
    )
    assert stall.index == 3
    assert stall.since_s == 0.0
    assert f"has not returned for {STALL_S} s" in stall.reason
    assert "key 'k', message 1:2:0, attempt 3" in stall.reason


def test_a_handler_that_usually_takes_long_is_named_only_after_twice_its_usual_time() -> None:
    watchdog = RangeWatchdog()
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
    assert RangeWatchdog().look(STALL_S, [RangeFacts(0, in_flight=1, blocking=key)], usual_s=60.0)


def test_rows_that_wait_for_a_retry_are_named_however_long_handlers_take() -> None:
    watchdog = RangeWatchdog()
    facts = RangeFacts(0, waiting=4, blocking=RETRYING)
    watchdog.look(0.0, [facts], usual_s=60.0)
    assert watchdog.look(STALL_S, [facts], usual_s=60.0)


def test_a_pause_of_all_handlers_is_named_as_the_reason() -> None:
    watchdog = RangeWatchdog()
    facts = RangeFacts(0, waiting=4, ready=2)
    pause = Pause(StallKind.CIRCUIT, "most keys fail")
    watchdog.look(0.0, [facts], usual_s=60.0, pause=pause)
    (stall,) = watchdog.look(STALL_S, [facts], usual_s=60.0, pause=pause)
    assert stall.kind is StallKind.CIRCUIT
    assert stall.reason.endswith("handlers are paused: most keys fail")


def test_rows_without_progress_are_named_with_their_reason() -> None:
    watchdog = RangeWatchdog()
    facts = RangeFacts(0, waiting=4, blocking=RETRYING)
    assert watchdog.look(0.0, [facts]) == []
    assert watchdog.look(STALL_S - 0.1, [facts]) == []
    (stall,) = watchdog.look(STALL_S, [facts])
    assert "4 messages wait" in stall.reason
    assert "retry in 4.0 s after ValueError('no')" in stall.reason


def test_rows_that_no_worker_takes_are_named() -> None:
    watchdog = RangeWatchdog()
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
    watchdog = RangeWatchdog()
    watchdog.look(0.0, [facts])
    watchdog.look(STALL_S, [facts])
    assert watchdog.stalls[0].kind is kind


def test_progress_and_idleness_start_the_time_again() -> None:
    watchdog = RangeWatchdog()
    watchdog.look(0.0, [RangeFacts(0, waiting=4, handled=0)])
    watchdog.look(STALL_S - 1, [RangeFacts(0, waiting=4, handled=1)])
    assert watchdog.look(STALL_S + 1, [RangeFacts(0, waiting=4, handled=1)]) == []
    watchdog.look(STALL_S + 2, [RangeFacts(0, handled=1)])
    assert watchdog.look(2 * STALL_S + 1, [RangeFacts(0, waiting=1, handled=1)]) == []
    assert watchdog.stalls == {}


def test_a_consumer_that_stays_away_is_named_with_its_topic_partitions() -> None:
    watchdog = RangeWatchdog()
    away = RangeFacts(1, disconnected=("a", "b", "c", "d"))
    assert watchdog.look(0.0, [away, RangeFacts(2)]) == []
    (stall,) = watchdog.look(STALL_S, [away, RangeFacts(2)])
    assert stall.reason == "its consumer is not connected to a, b, c and 1 more"
    assert watchdog.look(STALL_S + 1, [RangeFacts(1), RangeFacts(2)]) == []
    assert watchdog.stalls == {}
    assert watchdog.look(STALL_S + 2, [away]) == [], "a reconnect in between starts the time anew"


def test_a_stall_is_named_once_and_again_after_a_while() -> None:
    watchdog = RangeWatchdog()
    facts = [RangeFacts(0, waiting=1), RangeFacts(1)]
    watchdog.look(0.0, facts)
    named = [now for now in range(1, 200) if watchdog.look(float(now), facts)]
    assert named == [int(STALL_S + reminder * REMIND_S) for reminder in range(4)]
    assert set(watchdog.stalls) == {0}


def test_a_range_that_is_gone_after_a_rescale_is_forgotten() -> None:
    watchdog = RangeWatchdog()
    watchdog.look(0.0, [RangeFacts(0, waiting=1)])
    assert watchdog.look(STALL_S, [RangeFacts(0, waiting=1)])
    assert watchdog.look(STALL_S + 1, [RangeFacts(7)]) == []
    assert watchdog.stalls == {}


@pytest.mark.parametrize(
    ("facts", "usual_s", "for_s"),
    [
        (ActorFacts(0, None), 0.1, None),
        (ActorFacts(10, STALL_S - 0.1), 0.1, None),
        (ActorFacts(10, STALL_S), 0.1, STALL_S),
        (ActorFacts(1_000, 199.0), 0.1, None),
        (ActorFacts(1_000, 200.0), 0.1, 200.0),
        (ActorFacts(1, 100_000.0), math.inf, None),
        (ActorFacts(10, None, STALL_S - 0.1, "no"), 0.1, None),
        (ActorFacts(10, None, STALL_S, "no"), math.inf, STALL_S),
        (ActorFacts(10, 1.0, STALL_S, "no"), 0.1, STALL_S),
        (ActorFacts(1_000, 20.0, 30.0, "no"), 0.1, None),
        (ActorFacts(10, 20.0, 30.0, "no"), 0.1, 20.0),
    ],
)
def test_an_actor_stalls_by_its_call_or_by_its_failures(
    facts: ActorFacts, usual_s: float, for_s: float | None
) -> None:
    stalled = actor_stall(facts, usual_s)
    assert (None if stalled is None else stalled["forSeconds"]) == for_s
    if stalled is not None:
        assert stalled["kind"] == "actor"
        assert stalled["reason"].startswith("no" if facts.called_s in (None, 1.0) else "a call")
