"""Reads the messages of a split, in order, as record batches, with a plain Reader.

The process that reads a split may be another one than the process that planned it. It may read
later, and more than once. Each read returns the same rows in the same batches: the entries alone
decide which of them share a batch, not their arrival. A host that repeats a task continues where
the first attempt ended.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import compute

from keyshard.broker.admin.port import Admin
from keyshard.broker.auth.tls import of_bookies
from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Broker, OpensReaders, ReadOptions
from keyshard.broker.retry import retry_until
from keyshard.columns.entry_rows import only
from keyshard.columns.record_batches import record_batches
from keyshard.config.connection import Connection
from keyshard.config.segments import BOOKIES, BYTES_IN_FLIGHT, Segments
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.entry_assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.position.split import Split
from keyshard.core.position.zones import Storage
from keyshard.core.topic_segments import is_segment
from keyshard.errors import (
    BookieReadError,
    BrokerUnavailableError,
    DataLossTrimmedError,
    KeyShardError,
    ReplayTimeoutError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading import zone_builder
from keyshard.reading.read_report import ReadReport, was_read
from keyshard.reading.scan import Scan
from keyshard.reading.segment_ledgers import first_stored
from keyshard.reading.split_planner import created, open_index, open_offloads
from keyshard.reading.zone_builder import ZoneBuilder

if TYPE_CHECKING:
    from keyshard.bookkeeper.reader import StorageReads

QUEUE_MIN, QUEUE_MAX = 10, 1_000
"""Fewest and most messages that the client holds ahead."""
CUT_OFF_MAX = 10
"""Times in a row that a Reader may be cut off inside the same entry."""

_log = logging.getLogger(__name__)


def read_splits(
    connection: Connection,
    splits: Sequence[Split],
    names: Sequence[str],
    *,
    keys: Collection[str] | None = None,
    fail_on_data_loss: bool = True,
    segments: Segments | None = None,
    ledger_index: str | None = None,
    bytes_in_flight_max: int = BYTES_IN_FLIGHT,
    report: Callable[[ReadReport], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Connect, and read splits one after the other; see :func:`read_split`.

    Args:
        ledger_index: Path or fsspec URL of the index of closed ledgers, as the plan has it. The
            read adds the zones that it lacks.
        segments: Where closed ledgers are read, as the plan has it; ``None``: by the broker.
        bytes_in_flight_max: Most bytes of entries that are received ahead.
        report: Called after each split with the entries by their origin.

    Raises:
        BookieReadError: Neither bookies nor the store of offloads returned an entry, and the broker
            must not be asked for it.
    """
    with ExitStack() as opened:
        broker = opened.enter_context(closing(connect(connection)))
        admin = opened.enter_context(closing(connect_admin(connection)))
        bookies = _bookies(segments, connection.service_url, opened)
        index = None if ledger_index is None else open_index(ledger_index)
        for split in splits:
            reads = None if bookies is None else bookies(broker, split)
            seen: Counter[int] = Counter()
            closed = {one.ledger: one.closed for one in split.spans if one.closed}
            zones = ZoneBuilder(split) if index is not None and closed else None
            yield from read_split(
                reads or broker,
                admin,
                split,
                names,
                connection.operation_timeout_ms / 1000,
                keys=keys,
                fail_on_data_loss=fail_on_data_loss,
                bytes_in_flight_max=bytes_in_flight_max,
                seen=seen,
                zones=zones,
            )
            if index is not None and zones is not None:
                index.save(Storage(split.topic_partition, split.created, closed), zones.zones)
            if reads is not None:
                found = was_read(
                    split, seen, reads.from_storage, reads.left, reads.bookies.one_by_one
                )
                _log.info("%s was read by ledger: %s.", split.topic_partition, found)
            elif report is not None:
                placed = {span.ledger: span.placement for span in split.spans}
                left = {one: why for one, why in placed.items() if isinstance(why, str)}
                found = was_read(split, seen, {}, left)
            if report is not None:
                report(found)


