"""Batch reads from bookies: wrong responses, partial responses, and refusals."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from random import Random

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import REMEMBERED_S, Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.bookkeeper.protocol import BAD_REQUEST, TOO_MANY_REQUESTS, answer_of
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.port import Reader
from keyshard.core.position.entry import EntryId
from keyshard.core.position.replicas import LedgerReplicas
from keyshard.errors import BookieReadError
from tests.stored_entries import WHERE, single
from tests.support.deadlines import deadline, in_time
from tests.support.scripted_bookie import (
    BATCH_READ,
    FAULTS,
    LEDGER,
    Answer,
    Batch,
    as_bookkeeper,
    bookie,
    frame,
    read,
    refused,
    replicas,
    unknown,
    whole,
    wrong_digest,
)

pytestmark = pytest.mark.usefixtures("impatient_bookies")


def changed(change: Callable[[bytes], bytes]) -> Batch:
    """Change the responses to batch reads of a good bookie; their sizes stay right."""

    def answer(good: Answer, first: int, end: int) -> bytes:
        response = change((as_bookkeeper(good, first, end) or b"")[4:])
        return struct.pack(">I", len(response)) + response

    return answer


class NoBroker:
    """Opens no Reader."""

    def reader(self, *_: object) -> Reader:
        raise AssertionError("the broker was asked")


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


PLACES: dict[str, Callable[[int, int], int]] = {
    "first": lambda first, _: first,
    "middle": lambda first, end: (first + end) // 2,
    "last": lambda _, end: end - 1,
}
"""Entries of a batch read, by their place in the response."""


def changed_entry(place: str, asked: list[tuple[int, int]]) -> Batch:
    """Change one entry in each response to a batch read, and note the reads."""

    def answer(good: Answer, first: int, end: int) -> bytes | None:
        asked.append((first, end))
        wrong = PLACES[place](first, end)
        return as_bookkeeper(
            lambda entry: flipped(good(entry)) if entry == wrong else good(entry), first, end
        )

    return answer


def flipped(response: bytes | None) -> bytes:
    assert response is not None
    return response[:-1] + bytes([response[-1] ^ 1])


@pytest.mark.parametrize("digest", ["CRC32C", "CRC32"])
@pytest.mark.parametrize("place", PLACES)
def test_an_entry_with_a_wrong_digest_in_a_batch_response_comes_from_another_replica(
    place: str, digest: str
) -> None:
    """Issue: BookKeeper's client waited without end for the batch (apache/bookkeeper#4789)."""

    def right(entry: int) -> bytes:
        return whole(entry, digest)

    asked: list[tuple[int, int]] = []
    with bookie(right, changed_entry(place, asked)) as bad, bookie(right) as good:
        for names in (bad, good), (good, bad):
            end_s = time.monotonic() + deadline(20)
            asked.clear()
            assert read(replicas(*names, digest=digest)) == list(range(1_000))
            in_time(end_s, "a wrong digest makes no read wait")
            assert any(end - first > 2 for first, end in asked), "the place is one in a batch"


@pytest.mark.parametrize("place", PLACES)
def test_an_entry_with_a_wrong_digest_in_all_replicas_is_named_with_ledger_and_bookie(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Issue: BookKeeper's client waited without end for the batch (apache/bookkeeper#4789)."""
    wrong = PLACES[place](0, 10)

    def right(entry: int) -> bytes:
        head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
        body = single({
            "value": b"%d" % entry, "key": "k", "key_bytes": None, "ordering_key": None,
            "properties": {}, "event_ms": 0,
        })  # fmt: skip
        digested = struct.pack(">I", google_crc32c.value(head + body))
        return frame(entry, body=head + digested + body)

    def answer(entry: int) -> bytes:
        return flipped(right(entry)) if entry == wrong else right(entry)

    end_s = time.monotonic() + deadline(20)
    with bookie(answer) as one, bookie(answer) as other, closing(Bookies({})) as connections:
        names = (one, other)
        reads = StorageReads(
            NoBroker(), {LEDGER: replicas(*names, last=9)}, connections, required=True
        )
        reader, found = reads.reader(WHERE, EntryId(LEDGER, 0)), list[EntryId]()

        def read_on() -> None:
            while not reader.at_end():
                found.extend(block.id for block in reader.read(1_000))

        with pytest.raises(BookieReadError) as caught:
            read_on()
    in_time(end_s, "a wrong digest makes no read wait")
    assert found == [EntryId(LEDGER, entry) for entry in range(wrong)]
    said = caught.value.message
    assert f"entry {LEDGER}:{wrong} of {WHERE}" in said
    assert any(f"{name}: an entry with a wrong digest" in said for name in names)
    for name in names:
        warning = f"Bookie {name} gave no entry {LEDGER}:{wrong}: an entry with a wrong digest."
        assert warning in caplog.messages


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
