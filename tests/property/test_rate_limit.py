"""A rate limit lets no more calls begin than it says, and no fewer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.lanes.rate_limit import RateLimit

RATES = st.floats(0.01, 100_000)
BURSTS = st.one_of(st.none(), st.integers(1, 1_000))
PAUSES = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=40)


@given(RATES, BURSTS, PAUSES, st.floats(-1e6, 1e6))
def test_no_time_has_more_calls_than_the_limit(
    rate: float, burst: int | None, pauses: list[tuple[float, int]], now_s: float
) -> None:
    limit = RateLimit(rate, burst)
    earliest_s: float | None = None
    for pause_s, wanted in pauses:
        now_s += pause_s / rate
        for _ in range(min(wanted, limit.available(now_s))):
            limit.started(now_s)
            # The same limit as a time: each call moves it on by the time of a token.
            earliest_s = max(now_s, earliest_s or now_s) + 1 / rate
            assert earliest_s - now_s <= (limit.burst + 1e-3) / rate + 1e-6


@given(RATES, st.integers(2, 1_000), st.integers(1, 50), st.floats(0, 1e4))
def test_a_source_that_always_has_messages_gets_the_whole_rate(
    rate: float, burst: int, steps: int, now_s: float
) -> None:
    limit = RateLimit(rate, burst)
    began_s, calls = now_s, 0
    for _ in range(steps):
        for _ in range(limit.available(now_s)):
            limit.started(now_s)
            calls += 1
        limit.refused(now_s)
        last_s, now_s = now_s, now_s + (burst - 1) / rate
    # A token that is not whole yet is kept, unless there is no room for it.
    assert calls == pytest.approx(burst + (last_s - began_s) * rate, abs=1.01 + 1e-3 * calls)
    status = limit.status(now_s)
    assert status["holdsBack"]
    assert status["heldBackSeconds"] <= now_s - began_s + 1e-3


def test_the_time_for_which_it_holds_back_is_counted() -> None:
    limit = RateLimit(2.0)
    assert limit.status(5.0) == {
        "perSecond": 2.0, "burst": 1, "holdsBack": False, "heldBackSeconds": 0.0,
    }  # fmt: skip
    limit.started(5.0)
    assert limit.available(5.25) == 0
    limit.refused(5.25)
    limit.refused(5.3)
    assert limit.status(5.4)["holdsBack"]
    assert limit.status(5.4)["heldBackSeconds"] == pytest.approx(0.15)
    assert limit.available(5.5) == 1
    limit.started(5.5)
    limit.refused(5.5)
    limit.rested(6.0)
    limit.rested(9.0)
    assert limit.status(10.0)["heldBackSeconds"] == pytest.approx(0.75)
    assert not limit.status(10.0)["holdsBack"]


def test_the_default_burst_is_that_of_a_tenth_of_a_second() -> None:
    assert [RateLimit(rate).burst for rate in (0.5, 10, 29, 1_000)] == [1, 1, 2, 100]


def test_a_clock_that_goes_back_gives_no_token() -> None:
    limit = RateLimit(1.0)
    limit.started(10.0)
    assert limit.available(3.0) == 0
    assert limit.available(10.5) == 0
    assert limit.available(11.0) == 1
