"""Reads of a ledger from bookies that fail in every way; the bookies are threads of this test."""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from zlib import crc32

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper import ledger_reader
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import FAILURES_MAX, REMEMBERED_S, Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.bookkeeper.protocol import (
    BAD_REQUEST,
    BATCH_BYTES,
    START_TLS,
    TOO_MANY_REQUESTS,
    answer_of,
)
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.auth.tls import TlsOptions, of_bookies
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.wire.entries import RawEntry
from keyshard.config.segments import Segments
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.replicas import (
    BOOKIES_MAX,
    ENSEMBLES_MAX,
    METADATA_MAX,
    LedgerReplicas,
    Placement,
    replicas_of,
)
from keyshard.core.position.split import Span, Split
from keyshard.reading.read_report import NAMED_MAX, ReadReport, planned, was_read
from keyshard.testing.devbroker.security import Authority
from tests.helpers import wait_until
from tests.support.deadlines import deadline

LEDGER = 7
READ, BATCH_READ = 2 << 24 | 2 << 16, 2 << 24 | 7 << 16
Answer = Callable[[int], bytes | None]
"""Returns the bytes that a bookie sends for a request of an entry; ``None``: it closes."""
Batch = Callable[[Answer, int, int], bytes | None]
"""Returns the bytes that it sends for a batch read of entries from one to before another."""


def stored(entry: int) -> bytes:
    return b"\x0e\x01entry %d" % entry


def frame(entry: int, code: int = 0, body: bytes = b"", ledger: int = LEDGER) -> bytes:
    content = struct.pack(">Iiqq", READ, code, ledger, entry) + body
    return struct.pack(">I", len(content)) + content


def batch_frame(first: int, code: int = 0, entries: Sequence[bytes] = ()) -> bytes:
    content = struct.pack(">Iiqqq", BATCH_READ, code, LEDGER, first, first)
    content += b"".join(struct.pack(">I", len(one)) + one for one in entries)
    return struct.pack(">I", len(content)) + content


def as_bookkeeper(answer: Answer, first: int, end: int) -> bytes | None:
    """Answer a batch read as BookKeeper does: it ends before an entry that cannot be read."""
    entries: list[bytes] = []
    for entry in range(first, end):
        sent = answer(entry)
        good = frame(entry, body=sent[28:]) == sent if sent else False
        if not good and not entries:
            code = struct.unpack_from(">i", sent, 8)[0] if sent and len(sent) == 28 else 0
            return batch_frame(first, code) if code else sent
        if not good or sum(map(len, entries)) > BATCH_BYTES:
            break
        assert sent is not None
        entries.append(sent[28:])
    return batch_frame(first, 0, entries)


def unknown(_answer: Answer, _first: int, _end: int) -> None:
    """BookKeeper before 4.17 does not know batch reads, and closes the connection."""


def refused(_answer: Answer, first: int, _end: int) -> bytes:
    return batch_frame(first, BAD_REQUEST)


BATCHES: dict[str, Batch] = {"4.17": as_bookkeeper, "4.16": unknown, "bad request": refused}
batch: Batch = as_bookkeeper


def whole(entry: int, digest: str = "CRC32C") -> bytes:
    head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
    if digest == "CRC32C":
        digested = struct.pack(">I", google_crc32c.value(head + stored(entry)))
    else:
        digested = struct.pack(">q", crc32(head + stored(entry)))
    return frame(entry, body=head + digested + stored(entry))


