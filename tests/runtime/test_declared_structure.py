"""The structure of rows follows the schema that a topic declares.

This holds for each name of a topic, its own or that of a partition, and for each way to read it: as
a batch, a stream or a table, with or without the query's own columns, by either name of the format.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from keyshard import Connection, KeyShardSource, Message
from keyshard.broker import schemas as asked
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.columns.record_batches import COLUMNS
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, MalformedMessageError, SchemaError
from keyshard.reading.decoder import RowDecoder
from keyshard.reading.decoding_plan import CORRUPT, plan_decoding
from keyshard.reading.message_decoder import MessageDecoder
from spark_adapter.data_source import KeyShardDataSource
from spark_adapter.pulsar.source import PulsarDataSource
from spark_adapter.table_options import with_options
from spark_adapter.task_rows import Rows

OPTIONS = {"service.url": "pulsar://127.0.0.1:1", "admin.url": "http://127.0.0.1:1"}
FIRST = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "int"}]}
TEXT = {"name": "text", "type": ["null", "string"], "default": None}
SECOND = FIRST | {"fields": [{"name": "id", "type": "long"}, TEXT]}
THIRD = FIRST | {"fields": [{"name": "other", "type": "string", "default": ""}]}
KEPT = {"type": "record", "name": "R", "fields": [{"name": "value", "type": "bytes"}]}


class DeclaredTopics:
    """Topics of an in-process cluster; data sources of Spark read their schemas from it."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.cluster = MemoryCluster.named(self.name)

    def topic(self, name: str, *schemas: tuple[str, Any], partitions: int = 0) -> str:
        topic = self.cluster.create_topic(name, partitions)
        for schema in schemas:
            self.add(topic, *schema)
        return topic

    def add(self, topic: str, kind: str, definition: Any) -> None:
        versions = self.cluster.schemas.setdefault(topic, [])
        text = b"" if definition is None else json.dumps(definition).encode()
        versions.append(TopicSchema(kind, text, len(versions)))


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> DeclaredTopics:
    found = DeclaredTopics()
    monkeypatch.setattr(asked, "connect_admin", lambda *_: MemoryAdmin(found.cluster, found.name))
    return found


def avro(schema: Any, row: Any) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), row)
    return data.getvalue()


def raw(topic: str, *rows: tuple[bytes | None, int | None], partition: int = -1) -> pa.RecordBatch:
    """Rows as a window or a split gives them: with the name of the topic, and the partition."""
    found = [
        {
            "value": value, "__key": "k", "__keyBytes": b"k", "__topic": topic,
            "__partition": partition, "__messageId": f"7:{number}:0", "__schemaVersion": version,
        }
        for number, (value, version) in enumerate(rows)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(found, schema=pa.schema(COLUMNS))


def by_load(topic: str, options: Mapping[str, str], columns: StructType | None) -> Rows:
    source = KeyShardDataSource({**OPTIONS, **options, "topic": topic})
    schema = source.schema() if columns is None else columns
    return pickle.loads(pickle.dumps(source)).reader(schema)._rows


def by_stream(topic: str, options: Mapping[str, str], columns: StructType | None) -> Rows:
    source = KeyShardDataSource({**OPTIONS, **options, "topic": topic, "subscription": "s"})
    schema = source.schema() if columns is None else columns
    return source.streamReader(schema)._rows


def by_pulsar(topic: str, options: Mapping[str, str], columns: StructType | None) -> Rows:
    source = PulsarDataSource({**OPTIONS, **options, "topic": topic})
    schema = source.schema() if columns is None else columns
    return source.reader(schema)._rows


def _table(topic: str, options: Mapping[str, str], columns: StructType | None) -> StructType:
    output = {**OPTIONS, **options, "topic": topic}
    return with_options(KeyShardDataSource(output).schema() if columns is None else columns, output)


def by_table(topic: str, options: Mapping[str, str], columns: StructType | None) -> Rows:
    return KeyShardDataSource({}).reader(_table(topic, options, columns))._rows


def by_stream_of_table(topic: str, options: Mapping[str, str], columns: StructType | None) -> Rows:
    table = _table(topic, options, columns)
    return KeyShardDataSource({"subscription": "s"}).streamReader(table)._rows


WAYS = [by_load, by_stream, by_pulsar, by_table, by_stream_of_table]
Way = Callable[[str, Mapping[str, str], StructType | None], Rows]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda one: one.__name__)


