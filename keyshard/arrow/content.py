"""The content of messages, packed into Arrow columns as soon as they arrive.

A window holds hundreds of thousands of messages. As columns they take little more than their bytes,
and the garbage collector has nothing to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from keyshard.arrow.metadata import is_time, readable_times
from keyshard.core.metadata_columns import BROKER_PUBLISH_TIME, KEY_BYTES, PRODUCER, SEQUENCE_ID
from keyshard.core.position.entry import EntryBlock, EntryId, Part
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import differing, routing_key, slots_of

TIME = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())
CONTENT = pa.schema([
    pa.field("value", pa.binary()),
    pa.field("__key", pa.string()),
    pa.field("__orderingKey", pa.string()),
    pa.field("__eventTime", TIME),
    pa.field("__properties", PROPERTIES),
])  # fmt: skip
"""What only the messages themselves tell; the other columns follow from where an entry lies."""
METADATA = pa.schema([
    pa.field(KEY_BYTES, pa.binary()),
    pa.field(SEQUENCE_ID, pa.int64()),
    pa.field(PRODUCER, pa.string()),
    pa.field(BROKER_PUBLISH_TIME, TIME),
])  # fmt: skip
"""What they tell as well, and is content only where it was asked for, behind the rest."""
CONTENT_NAMES = frozenset([*CONTENT.names, *METADATA.names])
PAIR_BYTES = 8
"""Bytes of a property beside its name and value."""
PROPERTYLESS_MAX = 10_000
"""Most messages of a delivery that share one empty column when none of them has a property: making
one costs as much as the keys and values of a hundred messages."""


def pack(
    values: Sequence[bytes | None] | None,
    partition_keys: Sequence[str | None],
    ordering_keys: Sequence[str | None],
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
    *,
    metadata: Mapping[str, Sequence[Any]] = {},
) -> pa.RecordBatch:
    """Content of the messages of one delivery, in their order.

    Args:
        values: Payloads, ``None`` for a null value; ``None`` where nobody wants them.
        partition_keys: ``None`` for a message without key.
        ordering_keys: ``None`` for a message without one.
        event_ms: Event times, milliseconds since the epoch; 0 when unset, each a time.
        properties: Properties, mostly empty.
        metadata: Columns of :data:`METADATA` that were asked for, by name; broker's times as
            milliseconds.

    Returns:
        A record batch of :data:`CONTENT`, and of the columns of :data:`METADATA`.
    """
    no_values = values is None
    arrays = [
        pa.nulls(len(partition_keys), pa.binary()) if no_values else pa.array(values, pa.binary()),
        pa.array(partition_keys, pa.string()),
        _ordering_keys(ordering_keys),
        _event_times(event_ms),
        _properties(properties),
    ]
    arrays += [
        _times(values)
        if name == BROKER_PUBLISH_TIME
        else pa.array(values, METADATA.field(name).type)
        for name, values in metadata.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=content_with(tuple(metadata)))


def metadata_in(columns: Collection[str] | None) -> tuple[str, ...]:
    """Which columns of :data:`METADATA` are among some columns; none where those are not named."""
    return () if columns is None else tuple(name for name in METADATA.names if name in columns)


def content_columns(names: Collection[str]) -> Collection[str] | None:
    """Columns to ask a broker for, for whom all of :data:`CONTENT` and some columns are wanted."""
    metadata = metadata_in(names)
    return (*CONTENT.names, *metadata) if metadata else None


@cache
def content_with(metadata: tuple[str, ...]) -> pa.Schema:
    """:data:`CONTENT`, and some columns of :data:`METADATA` behind it."""
    return pa.schema([*CONTENT, *map(METADATA.field, metadata)]) if metadata else CONTENT


def entry_block(
    entry_id: EntryId,
    *,
    batch_size: int,
    batched: bool,
    indices: Sequence[int],
    values: Sequence[bytes | None],
    partition_keys: Sequence[str | None],
    ordering_keys: Sequence[str | None],
    publish_ms: int,
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
    came_to: HashRange | None = None,
    schema_version: int | None = None,
    metadata: Mapping[str, Sequence[Any]] = {},
) -> EntryBlock:
    """A block with content of its own; see :class:`~keyshard.core.position.entry.EntryBlock`.

    Args:
        values: Payloads; ``None`` for a null value.
        ordering_keys: ``None`` for a message without one.
        came_to: Range whose consumer received it; ``None`` at a Reader.
        metadata: As for :func:`pack`.
    """
    slot, mixed_slots, keys_of_bytes = slots_of(
        list(map(routing_key, partition_keys, ordering_keys)),
        came_to if ordering_keys[0] is None else None,
    )
    unreadable = 0
    if not (all(map(is_time, event_ms)) and is_time(publish_ms)):
        times = readable_times(event_ms, [publish_ms] * len(values), list(map(dict, properties)))
        event_ms, (publish_ms, *_), properties, wrong = times
        unreadable = sum(wrong)
    content = pack(values, partition_keys, ordering_keys, event_ms, properties, metadata=metadata)
    rows = len(values)
    return EntryBlock(
        entry_id,
        batch_size,
        batched,
        indices,
        slot,
        mixed_slots,
        publish_ms,
        sum(len(value or b"") for value in values),
        content,
        0,
        keys_of_bytes=keys_of_bytes,
        unreadable=unreadable,
        schema_version=schema_version,
        other_bytes=other_bytes(content)(0, rows),
    )


def other_bytes(
    content: pa.RecordBatch, names: Collection[str] | None = None
) -> Callable[[int, int], int]:
    """A function that sums the bytes of keys, properties and metadata of a stretch of rows.

    Args:
        content: Content of a delivery, as it was packed.
        names: Columns that count; ``None``: all but the values.
    """
    ends: list[memoryview] = []
    pairs: list[tuple[memoryview, memoryview, memoryview]] = []
    row_bytes = 0
    for name, column in zip(content.schema.names, content.columns, strict=True):
        if name == "value" or (names is not None and name not in names):
            continue
        if name == "__properties":
            if len(column.keys):
                pairs.append((_ends(column), _ends(column.keys), _ends(column.items)))
        elif name in (SEQUENCE_ID, BROKER_PUBLISH_TIME):
            row_bytes += 8
        elif name != "__eventTime" and column.null_count < len(column):
            ends.append(_ends(column))

    def of(start: int, stop: int) -> int:
        found = row_bytes * (stop - start) + sum(one[stop] - one[start] for one in ends)
        for rows, keys, values in pairs:
            first, last = rows[start], rows[stop]
            found += keys[last] - keys[first] + values[last] - values[first]
            found += PAIR_BYTES * (last - first)
        return found

    return of


def _ends(column: pa.Array) -> memoryview:
    """Offset of each value of a column, and the end of the last value."""
    return memoryview(column.buffers()[1]).cast("i")


def only(block: EntryBlock, indices: frozenset[int]) -> EntryBlock:
    """The messages of a block that have one of some batch indices."""
    rows = [(part, row) for part in block.parts for row in range(part.rows)]
    kept = [i for i, index in enumerate(block.indices) if index in indices]
    slots = [block.slots[i] for i in kept]
    parts = tuple(
        Part(part.content, part.start + row, 1, part.kept)
        for part, row in map(rows.__getitem__, kept)
    )
    return EntryBlock(
        block.id,
        block.batch_size,
        block.batched,
        [block.indices[i] for i in kept],
        slots[0],
        differing(slots),
        block.publish_ms,
        _payload_bytes(block, parts),
        parts[0].content,
        parts[0].start,
        block.redelivered,
        block.keys_of_bytes,
        later_parts=parts[1:],
        schema_version=block.schema_version,
        other_bytes=block.other_bytes * len(parts) // block.rows,
        kept=parts[0].kept,
    )


def _payload_bytes(block: EntryBlock, parts: Sequence[Part]) -> int:
    """Bytes of the values of some messages of a block; their share, where content is elsewhere."""
    if any(part.kept is not None for part in parts):
        return block.payload_bytes * len(parts) // block.rows
    return sum(len(part.content.column(0)[part.start].as_buffer() or b"") for part in parts)


def names_in(blocks: Sequence[EntryBlock]) -> list[str]:
    """Columns of the content of some entries of one source, which has the same in all."""
    return list(blocks[0].content.schema.names if blocks else CONTENT.names)


def gather(blocks: Sequence[EntryBlock], names: Sequence[str]) -> dict[str, pa.Array]:
    """Columns of the content, by name, for all messages of some blocks in their order."""
    runs = runs_of(blocks) if names else []
    if any(run.kept is not None for run in runs):
        raise ValueError("the content is kept elsewhere")
    return {
        name: pa.concat_arrays(
            [part.content.column(position).slice(part.start, part.rows) for part in runs]
        )
        for name, position in zip(names, _positions(runs, names), strict=True)
    }


def _positions(runs: Sequence[Part], names: Sequence[str]) -> Sequence[int]:
    # Metadata lies behind the rest, and all content of a source has the same.
    positions = list(map(CONTENT.get_field_index, names))
    if -1 in positions and runs:
        return list(map(runs[0].content.schema.get_field_index, names))
    return positions


def runs_of(blocks: Sequence[EntryBlock]) -> list[Part]:
    """Parts of some blocks; what lies together becomes one."""
    runs: list[Part] = []
    content: Any = None
    kept: Any = None
    start = end = -1

    def close() -> None:
        if start >= 0:
            runs.append(Part(content, start, end - start, kept))

    for block in blocks:
        if block.later_parts:
            close()
            start = end = -1
            runs += block.parts
            continue
        if block.content is not content or block.kept is not kept or block.start != end:
            close()
            content, kept, start = block.content, block.kept, block.start
            end = start
        end += len(block.indices)
    close()
    return runs


def _ordering_keys(keys: Sequence[str | None]) -> pa.Array:
    if keys.count(None) == len(keys):
        return pa.nulls(len(keys), pa.string())
    return pa.array(keys, pa.string())


def _event_times(event_ms: Sequence[int]) -> pa.Array:
    if not any(event_ms):
        return pa.nulls(len(event_ms), TIME)
    return _times([time or None for time in event_ms])


def _times(times_ms: Sequence[int | None]) -> pa.Array:
    return pa.array(times_ms, pa.timestamp("ms", tz="UTC")).cast(TIME)


def properties_of(offsets: pa.Array, keys: pa.Array, values: pa.Array) -> pa.Array:
    """Column of properties; all of it where no message has one.

    Args:
        offsets: Where those of each message begin, and where the last of them end.
        keys: Their names.
        values: Their values.
    """
    if not len(keys) and len(offsets) <= len(_NO_PROPERTIES):
        return _NO_PROPERTIES.slice(0, len(offsets) - 1)
    return pa.MapArray.from_arrays(offsets, keys, values)


def _properties(properties: Sequence[Mapping[str, str]]) -> pa.Array:
    if not any(properties) and len(properties) <= len(_NO_PROPERTIES):
        return _NO_PROPERTIES.slice(0, len(properties))
    offsets = [0] * (len(properties) + 1)
    keys: list[str] = []
    items: list[str] = []
    for row, own in enumerate(properties):
        keys.extend(own.keys())
        items.extend(own.values())
        offsets[row + 1] = len(keys)
    return properties_of(
        pa.array(offsets, pa.int32()), pa.array(keys, pa.string()), pa.array(items, pa.string())
    )


# Of bytes: given a number or a list, Arrow imports pandas to look whether that is one of its own.
_NO_PROPERTIES = pa.MapArray.from_arrays(
    pa.Array.from_buffers(
        pa.int32(), PROPERTYLESS_MAX + 1, [None, pa.py_buffer(bytes(4 * (PROPERTYLESS_MAX + 1)))]
    ),
    pa.nulls(0, pa.string()),
    pa.nulls(0, pa.string()),
)