def _bookies(
    segments: Segments | None, cluster: str, opened: ExitStack
) -> Callable[[Broker, Split], StorageReads | None] | None:
    """Return a function that makes the Readers of a split; ``None`` if only the broker is read."""
    if segments is None or segments.by_broker_only:
        return None
    from keyshard.bookkeeper.bookies import Bookies  # noqa: PLC0415 - few reads need it
    from keyshard.bookkeeper.failures import OF_PROCESS, Failures  # noqa: PLC0415
    from keyshard.bookkeeper.reader import StorageReads  # noqa: PLC0415

    required = segments.source == BOOKIES
    # If only bookies may be read, a task that a host runs again must ask a failed bookie again. So
    # it does not share the failures that this process remembers.
    failures = Failures() if required else OF_PROCESS
    tls = of_bookies(segments)
    bookies = opened.enter_context(closing(Bookies(segments.bookies_map, failures, tls)))
    offloads = None if segments.offloads is None else open_offloads(segments.offloads)

    def of(broker: Broker, split: Split) -> StorageReads | None:
        placements = {span.ledger: span.placement for span in split.spans}
        if all(isinstance(one, str) for one in placements.values()):
            return None
        return StorageReads(
            broker,
            placements,
            bookies,
            required=required,
            failures=failures,
            cluster=(cluster, tls, segments.offloads),
            offloads=offloads,
        )

    return of


