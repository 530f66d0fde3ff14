"""The control socket of a running source, and how another process of the same user finds it.

A Unix socket in a folder of the user's own, ``$XDG_RUNTIME_DIR/keyshard`` or ``keyshard-<uid>`` in
the temporary folder. Its name is made of the subscription, the service URL, and the process::

    <digest of the subscription>-<digest of the service URL>-<pid>-<random>

One connection carries one request and one answer, each one line of JSON::

    {"do": "explain", "key": "order-17"}
    {"ok": true, "result": {...}}
    {"ok": false, "code": "KEYSHARD_BAD_OPTION", "error": "..."}
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from keyshard.errors import ControlError, KeyShardError, ThreadStartError
from keyshard.redaction import redacted, shown
from keyshard.threads import begin

REQUEST_BYTES_MAX = 64 * 1024
"""Longest request, bytes."""
ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Longest answer, bytes."""
REQUEST_S = 5.0
"""Longest time for a request to arrive whole, and for an answer to be taken, seconds."""
ANSWER_S = 10.0
"""Longest wait of a client for an answer, unless it says otherwise, seconds."""
ACCEPT_AGAIN_S = 1.0
"""Pause after a failed accept, as while the process has no free file descriptor, seconds."""
CONNECTIONS_MAX = 8
"""Connections served at the same time; what is above is told so."""
_WHO = "who"

Handler = Callable[[Mapping[str, Any]], Any]
"""Takes a request, returns plain JSON values; errors are told as they are."""

_UNEXPECTED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors of reading JSON that has an unexpected shape."""
_log = logging.getLogger(__name__)


class ControlServer:
    """Answers requests in threads of its own until :meth:`close`.

    Args:
        subscription: Under which name it is found.
        service_url: Which cluster that is at.
        topics: What tells two sources of one subscription apart for a person.
        handlers: What can be asked.

    Raises:
        ControlError: The socket cannot be made.
    """

    def __init__(
        self,
        subscription: str,
        service_url: str,
        topics: str,
        handlers: Mapping[str, Handler],
    ) -> None:
        who = {
            "subscription": subscription,
            "serviceUrl": redacted(service_url),
            "topics": topics,
            "pid": os.getpid(),
        }
        self._handlers = {_WHO: lambda _request: who, **handlers}
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        prefix = f"{_digest(subscription)}-{_digest(service_url)}"
        self.path = _own_folder() / f"{prefix}-{os.getpid()}-{secrets.token_hex(2)}"
        self._socket = _listen(self.path)
        self._closed = threading.Event()
        self._thread = begin("keyshard-control", self._run)

    def close(self) -> None:
        """Accept nothing more and remove the socket. Idempotent."""
        self._closed.set()
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as exc:
                if not self._closed.is_set():
                    _log.warning("the control socket accepts no connection for a moment: %s", exc)
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            if _of_another_user(connection):
                connection.close()
                continue
            serves = self._free.acquire(blocking=False)
            try:
                begin(
                    "keyshard-control-answer", self._serve if serves else self._refuse, connection
                )
            except ThreadStartError as exc:
                # A question must not end the source.
                _log.warning("a request is not answered: %s", exc)
                connection.close()
                if serves:
                    self._free.release()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            _send(connection, _failed(ControlError("Too many requests at once. Ask again.")))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                _send(connection, self._answer(connection))
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> bytes:
        try:
            line = _receive(connection, REQUEST_BYTES_MAX, time.monotonic() + REQUEST_S)
            request = json.loads(line)
            handler = self._handlers.get(request.get("do"))
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                raise ControlError(f"The request asks to do nothing known; known is {known}.")
            return json.dumps({"ok": True, "result": handler(request)}).encode() + b"\n"
        except KeyShardError as exc:
            return _failed(exc)
        except (*_UNEXPECTED, OSError) as exc:
            return _failed(ControlError(f"The request cannot be answered: {exc!r}."))
        except Exception as exc:  # noqa: BLE001 - the source must live on, and the asker must know
            _log.exception("a request failed unexpectedly")
            return _failed(ControlError(f"The request failed unexpectedly: {exc!r}."))


@dataclass(frozen=True, slots=True)
class RunningSource:
    """A source that answered."""

    subscription: str
    service_url: str
    topics: str
    pid: int
    path: Path

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **fields: Any) -> Any:
        """Send a request and wait for its result.

        Raises:
            ControlError: It does not answer in time, or not as expected.
            KeyShardError: What the source refused it with.
        """
        try:
            return _ask(self.path, {"do": do, **fields}, timeout_s)
        except OSError as exc:
            raise ControlError(
                f"The source of {self.subscription!r} with pid {self.pid} does not answer: {exc}."
            ) from exc

    @contextmanager
    def read(self) -> Iterator[None]:
        """Within it, an answer is read: one of an unexpected shape is a ``ControlError``."""
        try:
            yield
        except _UNEXPECTED as exc:
            raise ControlError(
                f"The source of {self.subscription!r} with pid {self.pid} gives an answer that "
                f"this release of keyshard cannot read: {shown(exc)}. Use the keyshard that the "
                "source runs with."
            ) from exc


def running_sources(
    subscription: str | None = None, service_url: str | None = None
) -> list[RunningSource]:
    """Sources of this user on this machine, by process id. What dead ones left is removed.

    Args:
        subscription: Only those of this name.
        service_url: Only those of this cluster.

    Raises:
        ControlError: A process that is alive does not answer.
    """
    names = [_digest(part) if part is not None else "*" for part in (subscription, service_url)]
    found: list[RunningSource] = []
    for folder in _folders():
        for path in folder.glob(f"{names[0]}-{names[1]}-*-*"):
            try:
                told = _ask(path, {"do": _WHO}, ANSWER_S)
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
                continue
            except OSError as exc:
                pid = path.name.split("-")[2]
                raise ControlError(
                    f"Process {pid} holds a control socket and does not answer: {exc or 'late'}. "
                    "It is stopped or hangs."
                ) from exc
            found.append(_source_of(told, path))
    return sorted(found, key=lambda one: (one.pid, one.path))


def _source_of(told: Any, path: Path) -> RunningSource:
    match told:
        case {
            "subscription": str(subscription),
            "serviceUrl": str(service_url),
            "topics": str(topics),
            "pid": int(pid),
        }:
            return RunningSource(subscription, service_url, topics, pid, path)
    raise ControlError(
        f"The process that listens at {path} is no source of keyshard: it answers {shown(told)}. "
        "End the process, or remove the file."
    )


def running_source(
    subscription: str | None = None, service_url: str | None = None, pid: int | None = None
) -> RunningSource:
    """The one source that is meant.

    Raises:
        ControlError: There is none, or several; the message says how to name one.
    """
    found = running_sources(subscription, service_url)
    matching = [one for one in found if pid in (None, one.pid)]
    if len(matching) == 1:
        return matching[0]
    name = "source" if subscription is None else f"source of {subscription!r}"
    if not matching:
        where = ", ".join(map(str, _candidates()))
        raise ControlError(
            f"No running {name} is found for this user on this machine (looked in {where}). "
            f"{_others(running_sources())}Only a source that runs by source.run(...) or "
            "batches(...) has a control socket."
        )
    raise ControlError(
        f"{len(matching)} running sources match: {_list_of(matching)}. Name the subscription, "
        "--service-url or --pid of one."
    )


def _list_of(sources: list[RunningSource]) -> str:
    return "; ".join(
        f"pid {one.pid}: {one.subscription!r} on {one.topics} at {one.service_url}"
        for one in sources
    )


def _others(sources: list[RunningSource]) -> str:
    return f"What does run: {_list_of(sources)}. " if sources else ""


def _candidates() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime) / "keyshard"
    yield Path(tempfile.gettempdir()) / f"keyshard-{os.getuid()}"


def _folders() -> list[Path]:
    """Folders that exist and are the user's own alone: nobody else can put a socket there."""
    return [folder for folder in _candidates() if _is_own(folder)]


