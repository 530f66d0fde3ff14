"""Refusals of a broker on the wire, and the errors that they become."""

from __future__ import annotations

import pytest

from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.core.refusal_timer import REFUSED_S, RefusalTimer
from keyshard.errors import BrokerError, TopicNotFoundError

TOPIC = "persistent://public/default/t"
NOT_ALLOWED = 22


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (f"Partition metadata not found for the partitioned topic: {TOPIC}-partition-0", True),
        (f"Illegal topic partition name {TOPIC}-partition-3 with max allowed 2 partitions", True),
        ("Subscription type is disabled", False),
    ],
)
def test_a_partition_that_newer_brokers_deny_is_missing_and_ends_no_source(
    said: str, error: bool
) -> None:
    """Issue: the deletion of a partitioned topic ended a source on Pulsar 5.0 after 5 s."""
    refused = RefusedError(NOT_ALLOWED, said.encode())
    found = error_of(refused, "subscribe to", f"{TOPIC}-partition-0", TOPIC, "the client")
    assert type(found) is (TopicNotFoundError if error else BrokerError)
    refusals = RefusalTimer()
    ends = [refusals.failed(found, now_s) for now_s in (0.0, REFUSED_S, 10 * REFUSED_S)]
    assert ends == ([False] * 3 if error else [False, True, True])
