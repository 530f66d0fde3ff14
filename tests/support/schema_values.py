"""Schemas of a topic, and the rows of values that they decode."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import fastavro
import pyarrow as pa

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema

UTC = timezone.utc
TOPIC = "persistent://public/default/orders"
AT = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)


def rows_of(
    schema: TopicSchema,
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    writer: TopicSchema | None = None,
) -> tuple[list[Any], dict[int, str]]:
    found, reasons = decode_rows(
        codec_of(schema, TOPIC),
        pa.array(values, pa.binary()),
        pa.array(keys or [None] * len(values), pa.binary()),
        writer,
        in_parts=True,
    )
    found.validate(full=True)
    assert found.type == codec_of(schema, TOPIC).type
    assert len(found) == len(values)
    return found.to_pylist(), reasons


def decoded(schema: TopicSchema, *values: bytes | None, **how: Any) -> list[Any]:
    rows, reasons = rows_of(schema, values, **how)
    assert not reasons
    return rows


def record(*fields: Any, name: str = "Order", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def avro(schema: Any, **how: Any) -> TopicSchema:
    return TopicSchema("AVRO", json.dumps(schema).encode(), **how)


def written(schema: Any, *values: Any) -> list[bytes]:
    parsed = fastavro.parse_schema(schema)
    found = []
    for value in values:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, parsed, value)
        found.append(data.getvalue())
    return found


ITEM = record(field("sku", "string"), field("count", ["null", "int"]), name="Item")
FIRST = record(field("id", "int"), field("name", "string"), field("gone", "double"))
SECOND = record(
    field("id", "long"),
    field("title", "string", aliases=["name"]),
    field("added", "string", default="new"),
    field("perhaps", ["null", logical("long", "timestamp-millis")], default=None),
)
SOME = record(
    field("id", "long"),
    field("name", ["null", "string"]),
    field("tags", {"type": "array", "items": "string"}),
)


def jsons(schema: Any) -> TopicSchema:
    return TopicSchema("JSON", json.dumps(schema).encode())


TWO = record(field("a", "long"), field("b", ["null", "string"]))
