"""Makes messages from rows: encodes their columns by the schema of the topic."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from keyshard.broker.schemas import schema_of
from keyshard.columns.encoders import Encoder, encoded, encoder_of
from keyshard.columns.outgoing import COLUMNS, VALUE, Outgoing, one_batch, outgoing_of
from keyshard.config.sink import SinkConfig
from keyshard.core.option_checks import did_you_mean
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, SchemaError

FORMATS = {"json": "JSON", "avro": "AVRO", "protobuf": "PROTOBUF_NATIVE"}
"""Pulsar's schema types, by value format."""
_WITHOUT_SCHEMA = (None, "NONE", "BYTES")


class Values:
    """Makes messages from the rows of a sink. Asks for the schema of each topic once.

    Args:
        config: Options of the sink.
    """

    def __init__(self, config: SinkConfig) -> None:
        self._config = config
        self._encoders: dict[str, tuple[TopicSchema, Encoder] | None] = {}
        """By topic; ``None`` for a topic without a schema."""

    def outgoing(
        self, topic: str, rows: pa.RecordBatch | pa.Table, order_by: Collection[str] = ()
    ) -> Outgoing:
        """Return rows as messages.

        Args:
            topic: Full name of the topic.
            rows: Columns of a message, and those of the value.
            order_by: Columns that ordered the rows; see :meth:`kept`.

        Raises:
            ConfigError: A column does not fit.
            SchemaError: The topic has no schema or one of another type, or a column or a value does
                not fit it.
            BrokerError: The broker does not return the schema.
        """
        batch = one_batch(rows)
        check_names(batch.schema.names)
        if order_by:
            batch = batch.select(self.kept(topic, batch.schema, order_by))
        if self._config.value_format == "raw":
            return outgoing_of(batch)
        of_value = _of_value(batch.schema.names)
        payload = batch.select(of_value)
        found = self._encoder(topic, payload.schema)
        if found is None:
            if of_value != [VALUE]:
                raise SchemaError(
                    f"{topic} has no schema, so the rows need the column {VALUE} and no others "
                    f"beside those of a message; they have {', '.join(of_value) or 'none'}.",
                    "Register a schema for the topic, or set registerSchema=true.",
                    topic=topic,
                )
            return outgoing_of(batch)
        schema, encoder = found
        if self._config.value_format == "auto" and _are_bytes(payload.schema, encoder):
            return outgoing_of(batch)
        if encoder.slot.fields:
            values = payload.to_struct_array()
        else:
            for name in of_value:
                if name != VALUE:
                    raise SchemaError(
                        f"Column {name!r} is not a field of the schema of {topic}, which has type "
                        f"{schema.type}.",
                        f"Name the column {VALUE}.",
                        topic=topic,
                    )
            if not of_value:
                raise SchemaError(f"Column {VALUE} is missing.", "Add it.", topic=topic)
            values = payload.column(VALUE)
        made = encoded(values, encoder, topic)
        kept = [name for name in batch.schema.names if name in COLUMNS and name != VALUE]
        message = pa.RecordBatch.from_arrays(
            [made, *(batch.column(name) for name in kept)], names=[VALUE, *kept]
        )
        return replace(outgoing_of(message), schema=schema)

    def kept(self, topic: str, columns: pa.Schema, order_by: Collection[str]) -> list[str]:
        """Return the columns that are written to a topic: not those that only order the rows.

        Args:
            topic: Full name of the topic.
            columns: Columns of the rows, of which a schema may be made.
            order_by: Columns that order the rows. Message columns and fields of the schema are
                written nevertheless.

        Raises:
            KeyShardError: As in :meth:`outgoing`.
        """
        fields = self._fields(topic, columns)
        return [
            name
            for name in columns.names
            if name in COLUMNS or name in fields or name not in order_by
        ]

    def _fields(self, topic: str, columns: pa.Schema) -> Collection[str]:
        """Return the fields of the schema of a topic; empty if values have none."""
        if self._config.value_format == "raw":
            return ()
        of_value = [columns.field(name) for name in _of_value(columns.names)]
        found = self._encoder(topic, pa.schema(of_value))
        return () if found is None else found[1].slot.fields

    def _encoder(self, topic: str, columns: pa.Schema) -> tuple[TopicSchema, Encoder] | None:
        if topic not in self._encoders:
            schema = self._schema(topic, columns)
            found = None if schema is None else (schema, encoder_of(schema, topic))
            self._encoders[topic] = found
        return self._encoders[topic]

    def _schema(self, topic: str, columns: pa.Schema) -> TopicSchema | None:
        wanted = self._config.value_format
        schema = schema_of(self._config.how_to_connect(), topic)
        kind = None if schema is None else schema.type
        makes = self._config.register_schema and (wanted != "auto" or columns.names != [VALUE])
        if kind in _WITHOUT_SCHEMA and makes:
            return TopicSchema(FORMATS.get(wanted, "AVRO"), definition_of(columns, topic))
        if wanted == "auto":
            return None if kind in _WITHOUT_SCHEMA else schema
        if kind in _WITHOUT_SCHEMA:
            raise SchemaError(
                f"{topic} has no schema, which valueFormat={wanted} needs.",
                "Register one, or set registerSchema=true (avro, json).",
                topic=topic,
            )
        if kind != FORMATS[wanted]:
            raise SchemaError(
                f"The schema of {topic} has type {kind}, so valueFormat={wanted} does not fit.",
                "Set valueFormat=auto to encode by this schema.",
                topic=topic,
            )
        return schema


