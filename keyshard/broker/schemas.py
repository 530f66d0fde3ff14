"""What the broker keeps as the schema of a topic, by whichever interface there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from keyshard.broker.connect import connect_admin
from keyshard.broker.port import Admin
from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.first_question import ANSWER_S, missing_topics
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_pattern import TopicPattern
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import BrokerError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def schema_of(
    connection: Connection, topic: str, version: int | None = None, *, tries_s: float | None = None
) -> TopicSchema | None:
    """A version of the schema of a topic; ``None`` where there is none.

    Args:
        connection: With ``admin_url`` that interface is asked, else the broker; and the broker for
            a version where the interface fails, for who asks that is on its way.
        topic: Full name, without the partition suffix.
        version: ``None`` for the newest.
        tries_s: Longest time to ask again, seconds; ``None`` for ``operation_timeout_ms``.

    Raises:
        BrokerUnavailableError: There was no answer, however often it was asked.
        BrokerError: It refuses.
    """
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
                _log.debug("the broker is asked for a schema, since its interface fails: %s", exc)
        from keyshard.broker.wire.schema import ask_schema  # noqa: PLC0415

        if tries_s is not None:  # its error names the mistake in a URL
            missing_topics(connection, Credentials(connection), ())
        return ask_schema(connection, topic, version, answer_s)

    return retry_until(ask, timeout_s)


def first_tries_s(connection: Connection) -> float:
    """Time for which a query retries while it is built, seconds: a wrong URL fails soon."""
    return min(connection.operation_timeout_ms / 1000, FIRST_TRIES_S)


def topics_of(config: SourceConfig) -> Sequence[str]:
    """Topics of a source, those that are named or that match now, by the names that rows have.

    A partition that is named as a topic has rows, and the schema, of its topic.

    Raises:
        BrokerUnavailableError: The admin interface, which a pattern needs, does not answer.
        BrokerError: It refuses.
    """
    if config.topics_pattern is None:
        return tuple(dict.fromkeys(TopicPartition.parse(name).topic for name in config.topics))
    pattern = TopicPattern.parse(config.topics_pattern)
    found = asked_first(
        config.how_to_connect(), lambda admin: admin.topics(pattern.tenant, pattern.namespace)
    )
    return sorted(filter(pattern.matches, found))


def asked_first(connection: Connection, ask: Callable[[Admin], T]) -> T:
    """Ask the admin interface while a query is built. If it is away, the error comes soon.

    Args:
        connection: It has an ``admin_url``.
        ask: Asks; the answer may take long.

    Raises:
        BrokerUnavailableError: It does not answer.
        BrokerError: It refuses.
    """

    def asked() -> T:
        with _answering(connection) as admin:
            return ask(admin)

    return retry_until(asked, first_tries_s(connection))


@contextmanager
def _answering(connection: Connection) -> Iterator[Admin]:
    """An admin interface that has answered soon; what else it is asked may take longer."""
    with closing(connect_admin(connection, ANSWER_S)) as admin:
        try:
            admin.cluster()
        except BrokerError as exc:
            if exc.retriable:
                raise
            _log.debug("the admin interface answers, but not which clusters there are: %s", exc)
        yield admin
