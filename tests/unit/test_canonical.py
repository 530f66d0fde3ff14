"""The canonical order of a batch: equal for equal rows, whatever the order of their keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.columns.canonical import PartitionRows, canonical
from keyshard.columns.outgoing import Outgoing, outgoing_of
from keyshard.columns.routing import by_topic
from keyshard.core.publishing import key_partition
from keyshard.errors import ConfigError

Row = tuple[str | None, str | None]
ROWS = st.lists(
    st.tuples(st.none() | st.sampled_from("abc"), st.none() | st.sampled_from("xa")), max_size=40
)


def columns_of(rows: list[Row], numbers: list[int] | None = None) -> Outgoing:
    found = pa.record_batch(
        {
            "value": [b"%d" % number for number in numbers or range(len(rows))],
            "__key": pa.array([key for key, _ in rows], pa.string()),
            "__orderingKey": pa.array([ordering_key for _, ordering_key in rows], pa.string()),
        }
    )
    return outgoing_of(found)


def plan(columns: Outgoing, partitions: int = 3) -> list[PartitionRows]:
    return canonical(columns, partitions, keyless_from=1, scheme="java")


def ends(one: PartitionRows) -> list[int]:
    return one.entry_ends(5, 1_000_000)


def whole(one: PartitionRows) -> Outgoing:
    return one.rows(0, len(one))


def shown(parts: list[PartitionRows]) -> list[Any]:
    return [
        (
            one.partition,
            ends(one),
            one.checksum,
            whole(one).values.to_pylist(),
            whole(one).keys.to_pylist(),
        )
        for one in parts
    ]


@given(ROWS, st.integers(1, 4))
def test_every_row_is_there_once_where_its_key_belongs(rows: list[Row], partitions: int) -> None:
    found = plan(columns_of(rows), partitions)
    assert [one.partition for one in found] == sorted({one.partition for one in found})
    values = [value for one in found for value in whole(one).values.to_pylist()]
    assert sorted(values) == sorted(b"%d" % number for number in range(len(rows)))
    for one in found:
        for key in whole(one).keys.to_pylist():
            if key is not None:
                assert key_partition(key.decode(), partitions) == one.partition
            else:
                assert one.partition == 1 % partitions


@given(ROWS)
def test_an_entry_has_one_routing_key_and_a_key_keeps_its_order(rows: list[Row]) -> None:
    for one in plan(columns_of(rows)):
        routing = whole(one).routing_keys.to_pylist()
        numbers = [int(value) for value in whole(one).values.to_pylist()]
        for start, stop in pairwise([0, *ends(one)]):
            assert len(set(routing[start:stop])) == 1
        for key in set(routing):
            of_key = [
                number for number, other in zip(numbers, routing, strict=True) if other == key
            ]
            assert of_key == sorted(of_key)


@given(ROWS, st.randoms())
def test_the_order_of_keys_does_not_matter(rows: list[Row], draw: Any) -> None:
    queues: dict[Any, list[int]] = {}
    for number, (key, ordering_key) in enumerate(rows):
        # All rows of one routing key, and those without, keep their order.
        queues.setdefault(ordering_key or key, []).append(number)
    mixed: list[int] = []
    while queues:
        key = draw.choice(list(queues))
        mixed.append(queues[key].pop(0))
        if not queues[key]:
            del queues[key]
    again = columns_of([rows[number] for number in mixed], mixed)
    assert shown(plan(again)) == shown(plan(columns_of(rows)))


def test_a_delayed_message_is_an_entry_of_its_own() -> None:
    batch = pa.record_batch(
        {
            "value": [b"a", b"b", b"c"],
            "__key": ["k"] * 3,
            "__deliverAt": pa.array([None, 1_900_000_000_000, None], pa.timestamp("ms", "UTC")),
        }
    )
    assert ends(plan(outgoing_of(batch), 1)[0]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"value": [b""], "_key": ["k"]},
            "Column _key is not a column of a message. Did you mean __key",
        ),
        ({"__key": ["k"]}, "Column value is missing"),
        ({"value": [1]}, "Column value has the type int64; it must be text or binary"),
        ({"value": [b""], "__key": [b"k"]}, "Column __key has the type binary; it must be text"),
        (
            {"value": [b""], "__keyBytes": ["k"]},
            "__keyBytes has the type string; it must be binary",
        ),
        ({"value": [b""], "__key": ["k"], "__keyBytes": [b"k"]}, "Give only one of them"),
        (
            {"value": [b""], "__eventTime": [7]},
            "__eventTime has the type int64; it must be a times",
        ),
        ({"value": [b""], "__properties": ["a=b"]}, "it must be a map of text to text"),
        # Types are checked without a value, too.
        ({"value": [b""], "__key": pa.nulls(1, pa.int32())}, "__key has the type int32"),
        ({"value": [b""], "__deliverAt": pa.nulls(1, pa.int64())}, "must be a timestamp. Cast it"),
        (
            {
                "value": [b""],
                "__properties": pa.nulls(1, pa.map_(pa.string(), pa.int64())),
            },
            "it must be a map of text to text",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        outgoing_of(pa.record_batch(columns))
    assert said in caught.value.message


def test_times_before_the_epoch_and_nulls_in_maps_are_refused_with_their_row() -> None:
    early = pa.array([1_000, None, -1], pa.timestamp("us", "UTC"))
    columns = {"value": [b""] * 3, "__key": ["a", None, "c"], "__eventTime": early}
    with pytest.raises(ConfigError, match=r"1970-01-01 in row 2 with key 'c'"):
        outgoing_of(pa.record_batch(columns))
    pairs = pa.array([[], [("a", "b")], [("a", None)]], pa.map_(pa.string(), pa.string()))
    columns = {"value": [b""] * 3, "__properties": pairs}
    with pytest.raises(ConfigError, match=r"no text for 'a' in row 2\.\nRemedy: Remove"):
        outgoing_of(pa.record_batch(columns))


def test_text_that_is_not_utf_8_and_times_that_are_too_late_are_refused() -> None:
    ends = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    broken = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff\xfe")])
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), broken)
    for name, column in (("__key", broken), ("__orderingKey", broken), ("__properties", maps)):
        with pytest.raises(ConfigError, match=rf"{name} has text that is not UTF-8"):
            outgoing_of(pa.record_batch({"value": [b"", b""], name: column}))
    late = pa.array([1 << 62], pa.timestamp("s"))
    with pytest.raises(ConfigError, match="__deliverAt has a time that is too late"):
        outgoing_of(pa.record_batch({"value": [b""], "__deliverAt": late}))


def test_rows_that_are_not_arrow_rows_are_refused() -> None:
    rows: Any = [{"value": b""}]
    with pytest.raises(ConfigError, match=r"a list.\nRemedy: Give a pyarrow\.Table"):
        by_topic(rows, "t")
