"""What the broker keeps as the schema of a topic, by whichever interface there is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing

from keyshard.broker.connect import connect_admin
from keyshard.broker.retry import retry_until
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.topic_pattern import TopicPattern
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError

_log = logging.getLogger(__name__)


def schema_of(connection: Connection, topic: str, version: int | None = None) -> TopicSchema | None:
    """A version of the schema of a topic; ``None`` where there is none.

    Args:
        connection: With ``admin_url`` that interface is asked, else the broker; and the broker for
            a version where the interface fails, for who asks that is on its way.
        topic: Full name, without the partition suffix.
        version: ``None`` for the newest.

    Raises:
        BrokerUnavailableError: There was no answer, however often it was asked.
        BrokerError: It refuses.
    """
    timeout_s = connection.operation_timeout_ms / 1000

    def ask() -> TopicSchema | None:
        if connection.in_memory or connection.admin_url is not None:
            try:
                with closing(connect_admin(connection)) as admin:
                    return admin.schema(topic, version)
            except BrokerError as exc:
                if connection.in_memory or version is None:
                    raise
                _log.debug("the broker is asked for a schema, since its interface fails: %s", exc)
        from keyshard.broker.wire.schema import ask_schema  # noqa: PLC0415

        return ask_schema(connection, topic, version, timeout_s)

    return retry_until(ask, timeout_s)


def topics_of(config: SourceConfig) -> Sequence[str]:
    """Topics of a source: those that are named, or that match now.

    Raises:
        BrokerUnavailableError: The admin interface, which a pattern needs, does not answer.
        BrokerError: It refuses.
    """
    if config.topics_pattern is None:
        return config.topics
    connection, pattern = config.how_to_connect(), TopicPattern.parse(config.topics_pattern)

    def listed() -> set[str]:
        with closing(connect_admin(connection)) as admin:
            return admin.topics(pattern.tenant, pattern.namespace)

    found = retry_until(listed, connection.operation_timeout_ms / 1000)
    return sorted(filter(pattern.matches, found))