def made(rows: Rows, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    given: Iterable[pa.RecordBatch] = [one.select(list(rows.columns)) for one in batches]
    return [row for batch in rows.of(given) for row in batch.to_pylist()]


def struct(**kinds: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


PROJECTIONS = [None, struct(id=LongType(), __key=StringType()), struct(id=LongType())]


@every_way
@pytest.mark.parametrize("mode", ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"])
@pytest.mark.parametrize("named", ["orders", "orders-partition-1"])
@pytest.mark.parametrize("columns", range(len(PROJECTIONS)))
def test_rows_of_every_version_are_there_by_whichever_name(
    declared: DeclaredTopics, way: Way, mode: str, named: str, columns: int
) -> None:
    if way is by_pulsar and columns == 1:
        pytest.skip("there a key is bytes")
    topic = declared.topic("orders", ("AVRO", FIRST), ("AVRO", SECOND), partitions=2)
    rows = way(named, {"mode": mode}, PROJECTIONS[columns])
    declared.add(topic, "AVRO", THIRD)  # registered while the query runs
    batch = raw(
        topic,
        (avro(FIRST, {"id": 1}), 0),
        (avro(SECOND, {"id": 2, "text": "x"}), 1),
        partition=1,
    )
    assert [row["id"] for row in made(rows, batch)] == [1, 2]
    rows.check([topic])
    declared.cluster.schemas[topic] = []
    declared.add(topic, "AVRO", SECOND)
    declared.add(topic, "AVRO", FIRST)
    with pytest.raises(SchemaError, match="orders was created again after the query was built"):
        rows.check([topic])


def test_both_names_of_a_partition_are_one_topic_of_a_plan(declared: DeclaredTopics) -> None:
    topic = declared.topic("orders", ("AVRO", FIRST), partitions=2)
    url = f"memory://{declared.name}"
    named = [f"{topic}-partition-0", topic, f"{topic}-partition-1"]
    source = KeyShardSource(named, subscription="s", service_url=url, admin_url=url)
    assert asked.topics_of(source) == (topic,)
    batch = raw(topic, (avro(FIRST, {"id": 1}), 0), partition=1)
    (rows,) = source.decoder(["id"]).decoded([batch])
    assert rows.to_pylist() == [{"id": 1}]


def test_a_handler_has_the_data_of_a_topic_that_is_called_like_a_partition(
    declared: DeclaredTopics,
) -> None:
    topic = declared.topic("orders-partition-1", partitions=2)
    message = Message.for_test(b"x")._replace(topic=topic, partition=0)
    assert MessageDecoder(Connection(f"memory://{declared.name}"))(message) == b"x"


VALUES: dict[str, tuple[str, Any, bytes, bytes]] = {
    "record of AVRO": ("AVRO", KEPT, avro(KEPT, {"value": b"\0abc"}), b"\0abc"),
    "record of JSON": (
        "JSON", KEPT, json.dumps({"value": base64.b64encode(b"\0abc").decode()}).encode(), b"\0abc",
    ),
    "bytes of AVRO": ("AVRO", "bytes", b"\x08\0abc", b"\0abc"),
    "bytes": ("BYTES", None, b"\0abc", b"\0abc"),
    "none": ("NONE", None, b"\0abc", b"\0abc"),
}  # fmt: skip
"""Type and definition of a schema that declares a column ``value`` of bytes, what is stored of one,
and the column."""


@every_way
@pytest.mark.parametrize("of", VALUES)
@pytest.mark.parametrize("named", ["orders", "orders-partition-0"])
@pytest.mark.parametrize("columns", [None, struct(value=BinaryType())])
def test_a_column_value_of_bytes_is_the_one_that_the_schema_declares(
    declared: DeclaredTopics, way: Way, of: str, named: str, columns: StructType | None
) -> None:
    kind, definition, stored, wanted = VALUES[of]
    topic = declared.topic("orders", (kind, definition), partitions=1)
    rows = way(named, {}, columns)
    found = made(rows, raw(topic, (stored, 0), (None, 0), partition=0))
    assert [row["value"] for row in found] == [wanted, None]
    given = way(named, {"valueFormat": "raw"} if way is not by_pulsar else RAW, columns)
    found = made(given, raw(topic, (stored, 0), partition=0))
    assert [row["value"] for row in found] == [stored], "who wants it raw has it so"


RAW = {"allowDifferentTopicSchemas": "true"}


@every_way
def test_bytes_of_a_topic_without_such_a_column_are_the_published_ones(
    declared: DeclaredTopics, way: Way
) -> None:
    topic = declared.topic("orders", ("AVRO", FIRST))
    rows = way(topic, {}, struct(value=BinaryType()))
    assert made(rows, raw(topic, (b"\1\2", 0), (None, 0))) == [{"value": b"\1\2"}, {"value": None}]
    assert rows.plan is None, "nothing of them depends on a schema"


@every_way
def test_columns_of_keyshard_alone_ask_for_no_schema(
    declared: DeclaredTopics, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = declared.topic("orders", ("AVRO", FIRST))
    monkeypatch.setattr(asked, "schema_of", None)
    rows = way(topic, {}, struct(__topic=StringType()))
    assert len(made(rows, raw(topic, (b"\1", 0)))) == 1


@every_way
@pytest.mark.parametrize("named", ["orders", "orders-partition-0"])
@pytest.mark.parametrize(
    "columns", [None, struct(id=LongType()), struct(__topic=StringType())], ids=str
)
def test_malformed_rows_are_left_out_whichever_columns_are_selected(
    declared: DeclaredTopics, way: Way, named: str, columns: StructType | None
) -> None:
    topic = declared.topic("orders", ("JSON", FIRST), partitions=1)
    rows = way(named, {"mode": "DROPMALFORMED"}, columns)
    dropped: list[int] = []
    batch = raw(topic, (b'{"id": 1}', 0), (b"{", 0), (b'{"id": "x"}', 0), (None, 0), partition=0)
    given = [batch.select(list(rows.columns))]
    found = [row for one in rows.of(given, dropped.append) for row in one.to_pylist()]
    assert (len(found), dropped) == (2, [2])


@every_way
def test_malformed_rows_keep_their_payload(declared: DeclaredTopics, way: Way) -> None:
    topic = declared.topic("orders", ("JSON", FIRST))
    columns = struct(value=BinaryType(), __topic=StringType())
    rows = way(topic, {"mode": "DROPMALFORMED"}, columns)
    found = made(rows, raw(topic, (b'{"id": 1}', 0), (b"{", 0)))
    assert [row["value"] for row in found] == [b'{"id": 1}', b"{"]


def test_in_other_modes_columns_of_keyshard_alone_decode_nothing(declared: DeclaredTopics) -> None:
    topic = declared.topic("orders", ("JSON", FIRST))
    connection = Connection(f"memory://{declared.name}")
    for mode in ("FAILFAST", "PERMISSIVE"):
        decoder = RowDecoder(
            plan_decoding(connection, [topic], mode), pa.schema([COLUMNS.field(1)])
        )
        assert "value" not in decoder.raw_columns
    wanted = pa.schema([COLUMNS.field("__messageId")])
    decoder = RowDecoder(plan_decoding(connection, [topic], "DROPMALFORMED"), wanted)
    batch = raw(topic, (b'{"id": 1}', 0), (b"{", 0)).select(list(decoder.raw_columns))
    (found,) = decoder.decoded([batch])
    assert (found.to_pylist(), decoder.malformed) == ([{"__messageId": "7:0:0"}], 1)


@pytest.mark.parametrize("of_table", [True, False])
def test_a_table_takes_no_filters(declared: DeclaredTopics, of_table: bool) -> None:
    topic, asks = declared.topic("orders"), {"PushFilters": "true"}
    with pytest.raises(ConfigError, match="'pushFilters' is not supported for tables"):
        KeyShardDataSource({} if of_table else asks).reader(
            _table(topic, asks if of_table else {}, struct(value=BinaryType()))
        )
    by_table(topic, {"pushFilters": "false"}, struct(value=BinaryType()))
    by_load(topic, asks, None)


@every_way
def test_a_malformed_value_of_the_declared_column_is_reported(
    declared: DeclaredTopics, way: Way
) -> None:
    topic = declared.topic("orders", ("AVRO", KEPT))
    batch = raw(topic, (b"\x08abcd", 0), (b"\x7f", 0))
    with pytest.raises(MalformedMessageError, match="7:1:0"):
        made(way(topic, {}, struct(value=BinaryType())), batch)
    rows = way(topic, {"mode": "PERMISSIVE"}, None)
    found = [(row["value"], row[CORRUPT]) for row in made(rows, batch)]
    assert found == [(b"abcd", None), (None, b"\x7f")]
