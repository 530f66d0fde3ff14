"""A small draw of ``tests.proofs memory``, and the shapes that once took several windows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory.runner import measure
from tests.memory.shape import MIB, WAYS, Shape, drawn
from tests.stored_entries import NONE, ZSTD


def shape(way: str, **changes: int) -> Shape:
    fields: dict[str, Any] = {
        "window_bytes": 16 * MIB, "ranges": 4, "partitions": 1, "value_bytes": 100, "key_bytes": 0,
        "properties": 0, "property_bytes": 0, "entry_messages": 1, "compression": NONE,
        "small_first": 0,
    }  # fmt: skip
    return Shape(way=way, random_bytes=True, **fields | changes)


@pytest.mark.parametrize(
    "once_too_large",
    [
        shape("embedded", value_bytes=4 * MIB - 4_000, ranges=16),
        shape("embedded", value_bytes=4 * MIB - 4_000, ranges=64, window_bytes=8 * MIB),
        shape("embedded", value_bytes=4 * MIB - 4_000, small_first=300),
        shape("embedded", properties=1, property_bytes=100_000),
        shape("hosted", value_bytes=4 * MIB - 4_000),
        shape("spark", properties=1, property_bytes=1_000, entry_messages=1_000, compression=ZSTD),
        shape("batch", properties=1, property_bytes=220_000),
        pytest.param(
            shape("ray", value_bytes=4 * MIB - 4_000, window_bytes=64 * MIB, ranges=1),
            marks=pytest.mark.ray,
        ),
    ],
    ids=str,
)
def test_a_slow_sink_takes_no_more_memory_than_the_limit(once_too_large: Shape) -> None:
    found = measure(once_too_large)
    assert not found.problem, found


@pytest.mark.parametrize("seed", [7, 8])
def test_a_drawn_shape_takes_no_more_memory_than_the_limit(seed: int) -> None:
    found = measure(drawn(seed, WAYS[:-1]))  # Ray takes half a minute
    assert not found.problem, f"seed {seed}: {found}"
