"""Keys and values by a schema of both."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import pytest

from keyshard.core.topic_schema import TopicSchema
from tests.support.schema_values import FIRST, SECOND, TWO, avro, decoded, rows_of, written


def key_value(key: TopicSchema, value: TopicSchema, encoding: str, *, by_rest: bool) -> TopicSchema:
    if by_rest:
        output = {
            name: json.loads(one.definition) if one.definition else ""
            for name, one in (("key", key), ("value", value))
        }
        definition = json.dumps(output).encode()
    else:
        definition = pair(key.definition, value.definition)
    properties: Mapping[str, str] = {
        "key.schema.type": key.type,
        "key.schema.properties": "{}",
        "value.schema.type": value.type,
        "value.schema.properties": "{}",
        "kv.encoding.type": encoding,
    }
    return TopicSchema("KEY_VALUE", definition, 0, properties)


def pair(key: bytes | None, value: bytes | None) -> bytes:
    return b"".join(
        struct.pack(">i", -1) if one is None else struct.pack(">i", len(one)) + one
        for one in (key, value)
    )


@pytest.mark.parametrize("by_rest", [True, False])
def test_keys_and_values_become_two_columns(by_rest: bool) -> None:
    key, value = TopicSchema("INT32"), avro(TWO)
    (data,) = written(TWO, {"a": 1, "b": "x"})
    inline = key_value(key, value, "INLINE", by_rest=by_rest)
    values = [pair(b"\0\0\0\5", data), pair(None, data), pair(b"\0\0\0\6", None)]
    one = {"a": 1, "b": "x"}
    assert decoded(inline, *values) == [
        {"key": 5, "value": one},
        {"key": None, "value": one},
        {"key": 6, "value": None},
    ]
    negative = struct.pack(">i", -2) + pair(None, data)[4:]
    bad = [b"\0", pair(b"", b"")[:-1], pair(b"xx", data), negative, b"", b"\x7f\xff\xff\xff" + data]
    assert sorted(rows_of(inline, [*values, *bad])[1]) == [3, 4, 5, 6, 7, 8]
    separated = key_value(key, value, "SEPARATED", by_rest=by_rest)
    keys = [b"\0\0\0\5", None]
    assert decoded(separated, data, data, keys=keys) == [
        {"key": 5, "value": one},
        {"key": None, "value": one},
    ]
    # Java, too, shows the key of a deleted value.
    assert decoded(separated, None, data, keys=[keys[0], keys[0]]) == [
        {"key": 5, "value": None},
        {"key": 5, "value": one},
    ]
    assert rows_of(separated, [data], keys=[b"xx"])[1]


def test_versions_of_keys_and_values_are_resolved() -> None:
    key = TopicSchema("STRING")
    first, second = avro(FIRST), avro(SECOND)
    (data,) = written(FIRST, {"id": 7, "name": "x", "gone": 1.0})
    wanted = {"id": 7, "title": "x", "added": "new", "perhaps": None}
    assert decoded(
        key_value(key, second, "INLINE", by_rest=True),
        pair(b"k", data),
        writer=key_value(key, first, "INLINE", by_rest=False),
    ) == [{"key": "k", "value": wanted}]


def test_keys_and_values_are_split_by_the_version_of_the_message() -> None:
    """A broker compares the types of keys and values, and not how both are put together."""
    key, value = TopicSchema("STRING"), TopicSchema("STRING")
    inline, separated = (
        key_value(key, value, encoding, by_rest=True) for encoding in ("INLINE", "SEPARATED")
    )
    keys = [b"k"] * 3
    one = {"key": "k", "value": "v"}
    both = [pair(b"k", b"v"), pair(b"k", None), None]
    nothing = {"key": None, "value": None}
    assert decoded(separated, *both, keys=keys, writer=inline) == [
        one,
        one | {"value": None},
        nothing,
    ]
    assert decoded(inline, b"v", None, keys=keys[:2], writer=separated) == [one, None]
