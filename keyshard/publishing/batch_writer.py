"""Writes batches of rows to topics, each row once."""

from __future__ import annotations

import logging
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter, methodcaller
from typing import TypeVar

from pyarrow import compute

from keyshard.base_error import one_line
from keyshard.broker.port import Broker, EntryProducer, PublishOptions
from keyshard.broker.unconfirmed import BeginAgainError, MaybeStoredError
from keyshard.columns.canonical import PartitionRows, canonical
from keyshard.columns.outgoing import Outgoing
from keyshard.config.sink import EXACTLY_ONCE, MIB, SinkConfig
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import (
    NOTHING,
    ROWS_MAX,
    HashingScheme,
    batch_layout,
    batch_of,
    sequence_id,
)
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import (
    BrokerUnavailableError,
    ConfigError,
    KeyShardError,
    ProducerBusyError,
)
from keyshard.publishing.batch_part import Part, publish, publish_unless_cut, set_first
from keyshard.publishing.counts import Attempt, SinkCounts
from keyshard.publishing.preflight import deduplication_off
from keyshard.publishing.sink_claim import Claim
from keyshard.publishing.topic_tail import last_stored_id
from keyshard.threads import Pool

ATTEMPTS_MAX = 4
"""Most attempts of a call whose broker loses rows that an earlier call had sent."""
CUTS_MAX = 20
"""Most lost connections to a topic partition in a call, if the broker may know too few ids."""
BUSY_S = 1.0
"""Longest wait for a name in a topic partition while the writer has it in others, seconds."""
BUSY_REST_S = (0.1, 1.0)
"""Pause without any producer after that, drawn between these, seconds."""
LEAVE_S = 5.0
"""Longest wait, after an error, until the broker has taken the names back, seconds."""
THREADS_MAX = 8
"""Most producers of a batch that are opened, asked, waited for or closed at once."""
T = TypeVar("T")
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

    The broker may have accepted rows of step 2, but not stored them. If it loses them, the call
    begins again.

    Before Pulsar 5.0, a broker that has loaded the topic may know fewer rows than it stores
    (apache/pulsar#25953). So step 2 also reads the end of the topic, unless no earlier attempt
    wrote anything. If a connection is lost while rows are unconfirmed, the end is read again.

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
        for one in place(
            rows, broker.partitions(topic, create=True), partition, config.hashing_scheme
        )
    ]
    once = config.delivery_guarantee == EXACTLY_ONCE
    writer = BatchWriter(
        broker, config, name if once else None, claim if once else None, counts=counts
    )
    try:
        report = writer.write(placed, batch_id, new=new)
        writer.close()
    except BaseException:
        writer.leave()
        raise
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
        keyless_from: Number of the topic partition for the first rows without a key, modulo the
            number of topic partitions.
        scheme: Hash that chooses the topic partition of a key.

    Raises:
        ConfigError: A topic partition would get more rows than ids can number.
    """
    plans = canonical(rows, len(partitions), keyless_from=keyless_from, scheme=scheme)
    for plan in plans:
        if len(plan) > ROWS_MAX:
            raise ConfigError(
                f"The batch has {len(plan):,} rows for {partitions[plan.partition]}; the most is "
                f"{ROWS_MAX:,}.",
                "Write it in several batches, or in parts with other numbers.",
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
        self._looks: dict[TopicPartition, tuple[int, EntryId | None, int]] = {}
        """Batch of the last look into a topic partition, its last entry then, and the id found."""

    def write(self, placed: Sequence[Placed], batch_id: int, *, new: bool = False) -> WriteReport:
        """Write a batch, and keep the producers open; see :func:`write`.

        After an error, call :meth:`leave` before the next call.

        Args:
            placed: The rows.
            batch_id: Id of the batch; ids of one name ascend.
            new: As for :func:`write`.
        """
        for left in reversed(range(ATTEMPTS_MAX)):
            parts: list[Part] = []
            try:
                return self._write(parts, placed, batch_id, new=new)
            except BaseException as exc:
                begins = left > 0 and isinstance(exc, BeginAgainError)
                for part in parts:
                    part.attempt.repeated = begins
                if not begins:
                    raise
                _log.info("batch %d of %s begins again: %s", batch_id, self._name, one_line(exc))
            self.leave()
            new = False
        raise AssertionError("the last attempt returns or raises")

    def _write(
        self, parts: list[Part], placed: Sequence[Placed], batch_id: int, *, new: bool
    ) -> WriteReport:
        """Write a batch. Its rows are added to ``parts`` once their producers are open."""
        pending_bytes_max = self._config.pending_bytes_max // max(1, len(placed))
        checksums = {where.topic: plan.checksum for where, plan in placed}
        first_id = sequence_id(batch_id, 0, batch_layout(checksums.items()))
        producers = self._open_all(placed, pending_bytes_max)
        parts += (Part(*one, producer) for one, producer in zip(placed, producers, strict=True))
        find_first = partial(self._find_first, first_id=first_id, new=new)
        must_look = [self._must_look(part, new=new) for part in parts]
        _all_of(find_first, list(compress(parts, must_look)))
        for part, looked in zip(parts, must_look, strict=True):
            if not looked:
                find_first(part)
            part.began = part.first
            part.check_sizes()
        started_s = time.monotonic()
        if self._claim is not None:
            self._store_first(parts, self._claim, first_id)
        self._publish([part for part in parts if not part.sent], first_id, pending_bytes_max)
        for part in parts:
            self._confirm(part, first_id, pending_bytes_max)
        unproved = [part for part in parts if part.is_new and len(part.sent) == 1]
        if self._name is not None:
            _all_of(lambda part: self._prove(part, pending_bytes_max), unproved)
        return _report(parts, started_s)

    def _open_all(self, placed: Sequence[Placed], pending_bytes_max: int) -> list[EntryProducer]:
        """Open a producer for each topic partition, several at once.

        The lowest topic partition is opened alone, and closed last. So of two attempts with the
        same rows, one opens all topic partitions while the other waits for the lowest. Attempts
        with different rows may each have the name where the other one waits for it. So an attempt
        that has producers waits at most :data:`BUSY_S` for a busy name. Then it closes its
        producers, and begins again, until ``send_timeout_ms`` is over.

        Raises:
            ProducerBusyError: Another program has the name (retriable).
        """

        def open_one(one: Placed) -> None:
            where, plan = one
            busy_s = BUSY_S if self._producers else None
            self.open(where, pending_bytes_max, plan.batch.schema, busy_timeout_s=busy_s)

        end_s = time.monotonic() + self._config.send_timeout_ms / 1000
        while True:
            missing = sorted(
                (one for one in placed if one[0] not in self._producers), key=itemgetter(0)
            )
            try:
                _all_of(open_one, missing[:1])
                _all_of(open_one, missing[1:])
            except ProducerBusyError:
                if not self._producers or time.monotonic() >= end_s:
                    raise
            else:
                return [self._producers[where] for where, _ in placed]
            self.leave()
            time.sleep(random.uniform(*BUSY_REST_S))

    def _store_first(self, parts: Sequence[Part], claim: Claim, first_id: int) -> None:
        """Store the first rows in each topic, unless another query has the sink id."""
        topics: dict[str, list[Part]] = {}
        for part in parts:
            topics.setdefault(part.where.topic, []).append(part)
        timeout_s = self._config.send_timeout_ms / 1000
        for mine in topics.values():
            if all(part.is_first for part in mine):
                producers = [part.producer for part in mine]
                schema = mine[0].plan.batch.schema
                with claim.checked(self._broker, producers, schema, timeout_s):
                    # All rows of the topic partition: a producer that waits after the first entry
                    # may lose its name to another attempt (ADR 34).
                    publish(mine[0], self._config, first_id, self._counts)
                    mine[0].producer.flush()

    def _publish(self, parts: Sequence[Part], first_id: int, pending_bytes_max: int) -> None:
        """Publish rows. A topic partition whose producer has no room holds up no other.

        Rows that surely fit into the producer go first. The others may wait for room, in threads.
        """
        publish_one = partial(
            publish_unless_cut, config=self._config, first_id=first_id, counts=self._counts
        )
        fits = [part.bytes_max() <= max(MIB, pending_bytes_max) for part in parts]
        for part in compress(parts, fits):
            publish_one(part)
        others = [part for part, one in zip(parts, fits, strict=True) if not one]
        _all_of(publish_one, others, give_up=self.leave)

    def _confirm(self, part: Part, first_id: int, pending_bytes_max: int) -> None:
        """Wait until all rows of a topic partition are stored.

        Raises:
            BrokerUnavailableError: Too many connections were lost (retriable).
        """
        while True:
            try:
                part.confirm()
            except MaybeStoredError:
                part.is_cut = True
            if not part.is_cut:
                return
            self._resume(part, first_id, pending_bytes_max)

    def _resume(self, part: Part, first_id: int, pending_bytes_max: int) -> None:
        """Open the producer again, look which rows are stored, and publish the others."""
        part.cuts += 1
        if part.cuts == CUTS_MAX:
            raise BrokerUnavailableError(
                f"The connection to {part.where} was lost {CUTS_MAX} times while rows were "
                "unconfirmed.",
                "Repeat the call when the broker is healthy.",
            )
        part.attempt.repeated, part.attempt = True, Attempt()
        ends, part.ends, part.sent = part.ends, [], []
        _leave(self._producers.pop(part.where), time.monotonic() + LEAVE_S)
        part.producer = self.open(part.where, pending_bytes_max, part.plan.batch.schema)
        known = part.known
        self._find_first(part, first_id, new=False)
        part.known, part.is_cut = known, False
        part.entries += bisect_right(ends, part.first)
        publish_unless_cut(part, self._config, first_id, self._counts)

    def _prove(self, part: Part, pending_bytes_max: int) -> None:
        """Check that the broker deduplicates, after the first entry of a new name.

        The producer is opened again: the broker then has to know the id of that entry. A producer
        of several entries has checked this itself, before it sent the second one.

        Raises:
            DeduplicationError: The broker does not deduplicate the topic.
        """
        self._producers.pop(part.where).close()
        again = self.open(part.where, pending_bytes_max, part.plan.batch.schema)
        if again.last_sequence_id == NOTHING:
            raise deduplication_off(part.where.topic)

    def open(
        self,
        where: TopicPartition,
        pending_bytes_max: int,
        schema: TopicSchema | None = None,
        *,
        busy_timeout_s: float | None = None,
    ) -> EntryProducer:
        """Return the producer of a topic partition; the first call opens it.

        Args:
            where: The topic partition.
            pending_bytes_max: Most bytes without a confirmation, at least 1 MiB.
            schema: Schema of its messages.
            busy_timeout_s: As for :class:`~keyshard.broker.port.PublishOptions`.
        """
        producer = self._producers.get(where)
        if producer is None:
            how = PublishOptions(
                self._name,
                send_timeout_s=self._config.send_timeout_ms / 1000,
                busy_timeout_s=busy_timeout_s,
                pending_messages_max=2**31,
                pending_bytes_max=max(MIB, pending_bytes_max),
                compression=self._config.compression,
                schema=schema,
            )
            producer = self._producers[where] = self._broker.entry_producer(where, how)
        return producer

    def _must_look(self, part: Part, *, new: bool) -> bool:
        """Return whether the topic may hold rows that the broker does not know."""
        knows = part.producer.last_sequence_id != NOTHING and part.producer.knows_every_id
        return self._name is not None and not new and not knows

    def _find_first(self, part: Part, first_id: int, *, new: bool) -> None:
        """Find the first row to publish. The broker may have forgotten ids of the name."""
        last, name = part.producer.last_sequence_id, self._name
        part.is_new = last == NOTHING
        is_stored = False
        if name is not None and self._must_look(part, new=new):
            found = self._last_stored(part.producer, name, batch_of(first_id))
            last = part.producer.last_sequence_id
            part.is_new = last == NOTHING
            last, is_stored = max(found, last), found >= last
        part.is_first = last == NOTHING
        set_first(part, first_id, name, last, stored=is_stored)

    def _last_stored(self, producer: EntryProducer, name: str, batch_id: int) -> int:
        """Return the last id of the name near the end of the topic partition.

        If the producer is opened again during the search, another attempt may have stored rows, so
        the search is repeated. A known result is used again if no entry was stored after it.
        """
        end_s = time.monotonic() + self._config.send_timeout_ms / 1000
        where = producer.topic_partition
        while True:
            known, left_s = producer.last_sequence_id, max(0.0, end_s - time.monotonic())
            last, looked = producer.last_entry(), self._looks.get(where)
            if looked is not None and looked[:2] == (batch_id, last):
                found = looked[2]
            else:
                found = last_stored_id(self._broker, producer, name, batch_id, left_s, last=last)
                self._looks[where] = batch_id, last, found
            if producer.last_sequence_id == known:
                return found

    def close(self) -> None:
        """Give the name back.

        Raises:
            BrokerUnavailableError: No answer in time (retriable).
        """
        self._give_back(methodcaller("close"))

    def leave(self) -> None:
        """Give the name back, if the broker answers within a few seconds."""
        self._give_back(partial(_leave, end_s=time.monotonic() + LEAVE_S))

    def _give_back(self, close: Callable[[EntryProducer], None]) -> None:
        """Close the producers, several at once, that of the lowest topic partition last."""

        def give_back(where: TopicPartition) -> None:
            close(self._producers.pop(where))

        places = sorted(self._producers)
        _all_of(give_back, places[1:])
        _all_of(give_back, places[:1])


def _all_of(
    action: Callable[[T], object], items: Sequence[T], give_up: Callable[[], object] = tuple
) -> None:
    """Call an action for items, a few at once. After an error, ``give_up`` ends those that run."""
    if len(items) == 1:
        action(items[0])
    elif items:
        with Pool(THREADS_MAX, "keyshard-producers") as pool:
            try:
                list(pool.map(action, items))
            except BaseException:
                give_up()
                raise


def _report(parts: Sequence[Part], started_s: float) -> WriteReport:
    slowest = max(parts, key=lambda part: part.confirmed_s, default=None)
    sent = slowest is not None and slowest.confirmed_s
    return WriteReport(
        sum(len(part.plan) for part in parts),
        sum(part.entries + len(part.sent) for part in parts),
        sum(part.known for part in parts),
        len(parts),
        sum(compute.sum(part.plan.sizes.slice(part.began), min_count=0).as_py() for part in parts),
        slowest.where.name if slowest is not None and sent else "",
        slowest.confirmed_s - started_s if slowest is not None and sent else 0.0,
    )


def _leave(producer: EntryProducer, end_s: float) -> None:
    try:
        producer.close(max(0.001, end_s - time.monotonic()))
    except KeyShardError as exc:
        _log.debug("closing a producer: %s", exc.summary)
