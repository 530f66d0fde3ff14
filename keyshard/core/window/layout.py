"""The layout of a batch: the host's partition of each entry, and the order in it.

The layout is a pure function of the batch's end checkpoint and its entries. So a batch that runs
again, with another number of ranges or another release, has the same rows in the same places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import RING_SIZE, range_index
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.topic_segments import is_segment, reading_order

ROWS_PER_PARTITION_MIN = 50_000
"""Row count that justifies a partition of the host, unless the rows are large."""
BYTES_PER_PARTITION_MIN = 8 * 1024 * 1024
"""Payload that justifies a partition of the host, bytes."""

Located = tuple[TopicPartition, EntryBlock]
"""An entry and its topic partition."""


def home_range(
    topic_partition: TopicPartition, entry_id: EntryId, slot: int | None, ranges: int
) -> int:
    """Return the index of the range of an entry. Keyless entries are spread by their position."""
    if slot is None:
        slot = key_slot(f"{topic_partition.name}:{entry_id.ledger}:{entry_id.entry}")
    return range_index(slot, ranges)


def merged(rows: int, size_bytes: int, ranges: int) -> int:
    """Return the number of partitions of a batch, while nothing is known of the cost of its rows.

    Small batches merge neighbouring ranges: a host needs tens of milliseconds for each partition.

    Args:
        rows: Rows of the batch.
        size_bytes: Payload of the batch.
        ranges: Number of ranges.

    Returns:
        1 to ``ranges``.
    """
    wanted = max(rows // ROWS_PER_PARTITION_MIN, size_bytes // BYTES_PER_PARTITION_MIN)
    return min(ranges, max(1, wanted))


def shared_partition(range_index: int, ranges: int, partitions: int) -> int:
    """Return the partition of a range when neighbouring ranges share partitions."""
    return range_index * partitions // ranges


def lay_out(
    entries: Mapping[TopicPartition, Sequence[EntryBlock]],
    ranges: int,
    partitions: int | None = None,
) -> dict[int, list[Located]]:
    """Distribute the entries of a batch over its partitions.

    Args:
        entries: Entries of the batch per topic partition, ascending by position.
        ranges: Number of ranges in the batch's end checkpoint.
        partitions: Number of partitions in that checkpoint, if ranges share them; ``None``: one per
            range.

    Returns:
        For each partition with data, ascending: its entries by (topic partition, ledger, entry).
        Segments come after their ancestors. An entry of a segment is in each partition that has
        some of its messages; see :func:`own`.
    """
    result: defaultdict[int, list[Located]] = defaultdict(list)
    count = partitions or ranges
    for topic_partition in sorted(entries, key=reading_order):
        segment = is_segment(topic_partition)
        for block in entries[topic_partition]:
            if segment and block.mixed_slots:
                for index in set(_partitions_of(topic_partition, block, ranges, count)):
                    result[index].append((topic_partition, block))
                continue
            # By the text of its key: a replayed batch does not know which range received it.
            slot = block.text_slots[0] if block.keys_of_bytes else block.slot
            # Runs for every entry: a call for each is half of the cost.
            index = (
                home_range(topic_partition, block.id, slot, ranges)
                if slot is None
                else slot * ranges // RING_SIZE
            )
            result[index * count // ranges].append((topic_partition, block))
    return dict(sorted(result.items()))


def own(
    located: Located, index: int, ranges: int, partitions: int | None = None
) -> list[int] | None:
    """Return the messages of an entry that one partition of a batch has, by their numbers in it.

    Producers of Pulsar 5 batch keys of different ranges in segments of scalable topics. Such an
    entry is divided by slot, so that all messages of a key are in one partition. An entry of any
    other topic is in one partition, as in all releases of keyshard: a batch that runs again has
    the same rows in the same places.

    Args:
        located: An entry of that partition.
        index: Number of the partition.
        ranges: As for :func:`lay_out`.
        partitions: As for :func:`lay_out`.

    Returns:
        ``None``: all messages of the block.
    """
    where, block = located
    if not (block.mixed_slots and is_segment(where)):
        return None
    of_each = _partitions_of(where, block, ranges, partitions or ranges)
    found = [row for row, partition in enumerate(of_each) if partition == index]
    return None if len(found) == len(of_each) else found


def _partitions_of(where: TopicPartition, block: EntryBlock, ranges: int, count: int) -> list[int]:
    """Return the partition of each message of an entry."""
    slots = block.text_slots
    home = home_range(where, block.id, None, ranges) if None in slots else 0
    keyless = home * count // ranges
    return [
        keyless if slot is None else slot * ranges // RING_SIZE * count // ranges for slot in slots
    ]
