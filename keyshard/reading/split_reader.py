"""Reads a split: exactly its messages, in order, as record batches, with a plain Reader.

Another process reads it than planned it, perhaps later and more than once. It always gives the same
rows in the same batches: which entries share a batch follows from the entries alone, not from how
they came, because a host that runs a task again goes on where the first one ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing

import pyarrow as pa

from keyshard.arrow.columns import record_batches
from keyshard.arrow.content import only
from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Admin, Broker, HowToRead
from keyshard.broker.retry import retry_until
from keyshard.config.connection import Connection
from keyshard.core.position.assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.split import Split
from keyshard.errors import (
    BrokerUnavailableError,
    DataLossTrimmedError,
    KeyShardError,
    ReplayTimeoutError,
    TopicRecreatedError,
)
from keyshard.reading.keys import KEY, OnlyKeys
from keyshard.reading.scan import Scan
from keyshard.reading.splits import created

QUEUE_BYTES = 32 * 1024 * 1024
"""What the client may hold ahead, by the mean size of entries, bytes."""
QUEUE_MIN, QUEUE_MAX = 10, 1_000
"""Messages that it holds ahead at least and at most."""
CUT_OFF_MAX = 10
"""Times in a row that a Reader may end inside the same entry."""

_log = logging.getLogger(__name__)


def read_splits(
    connection: Connection,
    splits: Sequence[Split],
    names: Sequence[str],
    *,
    keys: Collection[str] | None = None,
    fail_on_data_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Connect, and read some splits one after the other; see :func:`read_split`."""
    with closing(connect(connection)) as broker, closing(connect_admin(connection)) as admin:
        for split in splits:
            yield from read_split(
                broker,
                admin,
                split,
                names,
                connection.operation_timeout_ms / 1000,
                keys=keys,
                fail_on_data_loss=fail_on_data_loss,
            )


