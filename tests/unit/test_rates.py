"""Rates, trends and loads from samples."""

from __future__ import annotations

import pytest

from keyshard.core.range_watchdog import (
    KeyFacts,
    Load,
    Pause,
    RangeFacts,
    Stall,
    StallKind,
    load_of,
    reason_of,
)
from keyshard.core.rates import HISTORY_S, Loads, Pace, Trend


def paced(*values: float | None, every_s: float = 1.0) -> Pace:
    pace = Pace()
    for number, value in enumerate(values):
        pace.look(number * every_s, {"one": value})
    return pace


def test_a_rate_covers_the_last_ten_seconds() -> None:
    slow = [10.0 * number for number in range(20)]
    fast = [slow[-1] + 100.0 * number for number in range(1, 11)]
    assert paced(*slow, *fast).rate("one") == pytest.approx(100)


@pytest.mark.parametrize("values", [(), (5.0,), (None, 5.0, None), (None, None)])
def test_a_rate_needs_two_samples(values: tuple[float | None, ...]) -> None:
    assert paced(*values).rate("one") is None
    assert paced(*values).rate("unknown") is None


def test_a_counter_that_begins_again_has_no_negative_rate() -> None:
    assert paced(100.0, 3.0).rate("one") == 0


def test_rare_samples_still_have_a_rate() -> None:
    assert paced(0.0, 150.0, every_s=15).rate("one") == pytest.approx(10)


@pytest.mark.parametrize(
    ("values", "trend"),
    [
        ([float(number) for number in range(30)], Trend.GROWING),
        ([float(30 - number) for number in range(30)], Trend.SHRINKING),
        ([100.0, 103.0] * 15, Trend.STEADY),
        ([0.0] * 30, Trend.STEADY),
        ([0.0, 500.0, 1_000.0] * 10, Trend.STEADY),
        ([1.0, 2.0, 3.0], None),
        ([None] * 30, None),
    ],
    ids=["growing", "shrinking", "steady", "nothing", "saw-tooth", "too short", "unknown"],
)
def test_the_lag_trend_is_growing_shrinking_steady_or_unknown(
    values: list[float | None], trend: Trend | None
) -> None:
    assert paced(*values).trend("one") is trend


def test_old_samples_are_forgotten() -> None:
    pace = paced(*([0.0] * 10))
    for second in range(60, 75):
        pace.look(second, {"one": 1_000.0 + second})
    assert len(pace._samples) <= HISTORY_S + 1
    assert pace.rate("one") == pytest.approx(1)


def test_the_shares_of_a_range_add_up() -> None:
    loads = Loads()
    assert loads.shares(0) is None
    for second in range(10):
        busy = RangeFacts(0, in_flight=1) if second < 6 else RangeFacts(0)
        loads.look(second, [busy, RangeFacts(1, waiting=3)])
    assert loads.shares(0) == {Load.BUSY: 0.6, Load.WAITING: 0.4, Load.HELD_BACK: 0.0}
    assert loads.shares(1) == {Load.BUSY: 0.0, Load.WAITING: 0.0, Load.HELD_BACK: 1.0}
    loads.look(11, [RangeFacts(0)])
    assert loads.shares(0) == {Load.BUSY: 0.0, Load.WAITING: 1.0, Load.HELD_BACK: 0.0}
    assert loads.shares(1) is None, "another number of ranges begins anew"


PAUSE = Pause(StallKind.CIRCUIT, "most keys fail")
FAILED = KeyFacts("k", "1:2:0", attempts=1, retry_in_s=3.0, error="ValueError: no")


@pytest.mark.parametrize(
    ("facts", "load", "reason"),
    [
        (RangeFacts(0), Load.WAITING, ""),
        (RangeFacts(0, waiting=5, in_flight=1), Load.BUSY, ""),
        (RangeFacts(0, waiting=5, blocking=FAILED), Load.HELD_BACK, "retry in 3.0 s after Value"),
        (RangeFacts(0, paused=True), Load.HELD_BACK, "the window or the checkpoint has no room"),
        (RangeFacts(0, draining=True), Load.HELD_BACK, "the range is about to move"),
        (
            RangeFacts(0, disconnected=("t",)), Load.HELD_BACK,
            "its consumer is not connected to t",
        ),
        (
            RangeFacts(0, in_flight=1, blocking=KeyFacts("k", "1:2:0", running_s=0.1)),
            Load.BUSY, "",
        ),
    ],
    ids=["idle", "busy", "retry", "paused", "draining", "away", "just started"],
)  # fmt: skip
def test_a_range_shows_its_activity_and_its_blocking_key(
    facts: RangeFacts, load: Load, reason: str
) -> None:
    assert load_of(facts) is load
    found = reason_of(facts, None)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    assert reason_of(facts, Stall(0, 1.0, StallKind.UNKNOWN, "stalls")) == "stalls"


def test_paused_handlers_block_a_range_with_messages() -> None:
    assert reason_of(RangeFacts(0, waiting=1), None, PAUSE) == (
        "handlers are paused: most keys fail"
    )
    assert reason_of(RangeFacts(0), None, PAUSE) == ""
