"""One connection to one broker: its socket, its reading thread, and pending requests.

No thread blocks in a write: the reading thread sends what the socket did not accept at once. A
consumer that takes nothing therefore never blocks others. Permits limit what a broker sends ahead.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import suppress
from functools import partial
from typing import Any

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.framing import FrameReader, ProtocolError
from keyshard.broker.wire.connect import Address, greeted, greeting, open_socket, proof
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import Frame, api, frame_of, read_frames
from keyshard.broker.wire.handles import Handle, Handles
from keyshard.broker.wire.keep_alive import Act, KeepAlive
from keyshard.broker.wire.requests import ANSWERS, PendingRequests, fail, new_id
from keyshard.config.connection import Connection
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.threads import Fail, begin, callback

READ_BYTES = 256 << 10
"""Maximum bytes of one read."""
UNSENT_BYTES_MAX = 16 << 20
"""Maximum unsent bytes; a broker that does not accept them counts as lost."""
FRAME_BYTES_MAX = 5 << 20
"""Largest message, bytes, if the broker does not announce its limit."""
FRAME_PADDING = 64 << 10
"""Bytes of a frame in addition to its message."""
TRICKLE_BYTES = 16 << 10
"""Bytes of an incomplete frame that count as a sign of life."""
_NO_REQUEST = 2**64 - 1
"""Request id with which a broker refuses the connection instead of a request."""

_PUSHED = ("watch_topic_update", "scalable_topic_update", "watch_scalable_topics_update")

_connections: weakref.WeakSet[WireConnection] = weakref.WeakSet()
_log = logging.getLogger(__name__)


class WireConnection:
    """An open connection.

    Args:
        address: Address of the broker.
        connection: How the cluster is reached.
        credentials: Credentials for the broker.
        timeout_s: Longest wait until the connection is open, seconds.
        fail: Called if the reading thread fails; ends the source. Default:
            :func:`keyshard.threads.owner` of the calling thread.
        pushed: Called by the reading thread with what the broker reports of topics.

    Raises:
        BrokerUnavailableError: Nothing answers at the address (retriable).
        TlsError: One side does not trust the other.
        AuthenticationError: The broker rejects the credentials.
        BrokerError: The broker refuses the connection.
    """

    def __init__(
        self, address: Address, connection: Connection, credentials: Credentials, timeout_s: float,
        fail: Fail | None = None, *, pushed: Callable[[Frame], None] | None = None,
    ) -> None:  # fmt: skip
        self.address = address._replace(ip="")
        self.opened_s = time.monotonic()
        """When opening began, monotonic seconds."""
        self._connection = connection
        self._credentials = credentials
        self._pushed = pushed
        self._lock = threading.Lock()
        self._requests = PendingRequests()
        self._connected: Future[Any] = Future()
        self._handles = Handles()
        self.message_bytes_max = FRAME_BYTES_MAX
        """Largest message that the broker accepts, with its metadata, bytes."""
        self.features: Any = api.FeatureFlags()
        """Features that the broker supports."""
        self._unsent = bytearray()
        self._why = ""
        """Why the connection ended; empty while it is open."""
        self._ours = False
        """Whether this side ended the connection."""
        self._proving = False
        """Whether a thread is about to send new credentials."""
        self._retired = False
        """Whether the connection ends with its last handle."""
        self._keep_alive = KeepAlive(time.monotonic())
        self._frames = FrameReader(FRAME_BYTES_MAX + FRAME_PADDING)
        deadline = time.monotonic() + min(timeout_s, connection.connection_timeout_ms / 1000)
        shown = credentials.show()
        self._woken_end = self._wake_end = -1
        self._socket = open_socket(address, connection, timeout_s)
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._begin(fail)
        try:
            self._greet(shown.method, shown.data, max(0.0, deadline - time.monotonic()))
        except BaseException:
            self.close("it was not opened")
            raise

    def _begin(self, fail: Fail | None) -> None:
        """Start the reading thread. If that fails, close everything."""
        host, port = self.address[:2]
        try:
            self._socket.settimeout(0)
            self._woken_end, self._wake_end = os.pipe()
            for end in (self._wake_end, self._woken_end):
                os.set_blocking(end, False)
            _connections.add(self)
            self._thread = begin(f"keyshard-wire-{host}:{port}", self._run, fail=fail)
        except BaseException as exc:
            self._end("it was not started")
            if not isinstance(exc, OSError):
                raise
            raise BrokerUnavailableError(
                f"Could not connect to the broker at {self.address}: {exc.strerror or exc}.",
                "Check the resource limits of this process.",
            ) from exc

    def _greet(self, method: str, data: str, timeout_s: float) -> None:
        watches = self._pushed is not None
        self.send("connect", greeting(self.address, method, data, watches=watches))
        response = greeted(self._connected, self.address, self._credentials, timeout_s)
        if response.max_message_size > 0:
            self._frames.bytes_max = response.max_message_size + FRAME_PADDING
            self.message_bytes_max = response.max_message_size
        self.features = response.feature_flags
        self.server: str = response.server_version.decode(errors="replace")
        """The broker's text about itself, perhaps with its version."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is not known to be lost."""
        return not self._why

    def unresponsive(self) -> str:
        """Return why the broker counts as unresponsive; empty while it answers."""
        unanswered_s = self._keep_alive.unanswered_s(time.monotonic())
        if not unanswered_s:
            return ""
        return f"The broker at {self.address} has not answered a ping for {unanswered_s:.0f} s."

    def send(self, name: str, content: Any) -> None:
        """Send a command; return at once.

        Raises:
            BrokerUnavailableError: The connection is lost.
        """
        data = frame_of(name, content)
        with self._lock:
            if self._why:
                raise self._lost()
            if self._unsent:
                self._unsent += data
            else:
                sent = self._write(data)
                if sent == len(data):
                    return
                self._unsent += data[sent:]
            if len(self._unsent) > UNSENT_BYTES_MAX:
                self._why = "the broker reads nothing from it"
            self._wake()

    def ask(
        self, name: str, content: Any, timeout_s: float, answered: Future[Any] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """Assign a ``request_id``, send the request, and wait for its answer.

        Args:
            name: Name of the command.
            content: The command.
            timeout_s: Longest wait, seconds.
            answered: Future of the answer, if another thread may also complete it.
            undo: Called by the reading thread if the answer comes after the request was given up.

        Raises:
            BrokerUnavailableError: The connection is lost, or no answer arrived in time.
            RefusedError: The broker refuses.
        """
        answered = answered or Future()
        number = content.request_id = new_id()
        self._requests.add(number, name, answered, undo)
        try:
            self.send(name, content)
            return answered.result(timeout_s)
        except NoAnswerError as exc:
            raise BrokerUnavailableError(
                f"The broker at {self.address} did not answer within {timeout_s:.1f} s.",
                "Check its load.",
            ) from exc
        finally:
            self.forget(number)

    def begin(self, name: str, content: Any, done: Callable[[int, Future[Any]], None]) -> int:
        """Assign a ``request_id``, send the request, and return the id at once.

        Args:
            name: Name of the command.
            content: The command.
            done: Called by the reading thread with the id and the answer, or the loss of it.

        Raises:
            BrokerUnavailableError: The connection is lost.
        """
        answered: Future[Any] = Future()
        number = content.request_id = new_id()
        answered.add_done_callback(callback(f"An answer to {name!r}", partial(done, number)))
        self._requests.add(number, name, answered)
        try:
            self.send(name, content)
        except BrokerUnavailableError:
            self.forget(number)
            raise
        return number

    def forget(self, request_id: int) -> None:
        """Stop waiting for an answer. Idempotent."""
        self._requests.forget(request_id)

    def register(self, handle_id: int, handle: Handle) -> None:
        """Deliver entries and receipts of a consumer id or producer id to a handle.

        Raises:
            BrokerUnavailableError: The connection is lost.
        """
        with self._lock:
            if self._why:
                raise self._lost()
            self._handles.add(handle_id, handle)

    def has_frames(self, producer_id: int) -> None:
        """Send the frames of a producer as fast as the broker takes them; return at once."""
        with self._lock:
            if not self._why:
                self._handles.has_frames(producer_id)
                self._pump()
                if self._unsent:
                    self._wake()

    def _pump(self) -> None:
        """Send frames of producers until the socket takes no more. Call it under the lock."""
        while not self._unsent and (frames := self._handles.next_frames()):
            self._unsent += memoryview(frames)[self._write(frames) :]

    def unregister(self, handle_id: int) -> Handle | None:
        """Stop notifying a handle, and return it. Idempotent."""
        with self._lock:
            handle = self._handles.take_off(handle_id)
            self._end_if_unused()
        return handle

    def retire(self) -> None:
        """End the connection with its last handle, or at once if it has none. Idempotent."""
        with self._lock:
            self._retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        """End a retired connection without handles. Call it under the lock."""
        if self._retired and not (self._handles or self._why):
            self._ours, self._why = True, "it was replaced"
            self._wake()

    def close(self, why: str = "it was closed") -> None:
        """End the connection; return at once. Idempotent."""
        with self._lock:
            self._ours, self._why = True, self._why or why
            self._wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread, after :meth:`close`."""
        self._thread.join(timeout_s)

    def forked(self) -> None:
        """Close the copy of the connection in a forked child, and leave the parent's open.

        The socket is closed without ``shutdown``, which would end the connection of the parent. No
        lock is taken: another thread of the parent may have held it during the fork.
        """
        self._why, self._ours = "the process was forked", True
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        """Close socket and pipe once: the numbers of closed descriptors are reused."""
        with suppress(OSError):
            self._socket.close()
        self._wake_end, self._woken_end, *ends = -1, -1, self._wake_end, self._woken_end
        for end in [one for one in ends if one >= 0]:
            os.close(end)

    def _lost(self) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The connection to the broker at {self.address} is lost: {self._why}.",
            "Check that the broker is running.",
        )

    def _wake(self) -> None:
        """Wake the reading thread. Call it under the lock."""
        if self._wake_end >= 0:
            with suppress(BlockingIOError):
                os.write(self._wake_end, b"\0")

    def _run(self) -> None:
        why = "reading from it failed"
        try:
            self._read_on()
        except ProtocolError as exc:
            why = f"the other side does not speak Pulsar's protocol: {exc}"
        except OSError as exc:
            why = exc.strerror or str(exc)
        except BrokerUnavailableError:
            pass  # The connection was ended before the broker answered.
        finally:
            try:
                self._end(why)
            finally:  # If ``_end`` fails, pending requests must not wait forever.
                with self._lock:
                    self._why = self._why or why
                    self._close_descriptors()
                self._requests.fail_all(self._lost())

    def _read_on(self) -> None:
        poll = select.poll()
        poll.register(self._woken_end, select.POLLIN)
        keep_alive, came = self._keep_alive, 0
        while not self._why:
            wanted = select.POLLIN | (select.POLLOUT if self._has_unsent() else 0)
            poll.register(self._socket, wanted)
            wait_s = 0.0 if self._pending() else keep_alive.due_s() - time.monotonic()
            ready = dict(poll.poll(max(0.0, wait_s) * 1000 + 1))
            if self._woken_end in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken_end, 4096)
            if self._has_unsent():
                self._send_on()
            if self._pending() or self._socket.fileno() in ready:
                data = self._read()
                if data == b"":
                    raise ConnectionResetError("the broker closed it")
                if data is not None:
                    frames = self._frames.feed(data)
                    came += len(data)
                    if frames or came >= TRICKLE_BYTES:
                        keep_alive.received(time.monotonic())
                        came = 0
                    self._take_all(frames)
            act = keep_alive.look(time.monotonic())
            if act is Act.GIVE_UP:
                silent_s = time.monotonic() - keep_alive.received_s
                raise TimeoutError(f"the broker was silent for {silent_s:.0f} s")
            if act is Act.PING:
                self.send("ping", api.Nothing())
            elif act is Act.UNRESPONSIVE:
                self._requests.give_up_early(BrokerUnavailableError(self.unresponsive()))

    def _pending(self) -> bool:
        """Return whether TLS has buffered bytes, which ``poll`` does not report."""
        if not self._tls:
            return False
        with self._lock:
            return self._socket.pending() > 0  # type: ignore[attr-defined, no-any-return]

    def _read(self) -> bytes | None:
        with self._lock:
            try:
                return self._socket.recv(READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None

    def _write(self, data: bytes | bytearray) -> int:
        """Send bytes under the lock; return how many. The reading thread finds errors."""
        try:
            return self._socket.send(data)
        except (OSError, ValueError):
            return 0

    def _has_unsent(self) -> bool:
        return bool(self._unsent) or self._handles.ready

    def _send_on(self) -> None:
        with self._lock:
            if self._unsent:
                del self._unsent[: self._write(self._unsent)]
            self._pump()

    def _take_all(self, frames: Sequence[bytes]) -> None:
        """Handle frames. Deliver entries and receipts together, before any other command."""
        came: dict[int, list[RawEntry]] = {}
        receipts: dict[int, list[Any]] = {}
        try:
            for one in read_frames(frames):
                if not isinstance(one, Frame):
                    came.setdefault(one[0], []).append(one[1])
                elif one.name == "send_receipt":
                    receipts.setdefault(one.command.producer_id, []).append(one.command)
                else:
                    self._hand_over(came, receipts)
                    came, receipts = {}, {}
                    self._take(one)
        finally:
            self._hand_over(came, receipts)

    def _hand_over(
        self, came: Mapping[int, Sequence[RawEntry]], receipts: Mapping[int, Sequence[Any]]
    ) -> None:
        for consumer_id, entries in came.items():
            if (handle := self._handles.get(consumer_id)) is not None:
                handle.arrived(consumer_id, entries)
        for producer_id, commands in receipts.items():
            if (handle := self._handles.get(producer_id)) is not None:
                handle.receipts(commands)

    def _take(self, frame: Frame) -> None:
        name, command = frame.name, frame.command
        if name in ANSWERS:
            self._requests.answer(name, command)
        elif name == "ping":
            self.send("pong", api.Nothing())
        elif name == "error":
            self._refuse(command)
        elif name in ("close_consumer", "close_producer"):
            self._ended_by_broker(getattr(command, f"{name.removeprefix('close_')}_id"))
        elif name == "send_error":
            if (handle := self._handles.get(command.producer_id)) is not None:
                handle.refused(command)
        elif name in _PUSHED and self._pushed is not None:
            self._pushed(frame)
        elif name == "topic_migrated":
            self._migrated(command)
        elif name == "connected":
            with suppress(InvalidStateError):
                self._connected.set_result(command)
        elif name == "auth_challenge" and not self._proving:
            self._proving = True
            begin("keyshard-wire-auth", self._prove)

    def _ended_by_broker(self, handle_id: int) -> None:
        if (handle := self.unregister(handle_id)) is not None:
            handle.lost(handle_id, ended=True)

    def _migrated(self, command: Any) -> None:
        url = command.broker_url_tls if self._tls else command.broker_url
        if (handle := self.unregister(command.resource_id)) is not None:
            handle.migrated(command.resource_id, url.decode(errors="replace"))

    def _refuse(self, command: Any) -> None:
        refused = RefusedError(command.error, command.message)
        waiting = self._requests.refused(command.request_id)
        if waiting is None and not self._connected.done():
            waiting = self._connected
        if waiting is not None:
            fail((waiting,), refused)
        elif command.request_id == _NO_REQUEST:
            raise ConnectionResetError(f"the broker refused it: {refused.said}")

    def _prove(self) -> None:
        """Send new credentials to the broker. Fetching them from an issuer may take long."""
        try:
            shown = self._credentials.show()
            self.send("auth_response", proof(shown.method, shown.data))
        except KeyShardError as exc:
            _log.warning("%s requests the credentials again: %s", self.address, exc.summary)
        finally:
            self._proving = False

    def _end(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            with suppress(OSError):
                # ``shutdown`` reaches the broker even if a forked child holds a copy of the socket.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._close_descriptors()
            handles = self._handles.clear()
        _connections.discard(self)
        if handles and not self._ours:
            lost = "the connection to the broker at %s is lost (%s); keyshard connects again"
            _log.warning(lost, self.address, self._why)
        fail((self._connected,), self._lost())
        self._requests.fail_all(self._lost())
        for handle_id, handle in handles:
            handle.lost(handle_id, ended=False)


def _leave_to_parent() -> None:
    for one in list(_connections):
        one.forked()
    _connections.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
