"""A reader over the wire whose cursor is moved: the broker skips stored entries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from keyshard.broker.port import ReadOptions
from keyshard.broker.retry import Retrier
from keyshard.broker.wire.consumer import WireReader
from keyshard.broker.wire.frames import api
from keyshard.core.position.entry import EntryId
from tests.helpers import wait_until
from tests.stored_entries import WHERE, plain, raw, single
from tests.support.one_broker import shared_at

DATA = single(plain())
FROM = EntryId(7, 10)


class At:
    """A connection to a broker with a mark-delete position."""

    is_open = True

    def __init__(self, mark: EntryId | None) -> None:
        self.mark = mark
        self.asked = 0
        self.starts: list[EntryId] = []
        self.first: EntryId | None = None
        """The first entry of each reader that is opened from now on."""
        self.loses: WireReader | None = None
        """A reader that is lost when it asks for the mark-delete position."""
        self._handles: dict[int, WireReader] = {}
        self._begun: set[int] = set()

    def register(self, consumer_id: int, handle: WireReader) -> None:
        self._handles[consumer_id] = handle

    def unregister(self, consumer_id: int) -> None:
        self._handles.pop(consumer_id, None)

    def send(self, _name: str, request: Any) -> None:
        begins = request.consumer_id not in self._begun
        self._begun.add(request.consumer_id)
        if self.first is not None and begins:
            arrived = [replace(raw(DATA), id=self.first)]
            self._handles[request.consumer_id].arrived(request.consumer_id, arrived)

    def begin(self, *_: object) -> int:
        return 1

    def forget(self, _number: int) -> None: ...

    def ask(self, name: str, request: Any, *_: object, **_undo: object) -> Any:
        if name == "subscribe":
            start = request.start_message_id
            self.starts.append(EntryId(start.ledger, start.entry))
        if name != "get_last_message_id":
            return None
        self.asked += 1
        if self.loses is not None:
            self.loses.lost(request.consumer_id, ended=False)
            wait_until(self.loses.is_connected)
        ends = {"last_message_id": api.MessageId(ledger=7, entry=99), "request_id": 1}
        if self.mark is not None:
            ledger, entry = self.mark
            ends["consumer_mark_delete_position"] = api.MessageId(
                ledger=ledger, entry=entry % 2**64
            )
        return api.GetLastMessageIdResponse(**ends)


class Readers:
    """Readers of one connection."""

    def __init__(self, mark: EntryId | None) -> None:
        self.at = At(mark)
        self.retrier = Retrier()
        self._opened: list[WireReader] = []
        self._shared = shared_at(self.at, self.retrier)

    def open(self, start: EntryId = FROM) -> WireReader:
        reader = WireReader(self._shared, WHERE, start, ReadOptions())
        reader.open()
        self._opened.append(reader)
        return reader

    def close(self) -> None:
        for reader in self._opened:
            reader.close()
        self.retrier.close()
        wait_until(lambda: "keyshard-resubscribe" not in str(threading.enumerate()))

    def give(self, reader: WireReader, *ids: EntryId) -> list[EntryId]:
        """Let entries arrive, and read."""
        reader.arrived(reader.standing()[1], [replace(raw(DATA), id=one) for one in ids])
        return [block.id for block in reader.read(0)]


@pytest.fixture
def unmoved() -> Iterator[Readers]:
    made = Readers(FROM._replace(entry=9))
    yield made
    made.close()


def entries(ledger: int, *numbers: int) -> list[EntryId]:
    return [EntryId(ledger, number) for number in numbers]


def test_entries_that_follow_one_another_cost_no_request(unmoved: Readers) -> None:
    reader = unmoved.open()
    assert unmoved.give(reader, *entries(7, 10, 11, 12)) == entries(7, 10, 11, 12)
    assert unmoved.give(reader, *entries(7, 13)) == entries(7, 13)
    assert unmoved.at.asked == 0
    assert unmoved.open(EntryId(0, 0)).read(0) == []


def test_gaps_count_while_the_cursor_stays_before_them(unmoved: Readers) -> None:
    """There is one request for all gaps: a marker, and the end of a ledger."""
    reader = unmoved.open()
    come = [*entries(7, 10, 12, 13), *entries(8, 0, 2)]
    assert unmoved.give(reader, *come) == come
    assert (unmoved.at.asked, reader.stayed_connected()) == (1, True)
    unmoved.at.mark = None
    assert unmoved.give(reader, *entries(8, 9)) == entries(8, 9), "an old broker does not say it"


def test_a_gap_that_the_cursor_has_reached_is_read_again(unmoved: Readers) -> None:
    reader = unmoved.open()
    unmoved.at.mark = EntryId(7, 40)
    assert unmoved.give(reader, *entries(7, 10, 11, 41, 42)) == entries(7, 10, 11)
    assert reader.read(0) == []
    assert not reader.stayed_connected()
    wait_until(lambda: len(unmoved.at.starts) == 2)
    assert unmoved.at.starts == [FROM, EntryId(7, 12)]
    unmoved.at.mark = EntryId(7, 11)
    wait_until(reader.is_connected)
    assert unmoved.give(reader, *entries(7, 12, 13)) == entries(7, 12, 13)


def test_at_its_start_another_reader_has_to_get_the_same_first_entry(unmoved: Readers) -> None:
    """The mark-delete position may lie behind the start: the broker acknowledges markers itself."""
    reader = unmoved.open()
    unmoved.at.mark, unmoved.at.first = EntryId(7, 11), EntryId(7, 12)
    assert unmoved.give(reader, *entries(7, 12, 13)) == entries(7, 12, 13)
    assert reader.stayed_connected()


def test_at_its_start_a_reader_that_was_moved_is_recognised(unmoved: Readers) -> None:
    reader = unmoved.open()
    unmoved.at.mark, unmoved.at.first = EntryId(7, 11), EntryId(7, 10)
    assert unmoved.give(reader, *entries(7, 12, 13)) == []
    assert not reader.stayed_connected()
    wait_until(reader.is_connected)
    assert unmoved.at.starts == [FROM] * 3, "the reader, another one, and the reader again"


def test_a_confirmed_start_proves_no_later_gap(unmoved: Readers) -> None:
    reader = unmoved.open()
    unmoved.at.mark, unmoved.at.first = EntryId(7, 60), EntryId(7, 12)
    assert unmoved.give(reader, *entries(7, 12, 13, 61, 62)) == entries(7, 12, 13)
    assert reader.read(0) == []
    assert not reader.stayed_connected()


def test_the_cursor_of_another_subscription_proves_nothing(unmoved: Readers) -> None:
    """1. The cursor moves. 2. The reader is lost while it asks. 3. The new cursor has not moved."""
    reader = unmoved.open()
    assert unmoved.give(reader, *entries(7, 10, 11)) == entries(7, 10, 11)
    unmoved.at.loses = reader
    assert unmoved.give(reader, *entries(7, 41, 42)) == []
    assert unmoved.at.starts == [FROM, EntryId(7, 12)]


@pytest.mark.parametrize(
    ("start", "first"), [(EntryId(0, 20), EntryId(0, 61)), (EntryId(0, 0), EntryId(7, 3))]
)
def test_a_gap_at_the_start_is_noticed_in_ledger_0_and_at_the_earliest_position(
    unmoved: Readers, start: EntryId, first: EntryId
) -> None:
    reader = unmoved.open(start)
    unmoved.at.mark, unmoved.at.first = EntryId(9, 0), EntryId(7, 1)
    assert unmoved.give(reader, first) == []
    assert not reader.stayed_connected()
