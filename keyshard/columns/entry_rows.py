"""Some of the messages of an entry, as a block of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keyshard.columns.content import ends_of
from keyshard.core.position.entry import EntryBlock, Part
from keyshard.core.ring.key_slot import differing


def only(block: EntryBlock, indices: frozenset[int]) -> EntryBlock:
    """Return the messages of a block that have one of the batch indices."""
    return picked(block, [row for row, index in enumerate(block.indices) if index in indices])


def picked(block: EntryBlock, rows: Sequence[int]) -> EntryBlock:
    """Return some messages of a block, by their numbers in it, ascending."""
    slots = list(map(block.slots.__getitem__, rows))
    parts = _parts_of(block, rows)
    first, *later = parts
    return EntryBlock(
        block.id,
        block.batch_size,
        block.batched,
        list(map(block.indices.__getitem__, rows)),
        slots[0],
        differing(slots),
        block.publish_ms,
        _payload_bytes(block, parts),
        first.content,
        first.start,
        block.redelivered,
        block.keys_of_bytes,
        later_parts=tuple(later),
        schema_version=block.schema_version,
        other_bytes=block.other_bytes * len(rows) // block.rows,
        remote=first.remote,
    )


def _parts_of(block: EntryBlock, rows: Sequence[int]) -> list[Part]:
    """Return the content of some rows of a block; adjacent rows have one part."""
    found: list[Part] = []
    remaining = iter(block.parts)
    content, start, _, remote = part = next(remaining)
    shift, ends = start, part.rows
    """Row of the content that is row 0 of the block; first row of the block after the part."""
    first = end = rows[0]
    for row in (*rows, -1):
        if row == end and row < ends:
            end += 1
            continue
        if end > first:
            found.append(Part(content, shift + first, end - first, remote))
        while row >= ends:
            content, start, _, remote = part = next(remaining)
            shift, ends = start - ends, ends + part.rows
        first, end = row, row + 1
    return found


def divided(block: EntryBlock, rows: int) -> tuple[EntryBlock, EntryBlock]:
    """Return the first messages of a block, and the others; there are some of both."""
    return _span(block, 0, rows), _span(block, rows, block.rows)


def _span(block: EntryBlock, first: int, end: int) -> EntryBlock:
    parts: list[Part] = []
    begins = 0
    for part in block.parts:
        low, high = max(first, begins), min(end, begins + part.rows)
        if low < high:
            parts.append(part._replace(start=part.start + low - begins, rows=high - low))
        begins += part.rows
    slots = block.mixed_slots and block.mixed_slots[first:end]
    return replace(
        block,
        indices=block.indices[first:end],
        slot=slots[0] if slots else block.slot,
        mixed_slots=differing(slots) if slots else None,
        payload_bytes=block.payload_bytes * (end - first) // block.rows,
        other_bytes=block.other_bytes * (end - first) // block.rows,
        content=parts[0].content,
        start=parts[0].start,
        remote=parts[0].remote,
        later_parts=tuple(parts[1:]),
        complete=False,
    )


def _payload_bytes(block: EntryBlock, parts: Sequence[Part]) -> int:
    """Return the bytes of the values in parts of a block; estimate those of remote content."""
    found = shift = 0
    content: Any = None
    ends = memoryview(b"")
    for one, start, rows, remote in parts:
        if remote is not None:
            return block.payload_bytes * sum(part.rows for part in parts) // block.rows
        if one is not content:
            content = one
            values = content.column(0)
            ends, shift = ends_of(values), values.offset
        found += ends[shift + start + rows] - ends[shift + start]
    return found
