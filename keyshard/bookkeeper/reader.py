"""A broker whose Readers read closed ledgers where they are stored, and all else by the broker.

The rows are the same either way. The broker therefore reads the rest of a ledger, from an entry on,
in these cases:

- The entry belongs to a transaction, or is a marker. Only the broker knows whether it is visible.
- Neither bookies nor the store of offloads return the entry, and the broker may be asked for it.
- The entry cannot be decoded. The broker names the error.
"""

from __future__ import annotations

import logging
import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.broker.port import DEFAULT_READ_OPTIONS, OpensReaders, Reader, ReadOptions
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.stored_entry import CHECKED, SIZE, after_broker_metadata
from keyshard.core.metadata_columns import STORED, Origin
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.replicas import LedgerReplicas, OffloadedLedger, Placement
from keyshard.core.protobuf import NotProtobufError, fields_of
from keyshard.errors import BookieReadError, BrokerError
from keyshard.offloads.offload_reader import (
    OffloadNotReadError,
    OffloadReader,
    Offloads,
    StoreFailedError,
)

_BROKER_DECIDES = {20: b"\xa0\x01", 22: b"\xb0\x01", 23: b"\xb8\x01"}
"""Tags of the fields ``marker_type``, ``txnid_least_bits`` and ``txnid_most_bits`` of
``MessageMetadata``, by field number (``PulsarApi.proto``)."""
_MAY_BELONG = re.compile(b"[\xa0\xb0\xb8][\x01\x81]")
"""The beginning of one of these tags, anywhere. Protobuf also reads their longer forms, such as
``a0 81 00``."""
_OF_BROKER = frozenset(one.name for one in STORED if one.origin is Origin.BROKER)

_log = logging.getLogger(__name__)


class StorageReads:
    """Opens Readers of one topic partition that read closed ledgers where they are stored.

    Args:
        broker: Reads all other entries.
        ledgers: The ledgers of the read: where they are stored, or why they are left to the broker.
        bookies: Connections to the bookies.
        required: Whether it is an error if neither bookies nor the store of offloads return an
            entry of a stored ledger. If not, the broker is asked for it.
        failures: Recent failures, to which it adds. Ledgers in them are left to the broker.
        cluster: Key of the cluster in ``failures``, with the options that reach its storage.
        offloads: The store of offloaded ledgers, if any ledger is read from there.
    """

    def __init__(
        self,
        broker: OpensReaders,
        ledgers: Mapping[int, Placement],
        bookies: Bookies,
        *,
        required: bool = False,
        failures: Failures | None = None,
        cluster: Hashable = "",
        offloads: Offloads | None = None,
    ) -> None:
        self.broker = broker
        self.bookies = bookies
        self.required = required
        self.left = {one: why for one, why in ledgers.items() if isinstance(why, str)}
        """Why the broker is asked for a ledger, from some entry on."""
        if offloads is None:
            offloaded = [one for one, at in ledgers.items() if isinstance(at, OffloadedLedger)]
            self.left |= dict.fromkeys(offloaded, "no store of offloads is given")
        self.stored = {
            one: found
            for one, found in ledgers.items()
            if isinstance(found, LedgerReplicas)
            or (isinstance(found, OffloadedLedger) and offloads is not None)
        }
        self.offloads = offloads
        self.from_storage: Counter[int] = Counter()
        """Entries that came without the broker, by ledger."""
        self._failures = failures or Failures()
        self._cluster = cluster

    def stored_at(self, at: EntryId) -> LedgerReplicas | OffloadedLedger | None:
        """Return where an entry is read, unless its ledger is left to the broker."""
        if at.ledger in self.left:
            return None
        if why := self._failures.ledger(self._cluster, at):
            self.left[at.ledger] = why
            return None
        found = self.stored.get(at.ledger)
        if isinstance(found, OffloadedLedger) and (why := self._failures.bookie(self._store())):
            self.left[at.ledger] = why
            return None
        return found

    def note_store(self, why: str) -> None:
        """Leave all offloaded ledgers to the broker for a while, because their store failed."""
        self._failures.note_bookie(self._store(), why)

    def _store(self) -> Hashable:
        return "offloads", None if self.offloads is None else self.offloads.url

    def segment(
        self,
        topic_partition: TopicPartition,
        ledger: LedgerReplicas | OffloadedLedger,
        first: int,
        last: int,
        bytes_max: int,
    ) -> LedgerReader | OffloadReader:
        """Return a reader of some entries of a ledger."""
        if isinstance(ledger, LedgerReplicas):
            return LedgerReader(ledger, first, last, self.bookies, bytes_max)
        assert self.offloads is not None, "only then are offloaded ledgers stored"
        return OffloadReader(self.offloads, topic_partition, ledger, (first, last), bytes_max)

    def leave(self, at: EntryId, why: str) -> None:
        """Leave a ledger to the broker, from an entry on."""
        self.left[at.ledger] = why
        self._failures.note_ledger(self._cluster, at, why)

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Reader:
        """Open a Reader that begins at ``start``, inclusive."""
        if how.columns is not None and not _OF_BROKER.isdisjoint(how.columns):
            # Only the broker knows whether it shows them.
            why = "it has a column that only the broker knows"
            self.left.update(dict.fromkeys(self.stored, why))
            return self.broker.reader(topic_partition, start, how)
        return SegmentReader(self, topic_partition, start, how)