@pytest.fixture(params=BATCHES)
def _versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with bookies of every version."""
    monkeypatch.setitem(globals(), "batch", BATCHES[request.param])


TLS_STARTS = bytes.fromhex("0a06080310091801 1000 d20600")
"""A response of version 3 to ``START_TLS``."""


def sized(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


@contextmanager
def bookie(
    answer: Answer,
    batch_answer: Batch | None = None,
    *,
    context: ssl.SSLContext | None = None,
    starts: bytes = sized(TLS_STARTS),
) -> Iterator[str]:
    """Serve one connection after the other on loopback, and yield the address.

    Its clients close their connections before it ends; then its thread ends too.

    Args:
        answer: Answers a read.
        batch_answer: Answers a batch read.
        context: Begins TLS after a request for it.
        starts: Answer to this request.
    """
    batch_answer = batch_answer or batch
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        if context is None:
                            talk(connection)
                            continue
                        assert connection.recv(len(START_TLS), socket.MSG_WAITALL) == START_TLS
                        connection.sendall(starts)
                        if starts == sized(TLS_STARTS):
                            with context.wrap_socket(connection, server_side=True) as secured:
                                talk(secured)

        def talk(connection: socket.socket) -> None:
            with connection.makefile("rb") as requests:
                while len(request := requests.read(24)) == 24:
                    size, header, ledger, entry = struct.unpack_from(">IIqq", request)
                    if header == BATCH_READ:
                        number, count, limit = struct.unpack(">qiq", requests.read(20))
                        assert (size, number, limit) == (40, entry, BATCH_BYTES)
                        sent = batch_answer(answer, entry, entry + count)
                    else:
                        assert (size, header) == (20, READ)
                        sent = answer(entry)
                    assert ledger == LEDGER
                    if sent is None:
                        return
                    connection.sendall(sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(deadline(30))
            assert not thread.is_alive()


def replicas(
    *names: str, last: int = 999, quorum: int = 0, digest: str = "CRC32C"
) -> LedgerReplicas:
    return LedgerReplicas(LEDGER, last, quorum or len(names), digest, ((0, names),))


def read(ledger: LedgerReplicas, first: int = 0, last: int = 10**9) -> list[int]:
    """Read a ledger; check each entry."""
    found: list[int] = []
    with closing(Bookies({})) as connections:
        reader = LedgerReader(ledger, first, last, connections, 1 << 20)
        while not reader.done:
            for raw in reader.read():
                assert raw.data[raw.position :] == stored(raw.id.entry)
                assert raw.id == EntryId(LEDGER, raw.id.entry)
                found.append(raw.id.entry)
    assert all(later == earlier + 1 for earlier, later in pairwise(found))
    return found


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookies_module, "SILENT_S", deadline(2))


@pytest.mark.usefixtures("_versions")
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


@pytest.mark.usefixtures("_versions")
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


def wrong_digest(entry: int) -> bytes:
    good = whole(entry)
    return good[:-1] + bytes([good[-1] ^ 1])


FAULTS: dict[str, Answer] = {
    "the ledger is missing": lambda entry: frame(entry, 1),
    "the entry is missing": lambda entry: whole(entry) if entry % 3 else frame(entry, 2),
    "reads need TLS with a client certificate": lambda entry: frame(entry, 102),
    "error 999": lambda entry: frame(entry, 999),
    "wrong digest": lambda entry: wrong_digest(entry) if entry % 7 == 5 else whole(entry),
    "instead of": lambda entry: frame(entry, body=whole(entry + 1)[28:]),
    "an entry of 3 bytes": lambda entry: frame(entry, body=b"abc"),
    "not sent": lambda entry: frame(entry, ledger=LEDGER + 1),
    "not requested": lambda entry: whole(entry) * 2,
    "a response of 4 bytes": lambda _: struct.pack(">II", 4, 0),
    "it asks for TLS": lambda _: b"\x15\x03\x03\x00\x02\x02\x46",
    "a frame of": lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "did not answer": lambda entry: b"" if entry > 50 else whole(entry),
    "closed the connection|reset by peer|Broken pipe": lambda entry: (
        None if entry == 77 else whole(entry)
    ),
}


@pytest.mark.usefixtures("_versions")
@pytest.mark.parametrize("said", FAULTS)
def test_another_replica_returns_an_entry_that_one_lacks(said: str) -> None:
    with bookie(FAULTS[said]) as bad, bookie(whole) as good:
        assert read(replicas(bad, good)) == list(range(1_000))
        assert read(replicas(good, bad)) == list(range(1_000))


@pytest.mark.usefixtures("_versions")
@pytest.mark.parametrize("said", FAULTS)
def test_without_another_replica_the_first_missing_entry_is_named(said: str) -> None:
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


def changed(change: Callable[[bytes], bytes]) -> Batch:
    """Change the responses to batch reads of a good bookie; their sizes stay right."""

    def answer(good: Answer, first: int, end: int) -> bytes:
        response = change((as_bookkeeper(good, first, end) or b"")[4:])
        return struct.pack(">I", len(response)) + response

    return answer


BATCH_FAULTS = {
    "without entries": changed(lambda response: response[:32]),
    "another ledger": changed(lambda one: one[:8] + struct.pack(">q", 8) + one[16:]),
    "another first entry": changed(lambda one: one[:16] + struct.pack(">q", 1 << 40) + one[24:]),
    "another request": changed(lambda one: one[:24] + struct.pack(">q", 1 << 40) + one[32:]),
    "a cut entry": changed(lambda response: response[:-1]),
    "a cut size": changed(lambda response: response + b"\0\0"),
    "a huge size": changed(lambda one: one[:32] + b"\x7f\xff\xff\xff" + one[36:]),
    "too many entries": changed(lambda response: response + response[32:]),
    "other entries": lambda good, first, end: changed(
        lambda response: response[:32] + (as_bookkeeper(good, end, 2 * end) or b"")[36:]
    )(good, first, end),
}


@pytest.mark.parametrize("kind", BATCH_FAULTS)
def test_another_replica_returns_the_entries_that_a_wrong_batch_response_lacks(kind: str) -> None:
    with bookie(whole, BATCH_FAULTS[kind]) as bad, bookie(whole) as good:
        assert read(replicas(bad, good)) == list(range(1_000))
        assert read(replicas(good, bad)) == list(range(1_000))
        with pytest.raises(EntryNotReadError):
            read(replicas(bad))


@pytest.mark.parametrize("seed", range(8))
def test_responses_to_batch_reads_may_end_anywhere(seed: int) -> None:
    """Two bookies return parts, refusals and damaged entries, and close; a third one is good."""
    drawn = Random(seed)
    close = 0.02 if seed % 2 else 0.0

    def single(entry: int) -> bytes | None:
        kind = drawn.choices(("good", "code", "digest", "close"), (1, 0.05, 0.05, close))[0]
        if kind == "code":
            return frame(entry, drawn.choice((1, 2, 101, BAD_REQUEST, TOO_MANY_REQUESTS, 999)))
        return {"good": whole, "digest": wrong_digest, "close": lambda _: None}[kind](entry)

    def part(answer: Answer, first: int, end: int) -> bytes | None:
        return as_bookkeeper(answer, first, drawn.randint(first + 1, end))

    with bookie(single, part) as one, bookie(single, part) as other, bookie(whole) as good:
        names = [one, other, good]
        drawn.shuffle(names)
        assert read(replicas(*names)) == list(range(1_000))


def test_consecutive_entries_of_one_bookie_are_requested_together() -> None:
    requests: Counter[str] = Counter()

    def counting(answer: Answer, first: int, end: int) -> bytes | None:
        requests["batch"] += 1
        return as_bookkeeper(answer, first, end)

    def single(entry: int) -> bytes:
        requests["entries"] += 1
        return whole(entry)

    with bookie(single, counting) as one, bookie(single, counting) as other:
        read(replicas(one, other))
        assert requests["batch"] < 20
        assert requests.pop("entries") == 1_000
        requests.clear()
        read(replicas(one, other, quorum=1))  # no bookie has two of them in a row
    assert requests == {"entries": 1_000}


def test_a_failed_bookie_leaves_batch_reads_to_the_others() -> None:
    singles: set[int] = set()

    def single(entry: int) -> bytes:
        singles.add(entry)
        return whole(entry)

    def together(_answer: Answer, first: int, end: int) -> bytes | None:
        return as_bookkeeper(whole, first, end)

    with bookie(FAULTS["a response of 4 bytes"]) as bad, bookie(single, together) as good:
        assert read(replicas(bad, good, last=4_999)) == list(range(5_000))
    assert len(singles) < 50


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


def test_single_answers_to_batch_reads_and_a_close_end_no_task() -> None:
    """Issue: the end of a connection without waiting entries was an IndexError."""
    ours, theirs = socket.socketpair()
    with closing(Bookies({})) as connections, theirs:
        connections._open["b"] = bookies_module._Bookie(ours)
        connections._selector.register(ours, selectors.EVENT_READ, "b")
        connections.request("b", LEDGER, range(5), 5)
        theirs.sendall(b"".join(map(whole, range(5))))
        ((_, frames),) = connections.receive(wait_s=5.0)
        assert len(frames) == 5
        connections.owed("b").clear()
        theirs.shutdown(socket.SHUT_RDWR)
        assert connections.receive("b") == []
        assert connections.failed == {"b": "it closed the connection"}


def test_few_batch_reads_wait_for_an_answer_at_once() -> None:
    most = 0

    def watching(answer: Answer, first: int, end: int) -> bytes | None:
        nonlocal most
        most = max(most, len(connections._open[one].batches))
        return as_bookkeeper(answer, first, min(end, first + 3))

    with bookie(whole, watching) as one, closing(Bookies({})) as connections:
        connections.request(one, LEDGER, range(200), 5)
        owed = connections.owed(one)
        while owed:
            for _, frames in connections.receive():
                owed -= {answer_of(response, LEDGER)[0] for response in frames}
    assert most == bookies_module.BATCHES_MAX


@pytest.mark.usefixtures("_versions")
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


@pytest.mark.usefixtures("_versions")
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


def busy(limit: int, until: Callable[[int], bool]) -> Answer:
    """A bookie that refuses requests beyond a number, until they are sent again often enough."""
    asked: Counter[int] = Counter()

    def answer(entry: int) -> bytes:
        asked[entry] += 1
        full = entry >= limit and not until(asked[entry])
        return frame(entry, TOO_MANY_REQUESTS) if full else whole(entry)

    return answer


@pytest.mark.usefixtures("_versions")
def test_a_busy_bookie_is_asked_again_later() -> None:
    with bookie(busy(100, lambda times: times > 2)) as one:
        assert read(replicas(one, last=199)) == list(range(200))
    with bookie(busy(0, lambda times: times > 1)) as one, bookie(busy(0, bool)) as other:
        assert read(replicas(one, other)) == list(range(1_000))


@pytest.mark.usefixtures("_versions")
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


def test_a_bookie_is_reached_under_another_address() -> None:
    with bookie(whole) as address, closing(Bookies({"bookie-0": address})) as connections:
        reader = LedgerReader(replicas("bookie-0"), 0, 3, connections, 1 << 20)
        found: list[int] = []
        while not reader.done:
            found += [raw.id.entry for raw in reader.read()]
        assert found == [0, 1, 2, 3]
        assert reader.read() == []


names = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=5, unique=True)


@given(names=names, data=st.data(), entry=st.integers(0, 10_000))
def test_the_bookies_of_an_entry_start_at_its_number_modulo_the_ensemble(
    names: list[str], data: st.DataObject, entry: int
) -> None:
    quorum = data.draw(st.integers(1, len(names)))
    later = data.draw(st.integers(1, 10_000))
    ledger = LedgerReplicas(
        LEDGER, 10_000, quorum, "CRC32C", ((0, tuple(names)), (later, tuple(reversed(names))))
    )
    ensemble = names if entry < later else names[::-1]
    assert ledger.bookies_of(entry) == tuple((ensemble * 2)[entry % len(names) :][:quorum])


@given(firsts=st.sets(st.integers(1, 99), max_size=6), bounds=st.data())
def test_a_part_of_a_ledger_has_the_bookies_of_its_entries(
    firsts: set[int], bounds: st.DataObject
) -> None:
    ensembles = tuple((at, (f"a{at}", f"b{at}")) for at in (0, *sorted(firsts)))
    ledger = LedgerReplicas(LEDGER, 99, 2, "CRC32C", ensembles)
    first = bounds.draw(st.integers(0, 99))
    end = bounds.draw(st.integers(first + 1, 100))
    part = ledger.part(first, end)
    for entry in range(first, end):
        assert part.bookies_of(entry) == ledger.bookies_of(entry)
    assert len(part.ensembles) == len(
        {part.bookies_of(entry)[0][1:] for entry in range(first, end)}
    )


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


@pytest.mark.parametrize("refuse", [unknown, refused])
def test_a_bookie_that_refuses_batch_reads_is_named_once_and_remembered(
    refuse: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    now, batches = [0.0], [0]
    failures = Failures(lambda: now[0])

    def counting(answer: Answer, first: int, end: int) -> bytes | None:
        batches[0] += 1
        return refuse(answer, first, end)

    def asked(address: str) -> int:
        """Read by a new split; return the batch reads that it sent."""
        batches[0] = 0
        with closing(Bookies({"bookie-0": address}, failures)) as connections:
            reader = LedgerReader(replicas("bookie-0"), 0, 999, connections, 1 << 20)
            while not reader.done:
                reader.read()
            assert connections.one_by_one == {"bookie-0"}
            assert not connections.failed
        return batches[0]

    with bookie(whole, counting) as one:
        assert asked(one) > 0
        assert asked(one) == 0
        now[0] = REMEMBERED_S - 1
        assert asked(one) == 0
        said = "Bookie bookie-0 refuses batch reads, and is read entry by entry."
        assert caplog.messages == [said]
        now[0] = REMEMBERED_S
        assert asked(one) > 0
        assert caplog.messages == [said] * 2


@pytest.mark.parametrize("answer", [lambda entry: frame(entry, 102), lambda _: None])
def test_a_bookie_that_refuses_all_reads_is_not_said_to_refuse_batch_reads(answer: Answer) -> None:
    failures = Failures()
    with bookie(answer, unknown) as one, closing(Bookies({}, failures)) as connections:
        reader = LedgerReader(replicas(one), 0, 999, connections, 1 << 20)
        with pytest.raises(EntryNotReadError):
            reader.read()
        assert not connections.one_by_one
        assert not failures.is_single((one, None))


def test_a_bookie_that_answers_batch_reads_is_not_said_to_refuse_them() -> None:
    with bookie(whole) as one, closing(Bookies({})) as connections:
        reader = LedgerReader(replicas(one), 0, 999, connections, 1 << 20)
        while not reader.done:
            reader.read()
        assert not connections.one_by_one


@given(
    size=st.integers(1, 5),
    data=st.data(),
    changes=st.lists(st.integers(1, 999), max_size=3, unique=True),
)
def test_a_bookie_is_only_asked_for_entries_that_it_stores(
    size: int, data: st.DataObject, changes: list[int]
) -> None:
    """A batch read returns consecutive entries of one bookie, which lacks some if it is striped."""
    quorum, asked = data.draw(st.integers(1, size)), Counter[int]()
    ensembles = tuple(
        (first, tuple(data.draw(st.permutations("abcdef"))[:size]))
        for first in (0, *sorted(changes))
    )
    ledger = LedgerReplicas(LEDGER, 999, quorum, "CRC32C", ensembles)

    def sent(name: str, first: int, count: int) -> None:
        for entry in range(first, first + count):
            assert name in ledger.bookies_of(entry)
            asked[entry] += 1

    class Noting(Bookies):
        def _connected(self, name: str) -> bookies_module._Bookie:
            if name not in self._open:
                self._open[name] = bookies_module._Bookie(socket.socket())
            return self._open[name]

        def _send(self, name: str, bookie: bookies_module._Bookie, requests: bytes) -> None:
            at = 0
            while at < len(requests):
                frame_size, header, _, entry = struct.unpack_from(">IIqq", requests, at)
                count = 1
                if header == BATCH_READ:
                    (count,) = struct.unpack_from(">i", requests, at + 32)
                    bookie.batches.pop(entry)  # as if it had answered
                sent(name, entry, count)
                at += 4 + frame_size
            if bookie.parts:
                self._send_batches(name, bookie)

    with closing(Noting({})) as connections:
        reader = LedgerReader(ledger, data.draw(st.integers(0, 999)), 999, connections, 1 << 20)
        reader._batch = data.draw(st.integers(1, 125))
        reader._ahead = 1_000
        reader._request_ahead()
        assert asked == dict.fromkeys(range(reader._next, 1_000), 1)


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


def test_a_read_tells_how_it_got_each_ledger() -> None:
    broker = MemoryBroker(MemoryCluster())
    with closing(Bookies({})) as connections:
        placed: dict[int, Placement] = {3: replicas("a"), 4: replicas("a"), 5: "it is not closed"}
        reads = StorageReads(broker, placed, connections)
        reads.from_storage[3] += 1_200
        reads.leave(EntryId(4, 0), "it has markers")
        spans = tuple(Span(one, 0, 2_000, 1, where) for one, where in placed.items())
        split = Split(TopicPartition("orders"), spans)
        seen = {3: 1_200, 4: 10, 5: 3}
        found = was_read(split, seen, reads.from_storage, reads.left)
        assert str(found) == (
            "3: 1,200 entries from bookies; 4: 10 by the broker, because it has markers; "
            "5: 3 by the broker, because it is not closed"
        )
        reads.from_storage[4] += 7
        later = was_read(split, seen, reads.from_storage, reads.left)
        found = ReadReport.of(found.by_start() | later.by_start())
        text = "4: 7 entries from bookies, then 3 by the broker, because it has markers"
        assert text in str(found)
        assert (found.by_bookies, found.by_broker) == (1_207, 6)
        assert found.reasons == {"it has markers": 3, "it is not closed": 3}
        plan = planned([split])
        assert (plan.by_bookies, plan.by_broker) == (4_000, 2_000)
        assert plan.reasons == {"it is not closed": 2_000}


def test_a_report_counts_bookies_that_were_read_entry_by_entry() -> None:
    placed: dict[int, Placement] = {3: replicas("a", "b"), 4: replicas("b", "c"), 5: replicas("d")}
    spans = tuple(Span(one, 0, 1_000, 1, where) for one, where in placed.items())
    split = Split(TopicPartition("orders"), spans)
    seen = {3: 1_000, 4: 1_000, 5: 1_000}
    left = {5: "it has markers"}
    found = was_read(split, seen, {3: 1_000, 4: 1_000}, left, {"b", "a", "d", "e"})
    assert [one.one_by_one for one in found.spans] == [("a", "b"), ("b",), ()]
    assert found.one_by_one == ("a", "b")
    assert str(found).endswith("it has markers; bookies that refuse batch reads: 2 (a, b)")
    batched = was_read(split, seen, {3: 1_000, 4: 1_000}, left)
    assert batched.one_by_one == ()
    assert ReadReport.of(found.by_start() | batched.by_start()).one_by_one == (), "it ran again"
    many = [f"bookie-{number:02}" for number in range(NAMED_MAX + 2)]
    found = was_read(
        Split(TopicPartition("orders"), (Span(3, 0, 1_000, 1, replicas(*many)),)),
        seen, {3: 1_000}, {}, many,
    )  # fmt: skip
    assert str(found).endswith("bookie-19, and 2 more)")


METADATA = (
    "LedgerMetadata{formatVersion=3, ensembleSize=2, writeQuorumSize=2, ackQuorumSize=1, "
    "state=CLOSED, length=377029, lastEntryId=999, digestType=CRC32C, password=OMITTED, "
    "ensembles={0=[127.0.0.1:28107, 127.0.0.1:31452], 512=[127.0.0.1:1, [::1]:2]}, "
    "customMetadata={component=base64:bWFuYWdlZA==, state=OPEN}}"
)


def listed(text: str = METADATA, **more: object) -> Placement:
    return replicas_of({"ledgers": [{"ledgerId": 3, "metadata": text, **more}]})[3]


def test_the_metadata_of_a_ledger_names_its_bookies() -> None:
    assert listed() == LedgerReplicas(
        3, 999, 2, "CRC32C",
        ((0, ("127.0.0.1:28107", "127.0.0.1:31452")), (512, ("127.0.0.1:1", "[::1]:2"))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (METADATA.replace("CLOSED", "OPEN"), "it is not closed"),
        (METADATA.replace("CLOSED", "IN_RECOVERY"), "it is not closed"),
        (METADATA.replace("CRC32C", "HMAC"), "its digest type HMAC cannot be checked"),
        (METADATA.replace("CRC32C", "DUMMY"), "its digest type DUMMY cannot be checked"),
        (METADATA.replace("writeQuorumSize=2", "writeQuorumSize=3"), "not understood"),
        (METADATA.replace("lastEntryId=999, ", ""), "not understood"),
        (METADATA.replace("{0=", "{1="), "not understood"),
        (METADATA.replace("{0=", "{0=["), "not understood"),
        (METADATA.replace("], 512", "], c], 512"), "not understood"),
        (METADATA.replace("], 512", "], more, 512"), "not understood"),
        ("", "it is not closed"),
        ("LedgerMetadata{state=CLOSED, digestType=CRC32C}", "not understood"),
    ],
)
def test_a_ledger_that_bookies_cannot_give_is_left_to_the_broker(text: str, why: str) -> None:
    found = listed(text)
    assert isinstance(found, str)
    assert why in found


def with_ensembles(*ensembles: str) -> str:
    text = ", ".join(f"{9 * number}=[{names}]" for number, names in enumerate(ensembles))
    return METADATA[: METADATA.index("{0=") + 1] + text + METADATA[METADATA.index("}, custom") :]


def test_a_ledger_with_too_many_ensembles_or_bookies_is_left_to_the_broker() -> None:
    pair = "127.0.0.1:1, [::1]:2"
    found = listed(with_ensembles(*[pair] * ENSEMBLES_MAX))
    assert isinstance(found, LedgerReplicas)
    assert found.ensembles[-1] == (9 * ENSEMBLES_MAX - 9, ("127.0.0.1:1", "[::1]:2"))
    beyond = with_ensembles(*[pair] * (ENSEMBLES_MAX + 1))
    assert listed(beyond) == "it has more than 1,000 ensembles"
    pairs = [f"a:{number}, b:{number}" for number in range(BOOKIES_MAX // 2)]
    found = listed(with_ensembles(*pairs, *pairs))
    assert isinstance(found, LedgerReplicas)
    assert len(found.names) == BOOKIES_MAX
    assert listed(with_ensembles(*pairs, "a:0, c:0")) == "it has more than 100 bookies"
    wide = ", ".join(f"a:{number}" for number in range(BOOKIES_MAX + 1))
    assert listed(with_ensembles(wide)) == "it has more than 100 bookies"


def test_long_metadata_of_a_ledger_is_not_parsed() -> None:
    """Metadata up to the limit is parsed at once, also if it is made to take long."""
    for part in ("0=[", "0=[[", "0=[a, ", "ensembles={", "0=[a], "):
        text = METADATA.replace("{0=", "{" + part * (METADATA_MAX // len(part) - 200) + "0=")
        assert len(text) <= METADATA_MAX
        began_s = time.monotonic()
        assert isinstance(listed(text), str)
        assert time.monotonic() - began_s < deadline(10)
    assert "more than 1,048,576 characters" in str(listed(METADATA + "x" * METADATA_MAX))


def test_an_offloaded_ledger_is_left_to_the_broker() -> None:
    assert listed(offloaded=True) == "it is offloaded"


# -- TLS ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.certificate("bookie"))
    return context


def over_tls(authority: Authority, ca: Path | None = None) -> TlsOptions:
    segments = Segments("auto", bookies_trust_certs_file_path=ca or authority.path)
    found = of_bookies(segments)
    assert found is not None
    return found


def said_over_tls(name: str, tls: TlsOptions) -> str:
    with closing(Bookies({}, tls=tls)) as connections:
        reader = LedgerReader(replicas(name), 0, 0, connections, 1 << 20)
        with pytest.raises(EntryNotReadError) as caught:
            reader.read()
        return str(caught.value)


def test_entries_of_any_size_come_over_tls(authority: Authority, server: ssl.SSLContext) -> None:
    """Large ones are in many records of TLS, and several small ones are in one."""
    sizes = [1, 100, 16_300, 16_400, 70_000]

    def body(entry: int) -> bytes:
        return b"%d" % entry + b"x" * sizes[entry % len(sizes)]

    def answer(entry: int) -> bytes:
        head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
        digested = struct.pack(">I", google_crc32c.value(head + body(entry)))
        return frame(entry, body=head + digested + body(entry))

    tls = over_tls(authority)
    with bookie(answer, context=server) as one, closing(Bookies({}, tls=tls)) as connections:
        reader = LedgerReader(replicas(one), 0, 499, connections, 1 << 20)
        found = 0
        while not reader.done:
            for raw in reader.read():
                assert raw.data[raw.position :] == body(raw.id.entry)
                found += 1
    assert found == 500


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (sized(bytes.fromhex("0a06080310091801 109403")), "not set up for TLS"),
        (sized(bytes.fromhex("0a06080310091801 10f503")), "error 501"),
        (sized(b"\xff" * 5), "error None"),
        (struct.pack(">I", 1 << 30), "answered a request for TLS with 1073741824 bytes"),
        (b"\0\0", "closed the connection after a request for TLS"),
        (b"", "closed the connection after a request for TLS"),
    ],
)
def test_a_bookie_that_does_not_begin_tls_is_named(
    authority: Authority, server: ssl.SSLContext, starts: bytes, said: str
) -> None:
    with bookie(whole, context=server, starts=starts) as one:
        assert said in said_over_tls(one, over_tls(authority))


def test_a_bookie_that_is_silent_after_a_request_for_tls_is_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bookies_module, "SILENT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer a request for TLS" in said_over_tls(name, over_tls(authority))


def test_certificates_that_do_not_fit_are_named_with_their_options(
    authority: Authority, server: ssl.SSLContext, tmp_path: Path
) -> None:
    with bookie(whole, context=server) as one:
        said = said_over_tls(one, over_tls(authority, Authority(tmp_path).path))
        assert "presents a certificate that is not trusted" in said
        assert "bookies_trust_certs_file_path" in said
    server.load_verify_locations(authority.path)
    server.verify_mode = ssl.CERT_REQUIRED
    with bookie(whole, context=server) as one:
        said = said_over_tls(one, over_tls(authority))
        wanted = "This connection has no certificate. Check bookies_certificate_file_path"
        assert wanted in said
    # It refuses after the handshake, and this side may send before it reads that.
    with (
        bookie(whole, context=server) as one,
        closing(Bookies({}, tls=over_tls(authority))) as sending,
    ):

        def is_failed() -> bool:
            sending.request(one, LEDGER, [0])
            return one in sending.failed

        wait_until(is_failed, deadline(60))
        assert wanted in sending.failed[one]


def test_a_role_that_a_bookie_does_not_admit_is_named(
    authority: Authority, server: ssl.SSLContext
) -> None:
    """It says so with a frame of version 3, after the handshake."""
    failed = sized(bytes.fromhex("0a06080310091801 10f503"))
    with bookie(lambda _: failed, context=server) as one:
        said = said_over_tls(one, over_tls(authority))
    assert "does not admit the client certificate: there is none" in said


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


def test_a_bookie_that_failed_without_tls_is_still_asked_over_tls(
    authority: Authority, server: ssl.SSLContext
) -> None:
    failures, tls = Failures(), over_tls(authority)
    with bookie(whole, context=server) as one:
        failures.note_bookie((one, None), "it wants TLS")
        with closing(Bookies({}, failures, tls)) as connections:
            assert LedgerReader(replicas(one), 0, 0, connections, 1 << 20).read()
        with closing(Bookies({}, failures)) as connections:
            reader = LedgerReader(replicas(one), 0, 0, connections, 1 << 20)
            with pytest.raises(EntryNotReadError, match="it wants TLS"):
                reader.read()