def read_split(
    broker: OpensReaders,
    admin: Admin,
    split: Split,
    names: Sequence[str],
    timeout_s: float,
    *,
    keys: Collection[str] | None = None,
    fail_on_data_loss: bool = True,
    bytes_in_flight_max: int = BYTES_IN_FLIGHT,
    seen: Counter[int] | None = None,
    zones: ZoneBuilder | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read the messages of a split, in the order of its topic partition.

    Args:
        broker: Opens Readers.
        admin: Knows what is still stored.
        split: The split.
        names: Columns of :data:`keyshard.columns.record_batches.COLUMNS`, at least one.
        timeout_s: Longest silence, seconds.
        keys: Partition keys whose messages are wanted; ``None``: all.
        fail_on_data_loss: Whether entries that are no longer stored are an error. If not, they are
            omitted with a warning.
        bytes_in_flight_max: Most bytes of entries that are received ahead.
        seen: Counts the entries that were read, by ledger.
        zones: Collects the zones of closed ledgers.

    Yields:
        Record batches as large as those of a stream.

    Raises:
        DataLossTrimmedError: Entries of the split are no longer stored.
        TopicRecreatedError: They are not stored, because the topic was created again.
        ChunkedMessageError: A message is chunked.
        UnreadableEntryError: A message is encrypted, or an entry cannot be read.
        ReplayTimeoutError: Nothing came for too long (retriable).
        BrokerError: The broker cannot be reached, or refuses.
    """
    queue = bytes_in_flight_max * split.entries // max(1, split.size_bytes)
    columns = names if keys is None else {*names, KEY}
    if zones is not None:
        columns = {*columns, *zone_builder.COLUMNS}
    queue = min(max(queue, QUEUE_MIN), QUEUE_MAX)
    how = ReadOptions(queue, columns=columns, receiver_queue_bytes=bytes_in_flight_max, first=queue)
    blocks = _stored(
        broker, admin, split, how, timeout_s, fail_on_data_loss=fail_on_data_loss,
        seen=Counter() if seen is None else seen, zones=zones,
    )  # fmt: skip
    if keys is not None:
        chosen = map(OnlyKeys(keys).of, blocks)
        blocks = (block for block in chosen if block is not None)
    yield from record_batches(((split.topic_partition, block) for block in blocks), names)


def _stored(
    broker: OpensReaders,
    admin: Admin,
    split: Split,
    how: ReadOptions,
    timeout_s: float,
    *,
    fail_on_data_loss: bool,
    seen: Counter[int],
    zones: ZoneBuilder | None,
) -> Iterator[EntryBlock]:
    """Read a split. Check before and after the read that all of it is stored."""
    if not split.spans:
        return
    stored = _check_stored(broker, admin, split, timeout_s, fail_on_data_loss=fail_on_data_loss)
    # Bookies keep deleted ledgers for a while.
    split = split.only(span for span in split.spans if span.ledger in stored)
    if not split.spans:
        return
    entries = {span.ledger: span for span in split.spans}
    edges = split.first, split.last
    lost: set[int] = set()
    blocks = _while_stored(
        broker, admin, split, how, timeout_s, fail_on_data_loss=fail_on_data_loss, lost=lost
    )
    for block in chain.from_iterable(blocks):
        ledger, entry = block.id
        span = entries.get(ledger)
        if span is None or not span.first <= entry < span.end:
            continue
        seen[ledger] += 1
        if zones is not None:
            zones.add(block)
        if split.matches(block.publish_ms):
            kept = _within(split, block) if block.id in edges else block
            if kept is not None:
                yield kept
    if zones is not None:
        zones.finish()
    rest = split.only(span for span in split.spans if span.ledger not in lost)
    if any(seen[span.ledger] < span.entries for span in rest.spans):
        # Readers do not return markers and aborted messages, which are stored.
        _check_stored(broker, admin, rest, timeout_s, fail_on_data_loss=fail_on_data_loss)


def _within(split: Split, block: EntryBlock) -> EntryBlock | None:
    """Return the messages of an entry that belong to a split, or ``None``."""
    first = split.first_index if block.id == split.first else 0
    end = split.end_index if block.id == split.last else None
    if not first and end is None:
        return block
    indices = frozenset(
        index for index in block.indices if index >= first and (end is None or index < end)
    )
    return only(block, indices) if indices else None


def _sizes(
    broker: OpensReaders, admin: Admin, split: Split, timeout_s: float
) -> Mapping[int, int] | None:
    """Return the numbers of entries of the stored ledgers that a split may have.

    Of a segment, only the first entry is looked for: retention and TTL remove the oldest ledgers.

    Returns:
        ``None`` if there is no such topic.
    """
    where = split.topic_partition
    if not is_segment(where):
        ledgers = retry_until(lambda: admin.ledgers(where), timeout_s)
        return None if ledgers is None else {one.id: one.entries for one in ledgers}
    try:
        first = first_stored(broker, where, timeout_s)
    except TopicNotFoundError:
        return None
    if first is None:
        return {}
    return {span.ledger: span.end for span in split.spans if span.ledger >= first.ledger}


def _check_stored(
    broker: OpensReaders, admin: Admin, split: Split, timeout_s: float, *, fail_on_data_loss: bool
) -> Collection[int]:
    """Check that the ledgers of a split are stored; return the stored ledgers."""
    found = _sizes(broker, admin, split, timeout_s)
    sizes = found or {}
    gone = [span for span in split.spans if sizes.get(span.ledger, 0) < span.end]
    if gone:
        first, last = gone[0], gone[-1]
        now = created(admin, split.topic_partition) if found is not None and split.created else ""
        kind: type[KeyShardError] = DataLossTrimmedError
        why = "retention, TTL or a deleted topic removed them after"
        if found is None and is_segment(split.topic_partition):
            why = "the broker deleted the segment after"
        if now and now != split.created:
            kind = TopicRecreatedError
            why = "the topic was deleted and created again after"
        loss = kind(
            f"{sum(span.entries for span in gone)} entries of {split.topic_partition}, from "
            f"{first.ledger}:{first.first} to {last.ledger}:{last.end - 1}, are no longer "
            f"stored: {why} the read was planned.",
            "Plan the read again. To accept the loss, set fail_on_data_loss to false.",
            topic_partition=split.topic_partition.name,
            missing=f"{first.ledger}:{first.first}-{last.ledger}:{last.end - 1}",
        )
        if fail_on_data_loss:
            raise loss
        _log.warning("%s They are left out, because fail_on_data_loss is false.", loss.summary)
    return sizes.keys()


def _while_stored(
    broker: OpensReaders,
    admin: Admin,
    split: Split,
    how: ReadOptions,
    timeout_s: float,
    *,
    fail_on_data_loss: bool,
    lost: set[int],
) -> Iterator[list[EntryBlock]]:
    """Read as :func:`_entries`, and continue after a ledger that is deleted during the read.

    Only reads without the broker need this, and those of a topic or segment that is deleted. Other
    Readers of the broker continue by themselves. Deleted ledgers are added to ``lost``.
    """
    while split.spans:
        last = EntryId(-1, -1)
        try:
            for blocks in _entries(broker, split, how, timeout_s):
                last = blocks[-1].id
                yield blocks
            return
        except (BookieReadError, TopicNotFoundError):
            stored = _check_stored(
                broker, admin, split, timeout_s, fail_on_data_loss=fail_on_data_loss
            )
            left = [span for span in split.spans if span.ledger in stored]
            if len(left) == len(split.spans):
                raise
            lost.update(span.ledger for span in split.spans if span.ledger not in stored)
            split = split.only(
                span.part(max(0, last.entry + 1 - span.first), span.entries)
                if span.ledger == last.ledger
                else span
                for span in left
                if (span.ledger, span.end - 1) > last
            )


def _entries(
    broker: OpensReaders, split: Split, how: ReadOptions, timeout_s: float
) -> Iterator[list[EntryBlock]]:
    """Read whole entries from the first to the last of a split, ascending, each once."""
    start, cut_off = split.first, 0
    while True:
        last: EntryId | None = None
        try:
            for blocks in _until_cut_off(broker, split, start, how, timeout_s):
                last = blocks[-1].id
                yield blocks
            return
        except RedeliveryNeeded as need:
            cut_off = 1 if last is not None else cut_off + 1
            if cut_off > CUT_OFF_MAX:
                raise BrokerUnavailableError(
                    f"Readers of {split.topic_partition} repeatedly lose their connection inside "
                    f"entry {need.entry_id.ledger}:{need.entry_id.entry}.",
                    "Check the load of the broker, and the network.",
                ) from need
            start = need.entry_id


def _until_cut_off(
    broker: OpensReaders, split: Split, start: EntryId, how: ReadOptions, timeout_s: float
) -> Iterator[list[EntryBlock]]:
    """Read whole entries, at least one at a time.

    Raises:
        RedeliveryNeeded: The connection was lost inside an entry. No later entry was returned.
    """
    assembly, end = EntryAssembly(), split.last
    with Scan(broker, split.topic_partition, start, end, how) as scan:
        progress_s = time.monotonic()
        while not scan.done:
            left_s = progress_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise ReplayTimeoutError(
                    f"Reading {split.topic_partition} from "
                    f"{scan.position.ledger}:{scan.position.entry} on returned nothing for "
                    f"{timeout_s:g} s before its end.",
                    "Check the load of the broker, or raise operation_timeout_ms.",
                )
            blocks = retry_until(scan.read, left_s)
            whole, need = _joined(assembly, blocks)
            whole = [one for one in whole if one.id <= end]
            if whole:
                yield whole
            if need is not None:
                raise need
            if blocks:
                # The caller may have been slow to take them.
                progress_s = time.monotonic()
    held = assembly.open
    if held is not None and held.id <= end:
        raise RedeliveryNeeded(held.id)


def _joined(
    assembly: EntryAssembly, blocks: Sequence[EntryBlock]
) -> tuple[list[EntryBlock], RedeliveryNeeded | None]:
    """Return the whole entries of some blocks, and the entry that must be read again, if any."""
    whole: list[EntryBlock] = []
    try:
        for block in blocks:
            whole += assembly.add(block)
    except RedeliveryNeeded as need:
        return whole, need
    return whole, None


# -- Messages of some keys, chosen before columns are made of them --------------------------------

KEY = "__key"


class OnlyKeys:
    """Chooses messages by partition key; checks all keys of a record batch together.

    The slot does not decide, because an ordering key takes precedence in routing.

    Args:
        keys: Keys as in column ``__key``.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = pa.array(sorted(keys), pa.string())
        self._content: Any = None
        self._rows: list[int] = []
        """Rows of the content that have one of the keys, ascending."""

    def of(self, block: EntryBlock) -> EntryBlock | None:
        """Return the messages of a block that have one of the keys, or ``None``."""
        kept: list[int] = []
        before = 0
        for part in block.parts:
            rows = self._rows_of(part.content)
            first, end = (bisect_left(rows, part.start + row) for row in (0, part.rows))
            kept.extend(block.indices[before + row - part.start] for row in rows[first:end])
            before += part.rows
        if len(kept) == block.rows:
            return block
        return only(block, frozenset(kept)) if kept else None

    def _rows_of(self, content: pa.RecordBatch) -> list[int]:
        if content is not self._content:
            found = compute.is_in(content.column(KEY), value_set=self._keys)
            self._content, self._rows = content, compute.indices_nonzero(found).to_pylist()
        return self._rows
