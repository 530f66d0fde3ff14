"""Runs handlers in child processes, each fed by a thread that waits for it.

A child first reports whether it could load the handler. It ignores signals to the process group
(Ctrl-C in a terminal, SIGTERM of a service manager): only the parent decides about messages. It
ends when the parent kills it, or when the parent ends.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from keyshard.base_error import IGNORE
from keyshard.core.lanes.failure import Failure, FailureKind, Reject, RetryLater, text_of
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerSlots, handler_slots
from keyshard.core.message import (
    NO_CONTEXT,
    HandlerContext,
    Message,
    Place,
    Produce,
    TakeNote,
)
from keyshard.core.process_end import ending, no_start, remedy
from keyshard.errors import ConfigError, HandlerProcessError, UnfitHandlerError
from keyshard.handlers.executors import ThreadExecutor, WorkSource
from keyshard.handlers.handler_call import Handle, HandlerCall, Take, unpublished
from keyshard.handlers.stacks import Call
from keyshard.threads import begin

START_TIMEOUT_S = 60.0
"""Longest wait until a process has loaded the handler, seconds."""
TRACEBACK_MAX = 8_000
"""Maximum number of characters of a traceback sent to the parent."""
_ROOT = Path(__file__).parents[2]
_OURS = tuple(
    f"{folder}{os.sep}"
    for folder in (_ROOT / "keyshard", _ROOT / "ray_adapter", Path(asyncio.__file__).parent)
)
"""Code between the call of a handler and the user's own code."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a child leaves to its parent."""

_log = logging.getLogger(__name__)
BEGAN = b"began"
"""A child sends this when it has a message. Its end before that is no attempt."""
NOTE = b"note:"
"""Begins a note of the handler, which a child sends before its answer."""
IDLE_ENDS_MAX = 3
"""Maximum number of replacements of a process that ends before it has a message."""


class _EndedIdleError(Exception):
    """A process ended before it had the message."""


