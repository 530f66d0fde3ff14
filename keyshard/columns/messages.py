"""Makes messages for handlers from entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import repeat
from typing import Any

import pyarrow as pa

from keyshard.columns.content import gather, names_in
from keyshard.core.message import Message, MessageId
from keyshard.core.metadata_columns import KEY_BYTES
from keyshard.core.position.entry import EntryBlock, TopicPartition


def messages_of(topic_partition: TopicPartition, block: EntryBlock) -> list[Message]:
    """Return the messages of an entry, in the order of their indices."""
    return next(messages_of_each([(topic_partition, block)]))


def messages_of_each(
    entries: Sequence[tuple[TopicPartition, EntryBlock]],
) -> Iterator[list[Message]]:
    """Return the messages of each entry, in the order of their indices.

    It converts all entries together, because a column costs as much for one message as for a
    hundred.
    """
    blocks = [block for _, block in entries]
    columns = gather(blocks, names_in(blocks))
    # The constructors of named tuples take several times as long.
    new = tuple.__new__
    rows = zip(
        columns["value"].to_pylist(), columns["__key"].to_pylist(),
        _mostly_null(columns["__orderingKey"]), _mostly_null(columns["__eventTime"]),
        _properties(columns["__properties"]),
        columns[KEY_BYTES].to_pylist() if KEY_BYTES in columns else repeat(None), strict=False,
    )  # fmt: skip
    for where, block in entries:
        topic, partition = where.topic, where.partition
        ledger, entry = block.id
        published = datetime.fromtimestamp(block.publish_ms / 1000, timezone.utc)
        redelivered, version = block.redelivered, block.schema_version
        yield [
            new(Message, (
                value, key, ordering_key, new(MessageId, (ledger, entry, index)), topic, partition,
                published, event_time, properties, slot, redelivered, version, key_bytes,
            ))
            for index, slot, (
                value, key, ordering_key, event_time, properties, key_bytes,
            ) in zip(
                block.indices, block.slots, rows, strict=False
            )
        ]  # fmt: skip


def _mostly_null(column: pa.Array) -> list[Any]:
    if column.null_count == len(column):
        return [None] * len(column)
    values: list[Any] = column.to_pylist()
    return values


def _properties(column: pa.Array) -> list[dict[str, str]]:
    offsets = column.offsets
    if offsets[0] == offsets[len(column)]:
        return [{} for _ in range(len(column))]
    return list(map(dict, column.to_pylist()))
