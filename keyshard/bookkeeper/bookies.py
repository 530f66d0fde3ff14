"""Connections to bookies, and the requests on them that have no answer yet.

Not thread-safe: one thread uses the connections. A bookie that refuses or loses the connection, is
silent for too long or sends a wrong entry is not asked again. Its requests without an answer then
go to other bookies.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from keyshard.bookkeeper.failures import Failures
from keyshard.bookkeeper.protocol import (
    BAD_REQUEST,
    RESPONSE_BYTES_MAX,
    START_TLS,
    STARTED_BYTES_MAX,
    TOO_MANY_REQUESTS,
    batch_of,
    batch_request,
    check_tls_starts,
    has_entry,
    read_requests,
    refusals,
    refuses_certificate,
    split_batch,
)
from keyshard.broker.auth.tls import TlsOptions, context_of, explained
from keyshard.broker.framing import FrameReader, ProtocolError

CONNECT_S = 3.0
"""Longest time until a bookie accepts a connection, seconds."""
SILENT_S = 3.0
"""Time without an answer after which a bookie is not asked again, seconds."""
BATCHES_MAX = 16
"""Most batch reads without an answer at one bookie. Their answers can arrive before their turn."""
_RECEIVE_BYTES = 1024 * 1024
_RECORD_BYTES = 16 * 1024
"""Largest content of a record of TLS: a read of so much leaves none behind in the TLS library."""
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""Beginnings of an alert and of a handshake of TLS."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Bookie:
    socket: socket.socket
    frames: FrameReader = field(default_factory=lambda: FrameReader(RESPONSE_BYTES_MAX))
    waiting: set[int] = field(default_factory=set)
    """Entries that were requested and not answered."""
    ledger: int = -1
    """The ledger of these entries."""
    batches: dict[int, int] = field(default_factory=dict)
    """Entries of the batch reads without an answer, by the first one."""
    parts: deque[tuple[int, int]] = field(default_factory=deque)
    """First entries and numbers of entries of batch reads that are not sent yet."""
    rests: dict[int, int] = field(default_factory=dict)
    """Entries that answers to batch reads left out and that are not requested again yet, by the
    first one. Earlier entries come first, so that few arrive before their turn."""
    batched: bool = False
    """Whether it has answered a batch read."""
    heard_s: float = 0.0
    """When it last answered, or got a request while none was waiting."""

    @property
    def may_be_old(self) -> bool:
        """Whether it may be a bookie that does not know batch reads."""
        return bool(self.waiting and self.batches) and not self.batched


class Bookies:
    """Connections to the bookies of a cluster.

    Args:
        addresses: Address ``host:port`` under which a bookie is reached, for those that are not
            reached under their names.
        failures: Bookies that failed lately and are not asked.
        tls: How TLS is spoken with them; ``None``: not at all.

    Raises:
        ConfigError: A file of ``tls`` has invalid content.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        failures: Failures | None = None,
        tls: TlsOptions | None = None,
    ) -> None:
        self._addresses = addresses
        self._tls = tls
        self._context = None if tls is None else context_of(tls)
        self._failures = failures or Failures()
        self._open: dict[str, _Bookie] = {}
        self._selector = selectors.DefaultSelector()
        self._lost: list[int] = []
        self._single: set[str] = set()
        """Bookies that do not know batch reads, or are asked as if they did not."""
        self.one_by_one: set[str] = set()
        """Bookies that refuse batch reads, and have returned entries one by one."""
        self.failed: dict[str, str] = {}
        """Why a bookie is not asked any more, by its name."""

    def request(self, name: str, ledger: int, entries: Sequence[int], batch: int = 1) -> None:
        """Request entries of a bookie; they are :meth:`lost` if that is not possible.

        Args:
            name: The bookie.
            ledger: Their ledger. Before a request for another one, all answers must have arrived.
            entries: The entries, ascending.
            batch: Most entries of a batch read. Entries that are not consecutive are requested one
                by one.
        """
        bookie = self._connected(name)
        if bookie is None:
            self._lost += entries
            return
        if not bookie.waiting:
            bookie.heard_s = time.monotonic()
        bookie.ledger = ledger
        bookie.waiting.update(entries)
        consecutive = entries[-1] - entries[0] == len(entries) - 1
        if name in self._single or not consecutive or min(batch, len(entries)) == 1:
            self._send(name, bookie, read_requests(ledger, entries))
            return
        bookie.parts += [
            (entries[at], min(batch, len(entries) - at)) for at in range(0, len(entries), batch)
        ]
        self._send_batches(name, bookie)

    def _send_batches(self, name: str, bookie: _Bookie) -> None:
        """Send the waiting batch reads, while fewer than :data:`BATCHES_MAX` are unanswered.

        A bookie that does not know batch reads gets single reads instead.
        """
        if name in self._single:
            left = [*bookie.parts, *bookie.rests.items()]
            bookie.parts.clear()
            bookie.rests.clear()
            entries = [one for first, count in left for one in range(first, first + count)]
            if entries:
                self._send(name, bookie, read_requests(bookie.ledger, entries))
            return
        requests = []
        while len(bookie.batches) < BATCHES_MAX:
            first = min(bookie.rests, default=-1)
            if bookie.rests and first < min(bookie.batches, default=first + 1):
                count = bookie.rests.pop(first)
            elif bookie.parts:
                first, count = bookie.parts.popleft()
            else:
                break
            bookie.batches[first] = count
            requests.append(batch_request(bookie.ledger, first, count))
        if requests:
            self._send(name, bookie, b"".join(requests))

    def _send(self, name: str, bookie: _Bookie, requests: bytes) -> None:
        try:
            bookie.socket.sendall(requests)
        except OSError as exc:
            if bookie.may_be_old and isinstance(exc, ConnectionError | ssl.SSLEOFError):
                # Not given up here: receive() first takes the answers before the end of the
                # connection. Then _closed() handles the end.
                return
            self.give_up(name, self._said(bookie) or f"it does not take requests: {exc}")

    def owed(self, name: str) -> set[int]:
        """Return the live set of a bookie's unanswered entries. Callers remove answered ones."""
        bookie = self._open.get(name)
        return set() if bookie is None else bookie.waiting

    def receive(
        self, only: str | None = None, wait_s: float | None = None
    ) -> list[tuple[str, list[bytes]]]:
        """Wait for frames of any bookie, and give up those that are silent.

        Args:
            only: The bookie whose frames are wanted, while those of others wait in their sockets;
                ``None``: all bookies.
            wait_s: Longest wait, seconds; ``None``: until a bookie is silent for too long.

        Returns:
            Names of bookies and the frames that arrived from them; empty if none came in time.
        """
        found = []
        # The time is read before the frames are processed: that work does not count as silence.
        ready, now = self._ready(only, wait_s), time.monotonic()
        for name in ready:
            bookie = self._open.get(name)
            if bookie is None:
                continue
            try:
                data = _received(bookie.socket)
            except OSError as exc:
                if why := self._of_tls(exc):
                    self.give_up(name, why)
                else:
                    self._closed(name, bookie, str(exc))
                continue
            if data is None:
                continue
            try:
                frames = bookie.frames.feed(data)
            except ProtocolError as exc:
                tls = data.startswith(_TLS_RECORDS)
                self.give_up(name, "it asks for TLS" if tls else str(exc))
                continue
            if not data:
                self._closed(name, bookie, "it closed the connection")
                continue
            if self._tls is not None and any(map(refuses_certificate, frames)):
                own = self._tls.certificate
                shown = "there is none" if own is None else f"it is {own}"
                self.give_up(name, f"it does not admit the client certificate: {shown}")
                continue
            bookie.heard_s = time.monotonic()
            if name in self._single and name not in self.one_by_one:
                self._note_single(name, frames)
            found.append((name, self._split(name, bookie, frames) if bookie.batches else frames))
        for name, bookie in list(self._open.items()):
            if bookie.waiting and now - bookie.heard_s >= SILENT_S:
                self.give_up(name, f"it did not answer for {SILENT_S:g} s")
        return found

    def _closed(self, name: str, bookie: _Bookie, why: str) -> None:
        """Give up a bookie that closed the connection, unless it may not know batch reads.

        A bookie closes the connection after a request that it does not know.
        """
        if not bookie.may_be_old:
            self.give_up(name, why)
            return
        self._single.add(name)
        self._drop(name, bookie)
        self.request(name, bookie.ledger, sorted(bookie.waiting))

    def _key_of(self, name: str) -> Hashable:
        """Return the key of a bookie in the recent failures."""
        return self._addresses.get(name, name), self._tls

    def _note_single(self, name: str, frames: Sequence[bytes]) -> None:
        """Note that a bookie refuses batch reads, once it has returned an entry without one.

        Until then, it may refuse all reads, or have closed the connection for another reason.
        """
        if not any(map(has_entry, frames)):
            return
        self.one_by_one.add(name)
        where = self._key_of(name)
        if not self._failures.is_single(where):
            self._failures.note_single(where)
            _log.info("Bookie %s refuses batch reads, and is read entry by entry.", name)

    def _split(self, name: str, bookie: _Bookie, frames: Sequence[bytes]) -> list[bytes]:
        """Split the responses to batch reads into those to single reads, and request the rest."""
        found: list[bytes] = []
        for frame in frames:
            if self._open.get(name) is not bookie:
                break
            first = batch_of(frame)
            if first is None or first not in bookie.batches:
                found.append(frame)
                continue
            end = first + bookie.batches.pop(first)
            try:
                code, responses = split_batch(frame, bookie.ledger, first, end)
            except ProtocolError as exc:
                self.give_up(name, f"it sent {exc}")
                continue
            found += responses
            bookie.batched = bookie.batched or not code
            next_entry = first + len(responses)
            if code == TOO_MANY_REQUESTS:
                found += refusals(bookie.ledger, range(first, end), code)
            elif code:
                # The error of a batch read need not be that of each entry. BAD_REQUEST means that
                # the bookie does not know batch reads.
                if code == BAD_REQUEST:
                    self._single.add(name)
                self._send(name, bookie, read_requests(bookie.ledger, range(first, end)))
            elif next_entry < end:
                bookie.rests[next_entry] = end - next_entry
        if self._open.get(name) is bookie:
            self._send_batches(name, bookie)
        return found

    def lost(self) -> list[int]:
        """Return the entries that became lost since the previous call.

        Their bookie has not answered, and is not asked any more.
        """
        lost, self._lost = self._lost, []
        return lost

    def abandon(self) -> None:
        """Close the connections on which answers may still arrive."""
        for name, bookie in list(self._open.items()):
            if bookie.waiting:
                self._drop(name, bookie)
        self._lost.clear()

    def give_up(self, name: str, why: str) -> None:
        """Close the connection to a bookie, and do not ask it again."""
        if name not in self.failed:
            self.failed[name] = why
            self._failures.note_bookie(self._key_of(name), why)
            _log.warning("Bookie %s is not read from: %s.", name, why)
        bookie = self._open.get(name)
        if bookie is not None:
            self._lost += bookie.waiting
            self._drop(name, bookie)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for bookie in self._open.values():
            bookie.socket.close()
        self._open.clear()
        self._selector.close()

    def _drop(self, name: str, bookie: _Bookie) -> None:
        del self._open[name]
        self._selector.unregister(bookie.socket)
        bookie.socket.close()

    def _connected(self, name: str) -> _Bookie | None:
        if name in self.failed:
            return None
        bookie = self._open.get(name)
        if bookie is None:
            where = self._addresses.get(name, name)
            key = self._key_of(name)
            if why := self._failures.bookie(key):
                self.failed[name] = why
                return None
            if self._failures.is_single(key):
                self._single.add(name)
            try:
                connection = self._connect(where)
            except ProtocolError as exc:
                self.give_up(name, str(exc))
                return None
            except (OSError, ValueError, OverflowError) as exc:
                self.give_up(name, self._of_tls(exc) or f"it cannot be reached: {exc}")
                return None
            bookie = self._open[name] = _Bookie(connection)
            self._selector.register(connection, selectors.EVENT_READ, name)
        return bookie

    def _connect(self, where: str) -> socket.socket:
        host, _, port = where.rpartition(":")
        if not port.isdecimal():
            raise ValueError("its name is not an address host:port. Add one to bookies_map")
        host = host.strip("[]")
        connection = socket.create_connection((host, int(port)), CONNECT_S)
        try:
            connection.settimeout(SILENT_S)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                return connection
            _start_tls(connection)
            return self._context.wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
            raise

    def _said(self, bookie: _Bookie) -> str:
        """Return the TLS error that a bookie sent before it closed the connection; may be empty."""
        try:
            if self._tls is not None:
                _received(bookie.socket)
        except OSError as exc:
            return self._of_tls(exc)
        return ""

    def _of_tls(self, exc: Exception) -> str:
        """Return the text of an error about TLS certificates or versions; empty for others."""
        error = None if self._tls is None else explained(exc, "it", self._tls)
        return "" if error is None else error.message.rstrip(".")

    def _ready(self, only: str | None, wait_s: float | None) -> list[str]:
        """Wait for bookies that have sent something, until one is silent for too long."""
        wanted = None if only is None else self._open.get(only)
        if wanted is None:
            patience_s = self._patience_s()
            wait_s = patience_s if wait_s is None else min(wait_s, patience_s)
            return [key.data for key, _ in self._selector.select(wait_s)]
        with selectors.DefaultSelector() as selector:
            selector.register(wanted.socket, selectors.EVENT_READ)
            found = selector.select(max(0.0, wanted.heard_s + SILENT_S - time.monotonic()))
        now = time.monotonic()
        for bookie in self._open.values():
            if bookie is not wanted:
                # Its socket was not read meanwhile, so the wait does not count as its silence.
                bookie.heard_s = now
        return [only] if found and only is not None else []

    def _patience_s(self) -> float:
        """Return the time until a bookie is silent for too long, seconds."""
        now = time.monotonic()
        waits = [one.heard_s + SILENT_S - now for one in self._open.values() if one.waiting]
        return max(0.0, min(waits, default=0.0))


