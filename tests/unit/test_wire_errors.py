"""Refusals of a broker on the wire, and the errors that they become."""

from __future__ import annotations

import pytest

from keyshard.broker.wire.errors import RefusedError, error_of, producing_error
from keyshard.core.position.entry import TopicPartition
from keyshard.core.refusal_timer import REFUSED_S, RefusalTimer
from keyshard.errors import BrokerError, SchemaError, TopicNotFoundError

TOPIC = "persistent://public/default/t"
INCOMPATIBLE_SCHEMA, NOT_ALLOWED = 18, 22
JAVA = "org.apache.pulsar.broker.service.schema.exceptions.IncompatibleSchemaException: "
NO_UPDATE = "Schema not found and schema auto updating is disabled."


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


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            f"{JAVA}{NO_UPDATE} caused by {JAVA}{NO_UPDATE}",
            "set-is-allow-auto-update-schema --enable public/default.",
        ),
        (
            f"{JAVA}Producers cannot connect or send message without a schema to topics",
            "set-schema-validation-enforce --disable public/default.",
        ),
        (
            f"{JAVA}Field b is missing. caused by {JAVA}",
            "or change the compatibility strategy of the namespace.",
        ),
    ],
)
def test_a_refused_schema_names_the_policy_and_no_class_of_the_broker(
    said: str, remedy: str
) -> None:
    """The texts are those of Pulsar 5.0.1."""
    refused = RefusedError(INCOMPATIBLE_SCHEMA, said.encode())
    found = producing_error(refused, "publish to", TopicPartition(TOPIC, 0), "the client")
    assert type(found) is SchemaError
    assert found.message.endswith(remedy)
    assert "org.apache" not in found.message