class SegmentReader:
    """A Reader that takes each ledger from where it is stored, or from the broker."""

    def __init__(
        self, reads: StorageReads, topic_partition: TopicPartition, start: EntryId, how: ReadOptions
    ) -> None:
        self._reads = reads
        self._topic_partition = topic_partition
        self._ids = sorted({*reads.left, *reads.stored})
        self._how = how
        self._next = start
        """All earlier entries were returned, or do not exist."""
        self._segment: LedgerReader | OffloadReader | None = None
        self._pending: list[RawEntry] = []
        """Entries of the segment that are not decoded yet."""
        self._reader: Reader | None = None
        self._end: EntryId | None = None
        """Where the broker's Reader ends, because the next ledger is read from its storage;
        exclusive."""
        self._was_lost = False
        self._closed = False

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        """See :meth:`keyshard.broker.port.Reader.read`."""
        self._check_open()
        while not self._is_past_end():
            if self._reader is not None:
                blocks, ended = self._from_broker(self._reader, timeout_ms)
                if blocks or not ended:
                    return blocks
            elif self._segment is not None:
                blocks = self._from_storage(self._segment)
                if blocks:
                    return blocks
            else:
                self._open()
        return []

    def at_end(self) -> bool:
        """See :meth:`keyshard.broker.port.Reader.at_end`."""
        self._check_open()
        if self._segment is None and self._reader is None and not self._is_past_end():
            self._open()
        if self._is_past_end():
            return True
        return self._end is None and self._reader is not None and self._reader.at_end()

    def stayed_connected(self) -> bool:
        """See :meth:`keyshard.broker.port.Reader.stayed_connected`."""
        return not self._was_lost and (self._reader is None or self._reader.stayed_connected())

    def close(self) -> None:
        """See :meth:`keyshard.broker.port.Reader.close`."""
        self._closed = True
        self._close_segment()
        self._close_reader()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerError(f"A reader of {self._topic_partition} is closed.")

    def _is_past_end(self) -> bool:
        return self._how.last is not None and self._next > self._how.last

    def _open(self) -> None:
        """Open the segment that has the next entry, or the broker's Reader if there is none."""
        ledger = self._stored_at(self._next)
        if ledger is not None:
            at = self._next.entry if self._next.ledger == ledger.ledger else 0
            last, until = ledger.last, self._how.last
            if until is not None and until.ledger == ledger.ledger:
                last = min(last, until.entry)
            self._next = EntryId(ledger.ledger, at)
            self._segment = self._reads.segment(
                self._topic_partition, ledger, at, last, self._how.receiver_queue_bytes
            )
            return
        later = (EntryId(one, 0) for one in self._ids if one > self._next.ledger)
        self._end = next((one for one in later if self._reads.stored_at(one)), None)
        self._reader = self._reads.broker.reader(self._topic_partition, self._next, self._how)

    def _stored_at(self, at: EntryId) -> LedgerReplicas | OffloadedLedger | None:
        """Return the ledger of the next entry, unless it is left to the broker."""
        for number in self._ids[bisect_left(self._ids, at.ledger) :]:
            first = at.entry if number == at.ledger else 0
            found = self._reads.stored_at(EntryId(number, first))
            if found is None or found.last >= first:
                return found
        return None

    def _from_broker(self, reader: Reader, timeout_ms: int) -> tuple[list[EntryBlock], bool]:
        """Return the next blocks, and whether the entries after them are read from storage."""
        blocks = reader.read(timeout_ms)
        if self._end is None:
            return blocks, False
        before = [block for block in blocks if block.id < self._end]
        ended = len(before) < len(blocks) or (
            not blocks and reader.at_end() and reader.stayed_connected()
        )
        if ended:
            self._next = self._end
            self._close_reader()
        return before, ended

    def _from_storage(self, segment: LedgerReader | OffloadReader) -> list[EntryBlock]:
        """Return the next blocks of a ledger; none if the ledger ends or is left to the broker."""
        if not self._pending:
            try:
                self._pending = segment.read()
            except (EntryNotReadError, OffloadNotReadError) as exc:
                if self._reads.required:
                    raise self._unreadable(str(exc)) from exc
                if isinstance(exc, StoreFailedError):
                    self._reads.note_store(str(exc))
                self._leave(str(exc))
                return []
        entries, why = _plain(self._pending)
        if not entries:
            self._leave(why)
            return []
        decoded = decode(entries, self._topic_partition, self._how.columns)
        taken = decoded.seen
        if decoded.refused is not None:
            taken -= 1
            if not decoded.blocks:
                self._leave("an entry cannot be decoded")
                return []
        last = entries[taken - 1].id
        self._next = EntryId(last.ledger, last.entry + 1)
        self._pending = self._pending[taken:]
        self._reads.from_storage[last.ledger] += taken
        if segment.done and not self._pending:
            self._close_segment()
        return decoded.blocks

    def _leave(self, why: str) -> None:
        """Leave the rest of the ledger to the broker."""
        ledger, entry = self._next
        _log.info(
            "%s: the broker is asked for ledger %d from entry %d on: %s.",
            self._topic_partition, ledger, entry, why,
        )  # fmt: skip
        self._reads.leave(self._next, why)
        self._close_segment()

    def _unreadable(self, why: str) -> BookieReadError:
        ledger, entry = self._next
        named = f"entry {ledger}:{entry} of {self._topic_partition}: {why}"
        if isinstance(self._segment, OffloadReader):
            text = f"The store of offloads did not return {named}."
            remedy = (
                "Check offloads, and the permissions there. If the ledger was deleted since the "
                "read was planned, plan it again."
            )
        else:
            text = f"No bookie returned {named}."
            remedy = (
                "Check that the bookies can be reached. If bookies were replaced since the read "
                "was planned, plan it again."
            )
        where = self._topic_partition.name
        remedy = f"{remedy} Or set segments to auto."
        return BookieReadError(text, remedy, topic_partition=where)

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment, self._pending = None, []
            self._reads.bookies.abandon()

    def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            self._was_lost = self._was_lost or not reader.stayed_connected()
            with suppress(BrokerError):
                # A failed close loses nothing: the entries that it returned are taken already.
                reader.close()


