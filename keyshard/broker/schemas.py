"""Requests for topic schemas and topic names, by the admin interface or by the broker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from keyshard.broker.admin.port import Admin
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.connect import connect_admin
from keyshard.broker.preflight import ANSWER_S, missing_topics
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.broker.topics import matching
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.core.topic_schema import TopicSchema
from keyshard.core.topic_segments import scalable_topic_of
from keyshard.errors import BrokerError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def schema_of(
    connection: Connection, topic: str, version: int | None = None, *, tries_s: float | None = None
) -> TopicSchema | None:
    """Return a version of the schema of a topic; ``None`` if there is none.

    Args:
        connection: If it has an ``admin_url``, the admin interface is asked, else the broker. If
            the admin interface fails for a specific version, the broker is asked.
        topic: Full name, without the partition suffix.
        version: ``None`` for the newest.
        tries_s: Longest time of the retries, seconds; ``None`` for ``operation_timeout_ms``.

    Raises:
        BrokerUnavailableError: No attempt was answered.
        BrokerError: The broker refuses.
    """
    topic = scalable_topic_of(topic)  # Segments have no schema of their own.
    operation_s = connection.operation_timeout_ms / 1000
    timeout_s = operation_s if tries_s is None else min(operation_s, tries_s)
    answer_s = min(operation_s, max(timeout_s, ANSWER_S))

    def ask() -> TopicSchema | None:
        if connection.in_memory or connection.admin_url is not None:
            try:
                if tries_s is not None:
                    with _answering(connection) as admin:
                        return admin.schema(topic, version)
                with closing(connect_admin(connection)) as admin:
                    return admin.schema(topic, version)
            except BrokerError as exc:
                if connection.in_memory or version is None:
                    raise
                _log.debug(
                    "the admin interface fails, so the broker is asked for a schema: %s",
                    exc.summary,
                )
        from keyshard.broker.wire.schema import ask_schema  # noqa: PLC0415

        if tries_s is not None:  # Its error names the mistake in a URL.
            missing_topics(connection, Credentials(connection), ())
        return ask_schema(connection, topic, version, answer_s)

    return retry_until(ask, timeout_s)


def first_tries_s(connection: Connection) -> float:
    """Time for which requests are retried while a query is built, seconds; short for wrong URLs."""
    return min(connection.operation_timeout_ms / 1000, FIRST_TRIES_S)


def topics_of(config: SourceConfig) -> Sequence[str]:
    """Return the topics of a source, as rows name them: the named ones, or those that match now.

    A partition that is named as a topic counts as its topic, which has the schema and is the one
    that rows name.

    Raises:
        BrokerUnavailableError: The admin interface, which a pattern needs, does not answer.
        BrokerError: The broker refuses.
    """
    if config.topics_pattern is None:
        return tuple(dict.fromkeys(TopicPartition.parse(name).topic for name in config.topics))
    pattern = TopicPattern.parse(config.topics_pattern)
    return asked_first(config.how_to_connect(), lambda admin: matching(admin, pattern))


def asked_first(connection: Connection, ask: Callable[[Admin], T]) -> T:
    """Ask the admin interface while a query is built. If it is unreachable, fail soon.

    Args:
        connection: A connection with an ``admin_url``.
        ask: Sends the request; its answer may take long.

    Raises:
        BrokerUnavailableError: The admin interface does not answer.
        BrokerError: The admin interface refuses.
    """

    def asked() -> T:
        with _answering(connection) as admin:
            return ask(admin)

    return retry_until(asked, first_tries_s(connection))


@contextmanager
def _answering(connection: Connection) -> Iterator[Admin]:
    """Open an admin interface that answers a short probe first; later answers may take longer."""
    with closing(connect_admin(connection, ANSWER_S)) as admin:
        try:
            admin.cluster()
        except BrokerError as exc:
            if exc.retriable:
                raise
            _log.debug(
                "the admin interface answers, but does not list the clusters: %s", exc.summary
            )
        yield admin
