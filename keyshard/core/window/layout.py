"""The layout of a batch: which entries go to which partition of the host, in which order.

A pure function of the batch's end checkpoint and its entries, so that a batch which runs again,
under another number of ranges or another release, has the same rows in the same places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot

ROWS_PER_PARTITION_MIN = 100
"""Rows that are worth a partition of the host, unless they are large."""
BYTES_PER_PARTITION_MIN = 1024 * 1024
"""Payload that is worth a partition of the host, bytes."""

Located = tuple[TopicPartition, EntryBlock]
"""An entry and the topic partition it lies in."""


def home_range(
    topic_partition: TopicPartition, entry_id: EntryId, slot: int | None, ranges: int
) -> int:
    """Index of the range that an entry belongs to; keyless entries are spread by their position."""
    if slot is None:
        slot = key_slot(f"{topic_partition.name}:{entry_id.ledger}:{entry_id.entry}")
    return range_index(slot, ranges)


def merged(rows: int, size_bytes: int, ranges: int) -> int:
    """Number of partitions for a batch: a small one puts several ranges into one partition.

    A host pays tens of milliseconds for each partition, whatever is in it.

    Args:
        rows: Rows of the batch.
        size_bytes: Payload of the batch.
        ranges: Number of ranges.

    Returns:
        1 to ``ranges``; decided at the cut and stored in the batch's checkpoint.
    """
    wanted = max(rows // ROWS_PER_PARTITION_MIN, size_bytes // BYTES_PER_PARTITION_MIN)
    return min(ranges, max(1, wanted))


def shared_partition(range_index: int, ranges: int, partitions: int) -> int:
    """The partition of a batch that a range lies in, when neighbouring ranges share them."""
    return range_index * partitions // ranges


def lay_out(
    entries: Mapping[TopicPartition, Sequence[EntryBlock]],
    ranges: int,
    partitions: int | None = None,
) -> dict[int, list[Located]]:
    """Distribute the entries of a batch over its partitions.

    Args:
        entries: Entries of the batch per topic partition, ascending by position.
        ranges: Number of ranges written in the batch's end checkpoint.
        partitions: Number of partitions written there, when neighbouring ranges share them;
            ``None``: one per range.

    Returns:
        Per partition that has data, ascending: its entries by (topic partition, ledger, entry).
    """
    result: dict[int, list[Located]] = {}
    count = partitions or ranges
    for topic_partition in sorted(entries):
        for block in entries[topic_partition]:
            # By the text of its key: a batch that is read again knows no range that it came to.
            slot = block.text_slots[0] if block.keys_of_bytes else block.slot
            index = home_range(topic_partition, block.id, slot, ranges)
            part = shared_partition(index, ranges, count)
            result.setdefault(part, []).append((topic_partition, block))
    return dict(sorted(result.items()))
