"""Writes batches of rows to topics, each row once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import compute

from keyshard.broker.port import Broker, EntryProducer, PublishOptions
from keyshard.broker.unconfirmed import AcceptedLostError
from keyshard.columns.canonical import PartitionRows, canonical
from keyshard.columns.outgoing import Outgoing
from keyshard.config.sink import EXACTLY_ONCE, MIB, SinkConfig
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import (
    NOTHING,
    ROWS_MAX,
    BatchChangedError,
    HashingScheme,
    LaterBatchError,
    batch_layout,
    batch_of,
    first_row,
    sequence_id,
)
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import (
    BatchMismatchError,
    ConfigError,
    KeyShardError,
    ProducerFencedError,
)
from keyshard.publishing.claim import Claim
from keyshard.publishing.counts import Attempt, SinkCounts
from keyshard.publishing.preflight import deduplication_off
from keyshard.publishing.topic_tail import last_stored_id

ATTEMPTS_MAX = 4
"""Most attempts of a call whose broker loses what an earlier call had sent."""
PIECE_BYTES = 2 * MIB
"""Size of the rows of a batch that are copied at once, to be encoded; an entry may exceed it."""
ENTRY_OVERHEAD = 1_024
"""Largest size of the metadata of an entry beside its messages and keys, bytes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteReport:
    """Counts of a finished write."""

    rows: int
    """Rows of the batch."""
    entries: int
    """Entries that were published."""
    already_stored: int
    """Rows that an earlier attempt had stored."""
    topic_partitions: int
    """Topic partitions that have rows."""
    bytes: int = 0
    """Bytes of the messages that were published, before compression."""
    slowest: str = ""
    """Topic partition that was confirmed last; empty without rows to publish."""
    slowest_s: float = 0.0
    """Time until it was confirmed, seconds."""


@dataclass(slots=True)
class _Part:
    """The rows for one topic partition, and their producer."""

    where: TopicPartition
    plan: PartitionRows
    producer: EntryProducer
    attempt: Attempt
    first: int = 0
    """First row to publish."""
    known: int = 0
    """Rows that the broker knew from an earlier attempt."""
    is_new: bool = False
    """Whether the broker did not know the name of the producer."""
    is_first: bool = False
    """Whether the topic has no row of the name either."""
    sent: list[Future[EntryId | None]] = field(default_factory=list)
    """Entries that were published."""
    confirmed_s: float = 0.0
    """Monotonic time of the last confirmation, seconds."""

    @property
    def sizes(self) -> pa.Array:
        """Upper bound of the stored size of each row to publish, bytes."""
        return self.plan.sizes.slice(self.first)

    def entry_ends(self, config: SinkConfig) -> list[int]:
        """Return the end of each entry to publish, exclusive."""
        # The keys stand once more in the metadata of an entry.
        overhead = ENTRY_OVERHEAD + self.plan.batch.keys_bytes_max()
        bytes_max = min(config.entry_bytes_max, self.producer.message_bytes_max - overhead)
        ends = self.plan.entry_ends(config.entry_messages_max, bytes_max)
        return [end for end in ends if end > self.first]


def write(
    broker: Broker,
    config: SinkConfig,
    topics: Mapping[str, Outgoing],
    batch_id: int,
    *,
    name: str,
    partition: int,
    new: bool = False,
    claim: Claim | None = None,
    counts: SinkCounts | None = None,
) -> WriteReport:
    """Write a batch. With the guarantee exactly-once, a repeated call stores nothing twice.

    1. The rows of each topic get their canonical order, and are cut into entries.
    2. A producer with the name is opened for each topic partition that has rows. It says which rows
       an earlier attempt wrote.
    3. The size of every row is checked, before the first is sent.
    4. The other rows are published; their sequence ids are those of batch and row.
    5. All are confirmed, and the producers give the name back.

    The rows of step 2 may be accepted only. If the broker loses them, all begins again.

    Args:
        broker: An open connection.
        config: Options of the sink.
        topics: The rows by full topic name.
        batch_id: Id of the batch; ids of one name ascend.
        name: Producer name of this writer; not used with the guarantee ``at-least-once``.
        partition: Number of this writer, which spreads rows without a key.
        new: Whether no earlier attempt wrote any row. Otherwise the end of the topic is read for
            them if the broker does not know the name.
        claim: The query that has the sink id for itself; ``None``: several may have it.
        counts: Counts what is published; ``None``: nothing counts it.

    Raises:
        TopicNotFoundError: A topic does not exist. Nothing was sent.
        SinkIdInUseError: Another query has stored rows with the sink id, and this one has not.
        MessageTooLargeError: A row is too large. Nothing was sent.
        ProducerFencedError: The broker knows a later batch of the name.
        BatchMismatchError: An earlier attempt wrote other rows, or distributed them otherwise.
        DeduplicationError: The broker does not deduplicate the topic.
        KeyShardError: The broker refuses, or does not confirm in time.
    """
    placed = [
        one
        for topic, rows in topics.items()
        for one in place(rows, broker.partitions(topic), partition, config.hashing_scheme)
    ]
    once = config.delivery_guarantee == EXACTLY_ONCE
    writer = BatchWriter(
        broker, config, name if once else None, claim if once else None, counts=counts
    )
    try:
        report = writer.write(placed, batch_id, new=new)
    except BaseException:
        writer.leave()
        raise
    writer.close()
    return report


