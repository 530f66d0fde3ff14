"""Requests to control sockets: one at a time, or to many at the same time in one thread."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyshard.errors import BY_CODE, ControlError, RuntimeStoppedError
from keyshard.redaction import shown
from keyshard.version import VERSION

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Longest answer, bytes."""
CONNECT_AGAIN_S = 0.05
"""Interval at which a socket without room for a further connection is tried again, seconds."""
STALE_S = 5.0
"""Longest time between two calls after which an answer that came in between is used, seconds."""
UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors of reading JSON that has an unexpected shape."""


def ask(path: Path, request: Mapping[str, Any], timeout_s: float) -> Any:
    """Send a request to a control socket, and return its result.

    Args:
        path: The socket.
        request: The request.
        timeout_s: Longest wait for the answer, seconds.

    Raises:
        OSError: The process does not answer in time.
        ControlError: The answer cannot be understood.
        KeyShardError: The process refuses the request with this error.
    """
    deadline_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        # A refused client gets its error before it has sent its request.
        with suppress(BrokenPipeError):
            connection.sendall(_line_of(request))
        return _result_of(path, receive(connection, ANSWER_BYTES_MAX, deadline_s))


def receive(connection: socket.socket, bytes_max: int, deadline_s: float) -> bytes:
    """Receive one line, without its end.

    Raises:
        OSError: It did not arrive whole in time.
        ControlError: It is longer than ``bytes_max``.
    """
    parts: list[bytes] = []
    size = 0
    while not (parts and parts[-1].endswith(b"\n")):
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(64 * 1024)
        if not part:
            raise _closed()
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            raise _too_long(bytes_max)
    return b"".join(parts)[:-1]


@dataclass(eq=False, slots=True)
class Request:
    """A request without fields, and its answer as far as it has arrived."""

    path: Path
    do: str
    began_s: float
    connection: socket.socket | None = None
    received: bytearray = field(default_factory=bytearray)
    ended: bool = False
    error: Exception | None = None

    def result(self) -> Any:
        """Return the result.

        Raises:
            OSError: The process has not answered.
            ControlError: The answer cannot be understood.
            KeyShardError: The process refuses the request with this error.
        """
        if self.error is not None:
            raise self.error
        if not self.ended:
            waited_s = time.monotonic() - self.began_s
            raise TimeoutError(f"its request has waited for {waited_s:.0f} s")
        return _result_of(self.path, bytes(self.received[:-1]))


class Requests:
    """Requests to many control sockets. Any thread may call the methods.

    A request that is not answered in time waits on, until it is answered, its process ends, or
    :meth:`close`. Until then it is not sent again, and a call does not wait for it again. So a
    process that hangs has one connection and delays one call, and no thread waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[tuple[Path, str], Request] = {}
        self._called_s = time.monotonic()
        self._closed = False

    def ask(
        self, wanted: Iterable[tuple[Path, str]], timeout_s: float
    ) -> dict[tuple[Path, str], Request]:
        """Send requests at the same time, and wait for all answers.

        Args:
            wanted: Sockets and names of requests.
            timeout_s: Longest wait, seconds. A call in another thread is waited for before.

        Raises:
            RuntimeStoppedError: It is closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeStoppedError("Requests to control sockets have ended.")
            if time.monotonic() - self._called_s > STALE_S:
                for ready, _ in self._selector.select(0):
                    self._drop(ready.data)
            before = set(self._waiting.values())
            asked = {key: self._waiting.get(key) or self._begin(*key) for key in wanted}
            self._wait(asked.values(), before, time.monotonic() + timeout_s)
            self._called_s = time.monotonic()
            return asked

    def close(self) -> None:
        """End all requests, also those that another thread waits for. Idempotent."""
        self._closed = True
        with self._lock:
            for one in list(self._waiting.values()):
                self._drop(one)
            self._selector.close()

    def _wait(
        self, asked: Collection[Request], before: Collection[Request], until_s: float
    ) -> None:
        """Receive answers until a time, or until nothing is to be waited for.

        Args:
            asked: The requests.
            before: Those that an earlier call has waited for; only an answer that has begun is
                waited for again.
            until_s: Monotonic time, seconds.
        """
        while not self._closed and (left_s := until_s - time.monotonic()) > 0:
            awaited = any(not one.ended and (one not in before or one.received) for one in asked)
            found = self._selector.select(min(left_s, CONNECT_AGAIN_S) if awaited else 0)
            for ready, _ in found:
                self._receive(ready.data)
            for one in list(self._waiting.values()):
                if one.connection is None:
                    self._connect(one)
            if not (awaited or found):
                return

    def _begin(self, path: Path, do: str) -> Request:
        request = self._waiting[path, do] = Request(path, do, time.monotonic())
        self._connect(request)
        return request

    def _connect(self, request: Request) -> None:
        connection = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(0)
            connection.connect(str(request.path))
            # A refused client gets its error before it has sent its request.
            with suppress(BrokenPipeError):
                connection.sendall(_line_of({"do": request.do}))
        except OSError as exc:
            if connection is not None:
                connection.close()
            if not isinstance(exc, BlockingIOError):  # then it has no room for a connection now
                self._end(request, exc)
            return
        request.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, request)

    def _receive(self, request: Request) -> None:
        assert request.connection is not None
        try:
            part = request.connection.recv(64 * 1024)
        except OSError as exc:
            self._end(request, exc)
            return
        request.received += part
        if not part:
            self._end(request, _closed())
        elif part.endswith(b"\n"):
            self._end(request, None)
        elif len(request.received) > ANSWER_BYTES_MAX:
            self._end(request, _too_long(ANSWER_BYTES_MAX))

    def _end(self, request: Request, error: Exception | None) -> None:
        request.ended, request.error = True, error
        self._drop(request)

    def _drop(self, request: Request) -> None:
        if request.connection is not None:
            self._selector.unregister(request.connection)
            request.connection.close()
        del self._waiting[request.path, request.do]


def releases(found: str) -> str:
    """Return a sentence on the releases of another process and of this one, after a space.

    Args:
        found: Release of the other process; empty if it is unknown. Without a difference, there is
            no sentence.
    """
    if found == VERSION:
        return ""
    name = shown(found).strip("'")
    theirs = f"keyshard {name}" if found else "an unknown release of keyshard"
    return f" It runs {theirs}, and this process runs keyshard {VERSION}."


def _line_of(request: Mapping[str, Any]) -> bytes:
    return json.dumps(request).encode() + b"\n"


def _result_of(path: Path, line: bytes) -> Any:
    try:
        answer = json.loads(line)
        if answer["ok"]:
            return answer["result"]
        said = str(answer["error"]), str(answer.get("remedy") or "")
        refusal = BY_CODE.get(answer["code"], ControlError)(*said)
    except UNEXPECTED as exc:
        raise ControlError(
            f"The answer of {path} cannot be understood: {line[:200]!r}.",
            "Check that the process is a keyshard source.",
        ) from exc
    raise refusal


def _closed() -> ConnectionResetError:
    return ConnectionResetError("the other side closed the connection")


def _too_long(bytes_max: int) -> ControlError:
    return ControlError(
        f"A line on the control socket exceeds {bytes_max} bytes.",
        "Use the same release of keyshard on both sides.",
    )