class Reply(NamedTuple):
    """A child's report of a failed attempt. After success it sends the messages to publish."""

    kind: FailureKind
    reason: str
    after_s: float | None = None
    error: bytes | None = None
    """The pickled error, if it can be pickled."""
    traceback: str = ""
    """The traceback, which pickling loses; cut to its end if it is long."""
    where: str = ""
    """File and line of the user's code nearest to the call of the handler."""

    @classmethod
    def of(cls, error: BaseException) -> Reply:
        failure = Failure.of(error)
        try:
            pickled = pickle.dumps(error)
        except BaseException:  # noqa: BLE001 - a user-defined class may raise anything
            pickled = None
        shown, where = _how_raised(error)
        return cls(failure.kind, failure.reason, failure.after_s, pickled, shown, where)

    def to_error(self) -> BaseException:
        """Return the error itself or, if it cannot be unpickled, an equivalent one.

        Its cause shows the traceback of the other process.
        """
        error = self._error()
        if self.traceback:
            with suppress(Exception):  # a user-defined class may raise anything
                error.__cause__ = RemoteTraceback(self.traceback)
        return error

    def _error(self) -> BaseException:
        try:
            error: Any = None if self.error is None else pickle.loads(self.error)
            if issubclass(type(error), BaseException) and Failure.of(error).kind is self.kind:
                return error  # type: ignore[no-any-return]
        except BaseException:  # noqa: BLE001, S110 - a user-defined class: the facts are enough
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
    """Return the traceback of an error as text, and file and line of the first user code in it."""
    try:
        steps = traceback.extract_tb(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        foreign = (one for one in steps if not one.filename.startswith(_OURS))
        where = next((f"{one.filename}:{one.lineno}" for one in foreign), "")
    except BaseException:  # noqa: BLE001 - a user-defined class may raise anything
        return "", ""
    return (text[-TRACEBACK_MAX:], where) if steps else ("", "")


class ProcessHandle:
    """Calls the handler in a child process, and starts another if that one dies.

    Args:
        pickled: The handler, the decoder of its messages, and its ``take``.
        started: Called at once with the new object.
        note: Takes the notes of the handler.
    """

    def __init__(
        self, pickled: bytes, started: Callable[[ProcessHandle], None], note: TakeNote | None
    ) -> None:
        self._pickled = pickled
        self._note = note
        self._process: Any = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._handled = self._starts = 0
        self._starting = False
        self._since_s: float | None = None
        """Start of the handler that runs, monotonic seconds."""
        started(self)

    def __call__(self, message: Message) -> Sequence[Produce] | None:
        self._since_s = time.monotonic()
        try:
            produced = self._produced(message)
            self._handled += 1
        finally:
            self._since_s = None
        return produced

    def slots(self, index: int, now_s: float) -> HandlerSlots:
        """Return its slot; any thread may call it."""
        since_s, runs = self._since_s, self._connection is not None
        return handler_slots(
            index, (self._process.pid, socket.gethostname()) if runs else None, 1,
            int(since_s is not None), starting=self._starting,
            running_s=None if since_s is None else now_s - since_s, handled=self._handled,
            restarts=max(0, self._starts - 1),
        )  # fmt: skip

    def _produced(self, message: Message) -> Sequence[Produce] | None:
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
                    raise HandlerProcessError(*exc.args) from exc
                _log.warning("%s %s Another process replaces it.", *exc.args)
        if isinstance(reply, Reply):
            raise reply.to_error()
        return reply

    def start(self) -> None:
        """Start the process, which loads the handler.

        Raises:
            UnfitHandlerError: It cannot load the handler.
            HandlerProcessError: The system cannot start it, it ended before, or it was not ready in
                time.
        """
        self._starting = True
        try:
            self._start()
        finally:
            self._starting = False

    def _start(self) -> None:
        try:
            self._begin()
        except OSError as exc:
            raise HandlerProcessError(*no_start("handler", exc)) from exc
        reply = self._ask(None, START_TIMEOUT_S, "it loaded the handler")
        if isinstance(reply, Reply):
            self.end()
            raise UnfitHandlerError(
                f"A handler process cannot load the handler: {reply.reason}.",
                "Define the handler at the top level of a module that the process can import, or "
                "set executor to 'threads'.",
            )

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(
            target=_serve, args=(far, self._pickled), name="keyshard-work", daemon=True
        )
        with self._lock:
            if self._ended:
                raise HandlerProcessError(
                    "The source ends, so no handler process is started.", IGNORE
                )
            with _signals_held_back():
                process.start()
            self._process, self._connection = process, near
            self._starts += 1
        far.close()

    @property
    def has_started(self) -> bool:
        """Whether the system has started a process."""
        return self._starts > 0

    def end(self) -> None:
        """Kill the process; from any thread. A caller that waits for it gets an error."""
        with self._lock:
            self._ended = True
        self._kill()

    def _ask(
        self, request: bytes | None, timeout_s: float | None, doing: str
    ) -> Reply | Sequence[Produce] | None:
        connection = self._connection
        assert connection is not None
        began = request is None
        try:
            if request is not None:
                connection.send_bytes(request)
                began = connection.recv_bytes() == BEGAN
            if not connection.poll(timeout_s):
                raise TimeoutError
            reply: Reply | Sequence[Produce] | None = pickle.loads(self._answer(connection))
        except (EOFError, OSError) as exc:
            # TimeoutError is an OSError: this also kills a process that was not ready in time.
            late = isinstance(exc, TimeoutError)
            code = self._left(0.0 if late else 1.0)
            if not began:
                raise _EndedIdleError(
                    f"A handler process {ending(code)} while it waited for a message.", remedy(code)
                ) from exc
            what = f"was not ready within {timeout_s} s" if late else ending(code)
            hint = "Look for what delays it." if late else remedy(code)
            raise HandlerProcessError(f"The handler process {what} while {doing}.", hint) from exc
        return reply

    def _answer(self, connection: Connection) -> bytes:
        """Return the answer; take the notes before it."""
        while (received := connection.recv_bytes()).startswith(NOTE):
            if self._note is not None:
                *place, text = json.loads(received[len(NOTE) :])
                self._note(tuple(place), text)
        return received

    def _left(self, wait_s: float) -> int | None:
        """Wait for the process, then kill it. Return its exit status; ``None``: it still ran."""
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


class ProcessExecutor(ThreadExecutor):
    """Runs handlers in a fixed number of child processes, each fed by a thread.

    Args:
        dispatcher: Source of work.
        count: Number of processes.
        handle: A picklable function.
        observed: Wraps the function that the feeding threads call.
        context: The run. Its decoder must be picklable.
        take: Checks or converts the result of the handler; picklable.

    Raises:
        ConfigError: The handler cannot be pickled.
        HandlerProcessError: The system cannot start a process.
        UnfitHandlerError: A process cannot load the handler.
    """

    takes_bulks = False

    def __init__(
        self,
        dispatcher: WorkSource,
        count: int,
        handle: Handle,
        observed: Callable[[Handle], Handle],
        context: HandlerContext = NO_CONTEXT,
        *,
        take: Take = unpublished,
    ) -> None:
        try:
            read_data = None if context.read_data is None else _LaterData(context.read_data)
            pickled = pickle.dumps((handle, read_data, take))
        except Exception as exc:
            raise ConfigError(
                f"The handler {text_of(handle)} cannot be sent to a process: {text_of(exc)}.",
                "Define it at the top level of a module, or set executor to 'threads'.",
            ) from exc
        self._processes: list[ProcessHandle] = []
        # When the interpreter ends, multiprocessing sends SIGTERM to children and waits for them.
        atexit.register(self._end_all)

        def new() -> ProcessHandle:
            return ProcessHandle(pickled, self._processes.append, context.note)

        spare = [_first(new())]

        def made() -> Handle:
            # The first thread takes the process that has already loaded the handler.
            try:
                process = spare.pop()
            except IndexError:
                process = new()
            return observed(process)

        super().__init__(dispatcher, count, made)

    def grow(self, count: int) -> None:
        """Do nothing: more processes than cores would not do more work."""

    def calls(self, work: Work) -> list[Call]:  # noqa: ARG002
        raise ConfigError(
            "Handlers of this source run in processes, whose stacks the source cannot see.",
            f"Set executor to 'threads', or attach a profiler to a child of process {os.getpid()}.",
        )

    def slots(self, now_s: float) -> list[HandlerSlots]:
        return [one.slots(index, now_s) for index, one in enumerate(self._processes)]

    def close(self, timeout_s: float) -> bool:
        ended = super().close(timeout_s)
        self._end_all()
        atexit.unregister(self._end_all)
        return ended

    def _end_all(self) -> None:
        for process in self._processes:
            process.end()


def _first(process: ProcessHandle) -> ProcessHandle:
    try:
        process.start()
    except HandlerProcessError as exc:
        if not process.has_started:
            raise
        raise UnfitHandlerError(
            f"{exc.problem} The output above this error shows its cause.",
            f"{exc.remedy} If a script runs a source in processes, the script needs "
            "`if __name__ == '__main__':`.",
        ) from exc
    return process


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block :data:`SIGNALS` while the body runs.

    A process that the body starts begins with them blocked, and unblocks them itself.
    """
    # Starting the resource tracker unblocks the signals, so it is started before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the child ---------------------------------------------------------------------------------


class _LaterData:
    """Loads the decoder of messages when a handler first uses it, because it imports Arrow.

    Args:
        read_data: The decoder; picklable.
    """

    def __init__(self, read_data: Callable[[Message], Any]) -> None:
        self._pickled = pickle.dumps(read_data)
        self._read_data: Callable[[Message], Any] | None = None

    def __call__(self, message: Message) -> Any:
        if self._read_data is None:
            self._read_data = pickle.loads(self._pickled)
        return self._read_data(message)


def _serve(connection: Connection, pickled: bytes) -> None:
    for number in SIGNALS:
        # Not SIG_IGN: programs started by the handler would inherit it.
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    begin("keyshard-parent-watch", _end_with_parent)
    # Held by a note that is being sent, and by this thread while no handler runs: notes of threads
    # that outlive their handler must not come between two answers.
    noting = threading.Lock()
    noting.acquire()

    def note(place: Place, text: str) -> None:
        ledger, entry, index, topic, partition = place
        # Plain values: an object of the user could fail in the parent, amid an answer.
        values = int(ledger), int(entry), int(index), str(topic), int(partition), text
        if noting.acquire(blocking=False):
            try:
                connection.send_bytes(NOTE + json.dumps(values).encode())
            finally:
                noting.release()

    try:
        handler, read_data, take = pickle.loads(pickled)
        handle = HandlerCall(handler, HandlerContext(read_data, note), take)
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
        noting.release()
        try:
            reply = pickle.dumps(handle(pickle.loads(request)))
        except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
            reply = pickle.dumps(Reply.of(exc))
        noting.acquire()
        connection.send_bytes(reply)


def _end_with_parent() -> None:
    """End the child with its parent: its handler must not run beside that of the next source."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
