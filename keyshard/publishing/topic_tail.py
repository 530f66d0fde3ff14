"""Finds the rows of a producer name, or of a query, at the end of a topic partition.

A broker forgets a name some hours after its last producer has left. It then says that it knows no
row of a batch, although an earlier attempt stored some. Stored entries still have names and ids.
The names also say which query of a sink stored the entries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from pyarrow import compute

from keyshard.broker.port import Broker, EntryProducer, Reader, ReadOptions
from keyshard.broker.unreadable_entries import entry_of
from keyshard.columns.content import gather
from keyshard.core.metadata_columns import PRODUCER, SEQUENCE_ID
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.publishing import NOTHING, query_of, sequence_id, writers_of
from keyshard.errors import BrokerUnavailableError, ChunkedMessageError, UnreadableEntryError

FIRST_SPAN = 4
"""Entries of the first look into a ledger."""
WIDER = 4
"""Factor by which each look is longer than the one before."""
READ_WAIT_MS = 50
"""Longest wait for an entry before the end is asked for, milliseconds."""
_COLUMNS = (PRODUCER, SEQUENCE_ID)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TailLimits:
    """How far back the end of a topic partition is read."""

    entries: int
    bytes: int


FIRST_BATCH_LIMITS = TailLimits(1_000, 4 * 1024 * 1024)
"""Limits for batch 0: a name that the broker does not know is new nearly always."""
LATER_BATCH_LIMITS = TailLimits(20_000, 64 * 1024 * 1024)
"""Limits for later batches."""
SMALL = TailLimits(256, 4 * 1024 * 1024)
"""Limits for reading older ledgers forwards, before the end of a ledger is searched."""


def last_stored_id(
    broker: Broker,
    producer: EntryProducer,
    name: str,
    batch_id: int,
    timeout_s: float,
    *,
    last: EntryId | None,
) -> int:
    """Return the last sequence id of a name that is stored near the end of a topic partition.

    Each look ends where the one before began, until one of them finds the name, or the limit is
    reached. Sequence ids ascend, so the newest entry of the name has the last one. A query begins
    a batch when it has stored the one before. So the search also ends at an entry of an earlier
    batch of its query: the name has no row of this batch before it.

    Args:
        broker: An open connection.
        producer: The producer that has the name, so no other one stores anything under it.
        name: Name of the producer.
        batch_id: Id of the batch that is written.
        timeout_s: Longest time, seconds.
        last: The last entry of the topic partition; ``None`` if it is empty.

    Returns:
        The id, or :data:`~keyshard.core.publishing.NOTHING` if the entries up to the limit have
        other names.

    Raises:
        BrokerUnavailableError: Reading took too long (retriable).
    """
    limits = LATER_BATCH_LIMITS if batch_id else FIRST_BATCH_LIMITS
    end_s = time.monotonic() + timeout_s
    seek = partial(_last_id, name=name, writers=writers_of(name), first_id=sequence_id(batch_id, 0))
    found = _search(broker, producer.topic_partition, seek, last, limits=limits, end_s=end_s)
    if found is None:
        _log.info("%s: its end has no entry of producer %r", producer.topic_partition, name)
        return NOTHING
    return found


def queries_at_end(
    broker: Broker, producer: EntryProducer, sink_id: str, query: str, timeout_s: float
) -> set[str]:
    """Return the queries of a sink that have entries near the end of a topic partition.

    The search covers at most :data:`FIRST_BATCH_LIMITS`. It ends at the first entries of ``query``.

    Args:
        broker: An open connection.
        producer: A producer of the topic partition, of any name.
        sink_id: Id of the sink.
        query: The query that writes.
        timeout_s: Longest time, seconds.

    Raises:
        BrokerUnavailableError: Reading took too long (retriable).
    """
    found: set[str] = set()

    def seek(blocks: Sequence[EntryBlock]) -> bool | None:
        names = compute.unique(gather(blocks, _COLUMNS)[PRODUCER]).to_pylist()
        found.update(one for name in names if name and (one := query_of(name, sink_id)))
        return True if query in found else None

    where, end_s = producer.topic_partition, time.monotonic() + timeout_s
    _search(broker, where, seek, producer.last_entry(), limits=FIRST_BATCH_LIMITS, end_s=end_s)
    return found


Seek = Callable[[Sequence[EntryBlock]], int | None]
"""Looks for something in at least one entry; ``None`` if it is not there."""


def _search(
    broker: Broker,
    where: TopicPartition,
    seek: Seek,
    last: EntryId | None,
    *,
    limits: TailLimits,
    end_s: float,
) -> int | None:
    """Search a topic partition from its end, until something is found or the limit is reached."""
    if last is None:
        return None
    tail = _Tail(broker, where, seek, last, limits=limits, end_s=end_s)
    tail.look_back(last.ledger, last.entry + 1)
    oldest = last.ledger
    while oldest and not tail.is_done():
        oldest = tail.look_before(oldest)
    return tail.found


class _Tail:
    """Reads the end of a topic partition backwards, in looks that do not overlap."""

    def __init__(
        self,
        broker: Broker,
        where: TopicPartition,
        seek: Seek,
        last: EntryId,
        *,
        limits: TailLimits,
        end_s: float,
    ) -> None:
        self.found: int | None = None
        """The newest result of ``seek``."""
        self.entries = self.bytes = 0
        """Size of the looks that reached their end."""
        self._broker = broker
        self._where = where
        self._seek = seek
        self._last = last
        self._limits = limits
        self._end_s = end_s
        self._seen = last
        """The last entry of the last look."""

    def is_done(self) -> bool:
        """Return whether ``seek`` has found something, or the limit is reached."""
        left = self._left()
        return self.found is not None or left.entries <= 0 or left.bytes <= 0

    def _left(self) -> TailLimits:
        return TailLimits(self._limits.entries - self.entries, self._limits.bytes - self.bytes)

    def look_back(self, ledger: int, end: int) -> None:
        """Look at a ledger from an entry back to its first one.

        Args:
            ledger: The ledger.
            end: First entry that is left out.
        """
        span, wider = FIRST_SPAN, WIDER
        while end and not self.is_done():
            left = self._left()
            first = max(0, end - min(span, left.entries))
            if self._look(EntryId(ledger, first), EntryId(ledger, end), left):
                end, span = first, span * wider
            elif end - first == 1:
                self.bytes = self._limits.bytes  # the next entry exceeds it
            else:
                span, wider = max(1, (end - first) // WIDER), 1

    def look_before(self, ledger: int) -> int:
        """Look at the ledgers before a ledger; return the oldest ledger id that was covered.

        A call covers at least one id. The ids are not dense, so a ledger is found by trying. Small
        ledgers are read whole. If they are too large together, the newest one is searched, and
        read from its end.
        """
        back = 1
        while ledger and not self.is_done():
            first = max(0, ledger - back)
            if not self._look(EntryId(first, 0), EntryId(ledger, 0), SMALL):
                break
            ledger, back = first, back * WIDER
        else:
            return ledger
        newest = self._seen.ledger
        while ledger - newest > 1:
            middle = (newest + ledger) // 2
            if not self._look(EntryId(middle, 0), EntryId(ledger, 0), SMALL):
                newest = self._seen.ledger
                continue
            ledger = middle
            if self.is_done():
                return ledger
        self.look_back(newest, self._end_of(newest))
        return newest

    def _end_of(self, ledger: int) -> int:
        """Return an entry number, 1 to ``FIRST_SPAN`` after the last entry of an older ledger."""
        inside, step = 0, SMALL.entries
        while self._reaches(EntryId(ledger, inside + step)):
            inside, step = inside + step, 2 * step
        end = inside + step
        while end - inside > FIRST_SPAN:
            middle = (inside + end) // 2
            if self._reaches(EntryId(ledger, middle)):
                inside = middle
            else:
                end = middle
        return end

    def _reaches(self, entry: EntryId) -> bool:
        """Return whether the ledger of an entry has this one, or a later one."""
        options = ReadOptions(columns=_COLUMNS, last=entry)
        with closing(self._broker.reader(self._where, entry, options)) as reader:
            more = True
            while more:
                blocks, more, refused = self._next(reader)
                if found := [block.id for block in blocks] or refused:
                    return found[0].ledger == entry.ledger
        return False

    def _look(self, first: EntryId, end: EntryId, most: TailLimits) -> bool:
        """Read from an entry up to another one.

        Returns:
            Whether the look reached its end. Otherwise it exceeds ``most`` or the rest of the
            limit, and does not count.
        """
        found: int | None = None
        entries = size = 0
        bytes_max = min(most.bytes, self._left().bytes)
        last = EntryId(end.ledger, end.entry - 1) if end.entry else self._last
        options = ReadOptions(columns=_COLUMNS, last=last)
        more = True
        while more:
            refused: list[EntryId] = []
            with closing(self._broker.reader(self._where, first, options)) as reader:
                while more and not refused:
                    blocks, more, refused = self._next(reader)
                    inside = [block for block in blocks if block.id < end]
                    ids = [block.id for block in blocks] or refused
                    more = more and all(one < last and one < end for one in ids)
                    entries += len(inside) + len(refused)
                    size += sum(block.payload_bytes for block in inside)
                    if inside and (newer := self._seek(inside)) is not None:
                        found = newer
                    self._seen = max((one for one in ids if one < end), default=self._seen)
                    if entries > most.entries or size > bytes_max:
                        return False
            for one in refused:  # a Reader does not continue after a chunked message
                first = EntryId(one.ledger, one.entry + 1)
        self.found = found
        self.entries += entries
        self.bytes += size
        return True

    def _next(self, reader: Reader) -> tuple[Sequence[EntryBlock], bool, list[EntryId]]:
        """Return the next entries, whether more may follow, and the entry that is refused."""
        if time.monotonic() >= self._end_s:
            raise BrokerUnavailableError(
                f"Could not read the end of {self._where} in time, to see what an earlier attempt "
                "stored.",
                "Repeat the call, or raise the timeout of a message.",
            )
        try:
            blocks = reader.read(READ_WAIT_MS)
            return blocks, bool(blocks) or not (reader.at_end() and reader.stayed_connected()), []
        except (ChunkedMessageError, UnreadableEntryError) as exc:
            return (), True, [entry_of(exc)]
        except BrokerUnavailableError as exc:  # it has no connection, and connects again
            _log.debug("reading the end of %s: %s", self._where, exc.summary)
            return (), True, []


def _last_id(
    blocks: Sequence[EntryBlock], name: str, writers: str | None, first_id: int
) -> int | None:
    """Return the last id of a name in some entries; ids ascend, so the newest entry has it.

    Args:
        blocks: The entries.
        name: The name.
        writers: Beginning of the names of its query; ``None`` if it belongs to no query.
        first_id: First sequence id of the batch. If the query has an entry with a lower id, the
            name has no earlier entry of this batch, and the result is :data:`NOTHING`.
    """
    columns = gather(blocks, _COLUMNS)
    names, ids = columns[PRODUCER], columns[SEQUENCE_ID]
    found = compute.max(ids.filter(compute.equal(names, name))).as_py()
    if found is not None:
        return int(found)
    if writers is not None:
        first = compute.min(ids.filter(compute.starts_with(names, writers))).as_py()
        if first is not None and first < first_id:
            return NOTHING
    return None
