"""Requests the schema of a topic by Pulsar's protocol, if there is no admin interface."""

from __future__ import annotations

from typing import Any

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.wire.connection_pool import SCHEMA_NUMBERS, ConnectionPool
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.broker.wire.frames import api
from keyshard.config.connection import Connection
from keyshard.core.topic_schema import TopicSchema

_NONE = 11
LEAVE_S = 2.0


def ask_schema(
    connection: Connection, topic: str, version: int | None, timeout_s: float
) -> TopicSchema | None:
    """Return a version of a topic's schema, over its own connection; ``None`` if there is none.

    Raises:
        BrokerUnavailableError: No answer in time (retriable).
        BrokerError: The broker refuses.
    """
    credentials = Credentials(connection)
    pool = ConnectionPool(connection, credentials)
    try:
        return pool.schema(topic, version, timeout_s)
    except RefusedError as exc:
        if exc.code == _NONE:
            return None
        raise error_of(exc, "ask for", "the schema", topic, credentials.who()) from exc
    finally:
        pool.close(LEAVE_S)


def declared(schema: TopicSchema) -> Any:
    """Return the schema that a producer declares."""
    pairs = [
        api.KeyValue(key=name.encode(), value=text.encode())
        for name, text in schema.properties.items()
    ]
    return api.Schema(
        name=b"", data=schema.definition, type=SCHEMA_NUMBERS[schema.type], properties=pairs
    )