def check_names(names: list[str]) -> None:
    """Check that names are unique, and that those with ``__`` in front are columns of a message.

    Raises:
        ConfigError: A name is unknown, or appears twice.
    """
    for name in names:
        if name.startswith("__") and name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS, f"The columns are {', '.join(COLUMNS)}.")
            raise ConfigError(f"Column {name} is not a column of a message.", hint)
        if names.count(name) > 1:
            raise ConfigError(f"Column {name} appears twice.", "Name each column once.")


def _of_value(names: list[str]) -> list[str]:
    """Return the columns that the value is made of."""
    return [name for name in names if name == VALUE or name not in COLUMNS]


def _are_bytes(columns: pa.Schema, encoder: Encoder) -> bool:
    """Return whether the rows have encoded values.

    They do if ``value`` is their only column, it is binary, and the schema has neither a binary
    field ``value`` nor binary values.
    """
    if columns.names != [VALUE] or not pa.types.is_binary(columns.field(VALUE).type):
        return False
    field = encoder.slot.fields.get(VALUE, encoder.slot)
    return not pa.types.is_binary(field.column)


# -- Schemas made of columns ----------------------------------------------------------------------

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_TIME = {"type": "long", "logicalType": "time-micros"}
_PLAIN: Mapping[pa.DataType, Any] = {
    pa.bool_(): "boolean", pa.int8(): "int", pa.int16(): "int", pa.int32(): "int",
    pa.int64(): "long", pa.float32(): "float", pa.float64(): "double", pa.string(): "string",
    pa.large_string(): "string", pa.binary(): "bytes", pa.large_binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"}, pa.time64("us"): _TIME,
    pa.time64("ns"): _TIME,
}  # fmt: skip


def definition_of(columns: pa.Schema, topic: str) -> bytes:
    """Return the Avro definition of a record with these columns. All fields are nullable.

    Raises:
        SchemaError: A column has a type that Avro lacks.
    """
    name = re.sub(r"\W", "_", topic.rpartition("/")[2])
    name = name if name[:1].isalpha() else f"t_{name}"
    return json.dumps(_Definition(topic).record(list(columns), name, "")).encode()


class _Definition:
    """Makes the types of one Avro definition."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._records: set[str] = set()
        """Names of its records, each of which Avro allows once."""

    def record(self, fields: Sequence[pa.Field], name: str, path: str) -> dict[str, Any]:
        """Return an Avro record.

        Args:
            fields: Its fields.
            name: Its name, to which ``_`` is added until it is unique.
            path: Column that the record describes, such as ``a.b``; empty for the whole row.
        """
        while name in self._records:
            name += "_"
        self._records.add(name)
        found = []
        for one in fields:
            at = f"{path}.{one.name}".lstrip(".")
            if _NAME.fullmatch(one.name) is None:
                raise SchemaError(
                    f"Column {at!r} has a name that Avro does not allow, so no schema can be "
                    f"registered at {self._topic}.",
                    "Rename it: letters, digits and _, without a digit first.",
                    topic=self._topic,
                )
            kind = self._type(one.type, f"{name}_{one.name}", at)
            found.append({"name": one.name, "type": ["null", kind], "default": None})
        return {"type": "record", "name": name, "fields": found}

    def _type(self, kind: pa.DataType, name: str, path: str) -> Any:
        types = pa.types
        if kind in _PLAIN:
            return _PLAIN[kind]
        if types.is_timestamp(kind):
            local = "" if kind.tz else "local-"
            return {"type": "long", "logicalType": f"{local}timestamp-micros"}
        if types.is_decimal128(kind):
            return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision,
                    "scale": kind.scale}  # fmt: skip
        if types.is_struct(kind):
            return self.record(list(kind), name, path)
        if types.is_list(kind):
            items = self._type(kind.value_type, name, f"{path}[]")
            return {"type": "array", "items": ["null", items]}
        if types.is_map(kind) and types.is_string(kind.key_type):
            return {
                "type": "map",
                "values": ["null", self._type(kind.item_type, name, f"{path}[]")],
            }
        raise SchemaError(
            f"Column {path!r} has the type {kind}, for which no schema can be registered at "
            f"{self._topic}.",
            "Cast the column.",
            topic=self._topic,
        )
