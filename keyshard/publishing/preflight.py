"""Checks, before the first row, that a topic can be written."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress

import pyarrow as pa

from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Broker, PublishOptions
from keyshard.columns.outgoing import Outgoing, OutgoingSlice
from keyshard.config.sink import EXACTLY_ONCE, SinkConfig
from keyshard.core.position.entry import EntryId, namespace_of
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import AuthorizationError, DeduplicationError, TopicNotFoundError
from keyshard.publishing.batch_part import check_sizes

_log = logging.getLogger(__name__)


def check_topics(
    sink: SinkConfig, topics: Iterable[str], schema: TopicSchema | None = None
) -> None:
    """Check that topics exist, and that the sink may publish to them.

    If the connection has an ``admin_url``, also check that the broker deduplicates them.

    Args:
        sink: Options of the sink.
        topics: Full names.
        schema: Schema of the messages. The broker registers it, unless it has it.

    Raises:
        TopicNotFoundError: A topic does not exist.
        SchemaError: The broker refuses the schema.
        DeduplicationError: The broker does not deduplicate a topic, and the sink needs that.
        KeyShardError: The broker cannot be reached, or refuses a producer.
    """
    connection = sink.how_to_connect()
    topics = list(topics)
    with closing(connect(connection)) as broker:
        for topic in topics:
            where = broker.partitions(topic, create=True)[0]
            broker.entry_producer(where, PublishOptions(schema=schema)).close()
    if sink.delivery_guarantee == EXACTLY_ONCE:
        check_deduplication(sink, topics)


def check_reading(sink: SinkConfig, topic: str) -> None:
    """Check that the sink may read the topic, to find rows that an earlier attempt stored.

    Raises:
        AuthorizationError: It may not.
        KeyShardError: The broker cannot be reached, or refuses.
    """
    with closing(connect(sink.how_to_connect())) as broker:
        where = broker.partitions(topic, create=True)[0]
        with suppress(TopicNotFoundError):  # the first task creates it
            broker.reader(where, EntryId(0, 0)).close()


def check_rows(broker: Broker, sink: SinkConfig, topics: Mapping[str, Outgoing]) -> None:
    """Check that the broker would take rows. Nothing is sent.

    Args:
        broker: An open connection.
        sink: Options of the sink.
        topics: The rows by full topic name.

    Raises:
        TopicNotFoundError: A topic does not exist.
        MessageTooLargeError: A row is too large.
        KeyShardError: The broker cannot be reached, or refuses a producer.
    """
    for topic, rows in topics.items():
        where = broker.partitions(topic, create=True)[0]
        how = PublishOptions(schema=rows.schema, compression=sink.compression)
        with closing(broker.entry_producer(where, how)) as producer:
            messages = OutgoingSlice(rows, 0, len(rows))
            check_sizes(producer, pa.array(rows.sizes(), pa.int64()), messages.__getitem__)


def check_deduplication(sink: SinkConfig, topics: Iterable[str]) -> None:
    """Check that the broker deduplicates topics, if the connection has an ``admin_url``.

    A topic that does not exist passes: a producer creates it, or is refused. If the role may not
    ask, the topic passes with a warning. :func:`keyshard.publishing.batch_writer.write` then checks
    deduplication by the first entry.

    Raises:
        DeduplicationError: The broker does not deduplicate a topic.
        KeyShardError: The admin interface does not answer.
    """
    connection = sink.how_to_connect()
    if connection.admin_url is None and not connection.in_memory:
        return
    with closing(connect_admin(connection)) as admin:
        for topic in topics:
            try:
                if admin.partition_count(topic) is None:
                    continue
                deduplicates = admin.deduplicates(topic)
                why = "the role may not read the configuration of the broker"
            except AuthorizationError as exc:
                deduplicates, why = None, exc.message
            if deduplicates is None:
                _log.warning(
                    "Whether the broker deduplicates %s is not known before the first entry is "
                    "confirmed: %s",
                    topic, why,
                )  # fmt: skip
            elif not deduplicates:
                raise deduplication_off(topic)


def deduplication_off(topic: str) -> DeduplicationError:
    """Return the error about a topic that the broker does not deduplicate."""
    return DeduplicationError(
        f"Deduplication is disabled for {topic}, so a repeated write would store its rows twice.",
        f"Enable it: pulsar-admin namespaces set-deduplication {namespace_of(topic)} --enable. Or "
        "write with the guarantee at-least-once.",
    )
