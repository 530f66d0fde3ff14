"""The schema by which the columns of a sink are encoded."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.broker.memory import MemoryCluster
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, SchemaError
from keyshard.publishing.values import Values

ROWS = pa.record_batch({"n": [1, 2], "text": ["a", None], "__key": ["k", "k"]})
BYTES = pa.record_batch({"value": [b"1", None], "__key": ["k", "k"]})
RECORD = {
    "type": "record", "name": "R",
    "fields": [{"name": "n", "type": "long"}, {"name": "text", "type": ["null", "string"]}],
}  # fmt: skip


class Target:
    """A topic, with or without a schema."""

    def __init__(self, kind: str = "", definition: Any = RECORD) -> None:
        name = f"values-{uuid.uuid4().hex}"
        cluster = MemoryCluster.named(name)
        self.topic = cluster.create_topic("out")
        self._url = f"memory://{name}"
        if kind:
            schema = TopicSchema(kind, json.dumps(definition).encode() if definition else b"")
            cluster.schemas[self.topic] = [schema]

    def made(self, rows: pa.RecordBatch, value_format: str, **options: Any) -> Any:
        """Make messages of rows."""
        options |= {"service_url": self._url, "value_format": value_format}
        return Values(KeyShardSink(self.topic, **options)).outgoing(self.topic, rows)


@pytest.mark.parametrize(
    ("kind", "value_format"),
    [("AVRO", "auto"), ("AVRO", "avro"), ("JSON", "auto"), ("JSON", "json")],
)
def test_columns_are_encoded_by_the_schema_of_the_topic(kind: str, value_format: str) -> None:
    found = Target(kind).made(ROWS, value_format)
    assert found.schema.type == kind
    assert found.keys.to_pylist() == [b"k", b"k"]
    assert (
        found.values.to_pylist()
        == {
            "AVRO": [b"\x02\x02\x02a", b"\x04\x00"],
            "JSON": [b'{"n":1,"text":"a"}', b'{"n":2,"text":null}'],
        }[kind]
    )


def test_a_lone_column_of_bytes_is_the_payload_unless_the_schema_has_it() -> None:
    for target in (Target(), Target("AVRO"), Target("BYTES", None)):
        found = target.made(BYTES, "auto")
        assert (found.schema, found.values.to_pylist()) == (None, [b"1", None])
    record = RECORD | {"fields": [{"name": "value", "type": ["null", "bytes"]}]}
    found = Target("AVRO", record).made(BYTES, "auto")
    assert found.values.to_pylist() == [b"\x02\x021", b"\x00"]
    numbers = pa.record_batch({"value": pa.array([1, None], pa.int32())})
    found = Target("INT64", None).made(numbers, "auto")
    assert found.values.to_pylist() == [b"\0" * 7 + b"\1", None]


@pytest.mark.parametrize("value_format", ["auto", "avro", "json"])
def test_a_schema_is_made_of_the_columns_if_that_is_asked_for(value_format: str) -> None:
    target = Target()
    with pytest.raises(SchemaError, match="has no schema"):
        target.made(ROWS, value_format)
    found = target.made(ROWS, value_format, register_schema=True)
    assert found.schema.type == ("JSON" if value_format == "json" else "AVRO")
    fields = json.loads(found.schema.definition)["fields"]
    assert fields == [
        {"name": "n", "type": ["null", "long"], "default": None},
        {"name": "text", "type": ["null", "string"], "default": None},
    ]


@pytest.mark.parametrize(
    ("target", "rows", "value_format", "text"),
    [
        (Target("AVRO"), ROWS, "json", "has type AVRO, so valueFormat=json does not fit"),
        (Target(), ROWS, "protobuf", "has no schema, which valueFormat=protobuf needs"),
        (Target("KEY_VALUE"), ROWS, "auto", "does not encode values by a schema of type KEY_VALUE"),
        (Target("STRING", None), ROWS, "auto", "'n' is not a field .* has type STRING"),
        (Target("STRING", None), BYTES.select(["__key"]), "auto", "Column value is missing"),
        (Target("AVRO"), ROWS.rename_columns(["n", "txt", "__key"]), "auto", "mean 'text'"),
        (Target("AVRO"), ROWS.rename_columns(["n", "text", "__kye"]), "auto", "mean '__key'"),
        (Target(), ROWS, "raw", "Column n is not a column of a message"),
    ],
)  # fmt: skip
def test_rows_and_formats_that_do_not_fit_the_schema_are_refused_with_a_reason(
    target: Target, rows: pa.RecordBatch, value_format: str, text: str
) -> None:
    with pytest.raises((ConfigError, SchemaError), match=text):
        target.made(rows, value_format)
    with pytest.raises(ConfigError, match="register_schema needs"):
        target.made(rows, "raw", register_schema=True)