def _plain(entries: Sequence[RawEntry]) -> tuple[list[RawEntry], str]:
    """Return the entries before the first one that only the broker can judge, and the reason.

    The returned entries begin after the broker's metadata, which clients do not get.
    The reason is empty if there is no such entry.
    """
    found: list[RawEntry] = []
    for raw in entries:
        data, position = raw.data, raw.position
        if data[position : position + 2] == CHECKED:
            start = position + 10
            end = start + SIZE.unpack_from(data, position + 6)[0] if start <= len(data) else start
            if start <= end <= len(data) and _MAY_BELONG.search(data, start, end) is None:
                found.append(raw)
                continue
        try:
            position, metadata = _opened(raw)
        except (NotProtobufError, DecodeError, IndexError, struct.error):
            return found, "its entries have an unknown form"
        if _MAY_BELONG.search(metadata) and _belongs_to_broker(metadata):
            return found, "it has entries of transactions or markers"
        found.append(raw if position == raw.position else replace(raw, position=position))
    return found, ""


def _opened(raw: RawEntry) -> tuple[int, bytes]:
    """Return the offset of an entry after the metadata of the broker, and its own metadata.

    An entry with a right digest can be damaged: the digest covers the bytes as they were written.

    Raises:
        NotProtobufError, DecodeError, IndexError, struct.error: It has another form.
    """
    data, position = raw.data, after_broker_metadata(raw.data, raw.position)
    if position != raw.position:
        api.BrokerEntryMetadata.FromString(data[raw.position + 6 : position])
    start = position + 6 if data[position : position + 2] == CHECKED else position
    if data[start] == 0x0E:
        raise NotProtobufError("an unknown magic number")
    end = start + 4 + SIZE.unpack_from(data, start)[0]
    if end > len(data):
        raise IndexError("its metadata ends too early")
    return position, data[start + 4 : end]


def _belongs_to_broker(metadata: bytes) -> bool:
    try:
        return not fields_of(metadata).keys().isdisjoint(_BROKER_DECIDES)
    except (NotProtobufError, IndexError):
        return True
