"""Values of single messages, decoded where a handler asks for them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from keyshard.config.connection import Connection
from keyshard.core.message import Message
from keyshard.errors import MalformedMessageError, SchemaError
from keyshard.reading.structured import WITHOUT_SCHEMA, Decoding, plan_decoding, writer_of
from keyshard.redaction import first_line
from keyshard.schemas.codec import Codec, decode_rows
from keyshard.schemas.codecs import codec_of


class MessageData:
    """Decodes messages by the schemas of their topics; picklable.

    Args:
        connection: Where the schemas are.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._topics: dict[str, tuple[Decoding, Codec]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_connection": self._connection, "_topics": {}}

    def __call__(self, message: Message) -> Any:
        """The value of a message: a dict, a scalar, or ``None`` where it has none.

        Raises:
            MalformedMessageError: The schema does not fit.
            SchemaError: It cannot be used, or that of the version of the message is gone.
        """
        topic = message.topic
        known = self._topics.get(topic)
        if known is None:
            plan = plan_decoding(self._connection, [topic])
            known = self._topics[topic] = plan, codec_of(plan.schemas[topic], topic)
        plan, codec = known
        version = message.schema_version
        if version is not None and plan.schemas[topic].type in WITHOUT_SCHEMA:
            raise SchemaError(
                f"Message {message.message_id} of {topic} was written with version {version} of "
                f"the schema of {topic}, which has none (any more). Register it again, and start "
                "anew; its bytes are message.value.",
                topic=topic,
            )
        values = pa.array([message.value], pa.binary())
        keys = pa.array([message.key], pa.string())
        found, reasons = decode_rows(codec, values, keys, writer_of(plan, topic, version))
        if reasons:
            raise self._malformed(message, reasons[0])
        try:
            return found.to_pylist(maps_as_pydicts="lossy")[0]
        except (OverflowError, ValueError) as exc:
            raise self._malformed(message, first_line(exc)) from exc

    def _malformed(self, message: Message, why: str) -> MalformedMessageError:
        kind = self._topics[message.topic][0].schemas[message.topic].type
        return MalformedMessageError(
            f"Message {message.message_id} of {message.topic}, partition {message.partition}, "
            f"cannot be decoded by its {kind} schema: {why}. Its bytes are message.value.",
            topic=message.topic,
            message_id=str(message.message_id),
        )
