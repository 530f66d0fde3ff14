"""Values of single messages, decoded where a handler asks for them."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.message import Message
from keyshard.core.metadata_columns import KEY_BYTES, NAME_KEY_BYTES
from keyshard.errors import MalformedMessageError, SchemaError, UnfitHandlerError
from keyshard.reading.decoding_plan import WITHOUT_SCHEMA, Decoding, check_same, plan_decoding
from keyshard.reading.structured import keep_newest, writer_of
from keyshard.redaction import first_line, shown
from keyshard.schemas.codec import Codec, decode_rows
from keyshard.schemas.codecs import KEY_VALUE, codec_of, keys_apart
from keyshard.schemas.projection import check_told

LEDGERS_MAX = 100_000
"""Ledgers of which it is remembered how their messages are decoded, about 25 MB."""


class MessageData:
    """Decodes messages by the schemas of their topics; picklable.

    Args:
        connection: Where the schemas are.
        key_bytes: Whether messages have the bytes of their keys.
    """

    def __init__(self, connection: Connection, *, key_bytes: bool = False) -> None:
        self._connection = connection
        self._key_bytes = key_bytes
        self._pid = os.getpid()
        self._topics: dict[str, tuple[Decoding, Codec]] = {}
        """The newest of each topic."""
        self._ledgers: dict[tuple[str, int, int], tuple[Decoding, Codec]] = {}
        """By topic, partition and ledger."""

    @classmethod
    def of(cls, config: SourceConfig) -> MessageData:
        """What decodes the messages of a source."""
        return cls(config.how_to_connect(), key_bytes=KEY_BYTES in config.metadata_columns)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_topics": {}, "_ledgers": {}}

    def __call__(self, message: Message) -> Any:
        """The value of a message: a dict, a scalar, or ``None`` where it has none.

        Raises:
            MalformedMessageError: The schema does not fit.
            SchemaError: It cannot be used, or that of the version of the message is gone.
            UnfitHandlerError: It has keys apart, and the source does not ask for their bytes; or
                this is not the process of the in-memory cluster.
        """
        if self._connection.in_memory and os.getpid() != self._pid:
            raise UnfitHandlerError(
                f"{shown(self._connection.service_url)} is a cluster of the process that made it, "
                "so message.data cannot ask for its schemas in another. Handle "
                "messages in that process, or take message.value."
            )
        topic = message.topic
        where = topic, message.partition, message.message_id.ledger
        plan, codec = self._ledgers.get(where) or self._planned(where)
        version = message.schema_version
        if version is not None and plan.schemas[topic].type in WITHOUT_SCHEMA:
            raise SchemaError(
                f"Message {message.message_id} of {topic} was written with version {version} of "
                f"the schema of {topic}, which has none (any more). Register it again, and start "
                "anew; its bytes are message.value.",
                topic=topic,
            )
        writer = writer_of(plan, topic, plan.schemas[topic], version)
        values = pa.array([message.value], pa.binary())
        # What was written as another type is malformed, wherever its keys are.
        if codec.kind == KEY_VALUE and keys_apart(writer or plan.schemas[topic]):
            if not self._key_bytes:
                raise UnfitHandlerError(
                    f"Keys of {topic} stand apart from its values, and message.data needs the "
                    f"bytes that they were set as: {NAME_KEY_BYTES}"
                )
            if message.key is not None and message.key_bytes is None:
                raise _malformed(message, plan, "what its key was set as is not known")
        keys = pa.array([message.key_bytes], pa.binary())
        found, reasons = decode_rows(codec, values, keys, writer)
        if reasons:
            raise _malformed(message, plan, reasons[0])
        try:
            return found.to_pylist(maps_as_pydicts="lossy")[0]
        except (OverflowError, ValueError) as exc:
            raise _malformed(message, plan, first_line(exc)) from exc

    def _planned(self, where: tuple[str, int, int]) -> tuple[Decoding, Codec]:
        """How messages of a ledger are decoded that is met first.

        As those before, unless the topic was deleted and created anew with another schema.
        """
        topic, _, _ = where
        known = self._topics.get(topic)
        if known is None or not _still_is(known[0], topic):
            plan = plan_decoding(self._connection, [topic])
            codec = codec_of(plan.schemas[topic], topic)
            check_told(codec.untold, topic)
            known = self._topics[topic] = plan, codec
        self._ledgers[where] = known
        keep_newest(self._ledgers, LEDGERS_MAX)
        return known


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
        f"Message {message.message_id} of {message.topic}, partition {message.partition}, "
        f"cannot be decoded by its {plan.schemas[message.topic].type} schema: {why}. Its bytes are "
        "message.value, and message.key is the text of its key.",
        topic=message.topic,
        message_id=str(message.message_id),
    )