def _is_own(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    own = facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o077
    return stat.S_ISDIR(facts.st_mode) and own


def _own_folder() -> Path:
    folder = next(_candidates())
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ControlError(f"{folder} cannot be made: {exc}. Set XDG_RUNTIME_DIR.") from exc
    if not _is_own(folder):
        raise ControlError(
            f"{folder} is no folder of this user alone (mode 0700). Remove it, or set "
            "XDG_RUNTIME_DIR."
        )
    return folder


def _of_another_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of another user, where the system says it.

    Folder and socket are this user's alone; this holds also when somebody has opened them.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    size = struct.calcsize("3i")
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", told)
    return bool(uid != os.getuid())


def _listen(path: Path) -> socket.socket:
    """A listening socket at ``path``: it appears there only when it answers."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = path.with_name(f"{secrets.token_hex(4)}.new")
    try:
        made.bind(str(fresh))
        fresh.chmod(0o600)
        made.listen(CONNECTIONS_MAX)
        fresh.rename(path)
    except OSError as exc:
        made.close()
        fresh.unlink(missing_ok=True)
        raise ControlError(
            f"The control socket {path} cannot be made: {exc}. Set XDG_RUNTIME_DIR to a folder "
            "with a short name."
        ) from exc
    return made


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _ask(path: Path, request: Mapping[str, Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        # Who is refused is told so before it has said what it wants.
        with suppress(BrokenPipeError):
            connection.sendall(json.dumps(request).encode() + b"\n")
        line = _receive(connection, ANSWER_BYTES_MAX, deadline)
    try:
        answer = json.loads(line)
        if answer["ok"]:
            return answer["result"]
        code, text = answer["code"], answer["error"]
        refusal = _error_of(code)(text if isinstance(text, str) else shown(text))
    except _UNEXPECTED as exc:
        raise ControlError(f"{path} answers something unexpected: {line[:200]!r}.") from exc
    raise refusal


def _receive(connection: socket.socket, bytes_max: int, deadline_s: float) -> bytes:
    """One line, without its end.

    Raises:
        OSError: It did not come whole in time.
        ControlError: It is longer than ``bytes_max``.
    """
    parts: list[bytes] = []
    size = 0
    while not (parts and parts[-1].endswith(b"\n")):
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(64 * 1024)
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            raise ControlError(f"A line on the control socket is longer than {bytes_max} bytes.")
    return b"".join(parts)[:-1]


def _send(connection: socket.socket, answer: bytes) -> None:
    connection.settimeout(REQUEST_S)
    connection.sendall(answer)


def _failed(error: KeyShardError) -> bytes:
    told = {"ok": False, "code": error.code, "error": error.message}
    return json.dumps(told).encode() + b"\n"


def _error_of(code: str) -> type[KeyShardError]:
    """The class of an error by its code."""
    waiting: list[type[KeyShardError]] = [KeyShardError]
    while waiting:
        kind = waiting.pop()
        if kind.code == code:
            return kind
        waiting += kind.__subclasses__()
    return ControlError
