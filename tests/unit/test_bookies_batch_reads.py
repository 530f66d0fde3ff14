"""Batch reads from bookies: wrong responses, partial responses, and refusals."""

from __future__ import annotations

import logging
import selectors
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import REMEMBERED_S, Failures
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.bookkeeper.protocol import BAD_REQUEST, TOO_MANY_REQUESTS, answer_of
from keyshard.core.position.replicas import LedgerReplicas
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
