"""Decodes values of single messages, on request of a handler."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from keyshard.base_error import first_line
from keyshard.broker.schemas import first_tries_s, schema_of
from keyshard.columns.codec import Codec, UndecodableError, decode_rows
from keyshard.columns.codecs import KEY_VALUE, codec_of, keys_apart
from keyshard.columns.projection import check_described
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.message import Message
from keyshard.core.metadata_columns import KEY_BYTES, NAME_KEY_BYTES
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import MalformedMessageError, SchemaError, UnfitHandlerError
from keyshard.reading.decoder import keep_newest, writer_of
from keyshard.reading.decoding_plan import WITHOUT_SCHEMA, Decoding, check_same, plan_decoding
from keyshard.redaction import shown

LEDGERS_MAX = 100_000
"""Ledgers whose decoding is remembered, about 25 MB."""


class MessageDecoder:
    """Decodes messages by the schemas of their topics; picklable.

    Args:
        connection: The cluster that has the schemas.
        key_bytes: Whether messages have the bytes of their keys.
    """

    def __init__(self, connection: Connection, *, key_bytes: bool = False) -> None:
        self._connection = connection
        self._key_bytes = key_bytes
        self._pid = os.getpid()
        self._topics: dict[str, tuple[Decoding, Codec]] = {}
        """The newest plan of each topic."""
        self._ledgers: dict[tuple[str, int, int], tuple[Decoding, Codec]] = {}
        """By topic, partition and ledger."""

    @classmethod
    def of(cls, config: SourceConfig) -> MessageDecoder:
        """Return the decoder for the messages of a source."""
        return cls(config.how_to_connect(), key_bytes=KEY_BYTES in config.metadata_columns)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_topics": {}, "_ledgers": {}}

    def __call__(self, message: Message) -> Any:
        """Return the value of a message: a dict, a scalar, or ``None`` if it has none.

        Raises:
            MalformedMessageError: The value does not fit the schema.
            SchemaError: The schema cannot be used, or the message's version no longer exists.
            UnfitHandlerError: The schema stores keys separately, and the source does not ask for
                their bytes; or the in-memory cluster belongs to another process.
        """
        if self._connection.in_memory and os.getpid() != self._pid:
            raise UnfitHandlerError(
                f"message.data cannot read the schemas of {shown(self._connection.service_url)}, "
                "an in-memory cluster of another process.",
                "Handle messages in that process, or use message.value.",
            )
        topic = message.topic
        where = topic, message.partition, message.message_id.ledger
        plan, codec = self._ledgers.get(where) or self._planned(where)
        version = message.schema_version
        if version is not None and plan.schemas[topic].type in WITHOUT_SCHEMA:
            raise SchemaError(
                f"Message {message.message_id} of {topic} was written with version {version} of "
                f"the schema of {topic}, which no longer exists.",
                "Register it again, and start again. Its bytes are message.value.",
                topic=topic,
            )
        writer = writer_of(plan, topic, plan.schemas[topic], version)
        written = writer or plan.schemas[topic]
        # A value of another schema type is malformed, wherever its keys are.
        if codec.kind == KEY_VALUE and keys_apart(written) and not self._key_bytes:
            raise UnfitHandlerError(
                f"The schema of {topic} stores keys separately, so message.data needs their bytes.",
                NAME_KEY_BYTES,
            )
        try:
            return _decoded(message, codec, writer, written)
        except UndecodableError as exc:
            raise _malformed(message, plan, str(exc)) from exc

    def _planned(self, where: tuple[str, int, int]) -> tuple[Decoding, Codec]:
        """Plan the decoding of a new ledger.

        It uses the known plan, unless the topic was created again with another schema.
        """
        topic, _, _ = where
        known = self._topics.get(topic)
        if known is None or not _still_is(known[0], topic):
            plan = plan_decoding(self._connection, [topic])
            codec = codec_of(plan.schemas[topic], topic)
            check_described(codec.undescribed, topic)
            known = self._topics[topic] = plan, codec
        self._ledgers[where] = known
        keep_newest(self._ledgers, LEDGERS_MAX)
        return known


def data_by_version(connection: Connection, message: Message) -> tuple[TopicSchema, Any]:
    """Return the schema version that a message was written with, and its value by it.

    A message without a version is decoded by the newest one. Nothing is remembered.

    Raises:
        MalformedMessageError: The value does not fit.
        SchemaError: The version does not exist, or cannot be used.
        BrokerError: The schema cannot be fetched.
        ConfigError: A required package is not installed.
    """
    topic, version = message.topic, message.schema_version
    schema = schema_of(connection, topic, version, tries_s=first_tries_s(connection))
    if version is None and (schema is None or schema.type in WITHOUT_SCHEMA):
        raise SchemaError(f"Topic {topic} has no schema.", topic=topic)
    if schema is None or schema.type in WITHOUT_SCHEMA:
        raise SchemaError(
            f"Version {version} of the schema of {topic}, which the message was written with, "
            "does not exist any more.",
            "Register it again.",
            topic=topic,
        )
    codec = codec_of(schema, topic)
    check_described(codec.undescribed, topic)
    try:
        return schema, _decoded(message, codec, None, schema)
    except UndecodableError as exc:
        raise MalformedMessageError(
            f"The value does not fit version {schema.version} of the {schema.type} schema of "
            f"{topic}: {exc}.",
            topic=topic,
            message_id=str(message.message_id),
        ) from exc


def _decoded(
    message: Message, codec: Codec, writer: TopicSchema | None, written: TopicSchema
) -> Any:
    """Return the value of a message; raises :class:`UndecodableError`."""
    apart = codec.kind == KEY_VALUE and keys_apart(written)
    if apart and message.key is not None and message.key_bytes is None:
        raise UndecodableError("the bytes of its key are unknown")
    values = pa.array([message.value], pa.binary())
    keys = pa.array([message.key_bytes], pa.binary())
    found, reasons = decode_rows(codec, values, keys, writer)
    if reasons:
        raise UndecodableError(reasons[0])
    try:
        return found.to_pylist(maps_as_pydicts="lossy")[0]
    except (OverflowError, ValueError) as exc:
        raise UndecodableError(first_line(exc)) from exc


def _still_is(plan: Decoding, topic: str) -> bool:
    """Whether a topic still has the schema of a plan."""
    if plan.schemas[topic].type in WITHOUT_SCHEMA:
        return False
    try:
        check_same(plan)
    except SchemaError:
        return False
    return True


def _malformed(message: Message, plan: Decoding, why: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"Message {message.message_id} of {message.topic}, partition {message.partition}, cannot "
        f"be decoded by its {plan.schemas[message.topic].type} schema: {why}.",
        "Its bytes are message.value. Its key is the text message.key.",
        topic=message.topic,
        message_id=str(message.message_id),
    )
