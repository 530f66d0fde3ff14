"""Entries of any form on bookies that fail in any way: the read returns what the broker returns."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.port import DEFAULT_READ_OPTIONS, OpensReaders, Reader, ReadOptions
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import RawEntry
from keyshard.columns.content import CONTENT
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.replicas import LedgerReplicas
from keyshard.core.protobuf import message
from keyshard.errors import UnreadableEntryError
from keyshard.reading.scan import Scan
from tests.stored_entries import DAMAGE, MESSAGES, WHERE, batch, damaged, single, with_broker

LEDGER = 7
NAMES = ("one", "other")
BROKER = st.none() | st.just(message({1: 1_700_000_000_000, 2: 7})) | st.binary(max_size=5)
WHOLE = st.one_of(
    st.lists(MESSAGES, min_size=1, max_size=3).map(batch),
    MESSAGES.map(single),
    st.builds(
        damaged, st.lists(MESSAGES, min_size=1, max_size=2).map(batch), st.lists(DAMAGE, max_size=2)
    ),
    st.binary(max_size=12),
    st.sampled_from([b"", b"\x0e", b"\x0e\x01", b"\x0e\x02\x00", b"\x0e\x02\x00\x00\x00\x09a"]),
)


@st.composite
def stored_bytes(draw: st.DrawFn) -> bytes:
    """Bytes of an entry in a ledger: sound, damaged, cut anywhere, or no entry at all."""
    whole, broker = draw(WHOLE), draw(BROKER)
    if broker is not None:
        whole = with_broker(broker, whole)
    cut = draw(st.none() | st.integers(0, 60))
    return whole if cut is None else whole[:cut]


ANSWER = st.one_of(
    st.just(("good", 0)),
    st.tuples(st.sampled_from(["cut", "flip", "code", "other", "close"]), st.integers(0, 300)),
)


class BrokerReads:
    """Opens Readers of entries, as the broker returns them."""

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.entries = entries

    def reader(
        self,
        topic_partition: TopicPartition,
        start: EntryId,
        how: ReadOptions = DEFAULT_READ_OPTIONS,
    ) -> Reader:
        return EntryReader(self.entries, topic_partition, start.entry, how)


class EntryReader:
    def __init__(
        self, entries: Sequence[bytes], where: TopicPartition, start: int, how: ReadOptions
    ) -> None:
        self.entries, self.where, self.next, self.how = entries, where, start, how

    def read(self, timeout_ms: int) -> list[EntryBlock]:  # noqa: ARG002 - of the port
        if self.at_end():
            return []
        raw = RawEntry(
            EntryId(LEDGER, self.next), redelivered=False, ack_set=(),
            data=self.entries[self.next], position=0,
        )  # fmt: skip
        self.next += 1
        found = decode([raw], self.where, self.how.columns)
        if found.refused is not None:
            raise found.refused
        return found.blocks

    def at_end(self) -> bool:
        return self.next >= len(self.entries)

    def stayed_connected(self) -> bool:
        return True

    def close(self) -> None:
        pass


class ScriptedBookies(Bookies):
    """Bookies without sockets, whose answers are drawn."""

    def __init__(self, entries: Sequence[bytes], drawn: dict[tuple[str, int], tuple[str, int]]):
        super().__init__({})
        self.entries, self.drawn = entries, drawn
        self.requested: list[tuple[str, int]] = []

    def request(self, name: str, ledger: int, entries: Sequence[int], batch: int = 1) -> None:
        assert (ledger, batch > 0) == (LEDGER, True)
        self.requested += [(name, entry) for entry in entries]

    def owed(self, name: str) -> set[int]:
        return set() if name in self.failed else set(range(len(self.entries)))

    def receive(
        self,
        only: str | None = None,
        wait_s: float | None = None,  # noqa: ARG002 - answers are there at once
    ) -> list[tuple[str, list[bytes]]]:
        assert only is None, "the entries are small"
        name, entry = self.requested.pop(0)
        if name in self.failed:
            self._lost.append(entry)
            return []
        kind, at = self.drawn[name, entry]
        if kind == "close":
            self.give_up(name, "it closed the connection")
            self._lost.append(entry)
            return []
        frame = answer(entry, self.entries[entry], kind, at)
        found = [(name, [frame])]
        if kind in ("cut", "other") and (len(frame) < 24 or kind == "other"):
            self._lost.append(entry)  # the reader gives the bookie up
        return found

    def abandon(self) -> None:
        self.requested.clear()
        super().abandon()


def answer(entry: int, stored: bytes, kind: str, at: int) -> bytes:
    head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
    digest = struct.pack(">I", google_crc32c.value(head + stored))
    ledger = LEDGER + (kind == "other")
    code = at % 200 + 1 if kind == "code" else 0
    frame = struct.pack(">Iiqq", 2 << 24 | 2 << 16, code, ledger, entry) + head + digest + stored
    if kind == "cut":
        return frame[: at % len(frame)]
    if kind == "flip":  # in the body, which the digest covers
        place = 24 + at % (len(frame) - 24)
        return frame[:place] + bytes([frame[place] ^ 1 + at % 255]) + frame[place + 1 :]
    return frame


def read(reads: OpensReaders, last: int) -> tuple[list[Any], dict[EntryId, str]]:
    """Return the content of a read, and the entries that it could not read."""
    unreadable: dict[EntryId, UnreadableEntryError] = {}
    found: list[Any] = []
    with Scan(reads, WHERE, EntryId(LEDGER, 0), EntryId(LEDGER, last),
              unreadable=unreadable) as scan:  # fmt: skip
        while not scan.done:
            for block in scan.read():
                columns = [block.column(name) for name in CONTENT.names]
                found.append((block.id, list(block.indices), block.publish_ms, columns))
    return found, {entry: str(error) for entry, error in unreadable.items()}


@given(entries=st.lists(stored_bytes(), min_size=1, max_size=5), data=st.data())
def test_bookies_return_the_same_entries_as_the_broker(
    entries: list[bytes], data: st.DataObject
) -> None:
    drawn = {(name, entry): data.draw(ANSWER) for name in NAMES for entry in range(len(entries))}
    last = len(entries) - 1
    broker = BrokerReads(entries)
    bookies = ScriptedBookies(entries, drawn)
    ledger = LedgerReplicas(LEDGER, last, len(NAMES), "CRC32C", ((0, NAMES),))
    try:
        assert read(StorageReads(broker, {LEDGER: ledger}, bookies), last) == read(broker, last)
    finally:
        bookies.close()
