"""What does decoding cost by format, compared with the usual library in a plain loop?

100,000 values of 10 fields and about 200 bytes, one thread, no broker. The loop only decodes;
keyshard also builds Arrow columns. A round measures every side once. Figures are medians of
``ROUNDS``.
"""

from __future__ import annotations

import io
import json
import statistics
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import fastavro
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from rich.console import Console

from keyshard.columns.codec import decode_rows
from keyshard.columns.codecs import codec_of
from keyshard.core.topic_schema import TopicSchema

ROWS, ROUNDS = 100_000, 5
FIELDS = {
    "id": "long", "name": "string", "customer": ["null", "string"], "amount": "double",
    "quantity": "int", "paid": "boolean", "note": "string", "weight": "float",
    "created": {"type": "long", "logicalType": "timestamp-millis"}, "address": "string",
}  # fmt: skip
_console = Console(stderr=True)


def schema_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an Avro record schema."""
    listed = [{"name": name, "type": kind} for name, kind in fields.items()]
    return {"type": "record", "name": "Order", "fields": listed}


def record(number: int) -> dict[str, Any]:
    """Return one value, as a handler would get it."""
    return {
        "id": number, "name": "n" * 20, "customer": None if number % 3 else "c" * 30,
        "amount": number * 1.5, "quantity": number % 7, "paid": number % 2 == 0,
        "note": "x" * 50, "weight": 0.5, "created": 1_700_000_000_000 + number, "address": "a" * 60,
    }  # fmt: skip


def _avro(row: dict[str, Any], schema: Any) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, schema, row)
    return data.getvalue()


def _message() -> tuple[Any, bytes]:
    """Return the class of protobuf messages, and the definition in the registry."""
    file = descriptor_pb2.FileDescriptorProto(name="bench_order.proto", package="bench")
    file.syntax = "proto3"
    order = file.message_type.add(name="Order")
    kinds = {"long": 3, "double": 1, "int": 5, "boolean": 8, "float": 2}
    for number, (name, kind) in enumerate(FIELDS.items(), 1):
        stored = kinds.get("long" if name == "created" else str(kind), 9)
        order.field.add(name=name, number=number, label=1, type=stored)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    definition = {
        "fileDescriptorSet": b64encode(files).decode(),
        "rootMessageTypeName": "bench.Order",
    }
    found = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Order"))
    return found, json.dumps(definition).encode()


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def run() -> dict[str, float]:
    """Measure every format; processor time."""
    rows = [record(number) for number in range(ROWS)]
    plain, grown = schema_of(FIELDS), schema_of(FIELDS | {"raw": "bytes"})
    newer = schema_of({**FIELDS, "quantity": "long"})
    newer["fields"].append({"name": "added", "type": "string", "default": "new"})
    parsed, parsed_grown = fastavro.parse_schema(plain), fastavro.parse_schema(grown)
    parsed_newer = fastavro.parse_schema(newer)
    message, definition = _message()
    reads = fastavro.schemaless_reader

    def avro(schema: Any) -> TopicSchema:
        return TopicSchema("AVRO", json.dumps(schema).encode())

    plain_values = [_avro(row, parsed) for row in rows]
    cases: dict[str, tuple[list[bytes], Callable[[bytes], object], TopicSchema, Any]] = {
        "avro": (plain_values, lambda v: reads(io.BytesIO(v), parsed), avro(plain), None),
        "avro_older_version": (
            plain_values, lambda v: reads(io.BytesIO(v), parsed, parsed_newer), avro(newer),
            avro(plain),
        ),
        "avro_with_bytes": (
            [_avro(row | {"raw": b"r"}, parsed_grown) for row in rows],
            lambda v: reads(io.BytesIO(v), parsed_grown), avro(grown), None,
        ),
        "json": (
            [json.dumps(row).encode() for row in rows], json.loads,
            TopicSchema("JSON", json.dumps(plain).encode()), None,
        ),
        "protobuf": (
            [message(**row).SerializeToString() for row in rows], message.FromString,
            TopicSchema("PROTOBUF_NATIVE", definition), None,
        ),
    }  # fmt: skip
    figures: dict[str, float] = {}
    for name, (values, loop, schema, writer) in cases.items():
        column, keys = pa.array(values, pa.binary()), pa.nulls(len(values), pa.binary())
        one_bad = pa.array([*values[: ROWS // 3], b"\x01", *values[ROWS // 3 + 1 :]], pa.binary())
        codec = codec_of(schema, "bench")
        looped, ours, bad = [], [], []
        for _ in range(ROUNDS):
            looped.append(_seconds(lambda: [loop(value) for value in values]))  # noqa: B023
            ours.append(_seconds(lambda: decode_rows(codec, column, keys, writer)))  # noqa: B023
            bad.append(_seconds(lambda: decode_rows(codec, one_bad, keys, writer)))  # noqa: B023
        figures[f"{name}_bytes"] = sum(map(len, values)) / len(values)
        figures[f"{name}_loop_us"] = statistics.median(looped) / ROWS * 1e6
        figures[f"{name}_us"] = statistics.median(ours) / ROWS * 1e6
        figures[f"{name}_one_bad_us"] = statistics.median(bad) / ROWS * 1e6
        figures[f"{name}_ratio"] = statistics.median(
            one / other for one, other in zip(looped, ours, strict=True)
        )
        _console.print(f"{name}: {figures[f'{name}_ratio']:.2f} times the loop")
    return figures
