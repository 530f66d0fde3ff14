"""The content of messages, packed into Arrow columns as soon as they arrive.

A window holds hundreds of thousands of messages. As columns they take little more than their bytes,
and the garbage collector has nothing to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from keyshard.core.entry import EntryBlock, EntryId, Part
from keyshard.core.key_slot import routing_key, slots_of

TIME = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())
CONTENT = pa.schema([
    pa.field("value", pa.binary()),
    pa.field("__key", pa.string()),
    pa.field("__eventTime", TIME),
    pa.field("__properties", PROPERTIES),
])  # fmt: skip
"""What only the messages themselves tell; the other columns follow from where an entry lies."""


def pack(
    values: Sequence[bytes],
    partition_keys: Sequence[str | None],
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
) -> pa.RecordBatch:
    """Content of the messages of one delivery, in their order.

    Args:
        values: Payloads.
        partition_keys: ``None`` for a message without key.
        event_ms: Event times, milliseconds since the epoch; 0 when unset.
        properties: Properties, mostly empty.

    Returns:
        A record batch of :data:`CONTENT`.
    """
    arrays = [
        pa.array(values, pa.binary()),
        pa.array(partition_keys, pa.string()),
        _event_times(event_ms),
        _properties(properties),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=CONTENT)


def entry_block(
    entry_id: EntryId,
    *,
    batch_size: int,
    batched: bool,
    indices: Sequence[int],
    values: Sequence[bytes],
    partition_keys: Sequence[str | None],
    ordering_keys: Sequence[str | None],
    publish_ms: int,
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
) -> EntryBlock:
    """A block with content of its own; see :class:`~keyshard.core.entry.EntryBlock`.

    Args:
        ordering_keys: ``None`` for a message without one.
    """
    slot, mixed_slots = slots_of(list(map(routing_key, partition_keys, ordering_keys)))
    content = pack(values, partition_keys, event_ms, properties)
    return EntryBlock(
        entry_id,
        batch_size,
        batched,
        indices,
        slot,
        mixed_slots,
        publish_ms,
        sum(map(len, values)),
        (Part(content, 0, len(values)),),
    )


def only(block: EntryBlock, indices: frozenset[int]) -> EntryBlock:
    """The messages of a block that have one of some batch indices."""
    rows = [(part, row) for part in block.parts for row in range(part.rows)]
    kept = [i for i, index in enumerate(block.indices) if index in indices]
    slots = [block.slots[i] for i in kept]
    parts = tuple(
        Part(part.content, part.start + row, 1) for part, row in map(rows.__getitem__, kept)
    )
    return EntryBlock(
        block.id,
        block.batch_size,
        block.batched,
        [block.indices[i] for i in kept],
        slots[0],
        slots if slots.count(slots[0]) < len(slots) else None,
        block.publish_ms,
        sum(len(part.content.column(0)[part.start].as_buffer()) for part in parts),
        parts,
    )


def column(blocks: Sequence[EntryBlock], name: str) -> pa.Array:
    """One column of :data:`CONTENT` for all messages of some blocks, in their order."""
    position = CONTENT.get_field_index(name)
    return pa.concat_arrays(
        [content.column(position).slice(start, rows) for content, start, rows in _runs(blocks)]
    )


def _runs(blocks: Sequence[EntryBlock]) -> list[Part]:
    """Parts of some blocks; what lies together becomes one."""
    runs: list[Part] = []
    content: Any = None
    start = end = 0
    for block in blocks:
        for part in block.parts:
            if part.content is content and part.start == end:
                end += part.rows
                continue
            if content is not None:
                runs.append(Part(content, start, end - start))
            content, start = part.content, part.start
            end = start + part.rows
    if content is not None:
        runs.append(Part(content, start, end - start))
    return runs


def _event_times(event_ms: Sequence[int]) -> pa.Array:
    if not any(event_ms):
        return pa.nulls(len(event_ms), TIME)
    return pa.array([time or None for time in event_ms], pa.timestamp("ms", tz="UTC")).cast(TIME)


def _properties(properties: Sequence[Mapping[str, str]]) -> pa.Array:
    offsets = [0] * (len(properties) + 1)
    keys: list[str] = []
    items: list[str] = []
    if any(properties):
        for row, own in enumerate(properties):
            keys.extend(own.keys())
            items.extend(own.values())
            offsets[row + 1] = len(keys)
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.array(keys, pa.string()), pa.array(items, pa.string())
    )
