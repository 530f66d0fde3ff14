"""Encodes deliveries: entries as JSON, the content of their messages as one record batch.

The entries of a delivery are encoded as one list for each field, not as one list for each entry.

- Most fields have the same value in all entries, so their list has only one value.
- The garbage collector scans fewer objects.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from keyshard.columns.content import CONTENT
from keyshard.core.position.entry import EntryBlock, entry_id_of
from keyshard.errors import BY_CODE, BrokerError, KeyShardError, UnreadableEntryError

NOTHING = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in CONTENT], schema=CONTENT)
"""The content of zero messages."""


class WorkerDelivery(NamedTuple):
    """The result of one ``receive`` of one consumer, or a report about its connection."""

    consumer: int
    blocks: Sequence[EntryBlock]
    error: KeyShardError | None = None
    """The error that ``receive`` raised instead."""
    connected: bool | None = None
    """If set, the consumer lost or regained its connection, after all earlier deliveries."""
    gave_all: bool = False
    """Whether this reports that a connected consumer has been silent for a while. An entry that it
    left incomplete may stay so."""
    problem: str = ""
    """The problem of the connection, if ``connected`` is set."""

    @property
    def continues(self) -> bool:
        """Whether the consumer receives again afterwards, as it does after an unreadable entry."""
        return self.error is None or isinstance(self.error, UnreadableEntryError)


class DeliveredTotals(NamedTuple):
    """Messages and bytes that a consumer delivered, or that were taken from it, since it began."""

    messages: int = 0
    size_bytes: int = 0
    """Memory of their columns and of stored refused entries, bytes. Both sides count the same."""

    def plus(self, delivery: WorkerDelivery) -> DeliveredTotals:
        """Add a delivery; the stored bytes of a refused entry count too."""
        blocks, error = delivery.blocks, delivery.error
        messages = sum(block.rows for block in blocks)
        size_bytes = sum(block.column_bytes for block in blocks)
        if isinstance(error, UnreadableEntryError):
            messages, size_bytes = messages + 1, size_bytes + len(error.stored)
        return DeliveredTotals(self.messages + messages, self.size_bytes + size_bytes)


class ContentHolder(Protocol):
    """A worker that keeps content, as seen by its references."""

    content_endpoint: tuple[str, str]
    """Address that serves the content, and the token for it."""
    lost: bool
    """Whether the worker is known to have ended."""
    released: deque[int]
    """Numbers of answers without references."""


class RemoteContent:
    """A reference to content that a worker keeps. The worker keeps it until the reference dies."""

    __slots__ = ("_keeper", "number")

    def __init__(self, keeper: ContentHolder, number: int) -> None:
        self._keeper = keeper
        self.number = number

    @property
    def endpoint(self) -> tuple[str, str]:
        """Address that serves the content, and the token for it."""
        return self._keeper.content_endpoint

    @property
    def lost(self) -> bool:
        """Whether the worker is known to have ended."""
        return self._keeper.lost

    def __del__(self) -> None:
        # Runs in any thread, perhaps while it holds locks, so it must not wait.
        self._keeper.released.append(self.number)


def keys_of(deliveries: Sequence[WorkerDelivery], content: pa.RecordBatch) -> pa.RecordBatch:
    """Return the key columns; without rows, unless a key may have been set as bytes."""
    blocks = [block for one in deliveries for block in one.blocks]
    # The rest of an incomplete entry may have such keys.
    needed = any(block.keys_of_bytes or not block.complete for block in blocks)
    keys = content.select(["__key", "__orderingKey"])
    return keys if needed else keys.slice(0, 0)


def encode_deliveries(deliveries: Iterable[WorkerDelivery]) -> tuple[list[Any], pa.RecordBatch]:
    """Encode deliveries as plain JSON values, and the content of all their messages."""
    listed: list[Any] = []
    contents: list[pa.RecordBatch] = []
    rows = 0
    for consumer, blocks, error, connected, gave_all, problem in deliveries:
        entries: list[tuple[Any, ...]] = []
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
                block.other_bytes, block.complete,
            ))  # fmt: skip
        wrong = None if error is None else encode_error(error)
        fields = [_shortened(values) for values in zip(*entries, strict=True)]
        listed.append((consumer, len(entries), fields, wrong, connected, gave_all, problem))
    return listed, contents[0] if len(contents) == 1 else pa.concat_batches(contents or [NOTHING])


def _shortened(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a field; only one value if all are the same."""
    return values[:1] if values.count(values[0]) == len(values) else values


def decode_deliveries(
    listed: Sequence[Any], content: pa.RecordBatch, remote: RemoteContent | None = None
) -> list[WorkerDelivery]:
    """Decode the result of :func:`encode_deliveries`.

    Args:
        listed: The deliveries.
        content: Content of their messages, without the columns that the worker keeps.
        remote: Reference to the content that the worker keeps.
    """
    return [
        WorkerDelivery(
            consumer,
            _blocks(count, fields, content, remote),
            None if error is None else decode_error(error),
            connected,
            gave_all,
            problem,
        )
        for consumer, count, fields, error, connected, gave_all, problem in listed
    ]


def _blocks(
    count: int, fields: Sequence[list[Any]], content: pa.RecordBatch, remote: RemoteContent | None
) -> list[EntryBlock]:
    """Decode the entries of a delivery.

    Args:
        count: Number of entries.
        fields: The values of each field; one value stands for all entries.
        content: As for :func:`decode_deliveries`.
        remote: As for :func:`decode_deliveries`.
    """
    return [
        EntryBlock(
            entry_id_of((ledger, number)), batch_size, batched,
            # A list of indices would take as much memory as the columns of a message.
            range(batch_size) if indices is None else indices,
            slot, mixed_slots, publish_ms, payload, content, start, redelivered, keys_of_bytes,
            unreadable, schema_version, other_bytes, complete, remote,
        )
        for (
            ledger, number, batch_size, batched, indices, slot, mixed_slots, publish_ms, payload,
            start, redelivered, keys_of_bytes, unreadable, schema_version, other_bytes, complete,
        ) in zip(*(one * count if len(one) == 1 else one for one in fields), strict=True)
    ]  # fmt: skip


def encode_error(error: KeyShardError) -> list[Any]:
    """Encode an error as plain JSON values; facts that JSON cannot hold become text."""
    facts = json.loads(json.dumps(error.facts, default=str))
    stored = error.stored if isinstance(error, UnreadableEntryError) else b""
    return [error.code, error.problem, error.remedy, facts, b64encode(stored).decode()]


def decode_error(error: Sequence[Any]) -> KeyShardError:
    """Decode the result of :func:`encode_error`."""
    code, cause, remedy, facts, stored = error
    result = BY_CODE.get(code, BrokerError)(cause, remedy, **facts)
    if isinstance(result, UnreadableEntryError):
        result.stored = b64decode(stored)
    return result
