"""Reads of a ledger from bookies that fail in every way."""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper import ledger_reader
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import FAILURES_MAX, REMEMBERED_S, Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.bookkeeper.protocol import TOO_MANY_REQUESTS
from keyshard.core.position.entry import EntryId
from tests.support.scripted_bookie import (
    FAULTS,
    Answer,
    bookie,
    frame,
    read,
    replicas,
    unknown,
    whole,
)

SILENT = "did not answer"
"""The fault of a bookie that says nothing."""

pytestmark = pytest.mark.usefixtures("impatient_bookies")


@pytest.mark.usefixtures("bookie_versions")
@pytest.mark.parametrize("said", FAULTS)
def test_another_replica_returns_an_entry_that_one_lacks(said: str) -> None:
    """Both orders at once, because a silent bookie makes either wait."""
    with (
        bookie(FAULTS[said]) as bad, bookie(whole) as good,
        bookie(FAULTS[said]) as other_bad, bookie(whole) as other_good,
        ThreadPoolExecutor(2) as threads,
    ):  # fmt: skip
        for found in threads.map(read, (replicas(bad, good), replicas(other_good, other_bad))):
            assert found == list(range(1_000))


@pytest.mark.usefixtures("bookie_versions")
@pytest.mark.parametrize("said", FAULTS)
def test_without_another_replica_the_first_missing_entry_is_named(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said == SILENT:
        monkeypatch.setattr(bookies_module, "SILENT_S", 0.2)  # at whatever entry it is given up
    with bookie(FAULTS[said]) as bad, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(bad), 0, 999, connections, 1 << 20)
        found: list[int] = []

        def read_on() -> None:
            while True:
                found.extend(raw.id.entry for raw in reader.read())

        with pytest.raises(EntryNotReadError, match=said):
            read_on()
        assert found == list(range(len(found))), "nothing is returned behind it"
        with pytest.raises(EntryNotReadError):
            reader.read()


def test_a_slow_connection_to_one_bookie_gives_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: the answers that arrived during the wait came too late."""
    connect = Bookies._connect

    def slow(self: Bookies, where: str) -> socket.socket:
        if where == old and where in tried:
            time.sleep(bookies_module.SILENT_S + 0.1)
            raise ConnectionRefusedError("after a while")
        tried.add(where)
        return connect(self, where)

    def later(entry: int) -> bytes:
        if entry == 250:
            time.sleep(0.3)
        return whole(entry)

    tried: set[str] = set()
    monkeypatch.setattr(Bookies, "_connect", slow)
    with bookie(whole, unknown) as old, bookie(later) as good:
        assert read(replicas(old, good), 245) == list(range(245, 1_000))


def busy(limit: int, until: Callable[[int], bool]) -> Answer:
    """A bookie that refuses requests beyond a number, until they are sent again often enough."""
    asked: Counter[int] = Counter()

    def answer(entry: int) -> bytes:
        asked[entry] += 1
        full = entry >= limit and not until(asked[entry])
        return frame(entry, TOO_MANY_REQUESTS) if full else whole(entry)

    return answer


@pytest.mark.usefixtures("bookie_versions")
def test_a_busy_bookie_is_asked_again_later() -> None:
    with bookie(busy(100, lambda times: times > 2)) as one:
        assert read(replicas(one, last=199)) == list(range(200))
    with bookie(busy(0, lambda times: times > 1)) as one, bookie(busy(0, bool)) as other:
        assert read(replicas(one, other)) == list(range(1_000))


@pytest.mark.usefixtures("bookie_versions")
def test_a_bookie_that_stays_busy_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_reader, "BUSY_S", 0.2)
    with bookie(busy(3, lambda _: False)) as one, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(one), 0, 999, connections, 1 << 20)
        found: list[int] = []

        def read_on() -> None:
            while True:
                found.extend(raw.id.entry for raw in reader.read())

        with pytest.raises(EntryNotReadError, match="too many requests"):
            read_on()
        assert found == [0, 1, 2]


def test_a_bookie_that_is_away_is_named_and_another_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"127.0.0.1:{closed.getsockname()[1]}"
    with bookie(whole) as good:
        assert read(replicas(away, good)) == list(range(1_000))
    for name in (away, "no-address", "host:99999999", "[::1"):
        with pytest.raises(EntryNotReadError, match="cannot be reached"):
            read(replicas(name))


def test_a_bookie_whose_name_is_no_address_is_named_with_the_option_for_it() -> None:
    """A bookie with an id of its own, such as that of a standalone broker."""
    wayout = "bk-0: it cannot be reached: its name is not an address.* bookies_map"
    with pytest.raises(EntryNotReadError, match=wayout):
        read(replicas("bk-0"))


def test_a_bookie_that_failed_is_not_asked_by_the_next_splits_until_later() -> None:
    now = [0.0]
    failures = Failures(lambda: now[0])
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"127.0.0.1:{closed.getsockname()[1]}"

    def asked() -> str:
        with closing(Bookies({"bookie-0": away}, failures)) as connections:
            reader = LedgerReader(replicas("bookie-0"), 0, 0, connections, 1 << 20)
            with pytest.raises(EntryNotReadError) as caught:
                reader.read()
            return str(caught.value)

    assert "cannot be reached" in asked()
    with bookie(whole) as address, closing(Bookies({"bookie-0": address}, failures)) as others:
        assert LedgerReader(replicas("bookie-0"), 0, 0, others, 1 << 20).read()
    failures.note_bookie((away, None), "remembered")
    assert "bookie-0: remembered" in asked()
    now[0] = REMEMBERED_S
    assert "cannot be reached" in asked()


def test_a_ledger_left_to_the_broker_is_left_from_its_first_failed_entry_on() -> None:
    now = [0.0]
    failures = Failures(lambda: now[0])
    failures.note_ledger("a", EntryId(3, 20), "later")
    failures.note_ledger("a", EntryId(3, 10), "it has markers")
    failures.note_ledger("a", EntryId(3, 30), "later")
    assert failures.ledger("a", EntryId(3, 10)) == "it has markers"
    assert not failures.ledger("a", EntryId(3, 9))
    assert not failures.ledger("a", EntryId(4, 10))
    assert not failures.ledger("b", EntryId(3, 10))
    now[0] = REMEMBERED_S
    assert not failures.ledger("a", EntryId(3, 10))


def test_the_memory_of_failures_is_limited() -> None:
    failures = Failures()
    for number in range(FAILURES_MAX + 5):
        failures.note_bookie(f"bookie-{number}", "away")
    assert not failures.bookie("bookie-4")
    assert failures.bookie("bookie-5")


def test_threads_share_the_memory_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue: a full memory raised an error if two threads noted failures at once."""
    monkeypatch.setattr("keyshard.bookkeeper.failures.FAILURES_MAX", 10)
    failures = Failures()

    def note(thread: int) -> None:
        for number in range(2_000):
            failures.note_bookie((thread, number), "away")

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(note, range(8)))
    finally:
        sys.setswitchinterval(switch_s)
    assert sum(bool(failures.bookie((thread, 1_999))) for thread in range(8)) > 0


def test_a_bookie_that_admits_no_plain_read_is_given_up_at_once() -> None:
    asked = Counter[int]()

    def answer(entry: int) -> bytes:
        asked[entry] += 1
        return frame(entry, 102)

    with bookie(answer) as one, bookie(whole) as other, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(one, other), 0, 999, connections, 1 << 20)
        while not reader.done:
            reader.read()
        assert "reads need TLS with a client certificate" in connections.failed[one]
    assert sum(asked.values()) <= ledger_reader.AHEAD_MAX
