"""Decisions about publishing: partitions of keys, entries, and the continuation after a reconnect.

Pulsar's deduplication stores a message once if it comes again under the same producer name and
sequence id. The broker compares only the first id of an entry, so an entry that holds old and new
messages would be dropped whole. The functions here keep the two apart.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import mmh3

NOTHING = -1
"""Last sequence id of a producer name that the broker does not know."""
HashingScheme = Literal["java", "murmur3"]
_ROW_BITS, _LAYOUT_BITS = 24, 8
BATCH_ID_MAX = (1 << 31) - 1
ROWS_MAX = 1 << _ROW_BITS
"""Most rows of a batch in one topic partition."""
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_QUERY = re.compile(rf"({_UUID})-\d+")
_WRITER = re.compile(rf"(.*-{_UUID}-)\d+")
LAYOUTS = 1 << _LAYOUT_BITS
"""Number of layouts that ids can tell apart."""


def sequence_id(batch_id: int, row: int, layout: int = 0) -> int:
    """Return the sequence id of a row of a batch; ids ascend with batches, then with rows.

    Args:
        batch_id: Id of the batch.
        row: Place of the row in its topic partition.
        layout: Layout of the batch; all its rows have the same.
    """
    return (batch_id << _LAYOUT_BITS | layout) << _ROW_BITS | row


def batch_of(sequence: int) -> int:
    """Return the batch of a sequence id."""
    return sequence >> _LAYOUT_BITS + _ROW_BITS


def layout_of(sequence: int) -> int:
    """Return the layout of a sequence id."""
    return sequence >> _ROW_BITS & (LAYOUTS - 1)


def row_of(sequence: int) -> int:
    """Return the row of a sequence id."""
    return sequence & (ROWS_MAX - 1)


def query_of(producer: str, sink_id: str) -> str | None:
    """Return the query of a producer of a sink; ``None`` if the producer is another one.

    The producers of a query are named by sink id, query id and number of the writer. A query id is
    a UUID, so the sink id ``a`` has no producer of the sink id ``a-b``.
    """
    if not producer.startswith(f"{sink_id}-"):
        return None
    found = _QUERY.fullmatch(producer, len(sink_id) + 1)
    return found[1] if found else None


def writers_of(producer: str) -> str | None:
    """Return the beginning of the names of all producers of a producer's query.

    ``None`` if the producer belongs to no query.
    """
    found = _WRITER.fullmatch(producer)
    return found[1] if found else None


class LaterBatchError(Exception):
    """The broker knows a later batch of the producer name."""


class BatchChangedError(Exception):
    """The broker knows rows of this batch that the given batch lacks, or another layout of it."""


def batch_layout(topics: Iterable[tuple[str, int]]) -> int:
    """Return the layout of a batch, which says how its rows are distributed.

    Repeated attempts must have the same. The order of the topics does not matter.

    Args:
        topics: Name of each topic, and a checksum of how its rows are distributed.
    """
    return sum(zlib.crc32(name.encode(), checksum) for name, checksum in topics) % LAYOUTS


def first_row(last: int, first_id: int, rows: int, *, stored: bool = False) -> int:
    """Return the first row of a batch that is to be published.

    Args:
        last: Last sequence id that the broker knows of the producer name.
        first_id: Sequence id of the first row of the batch.
        rows: Number of its rows.
        stored: Whether everything up to ``last`` is surely stored.

    Returns:
        0 if the broker knows no row of the batch. Otherwise the last row that it knows, because
        that row may not be stored. With ``stored``, the row after that one.

    Raises:
        LaterBatchError: The broker knows a later batch.
        BatchChangedError: The broker knows a row that the batch does not have, or another layout.
    """
    if batch_of(last) < batch_of(first_id):
        return 0
    if batch_of(last) > batch_of(first_id):
        raise LaterBatchError
    if layout_of(last) != layout_of(first_id) or row_of(last) >= rows:
        raise BatchChangedError
    return row_of(last) + stored


def key_partition(key: str, partitions: int, scheme: HashingScheme = "java") -> int:
    """Return the topic partition of a key, as Pulsar's clients choose it.

    Args:
        key: Partition key as text. A key of bytes counts as its base64, as in Java.
        partitions: Number of topic partitions, at least 1.
        scheme: ``java`` is the default of the Java client, ``murmur3`` its alternative.
    """
    if scheme == "murmur3":
        return (mmh3.hash(key.encode(), 0, signed=False) & 0x7FFFFFFF) % partitions
    number = 0
    data = key.encode("utf-16-be", "surrogatepass")
    for place in range(0, len(data), 2):
        number = (31 * number + (data[place] << 8 | data[place + 1])) & 0xFFFFFFFF
    return (number & 0x7FFFFFFF) % partitions


def entry_ends(
    group_ends: Sequence[int],
    sizes: Sequence[int],
    messages_max: int,
    bytes_max: int,
    alone: Collection[int] = (),
) -> list[int]:
    """Cut rows into entries; each entry lies in one group.

    Args:
        group_ends: End of each group of adjacent rows, exclusive, ascending. The rows of a group
            have one routing key.
        sizes: Sum of the sizes of all rows up to and including each, bytes.
        messages_max: Most rows of an entry.
        bytes_max: Most bytes of an entry; a larger row is an entry of its own.
        alone: Rows that are entries of their own.

    Returns:
        End of each entry, exclusive, ascending.
    """
    if not alone and len(sizes) <= messages_max and sizes and sizes[-1] <= bytes_max:
        return list(group_ends)
    ends: list[int] = []
    single = sorted(alone)
    start = next_single = 0
    for group_end in group_ends:
        while start < group_end:
            before = sizes[start - 1] if start else 0
            stop = min(
                group_end, start + messages_max, bisect_right(sizes, before + bytes_max, start)
            )
            while next_single < len(single) and single[next_single] < start:
                next_single += 1
            if next_single < len(single) and single[next_single] < stop:
                stop = max(start + 1, single[next_single])
            start = max(stop, start + 1)
            ends.append(start)
    return ends


@dataclass(frozen=True, slots=True)
class Resume:
    """How to continue with unconfirmed entries on a new connection."""

    covered: int
    """Number of entries whose ids the broker knows all."""
    probe: int | None
    """Sequence id that the broker knows last, if it is not known to be stored. A message with this
    id alone is sent first: if it is a duplicate, everything up to it is stored."""
    split: bool
    """Whether the broker knows a part of the next entry; the rest becomes an entry."""


class UnfitError(Exception):
    """The ids that the broker knows do not fit the entries of a producer."""


class OtherWriterError(UnfitError):
    """The broker knows ids of this producer name that no unconfirmed entry has."""


class RolledBackError(UnfitError):
    """The broker has lost ids that it had accepted, and that the caller took for known."""


class ForgottenError(UnfitError):
    """The broker no longer knows ids that it has confirmed."""


class UnsureError(UnfitError):
    """The broker may have stored more ids of this producer name than it knows."""


def resume(last: int, confirmed: int, entries: Sequence[tuple[int, int]]) -> Resume:
    """Decide where to continue, on a new connection or when entries are added.

    Args:
        last: Last sequence id that the broker knows of this producer name. It may still be lost.
        confirmed: Last id that the broker confirmed as stored, :data:`NOTHING` for none.
        entries: First and last id of each unconfirmed entry, ascending.

    Raises:
        OtherWriterError: Another producer used the name.
        ForgottenError: Deduplication is off, or the broker forgot the name.
    """
    if last < confirmed:
        raise ForgottenError
    if last == confirmed or not entries or entries[0][0] > last:
        return Resume(0, None, split=False)
    covered = 0
    while covered < len(entries) and entries[covered][1] <= last:
        covered += 1
    split = covered < len(entries) and entries[covered][0] <= last
    if not split and entries[covered - 1][1] != last:
        raise OtherWriterError
    return Resume(covered, last, split)
