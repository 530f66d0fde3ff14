"""Reads of a ledger from bookies that answer; the bookies are threads of this test."""

from __future__ import annotations

import struct
import threading
from contextlib import closing

import google_crc32c
import pytest

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.ledger_reader import LedgerReader
from keyshard.broker.wire.entries import RawEntry
from tests.support.deadlines import deadline
from tests.support.scripted_bookie import LEDGER, Answer, bookie, frame, read, replicas, whole

pytestmark = pytest.mark.usefixtures("impatient_bookies")


@pytest.mark.usefixtures("bookie_versions")
@pytest.mark.parametrize("digest", ["CRC32C", "CRC32"])
def test_all_entries_come_in_order(digest: str) -> None:
    with bookie(lambda entry: whole(entry, digest)) as one:
        assert read(replicas(one, digest=digest)) == list(range(1_000))
        assert read(replicas(one, digest=digest), 990, 995) == list(range(990, 996))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_first_requests_of_a_group_ask_the_same_bookies_as_later_ones(size: int) -> None:
    """First requests are made for a whole group at once, and later ones for each entry."""
    for quorum in range(1, size + 1):
        with closing(Bookies({})) as connections:
            asked: dict[int, str] = {}

            def noting(
                name: str,
                ledger: int,
                entries: list[int],
                batch: int = 1,
                *,
                to: dict[int, str] = asked,
            ) -> None:
                assert (ledger, entries, batch > 0) == (LEDGER, sorted(entries), True)
                assert not to.keys() & set(entries)
                to.update(dict.fromkeys(entries, name))

            connections.request = noting  # type: ignore[method-assign,assignment]
            ledger = replicas(*(f"bookie-{number}" for number in range(size)), quorum=quorum)
            reader = LedgerReader(ledger, 0, 999, connections, 1 << 20)
            reader._ask_first(7, 250)
            reader._ask_first(250, 251)
            reader._ask_first(251, 500)
            at_once, waiting = dict(asked), dict(reader._waiting)
            asked.clear()
            reader._waiting.clear()
            reader._ask(range(7, 500))
            assert (at_once, waiting) == (asked, reader._waiting)


@pytest.mark.usefixtures("bookie_versions")
def test_requests_are_spread_over_replicas() -> None:
    asked: list[set[int]] = [set(), set()]

    def noting(number: int) -> Answer:
        def answer(entry: int) -> bytes:
            asked[number].add(entry)
            return whole(entry)

        return answer

    with bookie(noting(0)) as one, bookie(noting(1)) as other:
        read(replicas(one, other))
    assert asked[0] | asked[1] == set(range(1_000))
    assert not asked[0] & asked[1]
    assert min(map(len, asked)) >= 250


@pytest.mark.usefixtures("bookie_versions")
def test_entries_that_arrive_before_their_turn_take_no_more_memory_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small entries come first, so many are requested; then large ones wait for a slow bookie."""
    monkeypatch.setattr(bookies_module, "SILENT_S", deadline(60))
    large = b"x" * 50_000
    held = threading.Event()

    def body(entry: int) -> bytes:
        return large if entry >= 500 else b"small"

    def answer(entry: int) -> bytes:
        if entry == 250:
            assert held.wait(deadline(20))
        head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
        digest = struct.pack(">I", google_crc32c.value(head + body(entry)))
        return frame(entry, body=head + digest + body(entry))

    with bookie(answer) as one, bookie(answer) as other, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(one, other), 0, 999, connections, 1 << 20)
        most, found = 0, 0
        receive = connections.receive

        def noting(
            only: str | None = None, wait_s: float | None = None
        ) -> list[tuple[str, list[bytes]]]:
            nonlocal most
            arrived = sum(len(raw.data) for raw in reader._arrived.values())
            assert arrived == reader._arrived_bytes
            most = max(most, arrived)
            if only is not None:
                held.set()  # the memory is full
            return receive(only, wait_s)

        connections.receive = noting  # type: ignore[method-assign]
        while not reader.done:
            found += len(reader.read())
    assert held.is_set(), "the limit was reached"
    assert found == 1_000
    assert 1 << 20 < most < 3 << 20


@pytest.mark.usefixtures("bookie_versions")
def test_large_entries_are_returned_in_steps_of_few_entries() -> None:
    """Bookies send the next entries while a step is decoded, so a step has only some of them."""

    def answer(entry: int) -> bytes:
        head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
        body = b"x" * (50_000 if entry >= 250 else 5)
        digest = struct.pack(">I", google_crc32c.value(head + body))
        return frame(entry, body=head + digest + body)

    with bookie(answer) as one, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(one), 0, 999, connections, 32 << 20)
        steps: list[list[RawEntry]] = []
        while not reader.done:
            steps.append(reader.read())
    assert [raw.id.entry for step in steps for raw in step] == list(range(1_000))
    assert sum(step[0].id.entry >= 250 for step in steps) > 10


def test_a_bookie_is_reached_under_another_address() -> None:
    with bookie(whole) as address, closing(Bookies({"bookie-0": address})) as connections:
        reader = LedgerReader(replicas("bookie-0"), 0, 3, connections, 1 << 20)
        found: list[int] = []
        while not reader.done:
            found += [raw.id.entry for raw in reader.read()]
        assert found == [0, 1, 2, 3]
        assert reader.read() == []
