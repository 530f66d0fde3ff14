"""The layout of a batch: which entries go to which partition of the host, in which order.

A pure function of the batch's end checkpoint and its entries, so that a batch which runs again,
under another number of ranges or another release, has the same rows in the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keyshard.core.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.hash_range import range_index
from keyshard.core.key_slot import key_slot

Located = tuple[TopicPartition, EntryBlock]
"""An entry and the topic partition it lies in."""


def home_range(
    topic_partition: TopicPartition, entry_id: EntryId, slot: int | None, ranges: int
) -> int:
    """Index of the range that an entry belongs to; keyless entries are spread by their position."""
    if slot is None:
        slot = key_slot(f"{topic_partition.name}:{entry_id.ledger}:{entry_id.entry}")
    return range_index(slot, ranges)


def lay_out(
    entries: Mapping[TopicPartition, Iterable[EntryBlock]], ranges: int
) -> dict[int, list[Located]]:
    """Distribute the entries of a batch over its ranges.

    Args:
        entries: Entries of the batch per topic partition, in any order.
        ranges: Number of ranges written in the batch's end checkpoint.

    Returns:
        Per range that has data, ascending: its entries by (topic partition, ledger, entry).
    """
    result: dict[int, list[Located]] = {}
    for topic_partition in sorted(entries):
        for block in sorted(entries[topic_partition], key=lambda block: block.id):
            index = home_range(topic_partition, block.id, block.slot, ranges)
            result.setdefault(index, []).append((topic_partition, block))
    return dict(sorted(result.items()))
