"""Handlers in processes of their own, each fed by a thread that waits for it.

A child begins with telling that it could load the handler. Signals to the whole group of processes
(Ctrl-C in a terminal, a service manager's SIGTERM) do nothing in it: the parent alone decides what
becomes of a message. It ends when the parent ends it, or is gone.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from keyshard.core.lanes.failure import Failure, FailureKind, Reject, RetryLater, text_of
from keyshard.core.message import Message
from keyshard.errors import ConfigError, HandlerProcessError, UnfitHandlerError
from keyshard.handlers.calling import Calling, Handle
from keyshard.handlers.executors import Desk, ThreadWorkers
from keyshard.threads import begin

START_TIMEOUT_S = 60.0
"""Longest wait until a process has loaded the handler, seconds."""
TRACEBACK_MAX = 8_000
"""Most characters of a traceback that cross."""
_ROOT = Path(__file__).parents[2]
_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (_ROOT / "keyshard", _ROOT / "ray_adapter", Path(asyncio.__file__).parent)
)
"""Code between the call of a handler and the user's own."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What a child leaves to its parent."""

_log = logging.getLogger(__name__)
BEGAN = b"began"
"""A child sends this when it has a message; if it ends before, that is no attempt."""
IDLE_ENDS_MAX = 3
"""Times that another process takes the place of one that ended before it had a message."""


class _EndedIdleError(Exception):
    """A process has ended before it had the message."""


class Reply(NamedTuple):
    """How a child tells that an attempt failed; ``None`` stands for success."""

    kind: FailureKind
    reason: str
    after_s: float | None = None
    error: bytes | None = None
    """The pickled error, where it can be pickled."""
    traceback: str = ""
    """Its traceback, which pickling loses; the end of a long one."""
    where: str = ""
    """File and line of the user's code that it passed first."""

    @classmethod
    def of(cls, error: BaseException) -> Reply:
        failure = Failure.of(error)
        try:
            pickled = pickle.dumps(error)
        except BaseException:  # noqa: BLE001 - a class of the user's
            pickled = None
        told, where = _how_raised(error)
        return cls(failure.kind, failure.reason, failure.after_s, pickled, told, where)

    def to_error(self) -> BaseException:
        """The error itself, or where it cannot cross, one that means the same.

        Its cause shows how it was raised in the other process.
        """
        error = self._error()
        if self.traceback:
            with suppress(Exception):  # a class of the user's
                error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def _error(self) -> BaseException:
        try:
            error: Any = None if self.error is None else pickle.loads(self.error)
            if issubclass(type(error), BaseException) and Failure.of(error).kind is self.kind:
                return error  # type: ignore[no-any-return]
        except BaseException:  # noqa: BLE001, S110 - a class of the user's: the facts are enough
            pass
        if self.kind is FailureKind.UNFIT:
            return UnfitHandlerError(self.reason)
        if self.kind is FailureKind.REJECTED:
            return Reject(self.reason)
        if self.kind is FailureKind.LATER:
            return RetryLater(self.after_s or 0.0, self.reason)
        return RuntimeError(self.reason)


