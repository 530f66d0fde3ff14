"""Deliveries as bytes: the entries as JSON, the content of their messages as one record batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from keyshard.arrow.content import CONTENT
from keyshard.core.position.entry import EntryBlock, EntryId, Part
from keyshard.errors import BY_CODE, BrokerError, KeyShardError

NOTHING = pa.RecordBatch.from_pylist([], schema=CONTENT)
"""The content of no messages."""


class Delivery(NamedTuple):
    """What one ``receive`` of one consumer brought."""

    consumer: int
    blocks: Sequence[EntryBlock]
    error: KeyShardError | None = None
    """What it raised instead."""
    connected: bool | None = None
    """Nothing came, but it has lost its connection, or has one: what comes before is from before.
    """


def packed(deliveries: Iterable[Delivery]) -> tuple[list[Any], pa.RecordBatch]:
    """Deliveries as plain JSON values, and the content of all their messages."""
    listed: list[Any] = []
    contents: list[pa.RecordBatch] = []
    rows = 0
    for consumer, blocks, error, connected in deliveries:
        entries: list[Any] = []
        base: dict[int, int] = {}
        for block in blocks:
            (part,) = block.parts
            start = base.get(id(part.content))
            if start is None:
                start = base[id(part.content)] = rows
                contents.append(part.content)
                rows += part.content.num_rows
            ledger, entry = block.id
            entries.append((
                ledger, entry, block.batch_size, block.batched, list(block.indices), block.slot,
                block.mixed_slots, block.publish_ms, block.payload_bytes, start + part.start,
                block.redelivered, block.keys_of_bytes, block.unreadable,
            ))  # fmt: skip
        listed.append((consumer, entries, None if error is None else told(error), connected))
    return listed, contents[0] if len(contents) == 1 else pa.concat_batches(contents or [NOTHING])


def unpacked(listed: Sequence[Any], content: pa.RecordBatch) -> list[Delivery]:
    """What :func:`packed` was given."""
    return [
        Delivery(
            consumer,
            [_block(entry, content) for entry in entries],
            None if error is None else heard(error),
            connected,
        )
        for consumer, entries, error, connected in listed
    ]


def _block(entry: Sequence[Any], content: pa.RecordBatch) -> EntryBlock:
    (
        ledger, number, batch_size, batched, indices, slot, mixed_slots, publish_ms, payload, start,
        redelivered, keys_of_bytes, unreadable,
    ) = entry  # fmt: skip
    return EntryBlock(
        EntryId(ledger, number), batch_size, batched, indices, slot, mixed_slots, publish_ms,
        payload, (Part(content, start, len(indices)),), redelivered, keys_of_bytes, unreadable,
    )  # fmt: skip


def told(error: KeyShardError) -> list[Any]:
    """An error as plain JSON values; facts that are none are texts."""
    facts = json.loads(json.dumps(error.facts, default=str))
    return [error.code, error.message, facts]


def heard(error: Sequence[Any]) -> KeyShardError:
    """What :func:`told` was given."""
    code, message, facts = error
    return BY_CODE.get(code, BrokerError)(message, **facts)
