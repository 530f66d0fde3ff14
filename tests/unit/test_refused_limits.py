"""Limits of a broker: recognised by its text, named with their remedy, and not retried for long."""

from __future__ import annotations

from collections.abc import Mapping

import pulsar
import pytest

from keyshard.broker import retry
from keyshard.broker.client.errors import translated
from keyshard.broker.retry import retry_until
from keyshard.broker.wire import reconnect
from keyshard.broker.wire.errors import RefusedError, error_of, producing_error
from keyshard.broker.wire.reconnect import first_answer
from keyshard.core.position.entry import TopicPartition
from keyshard.core.refused_limits import ConsumerLimits, limit_of
from keyshard.errors import (
    BrokerError,
    KeyShardError,
    LimitReachedError,
    ProducerBusyError,
    RangeConflictError,
)
from tests.helpers import P0

TOPIC = "persistent://public/default/t"
WHERE = TopicPartition(TOPIC, 3)
UNKNOWN, CONSUMER_BUSY, AUTHORIZATION, PRODUCER_BUSY, ASSIGN, NOT_ALLOWED = 0, 5, 4, 16, 19, 22
JAVA = "org.apache.pulsar.broker.service.BrokerServiceException$ProducerBusyException: "
PER_TOPIC = "Topic reached max consumers limit"
TEXTS = {
    PER_TOPIC: (CONSUMER_BUSY, "maxConsumersPerTopic"),
    "Subscription reached max consumers limit": (CONSUMER_BUSY, "maxConsumersPerSubscription"),
    "Topic reached max same address consumers limit": (
        CONSUMER_BUSY,
        "maxSameAddressConsumersPerTopic",
    ),
    f"Topic '{WHERE}' reached max producers limit": (PRODUCER_BUSY, "maxProducersPerTopic"),
    f"{JAVA}Topic '{WHERE}' reached max same address producers limit": (
        PRODUCER_BUSY,
        "maxSameAddressProducersPerTopic",
    ),
    f"Exceed the maximum number of subscriptions of the topic: {WHERE}": (
        NOT_ALLOWED,
        "maxSubscriptionsPerTopic",
    ),
    "Exceed maximum number of topics in namespace.": (NOT_ALLOWED, "maxTopicsPerNamespace"),
}
"""Answers of Pulsar 4.0.8 and 5.0.1, their codes, and the settings behind them."""


@pytest.mark.parametrize("said", TEXTS)
def test_each_limit_is_an_error_that_keeps_the_words_of_the_broker(said: str) -> None:
    """Issue: a limit of consumers was an occupied subscription, one of producers a used sink id."""
    code, setting = TEXTS[said]
    refused = RefusedError(code, said.encode())
    for found in (
        error_of(refused, "subscribe to", WHERE, TOPIC, "the client"),
        producing_error(refused, "publish to", WHERE, "the client"),
    ):
        assert type(found) is LimitReachedError
        assert found.facts["limit"] == setting
        assert f"the limit {setting} of the broker is reached" in found.message
        assert said.removeprefix(JAVA).rstrip(".") in found.message
        assert f"{setting} in broker.conf" in found.message
        assert ("NUMBER public/default" in found.message) is ("SameAddress" not in setting)
        assert "org.apache" not in found.message


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (CONSUMER_BUSY, "Subscription is of different type", RangeConflictError),
        (ASSIGN, "Range conflict with consumer c", RangeConflictError),
        (PRODUCER_BUSY, "Producer with name 'p' is already connected", ProducerBusyError),
        (NOT_ALLOWED, "Subscription type is disabled", BrokerError),
        (AUTHORIZATION, PER_TOPIC, KeyShardError),
    ],
)
def test_other_refusals_are_no_limits(code: int, said: str, kind: type[KeyShardError]) -> None:
    assert limit_of(code, said) is None
    found = producing_error(RefusedError(code, said.encode()), "open", WHERE, "the client")
    assert isinstance(found, kind)
    assert not isinstance(found, LimitReachedError)


@pytest.mark.parametrize(
    ("limits", "connected", "exceeded"),
    [
        (ConsumerLimits(), {"other": 1_000}, None),
        (ConsumerLimits(3, 3), {}, None),
        (ConsumerLimits(2, 0), {}, ("maxConsumersPerTopic", 2)),
        (ConsumerLimits(3, 0), {"other": 1}, ("maxConsumersPerTopic", 3)),
        (ConsumerLimits(0, 2), {}, ("maxConsumersPerSubscription", 2)),
        (ConsumerLimits(0, 3), {"other": 1}, None),
        (ConsumerLimits(0, 3), {"s": 1}, ("maxConsumersPerSubscription", 3)),
        (ConsumerLimits(None, 2), {}, ("maxConsumersPerSubscription", 2)),
        (ConsumerLimits(2, None), {}, ("maxConsumersPerTopic", 2)),
        (ConsumerLimits(None, None), {"s": 1_000}, None),
    ],
)
def test_a_limit_counts_the_consumers_that_are_connected(
    limits: ConsumerLimits, connected: Mapping[str, int], exceeded: tuple[str, int] | None
) -> None:
    found = limits.exceeded(3, "s", connected)
    assert (found and (found[0].setting, found[1])) == exceeded


def test_a_limit_that_is_unknown_is_told_from_none() -> None:
    assert ConsumerLimits(0, 0).unknown == ()
    assert ConsumerLimits(None, 0).unknown == ("maxConsumersPerTopic",)
    assert ConsumerLimits(0, None).unknown == ("maxConsumersPerSubscription",)


@pytest.mark.parametrize("refusal", [pulsar.ProducerBusy, pulsar.NotAllowedError])
def test_a_client_that_drops_the_text_says_that_it_may_be_a_limit(refusal: type) -> None:
    with pytest.raises(BrokerError, match="a limit of producers"), translated("open", P0):
        raise refusal


# -- Retries ---------------------------------------------------------------------------------------


def reached() -> LimitReachedError:
    found = error_of(
        RefusedError(CONSUMER_BUSY, PER_TOPIC.encode()), "subscribe to", WHERE, TOPIC, "me"
    )
    assert isinstance(found, LimitReachedError)
    return found


def test_a_limit_is_retried_for_less_time_than_an_occupied_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consumers of a program that just ended may count for a moment, and no longer."""
    monkeypatch.setattr(retry, "LIMITED_S", 0.0)
    monkeypatch.setattr(reconnect, "LIMITED_S", 0.0)
    for call in (
        lambda act: retry_until(act, 1_000.0),
        lambda act: first_answer(lambda _: act(), lambda _: True, 1_000.0),
    ):
        for passing in ([], [RangeConflictError("It has a consumer.")]):
            errors: list[KeyShardError] = [*passing, reached()]

            def act(errors: list[KeyShardError] = errors) -> None:
                raise errors.pop(0)

            with pytest.raises(LimitReachedError):
                call(act)
            assert not errors


def test_a_limit_that_ends_in_time_is_no_error() -> None:
    errors: list[KeyShardError] = [reached()]

    def act() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert retry_until(act, 1_000.0) == "done"
