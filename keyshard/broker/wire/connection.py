"""One connection to one broker: its socket, the thread that reads it, and who waits for answers.

Nobody waits in a write: what the socket does not take at once is sent by the reading thread. So a
consumer that takes nothing never holds up the others; what a broker may send ahead are permits.
"""

from __future__ import annotations

import itertools
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
from typing import Any, Protocol

from keyshard.broker.pulsar.credentials import Credentials
from keyshard.broker.pulsar.refusals import not_accepted
from keyshard.broker.wire.dialling import Address, dialled
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.errors import RefusedError
from keyshard.broker.wire.frames import (
    Frame,
    FrameReader,
    ProtocolError,
    api,
    frame_of,
    read_frames,
)
from keyshard.broker.wire.keep_alive import Act, KeepAlive
from keyshard.config.connection import Connection
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.threads import Fail, begin

READ_BYTES = 256 << 10
"""Bytes that one read takes at most."""
UNSENT_BYTES_MAX = 16 << 20
"""Bytes that wait to be sent; a broker that does not take them is not there any more."""
FRAME_BYTES_MAX = 5 << 20
"""Largest message of a broker that does not say it."""
FRAME_PADDING = 64 << 10
"""What a frame has beside a message."""
_CLIENT = b"keyshard"
_PROTOCOL_VERSION = 21
TRICKLE_BYTES = 16 << 10
"""Bytes that count as a sign of life where they are no whole frame yet."""
_ANSWER_TO = {
    "partitioned_metadata": "partitioned_metadata_response", "lookup": "lookup_response",
    "subscribe": "success", "close_consumer": "success", "ack": "ack_response",
    "get_last_message_id": "get_last_message_id_response", "get_schema": "get_schema_response",
}  # fmt: skip
_ANSWERS = set(_ANSWER_TO.values())
_GIVEN_UP_EARLY = {"lookup_response", "success"}
"""Answers that nobody waits for once the broker is unresponsive. Other requests keep their
time-outs."""
_MAY_FAIL = _ANSWERS - {"success", "get_last_message_id_response"}
_OF_CONSUMER = 1
_NO_REQUEST = 2**64 - 1
"""Request id of a broker that refuses no request, but the connection."""

_request_ids = itertools.count(1)
_connections: weakref.WeakSet[WireConnection] = weakref.WeakSet()
_log = logging.getLogger(__name__)


class Handle(Protocol):
    """Who is sent entries."""

    def came(self, consumer_id: int, entries: Sequence[RawEntry]) -> None:
        """Entries came. Called by the reading thread; returns at once."""

    def lost(self, consumer_id: int, *, ended: bool) -> None:
        """Nothing more comes: the connection is lost, or the broker has ended the subscription."""

    def migrated(self, consumer_id: int, url: str) -> None:
        """Nothing more comes, nor ever again: another cluster has the topic."""