def read_split(
    broker: Broker,
    admin: Admin,
    split: Split,
    names: Sequence[str],
    timeout_s: float,
    *,
    keys: Collection[str] | None = None,
    fail_on_data_loss: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Messages of a split, in the order of its topic partition.

    Args:
        broker: Connection to read through.
        admin: Tells what is still stored.
        split: What is read.
        names: Columns of :data:`keyshard.arrow.columns.COLUMNS`, at least one.
        timeout_s: Longest time in which nothing comes, seconds.
        keys: Partition keys whose messages are wanted; ``None``: all are.
        fail_on_data_loss: Whether entries that are no longer stored are an error; else they are
            left out, with a warning.

    Yields:
        Record batches as large as those of a stream.

    Raises:
        DataLossTrimmedError: Entries of the split are no longer stored.
        TopicRecreatedError: They are not, because the topic is another one by now.
        ChunkedMessageError: A message is chunked.
        UnreadableEntryError: A message is encrypted, or an entry cannot be read.
        ReplayTimeoutError: Nothing came for too long (retriable).
        BrokerError: The broker cannot be reached, or refuses.
    """
    queue = QUEUE_BYTES * split.entries // max(1, split.size_bytes)
    wanted = names if keys is None else {*names, KEY}
    queue = min(max(queue, QUEUE_MIN), QUEUE_MAX)
    how = HowToRead(queue, columns=wanted, receiver_queue_bytes=QUEUE_BYTES, first=queue)
    blocks = _stored(broker, admin, split, how, timeout_s, fail_on_data_loss=fail_on_data_loss)
    if keys is not None:
        chosen = map(OnlyKeys(keys).of, blocks)
        blocks = (block for block in chosen if block is not None)
    yield from record_batches(((split.topic_partition, block) for block in blocks), names)


def _stored(
    broker: Broker,
    admin: Admin,
    split: Split,
    how: HowToRead,
    timeout_s: float,
    *,
    fail_on_data_loss: bool,
) -> Iterator[EntryBlock]:
    """What is read of a split; checks before and afterwards that all of it is stored."""
    entries = {span.ledger: span for span in split.spans}
    if not entries or not _check_stored(
        admin, split, timeout_s, fail_on_data_loss=fail_on_data_loss
    ):
        return
    seen = dict.fromkeys(entries, 0)
    for block in _entries(broker, split, how, timeout_s):
        ledger, entry = block.id
        span = entries.get(ledger)
        if span is None or not span.first <= entry < span.end:
            continue
        seen[ledger] += 1
        if split.matches(block.publish_ms):
            kept = _within(split, block)
            if kept is not None:
                yield kept
    if any(seen[ledger] < span.entries for ledger, span in entries.items()):
        # Markers and aborted messages are stored, and no Reader shows them.
        _check_stored(admin, split, timeout_s, fail_on_data_loss=fail_on_data_loss)


def _within(split: Split, block: EntryBlock) -> EntryBlock | None:
    """The messages of an entry that belong to a split; ``None`` where none does."""
    first = split.first_index if block.id == split.first else 0
    end = split.end_index if block.id == split.last else None
    if not first and end is None:
        return block
    indices = frozenset(
        index for index in block.indices if index >= first and (end is None or index < end)
    )
    return only(block, indices) if indices else None


def _check_stored(admin: Admin, split: Split, timeout_s: float, *, fail_on_data_loss: bool) -> bool:
    """Whether the topic partition exists; the ledgers of a split do, or that is told."""
    ledgers = retry_until(lambda: admin.ledgers(split.topic_partition), timeout_s)
    sizes = {ledger.id: ledger.entries for ledger in ledgers or ()}
    gone = [span for span in split.spans if sizes.get(span.ledger, 0) < span.end]
    if gone:
        first, last = gone[0], gone[-1]
        now = created(admin, split.topic_partition) if ledgers and split.created else ""
        kind: type[KeyShardError] = DataLossTrimmedError
        why = "retention, TTL or a deleted topic removed them after"
        if now and now != split.created:
            kind = TopicRecreatedError
            why = "the topic was deleted and created anew after"
        loss = kind(
            f"{sum(span.entries for span in gone)} entries of {split.topic_partition}, from "
            f"{first.ledger}:{first.first} to {last.ledger}:{last.end - 1}, are no longer stored: "
            f"{why} the read was planned. Read what is left anew, or set fail_on_data_loss to "
            "false if the loss is accepted.",
            topic_partition=split.topic_partition.name,
            missing=f"{first.ledger}:{first.first}-{last.ledger}:{last.end - 1}",
        )
        if fail_on_data_loss:
            raise loss
        _log.warning("%s Left out, because fail_on_data_loss is false.", loss)
    return ledgers is not None


def _entries(
    broker: Broker, split: Split, how: HowToRead, timeout_s: float
) -> Iterator[EntryBlock]:
    """Whole entries from the first of a split to its last, ascending, each once."""
    start, cut_off = split.first, 0
    while True:
        last: EntryId | None = None
        try:
            for block in _until_cut_off(broker, split, start, how, timeout_s):
                last = block.id
                yield block
            return
        except RedeliveryNeeded as need:
            cut_off = 1 if last is not None else cut_off + 1
            if cut_off > CUT_OFF_MAX:
                raise BrokerUnavailableError(
                    f"Readers of {split.topic_partition} are cut off inside entry "
                    f"{need.entry_id.ledger}:{need.entry_id.entry} again and again. Check the "
                    "broker's load and the network."
                ) from need
            start = need.entry_id


def _until_cut_off(
    broker: Broker, split: Split, start: EntryId, how: HowToRead, timeout_s: float
) -> Iterator[EntryBlock]:
    """Whole entries from one on.

    Raises:
        RedeliveryNeeded: One ended before its last index, because the connection was cut there;
            what comes behind it has not been given out.
    """
    assembly = EntryAssembly()
    with Scan(broker, split.topic_partition, start, split.last, how) as scan:
        heard_s = time.monotonic()
        while not scan.done:
            left_s = heard_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise ReplayTimeoutError(
                    f"Nothing came of {split.topic_partition} from {scan.position.ledger}:"
                    f"{scan.position.entry} on for {timeout_s:g} s, and that is not its end. Check "
                    "the broker's load, or raise operation_timeout_ms."
                )
            blocks = retry_until(scan.read, left_s)
            for block in blocks:
                yield from (one for one in assembly.add(block) if one.id <= split.last)
            if blocks:
                # Whoever takes them may have taken his time.
                heard_s = time.monotonic()
    held = assembly.open
    if held is not None and held.id <= split.last:
        raise RedeliveryNeeded(held.id)