Placed = tuple[TopicPartition, PartitionRows]
"""The rows for one topic partition."""


def place(
    rows: Outgoing, partitions: Sequence[TopicPartition], keyless_from: int, scheme: HashingScheme
) -> list[Placed]:
    """Distribute rows over the topic partitions of their topic, in canonical order.

    Args:
        rows: Rows of one topic.
        partitions: Its topic partitions.
        keyless_from: Topic partition of the first rows without a key, modulo their number.
        scheme: Hash that chooses the topic partition of a key.

    Raises:
        ConfigError: A topic partition would get more rows than ids can number.
    """
    plans = canonical(rows, len(partitions), keyless_from=keyless_from, scheme=scheme)
    for plan in plans:
        if len(plan) > ROWS_MAX:
            raise ConfigError(
                f"The batch has {len(plan):,} rows for {partitions[plan.partition]}; the most is "
                f"{ROWS_MAX:,}. Write it in several batches, or in parts with other numbers."
            )
    return [(partitions[plan.partition], plan) for plan in plans]


class BatchWriter:
    """Writes batches under one name, and keeps its producers open between them.

    Args:
        broker: An open connection.
        config: Options of the sink.
        name: Producer name; ``None``: a repeated batch is stored again.
        claim: As for :func:`write`.
        counts: As for :func:`write`.
    """

    def __init__(
        self,
        broker: Broker,
        config: SinkConfig,
        name: str | None,
        claim: Claim | None = None,
        *,
        counts: SinkCounts | None = None,
    ) -> None:
        self._broker = broker
        self._config = config
        self._name = name
        self._claim = claim
        self._counts = counts
        self._producers: dict[TopicPartition, EntryProducer] = {}

    def write(self, placed: Sequence[Placed], batch_id: int, *, new: bool = False) -> WriteReport:
        """Write a batch, and keep the producers open; see :func:`write`.

        After an error, :meth:`leave` comes before the next call.

        Args:
            placed: The rows.
            batch_id: Id of the batch; ids of one name ascend.
            new: As for :func:`write`.
        """
        for left in reversed(range(ATTEMPTS_MAX)):
            attempt = Attempt()
            try:
                return self._write(placed, batch_id, attempt, new=new)
            except BaseException as exc:
                attempt.repeated = left > 0 and isinstance(exc, AcceptedLostError)
                if not attempt.repeated:
                    raise
            self.leave()
            new = False
            _log.info("batch %d of %s begins again: the broker has lost rows", batch_id, self._name)
        raise AssertionError("the last attempt returns or raises")

    def _write(
        self, placed: Sequence[Placed], batch_id: int, attempt: Attempt, *, new: bool
    ) -> WriteReport:
        pending_bytes_max = self._config.pending_bytes_max // max(1, len(placed))
        checksums = {where.topic: plan.checksum for where, plan in placed}
        first_id = sequence_id(batch_id, 0, batch_layout(checksums.items()))
        parts = [
            _Part(where, plan, self.open(where, pending_bytes_max, plan.batch.schema), attempt)
            for where, plan in placed
        ]
        for part in parts:
            self._find_first(part, first_id, new=new)
            _check_sizes(part)
        started_s = time.monotonic()
        if self._claim is not None:
            self._store_first(parts, self._claim, first_id)
        for part in parts:
            if not part.sent:
                _publish(part, self._config, first_id, self._counts)
        for part in parts:
            part.producer.flush()
            for one in part.sent:  # without a name, a failure concerns its own entry
                one.result()
        for part in parts:
            if self._name is not None and part.is_new and len(part.sent) == 1:
                self._prove(part, pending_bytes_max)
        return _report(parts, started_s)

    def _store_first(self, parts: Sequence[_Part], claim: Claim, first_id: int) -> None:
        """Store the first rows in each topic, unless another query has the sink id."""
        topics: dict[str, list[_Part]] = {}
        for part in parts:
            topics.setdefault(part.where.topic, []).append(part)
        timeout_s = self._config.send_timeout_ms / 1000
        for mine in topics.values():
            if all(part.is_first for part in mine):
                producers = [part.producer for part in mine]
                schema = mine[0].plan.batch.schema
                with claim.checked(self._broker, producers, schema, timeout_s):
                    # A producer with a part of its rows would be open to another attempt.
                    _publish(mine[0], self._config, first_id, self._counts)
                    mine[0].producer.flush()

    def _prove(self, part: _Part, pending_bytes_max: int) -> None:
        """Check that the broker knows the only entry of a name that was new.

        If there were more entries, the producer checked it before it sent the second one.

        Raises:
            DeduplicationError: The broker does not deduplicate the topic.
        """
        self._producers.pop(part.where).close()
        again = self.open(part.where, pending_bytes_max, part.plan.batch.schema)
        if again.last_sequence_id == NOTHING:
            raise deduplication_off(part.where.topic)

    def open(
        self, where: TopicPartition, pending_bytes_max: int, schema: TopicSchema | None = None
    ) -> EntryProducer:
        """Return the producer of a topic partition; the first call opens it.

        Args:
            where: The topic partition.
            pending_bytes_max: Most bytes without a confirmation, at least 1 MiB.
            schema: Schema of its messages.
        """
        producer = self._producers.get(where)
        if producer is None:
            how = PublishOptions(
                self._name,
                send_timeout_s=self._config.send_timeout_ms / 1000,
                pending_messages_max=2**31,
                pending_bytes_max=max(MIB, pending_bytes_max),
                compression=self._config.compression,
                schema=schema,
            )
            producer = self._producers[where] = self._broker.entry_producer(where, how)
        return producer

    def _find_first(self, part: _Part, first_id: int, *, new: bool) -> None:
        """Find the first row to publish. The broker may have forgotten the name."""
        last, name = part.producer.last_sequence_id, self._name
        part.is_new = last == NOTHING
        looked = False
        if name is not None and part.is_new and not new:
            timeout_s, looked = self._config.send_timeout_ms / 1000, True
            batch_id = batch_of(first_id)
            last = last_stored_id(self._broker, part.producer, name, batch_id, timeout_s)
        part.is_first = last == NOTHING
        _set_first(part, first_id, name, last, stored=looked)

    def close(self) -> None:
        """Give the name back.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
        """
        while self._producers:
            self._producers.popitem()[1].close()

    def leave(self) -> None:
        """Give the name back, if the broker answers."""
        while self._producers:
            _leave(self._producers.popitem()[1])