class WireConnection:
    """A connection that is open.

    Args:
        address: Where to.
        connection: How the cluster is reached.
        credentials: Those of the connection.
        timeout_s: Longest wait until it is open, seconds.
        fail: Ends the source if its thread fails; default: the owner of the calling thread.

    Raises:
        BrokerUnavailableError: Nobody answers there (retriable).
        TlsError: The two sides do not trust each other.
        AuthenticationError: It does not accept who this is.
        BrokerError: It refuses.
    """

    def __init__(
        self, address: Address, connection: Connection, credentials: Credentials, timeout_s: float,
        fail: Fail | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.opened_s = time.monotonic()
        """When it was begun, on the monotonic clock."""
        self._connection = connection
        self._credentials = credentials
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[str, Future[Any]]] = {}
        """What is waited for, by the request: the name of the command, and where it goes."""
        self._connected: Future[Any] = Future()
        self._handles: dict[int, Handle] = {}
        self._unsent = bytearray()
        self._why = ""
        """Why it ended; empty while it stands."""
        self._ours = False
        """Whether this side ended it."""
        self._proving = False
        """Whether a thread is about to show who this is."""
        self._retired = False
        """Whether it ends with its last handle."""
        self._keep_alive = KeepAlive(time.monotonic())
        self._frames = FrameReader(FRAME_BYTES_MAX + FRAME_PADDING)
        timeout_s = min(timeout_s, connection.connection_timeout_ms / 1000)
        deadline = time.monotonic() + timeout_s
        shown = credentials.show()
        self._woken_end = self._wake_end = -1
        self._socket = dialled(address, connection, timeout_s)
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._begin(fail)
        try:
            self._greet(shown.method, shown.data, max(0.0, deadline - time.monotonic()))
        except BaseException:
            self.close("it was not opened")
            raise

    def _begin(self, fail: Fail | None) -> None:
        """Start its thread; without one nothing stays open."""
        host, port, _ = self.address
        try:
            self._socket.settimeout(0)
            self._woken_end, self._wake_end = os.pipe()
            for end in (self._wake_end, self._woken_end):
                os.set_blocking(end, False)
            _connections.add(self)
            self._thread = begin(f"keyshard-wire-{host}:{port}", self._run, fail=fail)
        except BaseException as exc:
            self._end("it was not begun")
            if not isinstance(exc, OSError):
                raise
            raise BrokerUnavailableError(
                f"No connection to the broker at {self.address} can be made: "
                f"{exc.strerror or exc}. Look at the limits of this process."
            ) from exc

    def _greet(self, method: str, data: str, timeout_s: float) -> None:
        hello = api.Connect(
            client_version=_CLIENT,
            protocol_version=_PROTOCOL_VERSION,
            feature_flags=api.FeatureFlags(
                supports_auth_refresh=True, supports_broker_entry_metadata=True
            ),
        )
        if method != "none":
            hello.auth_method_name, hello.auth_data = method.encode(), data.encode()
        if self.address.behind_proxy:
            hello.proxy_to_broker_url = self.address.behind_proxy.encode()
        self.send("connect", hello)
        try:
            told = self._connected.result(timeout_s)
        except NoAnswerError as exc:
            raise BrokerUnavailableError(
                f"The broker at {self.address} takes a connection and does not answer within "
                f"{timeout_s:.1f} s. Check service_url and that the broker is running."
            ) from exc
        except RefusedError as exc:
            if exc.code in (3, 4):
                who = self._credentials.who()
                raise not_accepted(f"The broker at {self.address}", who, exc.said) from exc
            raise BrokerUnavailableError(
                f"The broker at {self.address} refuses the connection: {exc.said}."
            ) from exc
        if told.max_message_size > 0:
            self._frames.bytes_max = told.max_message_size + FRAME_PADDING

    @property
    def stands(self) -> bool:
        """Whether it is not known to be lost."""
        return not self._why

    def unresponsive(self) -> str:
        """Why the broker counts as unresponsive; empty while it answers."""
        pinged_s = self._keep_alive.pinged_s
        if self._keep_alive.responds or pinged_s is None:
            return ""
        return (
            f"The broker at {self.address} has not answered a ping for "
            f"{time.monotonic() - pinged_s:.0f} s. Check that it is running."
        )

    def send(self, name: str, content: Any) -> None:
        """Send a command; returns at once.

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
                self._why = "it takes nothing of what is sent"
            self._wake()

    def ask(
        self, name: str, content: Any, timeout_s: float, answered: Future[Any] | None = None
    ) -> Any:
        """Send a request, and wait for its answer; gives it its ``request_id``.

        Args:
            name: Of the command.
            content: The command.
            timeout_s: Longest wait, seconds.
            answered: Where the answer goes, for somebody else who may know it.

        Raises:
            BrokerUnavailableError: The connection is lost, or no answer came in time.
            RefusedError: The broker refuses.
        """
        content.request_id = next(_request_ids)
        answered = answered or Future()
        try:
            self._request(name, content, answered)
            return answered.result(timeout_s)
        except NoAnswerError as exc:
            raise BrokerUnavailableError(
                f"The broker at {self.address} did not answer within {timeout_s:.1f} s."
            ) from exc
        finally:
            self.forget(content.request_id)

    def begin(self, name: str, content: Any, done: Callable[[int, Future[Any]], None]) -> int:
        """Send a request; gives it its ``request_id``, and returns that at once.

        Args:
            name: Of the command.
            content: The command.
            done: Called with the id and the answer, or that it is lost, by the reading thread.

        Raises:
            BrokerUnavailableError: The connection is lost.
        """
        number = content.request_id = next(_request_ids)
        answered: Future[Any] = Future()
        answered.add_done_callback(partial(done, number))
        try:
            self._request(name, content, answered)
        except BrokerUnavailableError:
            self.forget(number)
            raise
        return number

    def forget(self, request_id: int) -> None:
        """Wait for an answer no more. Idempotent."""
        with self._lock:
            self._requests.pop(request_id, None)

    def _request(self, name: str, content: Any, answered: Future[Any]) -> None:
        with self._lock:
            self._requests[content.request_id] = _ANSWER_TO[name], answered
        self.send(name, content)

    def register(self, consumer_id: int, handle: Handle) -> None:
        """Give a handle what comes for a consumer id; it is told when the connection is lost.

        Raises:
            BrokerUnavailableError: It is lost.
        """
        with self._lock:
            if self._why:
                raise self._lost()
            self._handles[consumer_id] = handle

    def unregister(self, consumer_id: int) -> None:
        """Tell a handle nothing more. Idempotent."""
        self._taken_off(consumer_id)

    def _taken_off(self, consumer_id: int) -> Handle | None:
        """The handle that was told what comes for a consumer id, and is told it no more."""
        with self._lock:
            handle = self._handles.pop(consumer_id, None)
            self._end_if_unused()
        return handle

    def retire(self) -> None:
        """End it when its last handle is gone, or at once where it has none. Idempotent."""
        with self._lock:
            self._retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        """Under the lock."""
        if self._retired and not self._handles and not self._why:
            self._ours, self._why = True, "it is replaced"
            self._wake()

    def close(self, why: str = "it was closed") -> None:
        """End it; returns at once. Idempotent."""
        with self._lock:
            self._ours = True
            self._why = self._why or why
            self._wake()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread, which :meth:`close` asked for."""
        self._thread.join(timeout_s)

    def forked(self) -> None:
        """Leave it to the parent process, in a child that has only a copy of it.

        The copy is closed without ``shutdown``, which would end the connection of the parent.
        Locks are left alone: another thread of the parent may have held them.
        """
        self._why, self._ours = "the process was forked", True
        with suppress(OSError):
            self._socket.close()
        self._close_pipe()

    def _close_pipe(self) -> None:
        """Close both ends once: their numbers belong to other files afterwards."""
        self._wake_end, self._woken_end, *ends = -1, -1, self._wake_end, self._woken_end
        for end in ends:
            if end >= 0:
                os.close(end)

    def _lost(self) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"The connection to the broker at {self.address} is lost: {self._why}."
        )

    def _wake(self) -> None:
        """Let the reading thread look; under the lock."""
        if self._wake_end >= 0:
            with suppress(BlockingIOError):
                os.write(self._wake_end, b"\0")

    def _run(self) -> None:
        why = "reading it failed"
        try:
            self._read_on()
        except ProtocolError as exc:
            why = f"it does not speak Pulsar's protocol: {exc}"
        except OSError as exc:
            why = exc.strerror or str(exc)
        except BrokerUnavailableError:
            pass  # it was ended while it was to answer
        finally:
            self._end(why)

    def _read_on(self) -> None:
        poll = select.poll()
        poll.register(self._woken_end, select.POLLIN)
        keep_alive, came = self._keep_alive, 0
        while not self._why:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll.register(self._socket, wanted)
            wait_s = 0.0 if self._pending() else keep_alive.due_s() - time.monotonic()
            ready = dict(poll.poll(max(0.0, wait_s) * 1000 + 1))
            if self._woken_end in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken_end, 4096)
            if self._unsent:
                self._send_on()
            if self._pending() or self._socket.fileno() in ready:
                data = self._read()
                if data == b"":
                    raise ConnectionResetError("the broker closed it")
                if data is not None:
                    frames = self._frames.feed(data)
                    came += len(data)
                    if frames or came >= TRICKLE_BYTES:
                        keep_alive.heard(time.monotonic())
                        came = 0
                    self._take_all(frames)
            act = keep_alive.look(time.monotonic())
            if act is Act.GIVE_UP:
                silent_s = time.monotonic() - keep_alive.heard_s
                raise TimeoutError(f"the broker is silent for {silent_s:.0f} s")
            if act is Act.PING:
                self.send("ping", api.Nothing())
            elif act is Act.UNRESPONSIVE:
                self._give_up_early()

    def _give_up_early(self) -> None:
        """Tell those who would only wait: they may find another broker meanwhile."""
        error = BrokerUnavailableError(self.unresponsive())
        with self._lock:
            given_up = {
                number: answered
                for number, (wanted, answered) in self._requests.items()
                if wanted in _GIVEN_UP_EARLY
            }
            for number in given_up:
                del self._requests[number]
        for answered in given_up.values():
            with suppress(InvalidStateError):
                answered.set_exception(error)

    def _pending(self) -> bool:
        """Whether bytes came that poll does not tell of."""
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
        """Bytes of it that were taken; under the lock. An error is the reading thread's to find."""
        try:
            return self._socket.send(data)
        except (OSError, ValueError):
            return 0

    def _send_on(self) -> None:
        with self._lock:
            del self._unsent[: self._write(self._unsent)]

    def _take_all(self, frames: Sequence[bytes]) -> None:
        """Entries are handed over together, before the command that follows them."""
        came: dict[int, list[RawEntry]] = {}
        try:
            for one in read_frames(frames):
                if isinstance(one, Frame):
                    self._hand_over(came)
                    came = {}
                    self._take(one)
                else:
                    came.setdefault(one[0], []).append(one[1])
        finally:
            self._hand_over(came)

    def _hand_over(self, came: Mapping[int, Sequence[RawEntry]]) -> None:
        for consumer_id, entries in came.items():
            handle = self._handles.get(consumer_id)
            if handle is not None:
                handle.came(consumer_id, entries)

    def _take(self, frame: Frame) -> None:
        name, command = frame.name, frame.command
        if name in _ANSWERS:
            self._answer(name, command)
        elif name == "ping":
            self.send("pong", api.Nothing())
        elif name == "error":
            self._refuse(command)
        elif name == "close_consumer":
            handle = self._taken_off(command.consumer_id)
            if handle is not None:
                handle.lost(command.consumer_id, ended=True)
        elif name == "topic_migrated":
            self._migrated(command)
        elif name == "connected":
            with suppress(InvalidStateError):
                self._connected.set_result(command)
        elif name == "auth_challenge" and not self._proving:
            self._proving = True
            begin("keyshard-wire-auth", self._prove)

    def _migrated(self, command: Any) -> None:
        if command.resource_type != _OF_CONSUMER:
            return
        handle = self._taken_off(command.resource_id)
        url = command.broker_url_tls if self._tls else command.broker_url
        if handle is not None:
            handle.migrated(command.resource_id, url.decode(errors="replace"))

    def _answer(self, name: str, command: Any) -> None:
        with self._lock:
            wanted, waiting = self._requests.get(command.request_id, ("", None))
            if waiting is None:
                return
            if name != wanted:
                raise ProtocolError(f"{name!r} where {wanted!r} is the answer")
            del self._requests[command.request_id]
        with suppress(InvalidStateError):
            if name in _MAY_FAIL and command.HasField("error"):
                waiting.set_exception(RefusedError(command.error, command.message))
            else:
                waiting.set_result(command)

    def _refuse(self, command: Any) -> None:
        refused = RefusedError(command.error, command.message)
        with self._lock:
            _, waiting = self._requests.pop(command.request_id, ("", None))
        if waiting is None and not self._connected.done():
            waiting = self._connected
        if waiting is not None:
            with suppress(InvalidStateError):
                waiting.set_exception(refused)
        elif command.request_id == _NO_REQUEST:
            raise ConnectionResetError(f"the broker refuses it: {refused.said}")

    def _prove(self) -> None:
        """Show the broker again who this is; what is shown may come from an issuer far away."""
        try:
            shown = self._credentials.show()
            data = api.AuthData(
                auth_method_name=shown.method.encode(), auth_data=shown.data.encode()
            )
            self.send(
                "auth_response",
                api.AuthResponse(
                    client_version=_CLIENT, response=data, protocol_version=_PROTOCOL_VERSION
                ),
            )
        except KeyShardError as exc:
            _log.warning("the broker at %s asks who this is: %s", self.address, exc)
        finally:
            self._proving = False

    def _end(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            handles = list(self._handles.items())
            self._handles.clear()
            waiting = [self._connected, *(one for _, one in self._requests.values())]
            with suppress(OSError):
                # A forked child may have it open, too: the broker is told all the same.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._close_pipe()
        _connections.discard(self)
        if handles and not self._ours:
            _log.warning(
                "the connection to the broker at %s is lost (%s); it is made again",
                self.address, self._why,
            )  # fmt: skip
        for one in waiting:
            with suppress(InvalidStateError):
                one.set_exception(self._lost())
        for consumer_id, handle in handles:
            handle.lost(consumer_id, ended=False)


def _leave_to_parent() -> None:
    for one in list(_connections):
        one.forked()
    _connections.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
