"""Topic partitions of which the broker delivers nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from keyshard.core.partition_watchdog import UNDELIVERED_S, PartitionStall, PartitionWatchdog
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import REMIND_S, STALL_S, StallKind
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


class Looks:
    """Looks at a source whose ranges ask for messages of both topic partitions."""

    def __init__(self) -> None:
        self.deliveries = PartitionWatchdog()

    def at(
        self, now_s: float, states: dict[TopicPartition, SubscriptionState], **changes: Any
    ) -> list[PartitionStall]:
        """The stalls to report."""
        arguments: dict[str, Any] = {"limits": LIMITS, "asked": [P0, P1]}
        return self.deliveries.look(now_s, states, **(arguments | changes))

    def kinds(self, now_s: float, state: SubscriptionState, **changes: Any) -> list[StallKind]:
        """The stalls of one topic partition."""
        self.at(now_s, {P0: state}, **changes)
        return [one.kind for one in self.deliveries.stalls.values()]


@pytest.mark.parametrize(
    ("state", "kind", "after_s"),
    [
        (WITHHELD, StallKind.UNDELIVERED, UNDELIVERED_S),
        (replace(WITHHELD, backlog=502, delayed=499), StallKind.UNDELIVERED, UNDELIVERED_S),
        # The ranges ask for the entries in the replay queue, so that queue explains no delay.
        (replace(WITHHELD, in_replay=149), StallKind.UNDELIVERED, UNDELIVERED_S),
        (FULL, StallKind.LOOK_AHEAD, STALL_S),
        # At the limit, neither unacknowledged messages nor permits of other consumers matter.
        (replace(FULL, consumers=ASKING[:1], in_replay=100), StallKind.LOOK_AHEAD, STALL_S),
    ],
)
def test_a_topic_partition_is_stalled_after_a_while(
    state: SubscriptionState, kind: StallKind, after_s: float
) -> None:
    looks = Looks()
    assert looks.kinds(50.0, state) == []
    assert looks.kinds(50.0 + after_s - 0.1, state) == []
    (found,) = looks.at(50.0 + after_s, {P0: state})
    assert looks.deliveries.stalls == {P0: found}
    assert (found.name, found.kind, found.since_s) == (str(P0), kind, 50.0)


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
def test_a_broker_that_has_a_reason_stalls_nothing(state: SubscriptionState) -> None:
    looks = Looks()
    for now_s in (0.0, UNDELIVERED_S, 10 * UNDELIVERED_S):
        assert looks.kinds(now_s, state) == []


def test_a_full_replay_queue_stalls_nothing_while_no_range_asks_for_messages() -> None:
    """All ranges pause while a sink is slow, and the broker reads up to its limit."""
    looks = Looks()
    for now_s in (0.0, STALL_S, 10 * STALL_S):
        assert looks.kinds(now_s, FULL, asked=[P1]) == []
    assert looks.kinds(10 * STALL_S + 1, FULL) == []
    assert looks.kinds(11 * STALL_S + 1, FULL) == [StallKind.LOOK_AHEAD]


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
    looks, after_s = Looks(), UNDELIVERED_S if state is WITHHELD else STALL_S
    looks.kinds(0.0, state)
    looks.kinds(1.0, change(state))
    looks.kinds(2.0, state)
    assert looks.kinds(after_s + 1.9, state) == []
    assert looks.kinds(after_s + 2.0, state)


def test_the_longest_comes_first_and_a_topic_partition_that_is_gone_is_forgotten() -> None:
    looks = Looks()
    looks.at(0.0, {P1: WITHHELD})
    looks.at(1.0, {P1: WITHHELD})
    looks.at(UNDELIVERED_S - STALL_S, {P0: FULL, P1: WITHHELD})
    found = looks.at(UNDELIVERED_S, {P0: FULL, P1: WITHHELD})
    assert [one.kind for one in found] == [StallKind.UNDELIVERED, StallKind.LOOK_AHEAD]
    looks.at(UNDELIVERED_S + 1, {P0: FULL})
    assert looks.deliveries.stalls.keys() == {P0}
    assert looks.kinds(UNDELIVERED_S + 2, WITHHELD) == []


def test_a_stall_is_reported_when_found_and_then_once_a_minute() -> None:
    looks = Looks()
    named = [now_s for now_s in range(200) if looks.at(float(now_s), {P0: FULL, P1: QUIET})]
    assert named == [int(STALL_S + reminder * REMIND_S) for reminder in range(4)]


def test_a_stall_that_comes_and_goes_is_reported_once_a_minute() -> None:
    looks, reports = Looks(), []
    for second in range(600):
        reports += looks.at(float(second), {P0: replace(FULL, delivered=second // 10)})
    assert len(reports) == 600 / REMIND_S


@pytest.mark.parametrize("state", [WITHHELD, FULL])
def test_a_missing_answer_names_nothing_and_proves_nothing(state: SubscriptionState) -> None:
    looks, after_s = Looks(), UNDELIVERED_S if state is WITHHELD else STALL_S
    looks.kinds(0.0, state)
    assert looks.at(after_s, {}, unknown=[P0, P1]) == []
    assert looks.deliveries.stalls == {}
    (found,) = looks.at(after_s + 1, {P0: state})
    assert found.since_s == 0.0
    looks.at(after_s + 2, {}, unknown=[P0])
    moved = replace(state, delivered=8)
    assert looks.kinds(after_s + 3, moved) == []
    looks.at(after_s + 4, {})
    assert looks.kinds(2 * after_s + 5, moved) == [], "it was not owned meanwhile"


def test_a_broker_without_a_look_ahead_limit_is_never_at_it() -> None:
    looks, limits = Looks(), BrokerLimits(0, 0, 0, 0)
    busy = replace(FULL, consumers=(replace(ASKING[0], unacknowledged=1), ASKING[1]))
    assert looks.kinds(0.0, busy, limits=limits) == []
    assert looks.kinds(UNDELIVERED_S, busy, limits=limits) == []


def test_a_topic_partition_whose_deliveries_are_unknown_is_not_stalled() -> None:
    looks = Looks()
    for state in (replace(WITHHELD, delivered=None), replace(FULL, delivered=None)):
        assert looks.kinds(0.0, state) == looks.kinds(10 * UNDELIVERED_S, state) == []