def _start_tls(connection: socket.socket) -> None:
    """Ask a bookie to begin TLS, and take its answer, but no byte after it."""
    end_s = time.monotonic() + SILENT_S
    connection.sendall(START_TLS)
    (size,) = struct.unpack(">I", _exactly(connection, 4, end_s))
    if size > STARTED_BYTES_MAX:
        raise ProtocolError(f"it answered a request for TLS with {size} bytes")
    check_tls_starts(_exactly(connection, size, end_s))


def _exactly(connection: socket.socket, size: int, end_s: float) -> bytes:
    data = b""
    while len(data) < size:
        try:
            part = connection.recv(size - len(data))
        except TimeoutError:
            part = None
        if part is None or time.monotonic() > end_s:
            raise ProtocolError(f"it did not answer a request for TLS for {SILENT_S:g} s")
        if not part:
            raise ProtocolError("it closed the connection after a request for TLS")
        data += part
    return data


def _received(connection: socket.socket) -> bytes | None:
    """Return bytes that have arrived, none at the end, or ``None`` if only TLS itself had some."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.recv(_RECEIVE_BYTES)
    parts: list[bytes] = []
    connection.settimeout(0)
    try:
        while len(parts) * _RECORD_BYTES < _RECEIVE_BYTES:
            parts.append(connection.recv(_RECORD_BYTES))
            if not parts[-1]:
                break
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        if not parts:
            return None
    finally:
        connection.settimeout(SILENT_S)
    return b"".join(parts)