def _report(parts: Sequence[_Part], started_s: float) -> WriteReport:
    slowest = max(parts, key=lambda part: part.confirmed_s, default=None)
    sent = slowest is not None and slowest.sent
    return WriteReport(
        sum(len(part.plan) for part in parts),
        sum(len(part.sent) for part in parts),
        sum(part.known for part in parts),
        len(parts),
        sum(compute.sum(part.sizes, min_count=0).as_py() for part in parts),
        slowest.where.name if slowest is not None and sent else "",
        slowest.confirmed_s - started_s if slowest is not None and sent else 0.0,
    )


def _set_first(part: _Part, first_id: int, name: str | None, last: int, *, stored: bool) -> None:
    """Set the first row to publish, behind the last known id."""
    batch_id = batch_of(first_id)
    try:
        part.first = first_row(last, first_id, len(part.plan), stored=stored)
        part.known = max(0, last - first_id + 1)
    except LaterBatchError:
        raise ProducerFencedError(
            f"Batch {batch_id} of {name!r} is older than the newest batch of this name in "
            f"{part.where}. Another program uses the sink id, or an older attempt still runs. "
            "Give each sink and each new query its own sink id."
        ) from None
    except BatchChangedError:
        raise BatchMismatchError(
            f"Batch {batch_id} of {name!r} is distributed otherwise than in an earlier attempt, "
            f"which stored rows in {part.where}. Each attempt must have the same rows, number of "
            "topic partitions and hashing scheme. If the query is not deterministic, store the "
            "batch before you write it."
        ) from None


def _check_sizes(part: _Part) -> None:
    limit = part.producer.message_bytes_max - ENTRY_OVERHEAD
    large = compute.indices_nonzero(compute.greater(part.sizes, limit))
    for row in compute.add(large, part.first).to_pylist():
        part.producer.check(part.plan.rows(row, row + 1).messages(0, 1)[0])


def _publish(part: _Part, config: SinkConfig, first_id: int, counts: SinkCounts | None) -> None:
    """Publish the rows of a topic partition, a piece after the other as there is room."""
    start = part.first

    def confirm(_: Future[EntryId | None]) -> None:
        part.confirmed_s = time.monotonic()

    for ends in part.plan.pieces(start, part.entry_ends(config), PIECE_BYTES):
        rows = part.plan.rows(start, ends[-1])
        own_ends = [end - start for end in ends]
        sent = part.producer.publish_all(rows, own_ends, first_id + start)
        part.sent += sent
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


def _leave(producer: EntryProducer) -> None:
    try:
        producer.close()
    except KeyShardError as exc:
        _log.debug("closing a producer: %s", exc)
