"""Permits: messages that may be sent ahead, in any order of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keyshard.broker.wire.permits import LENT_MAX, Permits

INT32 = st.integers(-(2**31), 2**31 - 1)

STEPS = st.one_of(st.just("nudge"), st.integers(1, 300))


@given(st.integers(1, 100), st.lists(STEPS, max_size=200))
def test_the_queue_is_exceeded_at_most_by_lent_permits_and_never_half_empty(
    ahead: int, steps: list[int | str]
) -> None:
    permits = Permits(ahead)
    at_broker = permits.begin()
    for step in steps:
        if step == "nudge":
            granted = permits.nudge()
            assert granted or at_broker == ahead + LENT_MAX, "a broker that may be parked is helped"
            at_broker += granted
        else:
            # An entry is sent whole, however few are left.
            assert isinstance(step, int)
            at_broker += permits.use(step) - step
        assert ahead / 2 < at_broker <= ahead + LENT_MAX


@given(st.integers(1, 1_000), st.lists(st.one_of(st.integers(1, 300), INT32), max_size=20))
def test_a_broker_that_counts_declared_messages_has_the_right_permits(
    ahead: int, declared: list[int]
) -> None:
    """A broker counts in 32 bits and keeps excess permits; the consumer knows them."""
    permits = Permits(ahead)
    at_broker = permits.begin()
    for count in declared:
        at_broker = int32(at_broker - count)
        at_broker = int32(at_broker + permits.use(count))
        assert ahead / 2 < at_broker == permits.held


def int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def test_lent_permits_are_subtracted_from_used_ones() -> None:
    permits = Permits(10)
    assert [permits.nudge() for _ in range(LENT_MAX + 1)] == [1] * LENT_MAX + [0]
    assert [permits.use(LENT_MAX), permits.use(4), permits.use(1)] == [0, 0, 5]


def test_withheld_permits_are_granted_before_any_are_lent() -> None:
    permits = Permits(10)
    assert permits.use(4) == 0
    assert [permits.nudge(), permits.nudge()] == [4, 1]


def test_a_new_subscription_owes_nothing() -> None:
    permits = Permits(10)
    permits.nudge()
    assert permits.begin() == 10
    assert permits.use(5) == 5


def test_nothing_is_granted_while_a_broker_has_more_than_a_queue_that_became_smaller() -> None:
    """Messages became large while the grant for earlier ones was outstanding."""
    permits = Permits(1_000)
    assert [permits.begin(), permits.use(400)] == [1_000, 0]
    permits.resize(10)
    assert permits.use(1) == 0
    assert permits.held == 599


@given(
    st.integers(1, 1_000),
    st.lists(st.tuples(st.integers(1, 1_000), st.integers(1, 300)), max_size=50),
)
def test_a_queue_that_changes_holds_no_more_than_it_was_granted_or_may_hold(
    ahead: int, steps: list[tuple[int, int]]
) -> None:
    permits = Permits(ahead)
    at_broker = permits.begin()
    for size, messages in steps:
        before = at_broker
        permits.resize(size)
        at_broker += permits.use(messages) - messages
        assert size / 2 < at_broker == permits.held <= max(size, before)
