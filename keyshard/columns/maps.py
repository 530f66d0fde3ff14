"""Maps with unique keys: the last value of a repeated key counts.

Pulsar's clients, fastavro, msgspec and the protobuf specification read maps the same way.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import pyarrow as pa
from pyarrow import compute


def has_maps(kind: pa.DataType) -> bool:
    """Whether a type is a map or contains one."""
    types = pa.types
    if types.is_struct(kind):
        return any(has_maps(field.type) for field in kind)
    return bool(types.is_map(kind)) or (types.is_list(kind) and has_maps(kind.value_type))


def with_keys_once(values: pa.Array) -> pa.Array:
    """Return the values with unique keys in each map, on all levels."""
    return (
        _rebuilt(values.take(pa.array(range(len(values)), pa.int64())))
        if _repeats(values)
        else values
    )


def _repeats(values: pa.Array) -> bool:
    """Whether a map among the values has a repeated key."""
    types, kind = pa.types, values.type
    if types.is_struct(kind):
        return any(
            _repeats(values.field(place)) for place, one in enumerate(kind) if has_maps(one.type)
        )
    if types.is_list(kind):
        return has_maps(kind.value_type) and _repeats(values.values)
    if not types.is_map(kind):
        return False
    if (compute.max(compute.list_value_length(_keys(values))).as_py() or 0) > 1:
        entries = _entries(values)
        if compute.count_distinct(entries).as_py() < len(entries):
            return True
    return has_maps(kind.item_type) and _repeats(values.items)


def _rebuilt(values: pa.Array) -> pa.Array:
    """As :func:`with_keys_once`, for values that are not a slice."""
    types, kind = pa.types, values.type
    mask = values.is_null() if values.null_count else None
    if not has_maps(kind):
        return values
    if types.is_struct(kind):
        columns = [_rebuilt(values.field(place)) for place in range(kind.num_fields)]
        return pa.StructArray.from_arrays(columns, fields=list(kind), mask=mask)
    if types.is_list(kind):
        within = _rebuilt(values.values)
        return pa.ListArray.from_arrays(values.offsets, within, type=kind, mask=mask)
    entries = _entries(values)
    rows = range(len(entries))
    newest = dict(zip(entries.to_pylist(), rows, strict=True))
    kept = pa.array(sorted(newest.values()), pa.int64())
    counts = Counter(compute.list_parent_indices(_keys(values)).take(kept).to_pylist())
    ends = accumulate((counts[row] for row in range(len(values))), initial=0)
    offsets = pa.array(list(ends), pa.int32())
    keys, items = values.keys.take(kept), _rebuilt(values.items.take(kept))
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)


def _keys(values: pa.MapArray) -> pa.Array:
    """Return the keys of maps, as lists."""
    return pa.ListArray.from_arrays(values.offsets, values.keys)


def _entries(values: pa.MapArray) -> pa.Array:
    """Return a number for each entry of maps; equal for equal keys in the same row."""
    lists = _keys(values)
    keys = lists.flatten().dictionary_encode()
    rows = compute.list_parent_indices(lists)
    width = max(1, len(keys.dictionary))
    return compute.add(compute.multiply(rows, width), keys.indices.cast(pa.int64()))
