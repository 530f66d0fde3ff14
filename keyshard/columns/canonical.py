"""The canonical order of a batch: the same rows give the same entries and sequence ids.

A retry may get the rows of different keys in another order. So rows are grouped by topic partition
and routing key, and the groups are sorted. The rows of a key keep their order.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import compute

from keyshard.columns.outgoing import Outgoing
from keyshard.core.publishing import HashingScheme, entry_ends, key_partition

KEYLESS_RUN = 1_000
"""Rows without a key that go to one topic partition before the next takes over."""


@dataclass(frozen=True, slots=True)
class PartitionRows:
    """The rows of a batch for one topic partition, in canonical order."""

    partition: int
    batch: Outgoing
    """All rows of the batch, in any order."""
    order: pa.Array
    """The place in ``batch`` of each row."""
    sizes: pa.Array
    """Upper bound of the stored size of each row, bytes."""
    key_ends: list[int]
    """End of the rows of each routing key, exclusive."""
    checksum: int
    """Checksum of the distribution of all rows of the batch; the same for each topic partition."""

    def entry_ends(self, messages_max: int, bytes_max: int) -> list[int]:
        """Cut the rows into entries of one routing key; return the end of each, exclusive."""
        sizes = compute.cumulative_sum(self.sizes).to_pylist()
        return entry_ends(self.key_ends, sizes, messages_max, bytes_max, self._delayed())

    def __len__(self) -> int:
        return len(self.order)

    def rows(self, start: int, stop: int) -> Outgoing:
        """Copy the rows from ``start`` to ``stop``, exclusive."""
        return self.batch.take(self.order.slice(start, stop - start))

    def pieces(self, start: int, ends: Sequence[int], bytes_max: int) -> Iterator[list[int]]:
        """Group entries, so that no more than a piece of the batch is copied at once.

        Args:
            start: First row.
            ends: End of each entry, exclusive.
            bytes_max: Largest size of the rows of a group; a single entry may exceed it.

        Yields:
            The ends of the entries of each group.
        """
        sizes = compute.cumulative_sum(self.sizes)
        first = 0
        while first < len(ends):
            before = sizes[start - 1].as_py() if start else 0
            last = bisect_right(
                ends, before + bytes_max, first, key=lambda end: sizes[end - 1].as_py()
            )
            last = max(first + 1, last)
            yield list(ends[first:last])
            start, first = ends[last - 1], last

    def _delayed(self) -> list[int]:
        """Return the rows with a time of delivery: the broker delays whole entries."""
        times = self.batch.deliver_at_ms
        if times is None:
            return []
        found: list[int] = compute.indices_nonzero(
            compute.is_valid(times.take(self.order))
        ).to_pylist()
        return found


def canonical(
    columns: Outgoing,
    partitions: int,
    *,
    keyless_from: int,
    scheme: HashingScheme,
) -> list[PartitionRows]:
    """Distribute rows over topic partitions, and sort them.

    Args:
        columns: The rows.
        partitions: Number of topic partitions, at least 1.
        keyless_from: Topic partition of the first rows without a key, modulo ``partitions``. Such
            rows keep the order of ``columns``.
        scheme: Hash that chooses the topic partition of a key.

    Returns:
        The rows of each topic partition that has some, ascending.
    """
    if not len(columns):
        return []
    places = _partitions(columns, partitions, keyless_from, scheme)
    routing = columns.routing_keys.dictionary_encode(null_encoding="encode")
    distinct = len(routing.dictionary)
    # The inverse of the order is the rank of each key.
    ranks = compute.sort_indices(compute.sort_indices(routing.dictionary)).cast(pa.int64())
    groups = compute.add(compute.multiply(places, distinct), ranks.take(routing.indices))
    order = compute.sort_indices(groups)
    ends = compute.run_end_encode(groups.take(order)).run_ends.to_pylist()
    sizes = pa.array(columns.sizes(), pa.int64()).take(order)
    found: list[PartitionRows] = []
    start = first = 0
    encoded = compute.run_end_encode(places.take(order))
    place_ends = dict(zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True))
    checksum = zlib.crc32(f"{scheme} {partitions} {place_ends}".encode())
    checksum = zlib.crc32(array("q", ends), checksum)
    for place, stop in place_ends.items():
        last = bisect_right(ends, stop, first)
        key_ends = [end - start for end in ends[first:last]]
        count = stop - start
        found.append(
            PartitionRows(
                place,
                columns,
                order.slice(start, count),
                sizes.slice(start, count),
                key_ends,
                checksum,
            )
        )
        start, first = stop, last
    return found


def _partitions(
    columns: Outgoing, partitions: int, keyless_from: int, scheme: HashingScheme
) -> pa.Array:
    """Return the topic partition of each row."""
    if partitions == 1:
        return pa.repeat(pa.scalar(0, pa.int64()), len(columns))
    keys = columns.keys.dictionary_encode()
    chosen = pa.array(
        [
            key_partition(columns.key_text(key), partitions, scheme)
            for key in keys.dictionary.to_pylist()
        ],
        pa.int64(),
    )
    found = chosen.take(keys.indices)
    if not found.null_count:
        return found
    rows = compute.indices_nonzero(compute.is_null(found)).to_pylist()
    keyless = [(keyless_from + number // KEYLESS_RUN) % partitions for number in range(len(rows))]
    return compute.replace_with_mask(found, compute.is_null(found), pa.array(keyless, pa.int64()))
