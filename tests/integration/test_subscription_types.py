"""A subscription of another type on a real broker is named at once, not after the deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pulsar
import pytest

from keyshard import KeyShardSource
from keyshard.config.connection import Transport
from keyshard.errors import SubscriptionInUseError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.support.deadlines import deadline, in_time

pytestmark = pytest.mark.broker

AT_ONCE_S = deadline(15)
HOUR_MS = 3_600_000
"""``subscribe_timeout_ms`` that a test cannot wait for."""


@pytest.fixture
def client(dev_broker: DevBroker) -> Iterator[pulsar.Client]:
    made = pulsar.Client(dev_broker.service_url)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("transport", "with_admin"), [("wire", True), ("wire", False), ("client", True)]
)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pulsar.ConsumerType.Shared, "is of type Shared on"),
        (pulsar.ConsumerType.Failover, "is of type Failover on"),
        (pulsar.ConsumerType.KeyShared, "splitting the ring automatically (AUTO_SPLIT)"),
    ],
)
def test_a_subscription_of_another_type_is_named_at_once(  # noqa: PLR0917 - parameters
    dev_broker: DevBroker,
    client: pulsar.Client,
    topic_name: str,
    transport: Transport,
    with_admin: bool,
    kind: pulsar.ConsumerType,
    says: str,
) -> None:
    """Issue: the start tried for 20 s, and then said to stop the other query."""
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    other = client.subscribe(topic_name, "s", consumer_type=kind)
    source = KeyShardSource(
        topic_name, subscription="s", service_url=dev_broker.service_url, transport=transport,
        admin_url=dev_broker.admin_url if with_admin else None, parallelism=8,
        subscribe_timeout_ms=HOUR_MS,
    )  # fmt: skip
    began_s = time.monotonic()
    with pytest.raises(SubscriptionInUseError) as caught:
        source.open()
    in_time(began_s + AT_ONCE_S, "the refusal took longer")
    assert says in caught.value.message
    assert "Stop those consumers, or give keyshard its own subscription." in str(caught.value)
    if with_admin:
        holders = caught.value.facts["holders"]
        assert isinstance(holders, list)
        assert f"in use by {holders[0]}" in caught.value.message
    other.close()
    source.open().close()
