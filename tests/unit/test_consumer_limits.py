"""Consumers at the limit of a broker: a start and ``doctor`` name the limit, and who is there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pulsar
import pytest

from keyshard.broker.client.errors import translated
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.consumers.receiver import OwnedRange
from keyshard.consumers.subscribe import open_range_consumers
from keyshard.coordinator.consumer_limits import check_consumer_limits
from keyshard.core.diagnosis import Level, judge_consumers
from keyshard.core.position.entry import TopicPartition
from keyshard.core.refused_limits import ConsumerLimits
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.subscription_state import ConsumerState, SubscriptionState
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import (
    AdminError,
    KeyShardError,
    LimitReachedError,
    RangeConflictError,
    SubscriptionInUseError,
)
from tests.helpers import P0, FakeAdmin, FakeConsumer, config
from tests.support.faulty_broker import ScriptedCall, faulty

PER_TOPIC = "Topic reached max consumers limit"


def reached() -> KeyShardError:
    return error_of(RefusedError(5, PER_TOPIC.encode()), "subscribe to", P0, P0.topic, "me")


class Limited(FakeAdmin):
    """An admin interface that knows limits, and the consumers of another application."""

    def __init__(self, per_topic: int | None, others: int = 0) -> None:
        super().__init__()
        self.per_topic = per_topic
        self.others = others

    def consumer_limits(self, topic: str) -> tuple[int | None, int]:  # noqa: ARG002
        return self.per_topic, 0

    def subscriptions(self, *_: object) -> Mapping[str, Mapping[str, Any]]:
        return {"other-app": {"consumers": [{"address": "10.0.0.1:5"}] * self.others}, "s": {}}


class Full:
    """A broker with room for one consumer."""

    def __init__(self, refusal: KeyShardError) -> None:
        self.refusal = refusal
        self.made: list[FakeConsumer] = []

    def subscribe(self, spec: SubscriptionSpec, _: StartPosition) -> FakeConsumer:
        if spec.hash_range.start > 0:
            raise self.refusal
        self.made.append(FakeConsumer())
        return self.made[-1]


def open_three(broker: Full, admin: FakeAdmin | None) -> None:
    one: Any = broker
    ranges = [OwnedRange(P0, i, part) for i, part in enumerate(split_ring(3))]
    options = config("t", subscription="s", subscribe_timeout_ms=1)
    open_range_consumers(
        one, admin, options, ranges, StartPosition.EARLIEST,
        make_queue=lambda: ReceiverQueueSize(10**6, 1),
    )  # fmt: skip


def test_a_refused_start_names_the_limit_and_the_consumers_of_others() -> None:
    broker = Full(reached())
    with pytest.raises(LimitReachedError) as caught:
        open_three(broker, Limited(2, others=1))
    assert PER_TOPIC in caught.value.message
    assert "keyshard opens 3 consumers" in caught.value.message
    assert "1 of subscription 'other-app' (10.0.0.1:5)" in caught.value.message
    assert caught.value.facts["connected"] == {"other-app": 1, "s": 0}
    assert all(one.closed for one in broker.made)
    with pytest.raises(LimitReachedError, match="with admin_url, this error names the others"):
        open_three(broker, None)


def test_without_the_brokers_text_the_counts_decide_if_a_limit_was_reached() -> None:
    """pulsar-client drops the text of a refusal. The admin interface has the limit and counts."""
    with pytest.raises(RangeConflictError) as busy, translated("subscribe to", P0):
        raise pulsar.ConsumerBusy
    broker = Full(busy.value)
    with pytest.raises(LimitReachedError, match=r"it is 3.*1 of subscription 'other-app'"):
        open_three(broker, Limited(3, others=1))
    for admin in None, Limited(4):
        with pytest.raises(SubscriptionInUseError, match="or a limit of consumers is reached"):
            open_three(broker, admin)
    with pytest.raises(RangeConflictError) as taken, translated("subscribe to", P0):
        raise pulsar.ConsumerAssignError
    with pytest.raises(SubscriptionInUseError) as caught:
        open_three(Full(taken.value), Limited(3, others=1))
    assert "limit" not in caught.value.message


def test_a_parallelism_above_a_limit_is_refused_before_anything_is_created() -> None:
    check_consumer_limits(None, [P0], 3, 1.0)
    check_consumer_limits(Limited(3), [P0], 3, 1.0)
    with pytest.raises(LimitReachedError, match="it is 2") as caught:
        check_consumer_limits(Limited(2), [P0], 3, 1.0)
    assert "set-max-consumers-per-topic -c NUMBER" in caught.value.message


def test_a_role_that_may_not_see_the_limits_starts_without_the_check() -> None:
    forbidden = ScriptedCall(raises=AdminError("It is not yours."))
    check_consumer_limits(faulty(FakeAdmin(), consumer_limits=forbidden), [P0], 3, 1.0)
    assert forbidden.raised


@pytest.mark.parametrize(
    "names", [("a/a/gone", "a/b/stays"), ("a/b/gone", "a/b/stays"), ("a/b/stays", "a/b/gone")]
)
def test_a_deleted_topic_leaves_the_limits_of_the_others_known(names: tuple[str, ...]) -> None:
    """A rescale may come before the source has noticed the deletion."""

    def limits(_: object, topic: str) -> tuple[int, int]:
        if topic.endswith("gone"):
            raise AdminError("Topic not found")
        return 2, 0

    admin = faulty(FakeAdmin(), consumer_limits=limits)
    topics = [TopicPartition(f"persistent://{name}") for name in names]
    with pytest.raises(LimitReachedError, match="it is 2"):
        check_consumer_limits(admin, topics, 3, 1.0)


def test_a_start_without_a_check_of_a_limit_names_the_limit_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    check_consumer_limits(Limited(0), [P0], 3, 1.0)
    assert not caplog.messages
    check_consumer_limits(Limited(None), [P0], 3, 1.0)
    (said,) = caplog.messages
    assert "may not read maxConsumersPerTopic of the broker" in said


def test_doctor_counts_the_consumers_of_others_and_not_those_of_the_source() -> None:
    idle = SubscriptionState.from_stats({"type": "Key_Shared", "msgBacklog": 0})
    taken = replace(idle, consumers=(ConsumerState("c", "a", ()),) * 2)
    states = {P0: {"s": taken, "other-app": taken}}
    assert judge_consumers(states, "s", 3, ConsumerLimits(5, 3)) == []
    (finding,) = judge_consumers(states, "s", 4, ConsumerLimits(5, 0))
    assert finding.level is Level.PROBLEM
    assert "needs 4, and other subscriptions have 2" in finding.text
    assert "set-max-consumers-per-topic -c NUMBER" in finding.advice
