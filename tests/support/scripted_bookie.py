"""Bookies as threads of a test, and what they answer."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from zlib import crc32

import google_crc32c

from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.ledger_reader import LedgerReader
from keyshard.bookkeeper.protocol import BAD_REQUEST, BATCH_BYTES, START_TLS
from keyshard.core.position.entry import EntryId
from keyshard.core.position.replicas import LedgerReplicas
from tests.support.deadlines import deadline, joined

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
"""The answer of bookies to batch reads; the fixture ``bookie_versions`` replaces it."""


def whole(entry: int, digest: str = "CRC32C") -> bytes:
    head = struct.pack(">qqqq", LEDGER, entry, entry - 1, 100)
    if digest == "CRC32C":
        digested = struct.pack(">I", google_crc32c.value(head + stored(entry)))
    else:
        digested = struct.pack(">q", crc32(head + stored(entry)))
    return frame(entry, body=head + digested + stored(entry))


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
            joined(thread, deadline(30))


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
