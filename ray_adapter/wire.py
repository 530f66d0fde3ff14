"""What travels to an actor: Arrow columns, and for messages where each entry was stored.

Columns travel without a copy through Ray's object store. Nothing is pickled message by message
where entries have several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from keyshard.arrow.content import content_with, gather, metadata_in, names_in
from keyshard.arrow.messages import messages_of_each
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition

if TYPE_CHECKING:
    from ray_adapter.portions import Piece


class MessageRows(NamedTuple):
    """Some entries: the content of their messages, and what else makes each entry."""

    content: pa.RecordBatch
    entries: list[tuple[Any, ...]]


def message_rows(pieces: Sequence[Piece]) -> MessageRows:
    """Pieces for handlers of messages."""
    blocks = [piece.block for piece in pieces]
    names = names_in(blocks)
    content = pa.RecordBatch.from_arrays(
        list(gather(blocks, names).values()), schema=content_with(metadata_in(names))
    )
    return MessageRows(content, [_to_wire(*piece[:2]) for piece in pieces])


def arrow_rows(pieces: Sequence[Piece]) -> pa.RecordBatch:
    """Pieces for handlers of Arrow: the default columns, and those that the source names."""
    # Actors need none of what this imports.
    from keyshard.arrow.columns import columns_of  # noqa: PLC0415
    from keyshard.handlers.batches import one_record_batch  # noqa: PLC0415

    located = [(piece.where, piece.block) for piece in pieces]
    metadata = metadata_in(names_in([piece.block for piece in pieces]))
    return one_record_batch(located, columns_of(metadata))


def messages(rows: MessageRows) -> Iterator[list[Message]]:
    """The messages of each entry, in their order."""
    start = 0
    located: list[tuple[TopicPartition, EntryBlock]] = []
    for wire in rows.entries:
        located.append(_from_wire(wire, rows.content, start))
        start += located[-1][1].rows
    return messages_of_each(located)


def _to_wire(where: TopicPartition, block: EntryBlock) -> tuple[Any, ...]:
    return (
        where.topic, where.partition, *block.id, block.indices, block.slot, block.mixed_slots,
        block.publish_ms, block.redelivered, block.schema_version,
    )  # fmt: skip


def _from_wire(
    wire: tuple[Any, ...], content: pa.RecordBatch, start: int
) -> tuple[TopicPartition, EntryBlock]:
    (
        topic, partition, ledger, entry, indices, slot, mixed_slots, publish_ms, redelivered,
        schema_version,
    ) = wire  # fmt: skip
    rows = len(indices)
    block = EntryBlock(
        EntryId(ledger, entry), batch_size=rows, batched=True, indices=indices, slot=slot,
        mixed_slots=mixed_slots, publish_ms=publish_ms, payload_bytes=0,
        content=content, start=start, redelivered=redelivered,
        schema_version=schema_version,
    )  # fmt: skip
    return TopicPartition(topic, partition), block
