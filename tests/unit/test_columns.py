"""Columns: their content and types, and the limits of batches."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from keyshard.columns import content
from keyshard.columns import record_batches as columns
from keyshard.columns.content import CONTENT, gather, pack
from keyshard.columns.entry_rows import only, picked
from keyshard.columns.record_batches import SCHEMA, record_batches, select
from keyshard.core.position.entry import EntryBlock, EntryId, Part, TopicPartition
from keyshard.core.position.serialized_id import SerializedId
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.layout import Located
from tests.helpers import P0, P1, block

PLAIN = TopicPartition("persistent://a/b/c")
NOW_MS = 1_700_000_000_123
NOW = datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=timezone.utc)

LOCATED: list[Located] = [
    (P0, block(7, 1, "a", "b", of=3, indices=[0, 2], publish_ms=NOW_MS, values=[b"\x00", b""])),
    (P0, block(7, 2, None, publish_ms=NOW_MS + 1, event_ms=5, properties={"p": "1", "q": ""})),
    (P1, block(3, 0, "", ordering_key="o", publish_ms=0, schema_version=0)),
    (PLAIN, block(4, 0, "\u65e5", properties={"r": "2"}, schema_version=2**40)),
]


def table(names: list[str] | None = None) -> pa.Table:
    batches = list(record_batches(LOCATED, names or SCHEMA.names))
    return pa.Table.from_batches(batches)


EXPECTED: dict[str, list[Any]] = {
    "value": [b"\x00", b"", b"7:2:0", b"3:0:0", b"4:0:0"],
    "__key": ["a", "b", None, "", "\u65e5"],
    "__topic": [P0.topic, P0.topic, P0.topic, P0.topic, "persistent://a/b/c"],
    "__partition": [0, 0, 0, 1, -1],
    "__messageId": ["7:1:0", "7:1:2", "7:2:0", "3:0:0", "4:0:0"],
    "__publishTime": [
        NOW,
        NOW,
        NOW.replace(microsecond=124_000),
        None,
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc),
    ],
    "__eventTime": [None, None, datetime(1970, 1, 1, 0, 0, 0, 5_000, timezone.utc), None, None],
    "__properties": [[], [], [("p", "1"), ("q", "")], [], [("r", "2")]],
    "__slot": [key_slot("a"), key_slot("b"), None, key_slot("o"), key_slot("\u65e5")],
    "__schemaVersion": [None, None, None, 0, 2**40],
}


def test_message_ids_have_the_indices_of_each_entry() -> None:
    ranges = [(0, 1), (0, 3), (1, 2), (5, 7), (0, 1_000), (0, 1_002)]
    located: list[Located] = []
    for entry, (first, end) in enumerate(ranges):
        whole = block(7, entry, *["k"] * (end - first), of=1_002)
        located.append((P0, replace(whole, indices=range(first, end))))
    found = pa.Table.from_batches(record_batches(located, ["__messageId"]))["__messageId"]
    wanted = [f"7:{entry}:{at}" for entry, ends in enumerate(ranges) for at in range(*ends)]
    assert found.to_pylist() == wanted


def test_message_ids_count_up_to_the_last_row_of_a_large_entry() -> None:
    located: list[Located] = [
        (P0, block(7, entry, *["k"] * rows)) for entry, rows in enumerate((3, 12_000, 2))
    ]
    found = pa.Table.from_batches(record_batches(located, ["__messageId"]))["__messageId"]
    wanted = [f"7:{entry}:{at}" for entry, rows in enumerate((3, 12_000, 2)) for at in range(rows)]
    assert found.to_pylist() == wanted


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_column_holds_the_expected_values(name: str) -> None:
    assert table()[name].to_pylist() == EXPECTED[name]


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_column_has_its_type_alone_and_with_the_others(name: str) -> None:
    assert table().schema == SCHEMA
    alone = table([name])
    assert alone.schema == pa.schema([SCHEMA.field(name)])
    assert alone[name].to_pylist() == EXPECTED[name]
    alone.validate(full=True)


def test_message_ids_are_also_there_as_the_java_client_stores_them() -> None:
    rows = pa.Table.from_batches(record_batches(LOCATED, ["__messageIdBytes"]))
    wanted = [
        SerializedId(
            block.id.ledger, block.id.entry, where.partition,
            index if block.batched else -1, block.batch_size if block.batched else 0,
        )
        for where, block in LOCATED for index in block.indices
    ]  # fmt: skip
    assert [one.batch_index for one in wanted] == [0, 2, -1, -1, -1]
    assert rows["__messageIdBytes"].to_pylist() == [one.to_bytes() for one in wanted]


def test_entries_of_topic_partitions_may_come_in_turn() -> None:
    turns: list[Located] = [
        (where, block(entry, 0, "a", "b")) for entry in range(2) for where in (P0, P1, PLAIN)
    ]
    rows = pa.Table.from_batches(record_batches(turns, ["__topic", "__partition"]))
    wanted = [(where.topic, where.partition) for where, _ in turns for _ in range(2)]
    assert [tuple(row.values()) for row in rows.to_pylist()] == wanted


def test_every_column_is_expected_here() -> None:
    assert list(EXPECTED) == SCHEMA.names


def test_columns_come_in_the_order_they_are_named() -> None:
    assert table(["__slot", "value"]).column_names == ["__slot", "value"]
    assert select(["__slot", "value"]).names == ["__slot", "value"]


def test_an_unknown_column_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        select(["value", "nope"])


def test_no_entries_give_no_batches() -> None:
    assert list(record_batches([])) == []


def located(count: int, rows: int = 1, size: int = 1) -> list[Located]:
    return [
        (P0, block(1, entry, *["k"] * rows, values=[b"x" * size] * rows)) for entry in range(count)
    ]


def test_batches_are_limited_in_rows_and_entries_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "ROWS_PER_BATCH_MAX", 10)
    batches = list(record_batches(located(7, rows=3), ["__messageId"]))
    assert [batch.num_rows for batch in batches] == [9, 9, 3]
    ids = [text for batch in batches for text in batch.column(0).to_pylist()]
    assert ids == [f"1:{entry}:{index}" for entry in range(7) for index in range(3)]


def test_batches_are_limited_in_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "BYTES_PER_BATCH_MAX", 1_000)
    assert [batch.num_rows for batch in record_batches(located(5, size=400))] == [2, 2, 1]


@pytest.mark.parametrize(
    "large",
    [{"properties": {"p": "x" * 400}}, {"ordering_key": "x" * 400}, {"keys": ["k" * 400]}],
    ids=["properties", "ordering_key", "key"],
)
def test_batches_are_limited_in_all_that_messages_have(
    monkeypatch: pytest.MonkeyPatch, large: dict[str, Any]
) -> None:
    monkeypatch.setattr(columns, "BYTES_PER_BATCH_MAX", 1_000)
    keys = large.pop("keys", ["k"])
    blocks = [(P0, block(1, entry, *keys, **large)) for entry in range(5)]
    assert [batch.num_rows for batch in record_batches(blocks)] == [2, 2, 1]


def test_properties_of_more_than_a_column_holds_come_in_many_batches() -> None:
    """10,500 messages of 220 KB properties: 2.3 GB, and a column of one batch holds 2 GiB."""
    one = block(1, 0, properties={"p": "x" * 220_000})
    blocks = [(P0, replace(one, id=EntryId(1, entry))) for entry in range(10_500)]
    rows = size = 0
    for batch in record_batches(blocks, ["__properties", "__messageId"]):
        rows += batch.num_rows
        size = max(size, batch.nbytes)
    assert rows == 10_500
    assert size <= 9 * 1024 * 1024


def test_an_entry_above_the_limits_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "ROWS_PER_BATCH_MAX", 4)
    blocks = [*located(1), (P0, block(1, 1, *["k"] * 9)), *located(1)]
    assert [batch.num_rows for batch in record_batches(blocks)] == [1, 9, 1]


def test_a_million_rows_do_not_come_in_one_batch() -> None:
    rows = [batch.num_rows for batch in record_batches(located(3, rows=9_000), ["__partition"])]
    assert rows == [9_000] * 3


@st.composite
def interleaved(draw: st.DrawFn) -> list[EntryBlock]:
    """Entries of several deliveries in any order, some left out, some of several parts."""
    blocks: list[EntryBlock] = []
    joined = draw(st.integers(0, 3)) == 0
    for delivery in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=30))
        keys = draw(st.lists(st.sampled_from([None, "", "a", "é"]), min_size=1, max_size=3))
        rows = sum(sizes)
        partition_keys = [keys[row % len(keys)] for row in range(rows)]
        packed = pack(
            [None if row % 7 == 3 else b"%d:%d" % (delivery, row) for row in range(rows)],
            partition_keys,
            [key if row % 2 else None for row, key in enumerate(partition_keys)],
            [row % 3 for row in range(rows)],
            [{"p": str(row)} if row % 5 == 1 else {} for row in range(rows)],
        )
        start = 0
        for number, size in enumerate(sizes):
            entry = block(delivery, number, *["k"] * size)
            parts = (Part(packed, 0, 1),) if size > 1 and joined else ()
            blocks.append(replace(entry, content=packed, start=start, later_parts=parts))
            start += size
    mixed = draw(st.randoms(use_true_random=False))
    mixed.shuffle(blocks)
    return blocks[
        : draw(st.sampled_from([len(blocks), max(1, len(blocks) - 2), -(-len(blocks) // 4)]))
    ]


@settings(max_examples=200, deadline=None)
@given(blocks=interleaved())
def test_interleaved_entries_are_gathered_as_slices_of_their_content(
    blocks: list[EntryBlock],
) -> None:
    """Columns are the slices of the entries one after the other, in every order."""
    parts = [part for one in blocks for part in one.parts]
    for name, array in gather(blocks, CONTENT.names).items():
        slices = [part.content.column(name).slice(part.start, part.rows) for part in parts]
        array.validate(full=True)
        assert array.type == CONTENT.field(name).type
        assert array.equals(pa.concat_arrays(slices))


def test_entries_of_deliveries_that_alternate_are_not_sliced_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents = [block(1, 0, *["k"] * 60, values=[b"%d" % n] * 60).content for n in range(3)]
    blocks = [
        replace(block(1, entry, "a", "b"), content=contents[entry % 3], start=entry // 3 * 2)
        for entry in range(90)
    ]
    monkeypatch.delattr(content, "runs_of")
    values = gather(blocks, ["value"])["value"].to_pylist()
    assert values == [b"%d" % (entry % 3) for entry in range(90) for _ in range(2)]
    of_a_range = blocks[::2]  # a worker answers with entries of several ranges
    values = gather(of_a_range, ["value"])["value"].to_pylist()
    assert values == [b"%d" % (entry % 3) for entry in range(0, 90, 2) for _ in range(2)]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_picked_messages_have_their_keys_slots_and_values(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    total = sum(sizes)
    keys = data.draw(st.lists(st.sampled_from(["a", "b", None]), min_size=total, max_size=total))
    indices = sorted(data.draw(st.permutations(range(total + 3)))[:total])
    values = [b"v" * (row % 4) for row in range(total)]
    joined: EntryBlock | None = None
    for size in sizes:
        first = 0 if joined is None else joined.rows
        one = block(
            1, 0, *keys[first : first + size], of=total + 3,
            indices=indices[first : first + size], values=values[first : first + size],
        )  # fmt: skip
        joined = one if joined is None else joined.joined(one)
    assert joined is not None
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    for found in (picked(joined, rows), only(joined, frozenset(indices[row] for row in rows))):
        assert found.indices == [indices[row] for row in rows]
        assert found.partition_keys == [keys[row] for row in rows]
        assert found.slots == [joined.slots[row] for row in rows]
        assert found.values == [values[row] for row in rows]
        assert gather([found], ["value"])["value"].to_pylist() == found.values
    assert found.payload_bytes == sum(len(values[row]) for row in rows)
    assert len(found.parts) == 1 + sum(
        later != row + 1 or later in set(accumulate(sizes)) for row, later in pairwise(rows)
    )


def test_many_runs_of_one_content_are_taken_together() -> None:
    values = [b"%d" % row for row in range(100)]
    whole = block(1, 0, *["k"] * 100, values=values)
    odd = [picked(whole, range(1, 100, 2)), block(2, 0, "k", values=[b"last"])]
    assert gather(odd, ["value"])["value"].to_pylist() == [*values[1::2], b"last"]
