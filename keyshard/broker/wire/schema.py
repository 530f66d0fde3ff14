"""The schema of a topic, asked by Pulsar's protocol: whoever has no admin interface."""

from __future__ import annotations

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.wire.cluster import Cluster
from keyshard.broker.wire.errors import RefusedError, error_of
from keyshard.config.connection import Connection
from keyshard.core.topic_schema import TopicSchema

_NONE = 11
LEAVE_S = 2.0


def ask_schema(
    connection: Connection, topic: str, version: int | None, timeout_s: float
) -> TopicSchema | None:
    """A version of the schema of a topic, over a connection of its own; ``None`` where none is.

    Raises:
        BrokerUnavailableError: No answer in time (retriable).
        BrokerError: The broker refuses.
    """
    credentials = Credentials(connection)
    cluster = Cluster(connection, credentials)
    try:
        return cluster.schema(topic, version, timeout_s)
    except RefusedError as exc:
        if exc.code == _NONE:
            return None
        raise error_of(exc, "ask for", "the schema", topic, credentials.who()) from exc
    finally:
        cluster.close(LEAVE_S)