class RemoteTraceback(Exception):  # noqa: N818 - shows a text where Python shows the cause
    """Traceback of an error in another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def _how_raised(error: BaseException) -> tuple[str, str]:
    """The traceback of an error as text, and file and line of the first code that is not ours."""
    try:
        steps = traceback.extract_tb(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        foreign = (one for one in steps if not one.filename.startswith(_OURS))
        where = next((f"{one.filename}:{one.lineno}" for one in foreign), "")
    except BaseException:  # noqa: BLE001 - a class of the user's
        return "", ""
    return (text[-TRACEBACK_MAX:], where) if steps else ("", "")


class ProcessHandle:
    """Calls the handler in a process of its own, and starts another when that one dies.

    Args:
        pickled: The handler, and what decodes messages for it.
        started: Told of it at once.
    """

    def __init__(self, pickled: bytes, started: Callable[[ProcessHandle], None]) -> None:
        self._pickled = pickled
        self._process: Any = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._ended = False
        started(self)

    def __call__(self, message: Message) -> None:
        request = pickle.dumps(message)
        doing = f"it handled {message.message_id} of {message.topic}"
        for last in (*[False] * IDLE_ENDS_MAX, True):
            if self._connection is None:
                self.start()
            try:
                reply = self._ask(request, None, doing)
                break
            except _EndedIdleError as exc:
                if last:
                    raise HandlerProcessError(exc.args[0]) from exc
                _log.warning("%s Another one takes its place.", exc)
        if reply is not None:
            raise reply.to_error()

    def start(self) -> None:
        """Start the process, which loads the handler.

        Raises:
            UnfitHandlerError: It cannot load it.
            HandlerProcessError: It ended before, or is not ready in time.
        """
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(
            target=_serve, args=(far, self._pickled), name="keyshard-work", daemon=True
        )
        with self._lock:
            if self._ended:
                raise HandlerProcessError("The source ends, so no worker process is started.")
            with _signals_held_back():
                process.start()
            self._process, self._connection = process, near
        far.close()
        reply = self._ask(None, START_TIMEOUT_S, "it loaded the handler")
        if reply is not None:
            self.end()
            raise UnfitHandlerError(
                f"A worker process cannot load the handler: {reply.reason}. Define it at the top "
                "of a module that can be imported there, or use executor='threads'."
            )

    def end(self) -> None:
        """End the process, whatever it does; from any thread. Who waits for it is told."""
        with self._lock:
            self._ended = True
        self._kill()

    def _ask(self, request: bytes | None, timeout_s: float | None, doing: str) -> Reply | None:
        connection = self._connection
        assert connection is not None
        began = request is None
        try:
            if request is not None:
                connection.send_bytes(request)
                began = connection.recv_bytes() == BEGAN
            if not connection.poll(timeout_s):
                raise TimeoutError
            reply: Reply | None = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as exc:
            # Also ends one that is not ready in time.
            late = isinstance(exc, TimeoutError)
            code = self._left(0.0 if late else 1.0)
            if not began:
                raise _EndedIdleError(
                    f"A worker process ended with status {code} while it waited for a message."
                ) from exc
            what = f"was not ready within {timeout_s} s" if late else f"ended with status {code}"
            raise HandlerProcessError(
                f"The worker process {what} while {doing}. Look for a crash or the memory limit."
            ) from exc
        return reply

    def _left(self, wait_s: float) -> int | None:
        """Have no process; the status that it ended with by itself in a while."""
        self._process.join(wait_s)
        code: int | None = self._process.exitcode
        self._kill()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return code

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.join(1.0)


class ProcessWorkers(ThreadWorkers):
    """A fixed number of processes.

    Args:
        desk: Where work comes from.
        count: Number of processes.
        handle: A picklable function.
        observed: Wraps what the feeding threads call.
        read_data: What decodes messages, picklable.

    Raises:
        UnfitHandlerError: The handler cannot be pickled, or not be loaded by a process.
    """

    def __init__(
        self,
        desk: Desk,
        count: int,
        handle: Handle,
        observed: Callable[[Handle], Handle],
        read_data: Handle | None = None,
    ) -> None:
        try:
            pickled = pickle.dumps((handle, read_data))
        except Exception as exc:
            raise ConfigError(
                f"The handler {text_of(handle)} cannot be sent to a process: {text_of(exc)}. "
                "Define it at the top of a module, or use executor='threads'."
            ) from exc
        self._processes: list[ProcessHandle] = []
        # At the end of the interpreter children are sent SIGTERM, and waited for.
        atexit.register(self._end_all)
        spare = [_first(pickled, self._processes.append)]

        def made() -> Handle:
            # The first thread takes the process that showed that the handler can be loaded.
            try:
                process = spare.pop()
            except IndexError:
                process = ProcessHandle(pickled, self._processes.append)
            return observed(process)

        super().__init__(desk, count, made)

    def grow(self, count: int) -> None:
        """More processes than cores would not do more."""

    def close(self, timeout_s: float) -> bool:
        ended = super().close(timeout_s)
        self._end_all()
        atexit.unregister(self._end_all)
        return ended

    def _end_all(self) -> None:
        for process in self._processes:
            process.end()


def _first(pickled: bytes, started: Callable[[ProcessHandle], None]) -> ProcessHandle:
    process = ProcessHandle(pickled, started)
    try:
        process.start()
    except HandlerProcessError as exc:
        raise UnfitHandlerError(
            f"{exc.message} Its error stands in the output above this one. A script that runs a "
            "source in processes needs `if __name__ == '__main__':` around what it runs."
        ) from exc
    return process


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """What is started inside gets the signals only when it asks for them."""
    # Its own start lets the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the child ---------------------------------------------------------------------------------


def _serve(connection: Connection, pickled: bytes) -> None:
    for number in SIGNALS:
        # Not SIG_IGN, which programs that the handler starts would inherit.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    begin("keyshard-parent-watch", _end_with_parent)
    try:
        handle = Calling(*pickle.loads(pickled))
    except BaseException as exc:  # noqa: BLE001 - importing runs the user's code
        connection.send_bytes(pickle.dumps(Reply(FailureKind.UNFIT, Failure.of(exc).reason)))
        return
    connection.send_bytes(pickle.dumps(None))
    while True:
        try:
            request = connection.recv_bytes()
            connection.send_bytes(BEGAN)
        except (EOFError, OSError):
            return
        reply: Reply | None = None
        try:
            handle(pickle.loads(request))
        except BaseException as exc:  # noqa: BLE001 - whatever a handler raises is its failure
            reply = Reply.of(exc)
        connection.send_bytes(pickle.dumps(reply))


def _end_with_parent() -> None:
    """A handler must not go on beside the one of the source that is started next."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
