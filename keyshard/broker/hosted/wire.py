"""Deliveries as bytes: the entries as JSON, the content of their messages as one record batch."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from keyshard.arrow.content import CONTENT
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.errors import BY_CODE, BrokerError, KeyShardError, UnreadableEntryError

NOTHING = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in CONTENT], schema=CONTENT)
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
    gave_all: bool = False
    """Nothing came, though it was connected for a while: an entry that it left open may stay so."""
    trouble: str = ""
    """With ``connected``: the trouble of its connection."""

    @property
    def goes_on(self) -> bool:
        """Whether the consumer is received from again: behind what cannot be read, it is."""
        return self.error is None or isinstance(self.error, UnreadableEntryError)


class Taken(NamedTuple):
    """Messages and bytes that a consumer gave, or that were taken of it, since its beginning."""

    messages: int = 0
    size_bytes: int = 0
    """Their columns, and what is stored of refused entries, bytes: the same on both sides."""

    def plus(self, delivery: Delivery) -> Taken:
        """This, and one delivery more; what is stored of an entry that is refused counts, too."""
        blocks, error = delivery.blocks, delivery.error
        messages = sum(block.rows for block in blocks)
        size_bytes = sum(block.column_bytes for block in blocks)
        if isinstance(error, UnreadableEntryError):
            messages, size_bytes = messages + 1, size_bytes + len(error.stored)
        return Taken(self.messages + messages, self.size_bytes + size_bytes)


class Keeper(Protocol):
    """A worker that keeps content, as whoever refers to it knows it."""

    place: tuple[str, str]
    """Where it is asked for content, and the token for that."""
    lost: bool
    """Whether it is known to have ended."""
    released: deque[int]
    """Numbers that nobody refers to any more."""


class Kept:
    """Refers to content that a worker keeps; for as long as this is."""

    __slots__ = ("_keeper", "number")

    def __init__(self, keeper: Keeper, number: int) -> None:
        self._keeper = keeper
        self.number = number

    @property
    def place(self) -> tuple[str, str]:
        """Where it is asked for, and the token for that."""
        return self._keeper.place

    @property
    def lost(self) -> bool:
        """Whether the worker is known to have ended."""
        return self._keeper.lost

    def __del__(self) -> None:
        # In whatever thread, also while it holds locks: nothing here waits.
        self._keeper.released.append(self.number)


def keys_of(deliveries: Sequence[Delivery], content: pa.RecordBatch) -> pa.RecordBatch:
    """What decisions need of the content of deliveries: keys that may have been set as bytes."""
    blocks = [block for one in deliveries for block in one.blocks]
    # The rest of an entry may show that its keys are.
    needed = any(block.keys_of_bytes or not block.whole for block in blocks)
    keys = content.select(["__key", "__orderingKey"])
    return keys if needed else keys.slice(0, 0)


def packed(deliveries: Iterable[Delivery]) -> tuple[list[Any], pa.RecordBatch]:
    """Deliveries as plain JSON values, and the content of all their messages."""
    listed: list[Any] = []
    contents: list[pa.RecordBatch] = []
    rows = 0
    for consumer, blocks, error, connected, gave_all, trouble in deliveries:
        entries: list[Any] = []
        base: dict[int, int] = {}
        for block in blocks:
            assert not block.later_parts
            start = base.get(id(block.content))
            if start is None:
                start = base[id(block.content)] = rows
                contents.append(block.content)
                rows += block.content.num_rows
            ledger, entry = block.id
            entries.append((
                ledger, entry, block.batch_size, block.batched,
                None if block.whole else list(block.indices), block.slot, block.mixed_slots,
                block.publish_ms, block.payload_bytes, start + block.start, block.redelivered,
                block.keys_of_bytes, block.unreadable, block.schema_version,
                block.other_bytes,
            ))  # fmt: skip
        wrong = None if error is None else told(error)
        listed.append((consumer, entries, wrong, connected, gave_all, trouble))
    return listed, contents[0] if len(contents) == 1 else pa.concat_batches(contents or [NOTHING])


def unpacked(
    listed: Sequence[Any], content: pa.RecordBatch, kept: Kept | None = None
) -> list[Delivery]:
    """What :func:`packed` was given.

    Args:
        listed: The deliveries.
        content: Of their messages; without what is kept.
        kept: Where the rest of it is.
    """
    return [
        Delivery(
            consumer,
            [_block(entry, content, kept) for entry in entries],
            None if error is None else heard(error),
            connected,
            gave_all,
            trouble,
        )
        for consumer, entries, error, connected, gave_all, trouble in listed
    ]


def _block(entry: Sequence[Any], content: pa.RecordBatch, kept: Kept | None) -> EntryBlock:
    (
        ledger, number, batch_size, batched, indices, slot, mixed_slots, publish_ms, payload, start,
        redelivered, keys_of_bytes, unreadable, schema_version, other_bytes,
    ) = entry  # fmt: skip
    if indices is None:
        # A list of numbers takes as much memory as the columns of a message.
        indices = range(batch_size)
    return EntryBlock(
        EntryId(ledger, number), batch_size, batched, indices, slot, mixed_slots, publish_ms,
        payload, content, start, redelivered, keys_of_bytes, unreadable, schema_version,
        other_bytes, kept,
    )  # fmt: skip


def told(error: KeyShardError) -> list[Any]:
    """An error as plain JSON values; facts that are none are texts."""
    facts = json.loads(json.dumps(error.facts, default=str))
    stored = error.stored if isinstance(error, UnreadableEntryError) else b""
    return [error.code, error.message, facts, b64encode(stored).decode()]


def heard(error: Sequence[Any]) -> KeyShardError:
    """What :func:`told` was given."""
    code, message, facts, stored = error
    result = BY_CODE.get(code, BrokerError)(message, **facts)
    if isinstance(result, UnreadableEntryError):
        result.stored = b64decode(stored)
    return result
