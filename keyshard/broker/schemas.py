"""What the broker keeps as the schema of a topic, by whichever interface there is."""

from __future__ import annotations

from contextlib import closing

from keyshard.broker.connect import connect_admin
from keyshard.broker.retry import retry_until
from keyshard.config.connection import Connection
from keyshard.core.topic_schema import TopicSchema


def schema_of(connection: Connection, topic: str, version: int | None = None) -> TopicSchema | None:
    """A version of the schema of a topic; ``None`` where there is none.

    Args:
        connection: With ``admin_url`` that interface is asked, else the broker.
        topic: Full name, without the partition suffix.
        version: ``None`` for the newest.

    Raises:
        BrokerUnavailableError: There was no answer, however often it was asked.
        BrokerError: It refuses.
    """
    timeout_s = connection.operation_timeout_ms / 1000

    def ask() -> TopicSchema | None:
        if connection.in_memory or connection.admin_url is not None:
            with closing(connect_admin(connection)) as admin:
                return admin.schema(topic, version)
        from keyshard.broker.wire.schema import ask_schema  # noqa: PLC0415

        return ask_schema(connection, topic, version, timeout_s)

    return retry_until(ask, timeout_s)
