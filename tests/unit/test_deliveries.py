"""Topic partitions of which the broker delivers nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from keyshard.core.deliveries import UNDELIVERED_S, Deliveries
from keyshard.core.health import STALL_S, StallKind
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.subscription_state import BrokerLimits, ConsumerState, SubscriptionState

P0, P1 = (TopicPartition("persistent://public/default/t", number) for number in (0, 1))
LIMITS = BrokerLimits(replay_per_consumer=100, replay_per_subscription=150, delayed=500)
ASKING = tuple(ConsumerState("c", "a", (part,), permits=5) for part in split_ring(2))
QUIET = SubscriptionState(
    kind="Key_Shared", sticky=True, out_of_order=False, durable=True,
    backlog=0, in_replay=0, ack_gaps=0, blocked=False, consumers=ASKING, delivered=7,
)  # fmt: skip
WITHHELD = replace(QUIET, backlog=3)
FULL = replace(QUIET, backlog=900, in_replay=150)


def kinds(deliveries: Deliveries, now_s: float, state: SubscriptionState) -> list[StallKind]:
    return [one.kind for one in deliveries.look(now_s, {P0: state}, LIMITS)]


@pytest.mark.parametrize(
    ("state", "kind", "after_s"),
    [
        (WITHHELD, StallKind.UNDELIVERED, UNDELIVERED_S),
        (replace(WITHHELD, backlog=502, delayed=499), StallKind.UNDELIVERED, UNDELIVERED_S),
        # Its ranges ask for them, so it is no reason that they wait for their ranges.
        (replace(WITHHELD, in_replay=149), StallKind.UNDELIVERED, UNDELIVERED_S),
        (FULL, StallKind.LOOK_AHEAD, STALL_S),
        # At the limit, it matters neither how many are unacknowledged nor who asks for more.
        (replace(FULL, consumers=ASKING[:1], in_replay=100), StallKind.LOOK_AHEAD, STALL_S),
    ],
)
def test_a_topic_partition_is_held_up_after_a_while(
    state: SubscriptionState, kind: StallKind, after_s: float
) -> None:
    deliveries = Deliveries()
    assert kinds(deliveries, 50.0, state) == []
    assert kinds(deliveries, 50.0 + after_s - 0.1, state) == []
    (found,) = deliveries.look(50.0 + after_s, {P0: state}, LIMITS)
    assert (found.kind, found.since_s) == (kind, 50.0)
    assert str(P0) in found.reason


@pytest.mark.parametrize(
    "state",
    [
        QUIET,
        replace(WITHHELD, delayed=3),
        # It reads no entries behind so many delayed ones.
        replace(WITHHELD, backlog=503, delayed=500),
        replace(WITHHELD, consumers=()),
        replace(WITHHELD, consumers=ASKING[:1]),
        replace(WITHHELD, consumers=(ASKING[0], replace(ASKING[1], permits=0))),
        replace(WITHHELD, consumers=(ASKING[0], replace(ASKING[1], unacknowledged=1))),
        replace(FULL, in_replay=149, consumers=(replace(ASKING[0], permits=-2), ASKING[1])),
    ],
)
def test_a_broker_that_has_a_reason_holds_nothing_up(state: SubscriptionState) -> None:
    deliveries = Deliveries()
    for now_s in (0.0, UNDELIVERED_S, 10 * UNDELIVERED_S):
        assert kinds(deliveries, now_s, state) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda state: replace(state, delivered=8),
        # The broker counts from 0 after it has loaded the topic.
        lambda state: replace(state, delivered=0),
        lambda state: replace(state, backlog=0, in_replay=0),
    ],
)
@pytest.mark.parametrize("state", [WITHHELD, FULL])
def test_the_time_begins_again_with_each_delivery(
    state: SubscriptionState, change: Callable[[SubscriptionState], SubscriptionState]
) -> None:
    deliveries, after_s = Deliveries(), UNDELIVERED_S if state is WITHHELD else STALL_S
    kinds(deliveries, 0.0, state)
    kinds(deliveries, 1.0, change(state))
    kinds(deliveries, 2.0, state)
    assert kinds(deliveries, after_s + 1.9, state) == []
    assert kinds(deliveries, after_s + 2.0, state)


def test_the_longest_comes_first_and_a_topic_partition_that_is_gone_is_forgotten() -> None:
    deliveries = Deliveries()
    deliveries.look(0.0, {P1: WITHHELD}, LIMITS)
    deliveries.look(1.0, {P0: FULL, P1: WITHHELD}, LIMITS)
    found = deliveries.look(UNDELIVERED_S, {P0: FULL, P1: WITHHELD}, LIMITS)
    assert [one.kind for one in found] == [StallKind.UNDELIVERED, StallKind.LOOK_AHEAD]
    assert deliveries.look(40.0, {P0: FULL}, LIMITS)
    assert deliveries.look(41.0, {P1: WITHHELD}, LIMITS) == []


@pytest.mark.parametrize("state", [WITHHELD, FULL])
def test_a_missing_answer_names_nothing_and_proves_nothing(state: SubscriptionState) -> None:
    deliveries, after_s = Deliveries(), UNDELIVERED_S if state is WITHHELD else STALL_S
    kinds(deliveries, 0.0, state)
    assert deliveries.look(after_s, {}, LIMITS, unknown=[P0, P1]) == []
    (found,) = deliveries.look(after_s + 1, {P0: state}, LIMITS)
    assert found.since_s == 0.0
    deliveries.look(after_s + 2, {}, LIMITS, unknown=[P0])
    moved = replace(state, delivered=8)
    assert deliveries.look(after_s + 3, {P0: moved}, LIMITS) == []
    assert deliveries.look(after_s + 4, {}, LIMITS) == []
    assert kinds(deliveries, 2 * after_s + 5, moved) == [], "it was not owned meanwhile"


def test_a_broker_without_a_look_ahead_limit_is_never_at_it() -> None:
    deliveries, limits = Deliveries(), BrokerLimits(0, 0, 0, 0)
    busy = replace(FULL, consumers=(replace(ASKING[0], unacknowledged=1), ASKING[1]))
    deliveries.look(0.0, {P0: busy}, limits)
    assert deliveries.look(UNDELIVERED_S, {P0: busy}, limits) == []
