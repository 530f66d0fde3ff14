"""The rows of a batch for one topic partition, on their way to its broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import compute

from keyshard.broker.port import EntryProducer
from keyshard.broker.unconfirmed import ENTRY_MEMORY, MaybeStoredError
from keyshard.columns.canonical import PartitionRows
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.sink import MIB, SinkConfig
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import (
    BatchChangedError,
    LaterBatchError,
    batch_of,
    first_row,
)
from keyshard.errors import (
    BatchMismatchError,
    ProducerFencedError,
)
from keyshard.publishing.counts import Attempt, SinkCounts

PIECE_BYTES = 2 * MIB
"""Size of the rows of a batch that are copied at once, to be encoded; an entry may exceed it."""
ENTRY_OVERHEAD = 1_024
"""Largest size of the metadata of an entry beside its messages and keys, bytes."""


@dataclass(slots=True)
class Part:
    """The rows for one topic partition, and their producer."""

    where: TopicPartition
    plan: PartitionRows
    producer: EntryProducer
    attempt: Attempt = field(default_factory=Attempt)
    first: int = 0
    """First row to publish."""
    known: int = 0
    """Rows that the broker knew from an earlier attempt."""
    is_new: bool = False
    """Whether the broker did not know the name of the producer."""
    is_first: bool = False
    """Whether the topic has no row of the name either."""
    sent: list[Future[EntryId | None]] = field(default_factory=list)
    """Entries that were published to the producer."""
    ends: list[int] = field(default_factory=list)
    """End of each of them, exclusive, in rows."""
    entries: int = 0
    """Entries that earlier producers stored."""
    began: int = 0
    """First row that the call published."""
    cuts: int = 0
    """Connections that were lost while rows were unconfirmed."""
    is_cut: bool = False
    """Whether a connection was lost, so that the stored rows must be looked up."""
    confirmed_s: float = 0.0
    """Monotonic time of the last confirmation, seconds."""

    def confirm(self) -> None:
        """Wait until everything that was published is stored."""
        if not self.is_cut:
            self.producer.flush()
            for one in self.sent:  # without a producer name, flush() raises no error of an entry
                one.result()

    def check_sizes(self) -> None:
        """Check that no row to publish is too large; see :func:`check_sizes`."""
        rows, first = self.plan.rows, self.first
        sizes = self.plan.sizes.slice(first)
        check_sizes(
            self.producer, sizes, lambda row: rows(first + row, first + row + 1).messages(0, 1)[0]
        )

    def bytes_max(self) -> int:
        """Return the most memory that the rows to publish may take as entries, bytes."""
        sizes = self.plan.sizes.slice(self.first)
        overhead = ENTRY_OVERHEAD + ENTRY_MEMORY + self.plan.batch.keys_bytes_max()
        rows: int = compute.sum(sizes, min_count=0).as_py()
        return rows + len(sizes) * overhead

    def entry_ends(self, config: SinkConfig) -> list[int]:
        """Return the end of each entry to publish, exclusive."""
        # The metadata of an entry repeats its keys.
        overhead = ENTRY_OVERHEAD + self.plan.batch.keys_bytes_max()
        bytes_max = min(config.entry_bytes_max, self.producer.message_bytes_max - overhead)
        ends = self.plan.entry_ends(config.entry_messages_max, bytes_max)
        return [end for end in ends if end > self.first]


def set_first(part: Part, first_id: int, name: str | None, last: int, *, stored: bool) -> None:
    """Set the first row to publish.

    It is the row with the last known id, or the next one if that row is stored. If no row of the
    batch is known, it is row 0.
    """
    batch_id = batch_of(first_id)
    try:
        part.first = first_row(last, first_id, len(part.plan), stored=stored)
        part.known = max(0, last - first_id + 1)
    except LaterBatchError:
        raise ProducerFencedError(
            f"Batch {batch_id} of {name!r} is older than the newest batch of this name in "
            f"{part.where}. Another program uses the sink id, or an older attempt still runs.",
            "Give each sink and each new query its own sink id.",
        ) from None
    except BatchChangedError:
        raise BatchMismatchError(
            f"Batch {batch_id} of {name!r} is distributed otherwise than in an earlier attempt, "
            f"which stored rows in {part.where}. Each attempt must have the same rows, number of "
            "topic partitions and hashing scheme.",
            "If the query is not deterministic, store the batch before you write it. If topic "
            "partitions were added since, another sink id goes on; rows of this batch that are "
            "stored are then stored again.",
        ) from None


def check_sizes(
    producer: EntryProducer, sizes: pa.Array, message_at: Callable[[int], OutgoingMessage]
) -> None:
    """Check that no row is too large for the broker.

    Args:
        producer: A producer of the topic.
        sizes: Upper bound of the stored size of each row, bytes.
        message_at: Returns a row.

    Raises:
        MessageTooLargeError: A row is too large.
    """
    limit = producer.message_bytes_max - ENTRY_OVERHEAD
    for row in compute.indices_nonzero(compute.greater(sizes, limit)).to_pylist():
        producer.check(message_at(row))


def publish_unless_cut(
    part: Part, config: SinkConfig, first_id: int, counts: SinkCounts | None
) -> None:
    try:
        publish(part, config, first_id, counts)
    except MaybeStoredError:
        part.is_cut = True


def publish(part: Part, config: SinkConfig, first_id: int, counts: SinkCounts | None) -> None:
    """Publish the rows of a topic partition, one piece after another, as the producer has room."""
    start = part.first

    def confirm(_: Future[EntryId | None]) -> None:
        part.confirmed_s = time.monotonic()

    for ends in part.plan.pieces(start, part.entry_ends(config), PIECE_BYTES):
        rows = part.plan.rows(start, ends[-1])
        own_ends = [end - start for end in ends]
        sent = part.producer.publish_all(rows, own_ends, first_id + start)
        part.sent += sent
        part.ends += ends
        if counts is not None:
            sizes = part.plan.sizes.slice(start, own_ends[-1])
            counts.add(part.where, own_ends, compute.sum(sizes).as_py(), sent, part.attempt)
        start = ends[-1]
        _raise_failures(sent)
    if part.sent:
        part.sent[-1].add_done_callback(confirm)
    _raise_failures(part.sent)


def _raise_failures(sent: Sequence[Future[EntryId | None]]) -> None:
    for one in sent:
        if one.done():
            one.result()
