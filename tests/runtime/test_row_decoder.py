"""Decoded rows of raw ones: versions, modes, projections, topics that differ."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import keyshard
from keyshard.broker.memory import Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import ConfigError, MalformedMessageError, SchemaError
from keyshard.reading import decoder, message_decoder
from keyshard.reading.decoder import RowDecoder, writer_of
from keyshard.reading.decoding_plan import CORRUPT, Decoding, check_same
from keyshard.reading.message_decoder import MessageDecoder
from spark_adapter import task_rows
from spark_adapter.task_rows import Ledgers
from tests.helpers import P0, P1
from tests.support.deadlines import deadline
from tests.support.schema_shop import (
    ADDED,
    BAD,
    FIELDS,
    FIRST,
    SECOND,
    Shop,
    avro,
    of_java,
    publish,
    raw,
    source_of,
)


def rows_of(
    plan: Decoding, batches: Sequence[pa.RecordBatch], wanted: pa.Schema | None = None
) -> list[dict[str, Any]]:
    wanted = wanted or plan.columns
    decoder = RowDecoder(pickle.loads(pickle.dumps(plan)), wanted)
    given = [batch.select(list(decoder.raw_columns)) for batch in batches]
    found = list(decoder.decoded(given))
    for batch in found:
        batch.validate(full=True)
        assert batch.schema == wanted
    return [row for batch in found for row in batch.to_pylist()]


def only(*names: str, **kinds: pa.DataType) -> pa.Schema:
    fields = [SCHEMA.field(name) for name in names]
    return pa.schema([*(pa.field(*one) for one in kinds.items()), *fields])


def test_fields_are_columns_beside_those_of_keyshard(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    plan = shop.plan(topic)
    assert plan.columns.names == ["id", "name", *SCHEMA.names[1:]]
    (row,) = rows_of(plan, [raw(topic, (avro(FIRST, {"id": 5, "name": "x"}), 0))])
    assert (row["id"], row["name"], row["__messageId"], row["__schemaVersion"]) == (
        5, "x", "7:0:0", 0,
    )  # fmt: skip


def test_each_message_is_read_with_the_schema_it_was_written_with(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    plan = shop.plan(topic)
    later = SECOND | {
        "fields": [
            {"name": "id", "type": "long"},
            *SECOND["fields"][1:],
            ADDED | {"name": "z", "type": ["null", "string"]},
        ]
    }
    shop.add(topic, later)  # registered while the query runs
    batch = raw(
        topic,
        (avro(FIRST, {"id": 1, "name": "a"}), 0),
        (avro(SECOND, {"id": 2**40, "name": "b", "added": 7}), 1),
        (avro(later, {"id": 3, "name": "c", "added": 8, "z": "zz"}), 2),
        (avro(FIRST, {"id": 4, "name": "d"}), 0),
        (avro(SECOND, {"id": 5, "name": "e", "added": None}), None),
        (None, 1),
    )
    wanted = only("__messageId", id=pa.int64(), name=pa.string(), added=pa.int64())
    assert rows_of(plan, [batch], wanted) == [
        {"id": 1, "name": "a", "added": None, "__messageId": "7:0:0"},
        {"id": 2**40, "name": "b", "added": 7, "__messageId": "7:1:0"},
        {"id": 3, "name": "c", "added": 8, "__messageId": "7:2:0"},
        {"id": 4, "name": "d", "added": None, "__messageId": "7:3:0"},
        {"id": 5, "name": "e", "added": None, "__messageId": "7:4:0"},
        {"id": None, "name": None, "added": None, "__messageId": "7:5:0"},
    ]


KINDS: list[tuple[str, Any, bytes]] = [
    ("AVRO", FIRST, avro(FIRST, {"id": 49, "name": "a"})),
    ("JSON", FIRST, b'{"id": 49, "name": "a"}'),
    ("STRING", None, b"12345678"),
    ("INT64", None, b"12345678"),
    ("DOUBLE", None, b"12345678"),
]


@pytest.mark.parametrize(("kind", "schema", "value"), KINDS)
def test_a_value_written_as_another_type_is_malformed_and_not_converted(
    shop: Shop, kind: str, schema: Any, value: bytes
) -> None:
    """If its policy allows it, a broker accepts any schema after any other."""
    topic = shop.topic("orders")
    for one, of, _ in KINDS:
        shop.add(topic, of, one)
    shop.add(topic, schema, kind)
    plan = shop.plan(topic, mode="PERMISSIVE")
    others = [(data, version) for version, (_, _, data) in enumerate(KINDS)]
    rows = rows_of(plan, [raw(topic, *others, (value, len(KINDS)))])
    right = {len(KINDS), next(at for at, one in enumerate(KINDS) if one[0] == kind)}
    assert {at for at, row in enumerate(rows) if row[CORRUPT] is None} == right
    data = MessageDecoder(shop.connection)
    if kind != "JSON":
        bad = next(at for at in range(len(KINDS)) if at not in right)
        found = keyshard.Message.for_test(KINDS[bad][2])._replace(topic=topic, schema_version=bad)
        with pytest.raises(MalformedMessageError, match=f"it was written as {KINDS[bad][0]}"):
            data(found)


def test_columns_follow_the_newest_version_when_an_older_one_has_other_unions(shop: Shop) -> None:
    of_many = {"name": "u", "type": ["null", "int", "string"]}
    before = FIRST | {"fields": [*FIELDS, of_many, of_many | {"name": "v"}]}
    kept = {"name": "v", "type": ["null", "string"]}
    topic = shop.topic("orders", before, SECOND | {"fields": [*SECOND["fields"], kept]})
    first = {"id": 1, "name": "a", "u": 5, "v": "x"}
    batch = raw(topic, *((avro(before, first | {"v": v}), 0) for v in ("x", 7, None)))
    rows = rows_of(shop.plan(topic, mode="PERMISSIVE"), [batch])
    assert [(row["id"], row["v"], row[CORRUPT] is None) for row in rows] == [
        (1, "x", True), (None, None, False), (1, None, True),
    ]  # fmt: skip


def test_a_version_that_is_gone_is_named(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    batch = raw(topic, (avro(FIRST, {"id": 1, "name": "a"}), 9))
    with pytest.raises(SchemaError, match=rf"Version 9 of the schema of {topic} no longer exists"):
        rows_of(shop.plan(topic), [batch])


def test_a_version_is_asked_for_once_in_a_process(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    plan = shop.plan(topic)
    batch = raw(topic, (avro(FIRST, {"id": 1, "name": "a"}), 0))
    first = rows_of(plan, [batch])
    del shop.cluster.schemas[topic]
    assert rows_of(plan, [batch]) == first


def test_failing_fast_names_topic_message_and_reason(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    good = avro(FIRST, {"id": 1, "name": "a"})
    batches = [raw(topic, (good, 0)), raw(topic, (good, 0), (BAD, 0), (good, 1), start=10)]
    with pytest.raises(MalformedMessageError) as raised:
        rows_of(shop.plan(topic), batches)
    text = str(raised.value)
    for part in ("7:11:0", topic, "AVRO", "version 1, written with version 0", "mode=PERMISSIVE"):
        assert part in text
    assert raised.value.facts == {"topic": topic, "message_id": "7:11:0"}


def test_a_field_of_another_type_is_named(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, kind="JSON")
    with pytest.raises(MalformedMessageError, match=r"got `str` - at `\$\.id`"):
        rows_of(shop.plan(topic), [raw(topic, (b'{"id": "x"}', 0))])


def test_permissive_rows_are_null_beside_their_bytes(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    good = avro(FIRST, {"id": 1, "name": "a"})
    plan = shop.plan(topic, mode="PERMISSIVE")
    assert plan.columns.names[-1] == CORRUPT
    wanted = only("__messageId", id=pa.int32(), **{CORRUPT: pa.binary()})
    assert rows_of(plan, [raw(topic, (good, 0), (BAD, 0), (None, 0))], wanted) == [
        {"id": 1, CORRUPT: None, "__messageId": "7:0:0"},
        {"id": None, CORRUPT: BAD, "__messageId": "7:1:0"},
        {"id": None, CORRUPT: None, "__messageId": "7:2:0"},
    ]


def test_corrupt_entries_are_reported_without_the_value_column(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    good = avro(FIRST, {"id": 1, "name": "a"})
    wanted = only("__messageId", **{CORRUPT: pa.binary()})
    batch = raw(topic, (good, 0), (BAD, 0))
    rows = rows_of(shop.plan(topic, mode="PERMISSIVE"), [batch], wanted)
    assert [row[CORRUPT] for row in rows] == [None, BAD]
    plain = RowDecoder(shop.plan(topic), wanted)
    assert "__schemaVersion" not in plain.raw_columns, "without the mode it has nothing to tell"


def test_malformed_rows_can_be_left_out_and_are_counted(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    good = avro(FIRST, {"id": 1, "name": "a"})
    plan = shop.plan(topic, mode="DROPMALFORMED")
    decoder = RowDecoder(plan, only("__messageId", id=pa.int32()))
    batches = [raw(topic, (BAD, 0), (good, 0), (BAD, 0)), raw(topic, (BAD, 0), start=3)]
    found = list(decoder.decoded([one.select(list(decoder.raw_columns)) for one in batches]))
    assert [one.num_rows for one in found] == [1, 0]
    assert found[0].to_pylist() == [{"id": 1, "__messageId": "7:1:0"}]
    assert decoder.malformed == 3


def test_a_topic_without_a_schema_has_the_bytes(shop: Shop) -> None:
    topic = shop.topic("plain")
    plan = shop.plan(topic)
    assert plan.columns == SCHEMA
    decoder = RowDecoder(plan, only("__key", value=pa.binary()))
    assert set(decoder.raw_columns) == {"value", "__key"}
    batch = raw(topic, (b"\xff", None), (None, None))
    assert rows_of(plan, [batch], only(value=pa.binary())) == [{"value": b"\xff"}, {"value": None}]


def test_bytes_are_there_if_they_are_selected(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    decoder = RowDecoder(shop.plan(topic), only("__key", value=pa.binary()))
    assert set(decoder.raw_columns) == {"value", "__key"}
    batch = raw(topic, (BAD, 0)).select(list(decoder.raw_columns))
    assert next(decoder.decoded([batch])).to_pylist() == [{"value": BAD, "__key": "k"}]


def test_nothing_is_decoded_for_columns_of_keyshard_alone(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    decoder = RowDecoder(shop.plan(topic), only("__key"))
    assert decoder.raw_columns == ("__key",)
    batch = raw(topic, (BAD, 0)).select(["__key"])
    assert next(decoder.decoded([batch])).to_pylist() == [{"__key": "k"}]


def test_a_primitive_is_the_column_value(shop: Shop) -> None:
    topic = shop.topic("numbers", None, kind="INT32")
    plan = shop.plan(topic)
    assert plan.columns.field("value").type == pa.int32()
    batch = raw(topic, (b"\0\0\0\5", 0))
    assert rows_of(plan, [batch], only(value=pa.int64())) == [{"value": 5}]
    assert rows_of(plan, [batch], only(value=pa.float64())) == [{"value": 5.0}]
    assert rows_of(plan, [batch], only(value=pa.binary())) == [{"value": b"\0\0\0\5"}]
    assert rows_of(plan, [batch], only(value=pa.decimal128(12, 2))) == [{"value": Decimal(5)}]
    with pytest.raises(
        SchemaError, match=r"'value' has type .* cannot be cast to decimal128\(11, 2\)"
    ):
        RowDecoder(plan, only(value=pa.decimal128(11, 2)))


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("id", pa.int16(), "'id' has type int64, which cannot be cast to int16"),
        ("id", pa.float64(), "'id' has type int64, which cannot be cast to double"),
        ("id", pa.string(), "'id' has type int64, which cannot be cast to string"),
        ("name", pa.int32(), "'name' has type string, which cannot be cast to int32"),
        ("nobody", pa.int32(), "has no field 'nobody'.* fields: id, name, added"),
    ],
)
def test_a_projection_that_would_lose_something_is_refused(
    shop: Shop, name: str, kind: pa.DataType, why: str
) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    with pytest.raises(SchemaError, match=why):
        RowDecoder(shop.plan(topic), only(**{name: kind}))


def test_fields_of_fields_can_be_chosen(shop: Shop) -> None:
    inner = {"type": "record", "name": "In", "fields": [*FIELDS, ADDED]}
    listed = {"type": "array", "items": "In"}
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "one", "type": inner}, {"name": "many", "type": listed}],
    }
    topic = shop.topic("nested", schema)
    part = {"id": 1, "name": "x", "added": 5}
    batch = raw(topic, (avro(schema, {"one": part, "many": [part]}), 0))
    kind = pa.struct([("added", pa.int64()), ("id", pa.int64())])
    wanted = only(many=pa.list_(pa.field("element", kind)), one=kind)
    less = {"added": 5, "id": 1}
    assert rows_of(shop.plan(topic), [batch], wanted) == [{"many": [less], "one": less}]
    worse = only(one=pa.struct([("id", pa.int8())]))
    with pytest.raises(SchemaError, match=r"'one\.id' has type .* cannot be cast to int8"):
        RowDecoder(shop.plan(topic), worse)
    nobody = only(many=pa.list_(pa.struct([("nobody", pa.int8())])))
    with pytest.raises(
        SchemaError, match=r"'many\[\]' has no field 'nobody', only id, name, added "
    ):
        RowDecoder(shop.plan(topic), nobody)


def test_topics_that_differ_are_one_error_and_can_be_projected(shop: Shop) -> None:
    first, second = shop.topic("a", FIRST), shop.topic("b", SECOND)
    plain = shop.topic("c")
    plan = shop.plan(first, second)
    with pytest.raises(SchemaError, match=rf"(?s){first} and {second} .*valueFormat=raw"):
        _ = plan.columns
    with pytest.raises(SchemaError, match=rf"{first} and {plain}"):
        _ = shop.plan(first, plain).columns
    batch = pa.concat_batches([
        raw(first, (avro(FIRST, {"id": 1, "name": "a"}), 0)),
        raw(second, (avro(SECOND, {"id": 2, "name": "b", "added": 1}), 0), start=1),
        raw(first, (avro(FIRST, {"id": 3, "name": "c"}), 0), start=2),
    ])  # fmt: skip
    wanted = only("__messageId", id=pa.int64(), name=pa.string())
    assert rows_of(plan, [batch], wanted) == [
        {"id": 1, "name": "a", "__messageId": "7:0:0"},
        {"id": 2, "name": "b", "__messageId": "7:1:0"},
        {"id": 3, "name": "c", "__messageId": "7:2:0"},
    ]


def test_a_topic_that_is_found_later_is_decoded_by_its_own_schema(shop: Shop) -> None:
    first = shop.topic("a", FIRST)
    plan = shop.plan(first)
    second = shop.topic("b", SECOND)
    batch = raw(second, (avro(SECOND, {"id": 2, "name": "b", "added": 1}), 0))
    assert rows_of(plan, [batch], only(name=pa.string())) == [{"name": "b"}]
    with pytest.raises(SchemaError, match=f"'id' has type .* cannot be cast to int32.*{second}"):
        rows_of(plan, [batch], only(id=pa.int32()))


def test_a_field_that_is_called_like_a_column_of_keyshard_is_refused(shop: Shop) -> None:
    schema = FIRST | {"fields": [{"name": "__key", "type": "int"}]}
    with pytest.raises(SchemaError, match=r"(?s)'__key'.*valueFormat=raw"):
        _ = shop.plan(shop.topic("orders", schema)).columns


def test_a_json_field_that_does_not_fit_leaves_the_others_and_is_counted(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, kind="JSON")
    good, bad = b'{"id": 1, "name": "a"}', b'{"id": "x", "name": "b"}'
    batch = raw(topic, (good, 0), (bad, 0))
    wanted = only(id=pa.int32(), name=pa.string(), **{CORRUPT: pa.binary()})
    decoder = RowDecoder(shop.plan(topic, mode="PERMISSIVE"), wanted)
    (found,) = decoder.decoded([batch.select(list(decoder.raw_columns))])
    assert found.to_pylist() == [
        {"id": 1, "name": "a", CORRUPT: None},
        {"id": None, "name": "b", CORRUPT: bad},
    ]
    assert decoder.malformed == 1
    with pytest.raises(MalformedMessageError, match="id"):
        rows_of(shop.plan(topic), [batch])


def test_one_bad_row_among_many_costs_no_more_than_all_others(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    values = [(avro(FIRST, {"id": i, "name": "n"}), 0) for i in range(2_000)]
    values[1_234] = (BAD, 0)
    plan = shop.plan(topic, mode="PERMISSIVE")
    wanted = only(id=pa.int32(), **{CORRUPT: pa.binary()})
    rows = rows_of(plan, [raw(topic, *values)], wanted)
    assert [i for i, row in enumerate(rows) if row[CORRUPT] is not None] == [1_234]
    assert [row["id"] for row in rows] == [None if i == 1_234 else i for i in range(2_000)]


def test_columns_without_an_undescribed_field_are_read_in_any_version(shop: Shop) -> None:
    topic = of_java(shop)
    plan = shop.plan(topic)
    for ask in (lambda: plan.columns, lambda: plan.only(["id", "state"])):
        with pytest.raises(SchemaError, match=r"(?s)'state' .*is an enumeration.*valueFormat=raw"):
            ask()
    # Fields are known by their numbers, also where the version of a message is gone.
    batch = raw(topic, (b"\x08\x01\x10\x05", 0), (b"\x10\x06", 3))
    assert rows_of(plan, [batch], plan.only(["id"])) == [{"id": 5}, {"id": 6}]


def test_a_decoder_makes_columns_of_the_rows_of_a_stream(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    publish(shop, topic)
    source = source_of(shop, topic, malformed="DROPMALFORMED")
    decoder = source.decoder(["__key", "name", "added"])
    rows: list[dict[str, Any]] = []
    with source.open() as stream:
        while len(rows) < 3:
            batch = stream.next_batch(timeout_s=deadline(20))
            assert batch is not None
            for one in decoder.decoded(batch):
                rows += one.to_pylist()
    assert sorted(rows, key=lambda row: row["__key"]) == [
        {"__key": "k0", "name": "a", "added": None},
        {"__key": "k1", "name": "b", "added": 7},
        {"__key": "k2", "name": None, "added": None},
    ]
    assert decoder.malformed <= 1
    with pytest.raises(ConfigError, match=r"(?s)'nobody' does not exist.*added"):
        source.decoder(["nobody"])


def test_a_decoder_makes_columns_of_batches(shop: Shop) -> None:
    topic = shop.topic("numbers", None, kind="INT32")
    shop.cluster.publish(topic, Message(b"\0\0\0\5", "k"))
    source = source_of(shop, topic)
    batch = next(iter(source.batches(max_wait_s=0.01)))
    (rows,) = source.decoder().decoded([batch.records])
    assert rows.column("value").to_pylist() == [5]


def test_a_new_ledger_lets_the_schema_of_a_topic_be_checked_again() -> None:
    ledgers = Ledgers()

    def new(*texts: str) -> list[str]:
        batch = {where: EntrySet.parse(text) for where, text in zip((P0, P1), texts, strict=False)}
        return sorted(ledgers.new(batch))

    assert new("7:0-3") == [P0.topic]
    assert new("7:4-9", "") == []
    assert ledgers.followed == 0
    assert new("7:10", "8:0") == [P0.topic]  # the first of the other topic partition
    assert ledgers.followed == 0
    assert new("7:11;9:0", "8:1") == [P0.topic]
    assert ledgers.followed == 1
    assert new("7:12;9:1", "8:2") == []


def test_facts_about_ledgers_have_a_limit(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query or handler that runs for months meets a new ledger every few minutes."""
    for module, name in (
        (task_rows, "SEEN_MAX"), (decoder, "VERSIONS_MAX"), (message_decoder, "LEDGERS_MAX"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 4)
    monkeypatch.setattr(decoder, "_other_versions", {})
    topic = shop.topic("orders", FIRST, SECOND)
    plan, ledgers, read = shop.plan(topic), Ledgers(), MessageDecoder(shop.connection)
    one = keyshard.Message.for_test(avro(FIRST, {"id": 1, "name": "a"}))
    one = one._replace(topic=topic, schema_version=0)
    for ledger in range(1, 30):
        assert ledgers.new({P0: EntrySet.parse(f"{ledger}:0-3")}) == {P0.topic}
        assert ledgers.new({P0: EntrySet.parse(f"{ledger}:4")}) == set()
        later = replace(plan, name=f"{plan.name} {ledgers.followed}")
        assert writer_of(later, topic, plan.schemas[topic], 0) == shop.cluster.schemas[topic][0]
        assert read(one._replace(message_id=one.message_id._replace(ledger=ledger)))["id"] == 1
    (seen,) = ledgers._seen.values()
    assert len(seen) <= 4
    assert len(decoder._other_versions) <= 4
    assert len(read._ledgers) <= 4


def test_versions_of_a_re_created_topic_are_read_again(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST, SECOND)
    plan = shop.plan(topic)
    versions = shop.cluster.schemas[topic]
    check_same(plan)
    versions[:] = []
    check_same(plan)  # deleted: the planned entries are fixed
    check_same(plan, ["persistent://public/default/found-later"])
    shop.add(topic, FIRST)
    with pytest.raises(SchemaError, match="orders was created again after the query was built"):
        check_same(plan, [topic])
    check_same(plan, [])


def test_a_topic_that_is_found_later_and_does_not_fit_is_malformed(shop: Shop) -> None:
    topic = shop.topic("orders", FIRST)
    text, bare = shop.topic("orders-text", None, kind="STRING"), shop.topic("orders-bare")
    batches = [
        raw(topic, (avro(FIRST, {"id": 1, "name": "a"}), 0)),
        raw(text, (b"b", 0), (None, 0)),
        raw(bare, (b"c", None)),
    ]
    for wanted in (None, only("__topic", id=pa.int32())):
        with pytest.raises(
            SchemaError, match=r"(?s)discovered later .*text has no field 'id'.*mode=DROP"
        ):
            rows_of(shop.plan(topic), batches, wanted)
    rows = rows_of(shop.plan(topic, mode="PERMISSIVE"), batches)
    assert [(row["id"], row[CORRUPT]) for row in rows] == [
        (1, None), (None, b"b"), (None, None), (None, b"c")
    ]  # fmt: skip
    assert [row["id"] for row in rows_of(shop.plan(topic, mode="DROPMALFORMED"), batches)] == [1]
    # What needs no value of it has no need to fit.
    names = [row["__topic"] for row in rows_of(shop.plan(topic), batches, only("__topic"))]
    assert names == [topic, text, text, bare]
