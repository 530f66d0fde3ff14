"""The broker's statistics of a subscription."""

from __future__ import annotations

from typing import Any

import pytest

from keyshard.core.ring.hash_range import HashRange, gaps, split_ring
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState


def test_the_gaps_of_the_ring_are_found() -> None:
    assert gaps(split_ring(7)) == ()
    assert gaps([]) == (HashRange(0, 65535),)
    assert gaps([HashRange(5, 9), HashRange(7, 8), HashRange(12, 65534)]) == (
        HashRange(0, 4),
        HashRange(10, 11),
        HashRange(65535, 65535),
    )


@pytest.mark.parametrize(
    "ranges",
    [
        {"keyHashRangeArrays": [[0, 10], [20, 65535]]},
        {"keyHashRanges": ["[0, 10]", "[20, 65535]"]},
    ],
)
def test_consumers_and_their_ranges_are_read_as_new_and_old_brokers_write_them(
    ranges: dict[str, object],
) -> None:
    state = SubscriptionState.from_stats(
        {
            "type": "Key_Shared",
            "keySharedMode": "STICKY",
            "msgBacklog": 7,
            "msgInReplay": 3,
            "nonContiguousDeletedMessagesRanges": 2,
            "consumers": [{"consumerName": "c", "address": "a", "unackedMessages": 5, **ranges}],
        }
    )
    assert (state.kind, state.sticky, state.backlog) == ("Key_Shared", True, 7)
    assert (state.in_replay, state.ack_gaps) == (3, 2)
    (consumer,) = state.consumers
    assert (consumer.name, consumer.address, consumer.unacknowledged) == ("c", "a", 5)
    assert state.gaps == (HashRange(11, 19),)


@pytest.mark.parametrize(("stated", "known"), [(0, None), (-1, None), (1_795_853_064_607,) * 2])
def test_the_age_of_the_backlog_is_known_if_it_was_asked_for(
    stated: int, known: int | None
) -> None:
    state = SubscriptionState.from_stats(
        {"msgBacklog": 1, "earliestMsgPublishTimeInBacklog": stated}
    )
    assert state.oldest_ms == known


@pytest.mark.parametrize(("stated", "known"), [(-1, None), (0, 0), (90, 90)])
def test_the_age_that_the_broker_measured_is_known_if_it_measures_one(
    stated: int, known: int | None
) -> None:
    stats = {"msgBacklog": 1, "oldestBacklogMessageAgeSeconds": stated}
    assert SubscriptionState.from_stats(stats).age_s == known
    assert SubscriptionState.from_stats({"msgBacklog": 1}).age_s is None, "before Pulsar 4.0.14"


def test_a_consumer_is_missed_by_its_range_or_else_by_its_name() -> None:
    stats = {"msgBacklog": 0, "consumers": [{"consumerName": "a", "keyHashRangeArrays": [[0, 9]]}]}
    shown = SubscriptionState.from_stats(stats)
    assert not shown.lacks(HashRange(0, 9), "b")
    assert shown.lacks(HashRange(0, 10), "a")
    hidden = SubscriptionState.from_stats({"msgBacklog": 0, "consumers": [{"consumerName": "a"}]})
    assert not hidden.lacks(HashRange(0, 9), "a")
    assert hidden.lacks(HashRange(0, 9), "b")
    nobody = SubscriptionState.from_stats({"msgBacklog": 0, "consumers": []})
    assert nobody.lacks(HashRange(0, 9), "a")


def test_statistics_that_lack_the_backlog_are_refused() -> None:
    with pytest.raises(ValueError, match="msgBacklog"):
        SubscriptionState.from_stats({"type": "Shared"})


def test_limits_come_from_the_broker_if_it_reports_them() -> None:
    limits = BrokerLimits().with_settings(
        {"maxUnackedMessagesPerConsumer": "0", "maxMessageSize": "100", "other": "x"}
    )
    assert limits == BrokerLimits(unacked_per_consumer=0, message_bytes=100)
    assert (limits.replay(3), limits.replay(50)) == (6_000, 20_000)


@pytest.mark.parametrize(
    ("limits", "three", "fifty"),
    [
        (BrokerLimits(), 6_000, 20_000),
        (BrokerLimits(replay_per_consumer=0), 20_000, 20_000),
        (BrokerLimits(replay_per_subscription=0), 6_000, 100_000),
        (BrokerLimits(replay_per_consumer=0, replay_per_subscription=0), 150_000, 200_000),
        (BrokerLimits(0, 0, replay_per_consumer=0, replay_per_subscription=0), 0, 0),
        # In Java, both products are negative.
        (BrokerLimits(replay_per_consumer=2**30, replay_per_subscription=0), 150_000, 200_000),
    ],
)
def test_limits_of_unacknowledged_messages_stand_in_for_those_of_waiting_entries(
    limits: BrokerLimits, three: int, fifty: int
) -> None:
    assert (limits.replay(3), limits.replay(50)) == (three, fifty)


def test_a_negative_limit_is_none() -> None:
    names = {"keySharedLookAheadMsgInReplayThresholdPerConsumer": "-1", "maxMessageSize": "1 MB"}
    assert BrokerLimits().with_settings(names) == BrokerLimits(replay_per_consumer=0)


def test_the_type_of_an_unused_subscription_is_unknown() -> None:
    for output in ({"type": "None"}, {"type": None}, {}):
        assert SubscriptionState.from_stats({"msgBacklog": 0, **output}).kind == ""


@pytest.mark.parametrize(
    "stats",
    [[], "no", {"msgBacklog": float("inf")}, {"msgBacklog": 1, "consumers": ["c"]},
     {"msgBacklog": 1, "consumers": None}],
)  # fmt: skip
def test_invalid_statistics_are_refused(stats: Any) -> None:
    with pytest.raises(ValueError, match="are incomplete"):
        SubscriptionState.from_stats(stats)
