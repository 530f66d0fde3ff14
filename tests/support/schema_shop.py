"""Topics with schemas on the in-memory broker, and their raw rows."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import fastavro
import pyarrow as pa

from keyshard import Connection, KeyShardSource
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.topic_schema import TopicSchema
from keyshard.reading.decoding_plan import Decoding, plan_decoding

FIELDS = [{"name": "id", "type": "int"}, {"name": "name", "type": "string"}]
FIRST = {"type": "record", "name": "R", "fields": FIELDS}
ADDED = {"name": "added", "type": ["null", "long"], "default": None}
SECOND = FIRST | {"fields": [FIELDS[0] | {"type": "long"}, FIELDS[1], ADDED]}
BAD = b"\x01"
"""A value that does not fit the schemas."""


class Shop:
    """A cluster of this process with topics that have schemas."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.cluster = MemoryCluster.named(self.name)
        self.connection = Connection(f"memory://{self.name}")

    def topic(self, name: str, *schemas: Any, kind: str = "AVRO") -> str:
        topic = self.cluster.create_topic(name)
        for schema in schemas:
            self.add(topic, schema, kind)
        return topic

    def add(self, topic: str, schema: Any, kind: str = "AVRO") -> None:
        versions = self.cluster.schemas.setdefault(topic, [])
        definition = b"" if schema is None else json.dumps(schema).encode()
        versions.append(TopicSchema(kind, definition, len(versions)))

    def plan(self, *topics: str, mode: str = "FAILFAST") -> Decoding:
        return plan_decoding(self.connection, topics, mode)


def avro(schema: Any, row: dict[str, Any]) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), row)
    return data.getvalue()


def raw(topic: str, *rows: tuple[bytes | None, int | None], start: int = 0) -> pa.RecordBatch:
    """Rows as a window or a split gives them."""
    found = [
        {
            "value": value, "__key": "k", "__topic": topic, "__partition": -1,
            "__messageId": f"7:{number}:0", "__schemaVersion": version,
        }
        for number, (value, version) in enumerate(rows, start)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(found, schema=SCHEMA)


def source_of(shop: Shop, topic: str, **how: Any) -> KeyShardSource:
    return KeyShardSource(
        topic, subscription="keyshard",
        service_url=f"memory://{shop.name}", starting_position="earliest", parallelism=2,
        **how,
    )  # fmt: skip


def publish(shop: Shop, topic: str) -> None:
    """A message of each version, one that is no value, and one that does not fit."""
    for number, (value, version) in enumerate(
        [
            (avro(FIRST, {"id": 1, "name": "a"}), 0),
            (avro(SECOND, {"id": 2, "name": "b", "added": 7}), 1),
            (None, 1),
            (BAD, 1),
        ]
    ):
        shop.cluster.publish(topic, Message(value, f"k{number}", schema_version=version))


def of_java(shop: Shop) -> str:
    """Return a topic with an enumeration field whose numbers no schema gives."""
    topic = shop.topic("orders")
    info = [
        {"number": 1, "name": "state", "type": "ENUM", "label": "LABEL_OPTIONAL"},
        {"number": 2, "name": "id", "type": "INT32", "label": "LABEL_OPTIONAL"},
    ]
    properties = {"__PARSING_INFO__": json.dumps(info)}
    definition = json.dumps({"name": "M", "fields": [{"name": "id", "default": 0}]}).encode()
    shop.cluster.schemas[topic] = [TopicSchema("PROTOBUF", definition, 0, properties)]
    return topic
