"""The control socket of a source, sink or worker, and its discovery by processes of the same user.

Each has a Unix socket in a private folder: ``$XDG_RUNTIME_DIR/keyshard``, or ``keyshard-<uid>`` in
the temporary folder. The name of the socket consists of digests and the process::

    <digest of the subscription>-<digest of the service URL>-<pid>-<random>
    <digest of the name>-<digest of the service URL>-<pid>-<random>.sink
    <digest of the subscription>-<digest of the service URL>-<pid>-<random>.worker

One connection carries one request and one answer, each one line of JSON::

    {"do": "explain", "key": "order-17"}
    {"ok": true, "result": {...}}
    {"ok": false, "code": "KEYSHARD_BAD_OPTION", "error": "...", "remedy": "..."}
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from keyshard import control_folder
from keyshard.control_requests import UNEXPECTED, Request, Requests, ask, receive, releases
from keyshard.errors import ControlError, KeyShardError, ThreadStartError
from keyshard.redaction import redacted, shown
from keyshard.threads import begin
from keyshard.version import VERSION

REQUEST_BYTES_MAX = 64 * 1024
"""Longest request, bytes."""
REQUEST_S = 5.0
"""Longest time to receive a whole request, and to send an answer, seconds."""
ANSWER_S = 10.0
"""Default of the longest wait of a client for an answer, seconds."""
ACCEPT_AGAIN_S = 1.0
"""Pause after a failed accept, seconds; accept fails if no file descriptor is free."""
CONNECTIONS_MAX = 8
"""Most connections served at the same time; further ones get an error."""
SINK, WORKER = "sink", "worker"
"""Kinds with a suffix of their sockets, so that commands for sources need not ask them."""
ANY = "any"
"""Stands for sources, sinks and workers."""
ASKED_MAX = 200
"""Most sockets that are asked at the same time."""
WHO = "who"
"""The request for the facts of a :class:`RunningSource`."""

Handler = Callable[[Mapping[str, Any]], Any]
"""Takes a request and returns plain JSON values; its errors are sent to the client."""

_log = logging.getLogger(__name__)


class ControlServer:
    """Answers requests in its own threads until :meth:`close`.

    Args:
        subscription: Subscription of the source, or name of the sink.
        service_url: URL of its cluster.
        topics: Its topics, to tell apart two sources of one subscription.
        handlers: Handlers of requests by name.
        kind: Kind of the run, as in the status, or :data:`SINK` or :data:`WORKER`.
        name: Its name; default: the subscription.

    Raises:
        ControlError: The socket cannot be created.
        ThreadStartError: Its thread cannot be started.
    """

    def __init__(
        self,
        subscription: str,
        service_url: str,
        topics: str,
        handlers: Mapping[str, Handler],
        *,
        kind: str = "handlers",
        name: str | None = None,
    ) -> None:
        who = {
            "subscription": subscription,
            "serviceUrl": redacted(service_url),
            "topics": topics,
            "pid": os.getpid(),
            "kind": kind,
            "name": subscription if name is None else name,
            "release": VERSION,
        }
        self._handlers = {WHO: lambda _request: who, **handlers}
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        prefix = f"{_digest(subscription)}-{_digest(service_url)}"
        self._who = who
        name_end = f"{os.getpid()}-{secrets.token_hex(2)}{_suffix_of(kind)}"
        self.path = control_folder.own_folder() / f"{prefix}-{name_end}"
        self._socket = _listen(self.path)
        self._closed = threading.Event()
        try:
            self._thread = begin("keyshard-control", self._run)
        except ThreadStartError:
            self._remove()
            raise

    def close(self, wait_s: float = 1.0) -> None:
        """Accept nothing more and remove the socket. Idempotent.

        A forked child only closes its copy, and leaves the socket to its parent.

        Args:
            wait_s: Longest wait for the end of its thread, seconds.
        """
        if self._who["pid"] != os.getpid():
            self._socket.close()
            return
        self._closed.set()
        self._remove()
        self._thread.join(wait_s)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as exc:
                if not self._closed.is_set():
                    _log.warning("the control socket accepts no connections temporarily: %s", exc)
                self._closed.wait(ACCEPT_AGAIN_S)
                continue
            try:
                if _of_another_user(connection):
                    connection.close()
                else:
                    self._begin_answer(connection)
            except BaseException:
                connection.close()
                raise

    def _begin_answer(self, connection: socket.socket) -> None:
        """Answer a request in a thread of its own, which closes the connection."""
        serves = self._free.acquire(blocking=False)
        try:
            begin("keyshard-control-answer", self._serve if serves else self._refuse, connection)
        except ThreadStartError as exc:
            # A request must not end the source.
            _log.warning("a request got no answer: %s", exc.summary)
            connection.close()
            if serves:
                self._free.release()

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            _send(
                connection,
                _failed(
                    ControlError("The source has too many concurrent requests.", "Try again later.")
                ),
            )

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                _send(connection, self._answer(connection))
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket) -> bytes:
        try:
            line = receive(connection, REQUEST_BYTES_MAX, time.monotonic() + REQUEST_S)
            request = json.loads(line)
            handler = self._handlers.get(request.get("do"))
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                raise ControlError(
                    f"The request has a command that keyshard {VERSION} does not know here.",
                    f"The commands are: {known}.",
                )
            return json.dumps({"ok": True, "result": handler(request)}).encode() + b"\n"
        except KeyShardError as exc:
            return _failed(exc)
        except (*UNEXPECTED, OSError) as exc:
            return _failed(
                ControlError(f"The request cannot be answered: {exc!r}.", "Check its fields.")
            )
        except Exception as exc:  # noqa: BLE001 - the client gets the error, and the source goes on
            _log.exception("a request failed unexpectedly")
            return _failed(
                ControlError(
                    f"The request failed unexpectedly: {exc!r}.", "See the log of the source."
                )
            )


@dataclass(frozen=True, slots=True)
class RunningSource:
    """A source, sink or worker that answered."""

    subscription: str
    service_url: str
    topics: str
    pid: int
    path: Path
    kind: str
    name: str
    release: str = field(default="", kw_only=True)
    """Its release of keyshard; empty if it does not tell it."""

    @property
    def kind_word(self) -> str:
        """``source``, ``sink`` or ``worker``."""
        return self.kind if self.kind in (SINK, WORKER) else "source"

    @property
    def title(self) -> str:
        """Its name in errors."""
        if self.kind == SINK:
            return f"sink {self.name!r}"
        return f"{self.kind_word} of {self.subscription!r}"

    @property
    def facts(self) -> dict[str, Any]:
        """Its facts as JSON values."""
        return {
            "pid": self.pid, "kind": self.kind, "name": self.name,
            "subscription": None if self.kind == SINK else self.subscription,
        }  # fmt: skip

    def ask(self, do: str, *, timeout_s: float = ANSWER_S, **fields: Any) -> Any:
        """Send a request and wait for its result.

        Raises:
            ControlError: The source does not answer in time, or not as expected.
            KeyShardError: The source refused the request with this error.
        """
        return self.answer(lambda: ask(self.path, {"do": do, **fields}, timeout_s))

    def answer(self, result: Callable[[], Any]) -> Any:
        """Return the result of a request; its errors are raised as by :meth:`ask`.

        Args:
            result: Returns the result of a request to its socket.
        """
        try:
            return result()
        except OSError as exc:
            raise ControlError(
                f"The {self.title} with pid {self.pid} does not answer: {exc}.",
                "Check that the process is running.",
            ) from exc
        except ControlError as exc:
            if more := releases(self.release):
                remedy = f"{exc.remedy} Use the same release for both."
                raise exc.with_text(f"{exc.problem}{more}", remedy) from exc.__cause__
            raise

    @contextmanager
    def read(self) -> Iterator[None]:
        """Raise ``ControlError`` if the answer that the block reads has an unexpected shape."""
        try:
            yield
        except UNEXPECTED as exc:
            raise ControlError(
                f"The answer of the {self.title} with pid {self.pid} cannot be understood: "
                f"{shown(exc)}.{releases(self.release)}",
                f"Use the same release of keyshard as the {self.kind_word}.",
            ) from exc


def running_sources(
    subscription: str | None = None, service_url: str | None = None
) -> list[RunningSource]:
    """Return the sources of this user on this machine, by process id; remove sockets of dead ones.

    Args:
        subscription: Only sources with this subscription. If none has it, those with this name.
        service_url: Only sources of this cluster.

    Raises:
        ControlError: A process that is alive does not answer.
    """
    found, errors = _answering(subscription, service_url, ANSWER_S)
    if subscription is not None and not (found or errors):
        every, errors = _answering(None, service_url, ANSWER_S)
        found = [one for one in every if one.name == subscription]
    if errors:
        raise errors[0]
    return found


def answering_sources(
    timeout_s: float, kind: str | None = None, service_url: str | None = None
) -> tuple[list[RunningSource], list[str]]:
    """Return the sources of this user that answer, by process id, and the errors of the others.

    Args:
        timeout_s: Longest wait for each of them, seconds.
        kind: :data:`SINK`, :data:`WORKER`, or :data:`ANY` of the three; ``None``: sources.
        service_url: Only those of this cluster.
    """
    found, errors = _answering(None, service_url, timeout_s, kind)
    return found, [error.message for error in errors]


def _answering(
    subscription: str | None, service_url: str | None, timeout_s: float, kind: str | None = None
) -> tuple[list[RunningSource], list[ControlError]]:
    """Return the sources that answer, by process id, and the errors of the others.

    They are asked at the same time: a process that hangs has a socket for each of its sinks.
    """
    paths = sockets(kind, subscription, service_url)
    asked: list[Request] = []
    for at in range(0, len(paths), ASKED_MAX):
        with closing(Requests()) as requests:
            some = [(path, WHO) for path in paths[at : at + ASKED_MAX]]
            asked += requests.ask(some, timeout_s).values()
    found, errors = found_among(asked)
    return sorted(found, key=lambda one: (one.pid, one.path)), errors


def sockets(
    kind: str | None = None, subscription: str | None = None, service_url: str | None = None
) -> list[Path]:
    """Return the control sockets of this user, also those of processes that have ended.

    Args:
        kind: :data:`SINK`, :data:`WORKER`, or :data:`ANY` of the three; ``None``: sources.
        subscription: Only those with this subscription, or name of a sink.
        service_url: Only those of this cluster.
    """
    names = [_digest(part) if part is not None else "*" for part in (subscription, service_url)]
    return [
        path
        for folder in control_folder.folders()
        for path in folder.glob(f"{names[0]}-{names[1]}-*-*")
        if kind == ANY or path.suffix == _suffix_of(kind)
    ]


def kind_at(path: Path) -> str:
    """Return ``source``, ``sink`` or ``worker``, by the name of a control socket."""
    return path.suffix.removeprefix(".") or "source"


def found_among(asked: Iterable[Request]) -> tuple[list[RunningSource], list[ControlError]]:
    """Return what runs at the sockets of requests :data:`WHO`, and the errors of the others."""
    outcomes = [_outcome_of(one) for one in asked]
    found = [one for one in outcomes if isinstance(one, RunningSource)]
    return found, [one for one in outcomes if isinstance(one, ControlError)]


def _outcome_of(request: Request) -> RunningSource | ControlError | None:
    try:
        return found_at(request.path, request.result)
    except ControlError as exc:
        return exc


def found_at(path: Path, result: Callable[[], Any]) -> RunningSource | None:
    """Return what runs at a socket; ``None`` if its process has ended: then the socket is removed.

    Args:
        path: The socket.
        result: Returns the result of the request :data:`WHO`.

    Raises:
        ControlError: The process does not answer, or not as expected.
    """
    try:
        return _source_of(result(), path)
    except OSError as exc:
        if has_ended(path, exc):
            return None
        pid = path.name.split("-")[2]
        raise ControlError(
            f"Process {pid} has a control socket, but does not answer: {exc or 'late'}.",
            "It is suspended or hangs. Resume or end it.",
        ) from exc


def has_ended(path: Path, error: BaseException | None) -> bool:
    """Whether the error of a request shows that its process has ended; remove the socket then."""
    if isinstance(error, ConnectionRefusedError):
        path.unlink(missing_ok=True)
    return not path.exists()


def _source_of(answer: Any, path: Path) -> RunningSource:
    match answer:
        case {
            "subscription": str(subscription),
            "serviceUrl": str(service_url),
            "topics": str(topics),
            "pid": int(pid),
            "kind": str(kind),
            "name": str(name),
        }:
            return RunningSource(
                subscription, service_url, topics, pid, path, kind, name,
                release=str(answer.get("release", "")),
            )  # fmt: skip
    raise ControlError(
        f"The process at {path} is not a keyshard source: its answer is {shown(answer)}.",
        "End the process, or remove the file.",
    )


def running_source(
    subscription: str | None = None, service_url: str | None = None, pid: int | None = None
) -> RunningSource:
    """Return the only matching source.

    Raises:
        ControlError: There is none, or several; the message says how to name one.
    """
    found = running_sources(subscription, service_url)
    matching = [one for one in found if pid in (None, one.pid)]
    if matching:
        return only_of(matching, ", --service-url")
    name = "source" if subscription is None else f"source of {subscription!r}"
    where = ", ".join(map(str, control_folder.candidates()))
    raise ControlError(
        f"No running {name} of this user was found on this machine (in {where}).",
        f"{_others(running_sources())}Only a source that is running has a control socket.",
    )


def only_of(matching: Sequence[RunningSource], by: str) -> RunningSource:
    """Return the only one.

    Args:
        matching: At least one.
        by: Options that select one, besides its name and ``--pid``, for the error.

    Raises:
        ControlError: There are several.
    """
    if len(matching) > 1:
        raise ControlError(
            f"{len(matching)} {matching[0].kind_word}s match: {_list_of(matching)}.",
            f"Select one by its name{by} or --pid.",
        )
    return matching[0]


def _suffix_of(kind: str | None) -> str:
    return f".{kind}" if kind in (SINK, WORKER) else ""


def _list_of(sources: Sequence[RunningSource]) -> str:
    return "; ".join(
        f"pid {one.pid}: {one.subscription!r} on {one.topics} at {one.service_url}"
        for one in sources
    )


def _others(sources: list[RunningSource]) -> str:
    return f"Running sources: {_list_of(sources)}. " if sources else ""


def _of_another_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of another user, if the system can tell.

    Folder and socket are private. This check also holds if somebody has opened them to others.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid != os.getuid())


def _listen(path: Path) -> socket.socket:
    """Return a listening socket at ``path``; the path appears only once the socket listens."""
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
            f"The control socket {path} cannot be created: {exc}.",
            "Set XDG_RUNTIME_DIR to a folder with a short path.",
        ) from exc
    return made


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def _send(connection: socket.socket, answer: bytes) -> None:
    connection.settimeout(REQUEST_S)
    connection.sendall(answer)


def _failed(error: KeyShardError) -> bytes:
    answer = {"ok": False, "code": error.code, "error": error.problem, "remedy": error.remedy}
    return json.dumps(answer).encode() + b"\n"
