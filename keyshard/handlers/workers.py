"""Where handlers run: threads, an event loop, or processes.

All ask one :class:`Desk` for the next message and tell it how the handler ended.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from keyshard.core.lane_queues import Work
from keyshard.core.message import Message
from keyshard.errors import ConfigError, HandlerProcessError

Handle = Callable[[Message], Any]
"""A handler: a function, or a coroutine function."""


class Desk(Protocol):
    """Hands out messages and takes results; implemented by the handler run."""

    changed: threading.Condition
    """Held by who calls :meth:`next` and :meth:`finish`; notified when there is work."""

    def next(self) -> Work | None:
        """The message to handle now; ``None`` when there is none."""

    def finish(self, work: Work, error: BaseException | None) -> None:
        """An attempt ended; ``error``: what the handler raised."""

    @property
    def closed(self) -> bool:
        """Whether no work is handed out any more."""


class Workers(Protocol):
    """Runs handlers until the desk is closed."""

    count: int
    """Threads or processes; 1 for an event loop."""

    @property
    def resting(self) -> bool:
        """Whether there is somebody to wake; the desk's lock is held."""

    def wake(self, messages: int) -> None:
        """There are so many messages to start; the desk's lock is held."""

    def grow(self, count: int) -> None:
        """There may be more lanes than before: run as many handlers at once, where threads do."""

    def close(self, timeout_s: float) -> bool:
        """The desk is closed: wait for running handlers; whether all have ended."""


class ThreadWorkers:
    """Daemon threads, never fewer than before.

    Args:
        desk: Where work comes from.
        count: Number of threads to begin with.
        handles: Makes the function that a thread calls for each message.
    """

    def __init__(self, desk: Desk, count: int, handles: Callable[[], Handle]) -> None:
        self.count = 0
        self._desk = desk
        self._handles = handles
        self._idle = 0
        self._left_behind = False
        """Whether nobody waits any more for handlers that still run."""
        self._threads: list[threading.Thread] = []
        self._start_threads(count)

    def grow(self, count: int) -> None:
        self._start_threads(count)

    def _start_threads(self, count: int) -> None:
        for number in range(self.count, count):
            thread = threading.Thread(target=self._run, name=f"keyshard-work-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.count = max(self.count, count)

    @property
    def resting(self) -> bool:
        return self._idle > 0

    def wake(self, messages: int) -> None:
        self._desk.changed.notify(min(messages, self._idle))

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._desk.changed:
            self._desk.changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._left_behind = True
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        desk, handle = self._desk, self._handles()
        work: Work | None = None
        error: BaseException | None = None
        while True:
            with desk.changed:
                if work is not None:
                    desk.finish(work, error)
                while (work := desk.next()) is None:
                    if desk.closed:
                        return
                    self._idle += 1
                    desk.changed.wait()
                    self._idle -= 1
            error = None
            try:
                handle(work.message)
            except BaseException as exc:  # noqa: BLE001 - whatever a handler raises is its failure
                error = exc
            if self._left_behind:
                return


class AsyncWorkers:
    """One event loop in a daemon thread; as many coroutines as there are lanes to fill.

    Args:
        desk: Where work comes from.
        handle: A coroutine function.
    """

    def __init__(self, desk: Desk, handle: Callable[[Message], Awaitable[Any]]) -> None:
        self.count = 1
        self._desk = desk
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._awake = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="keyshard-work-async", daemon=True)
        self._thread.start()

    @property
    def resting(self) -> bool:
        return not self._awake

    def wake(self, messages: int) -> None:
        if messages:
            self._awake = True
            self._loop.call_soon_threadsafe(self._start)

    def grow(self, count: int) -> None:
        """Coroutines need no threads."""

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        ended = not self._tasks
        self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(1.0)
        return ended

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _start(self) -> None:
        with self._desk.changed:
            self._awake = False
            while work := self._desk.next():
                task = self._loop.create_task(self._serve(work))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            error: BaseException | None = None
            try:
                await self._handle(work.message)
            except asyncio.CancelledError as exc:
                if self._desk.closed:
                    return
                error = exc
            except BaseException as exc:  # noqa: BLE001 - whatever a handler raises is its failure
                error = exc
            with self._desk.changed:
                self._desk.finish(work, error)
                work = self._desk.next()


class ProcessHandle:
    """Calls the handler in a process of its own, and starts another when that one dies.

    Args:
        pickled: The handler, pickled.
    """

    def __init__(self, pickled: bytes, started: Callable[[ProcessHandle], None]) -> None:
        self._pickled = pickled
        self._process: Any = None
        self._connection: Connection | None = None
        started(self)

    def __call__(self, message: Message) -> None:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(message)
            error = self._connection.recv()
        except (EOFError, OSError) as exc:
            self._process.join(1.0)
            code = self._process.exitcode
            self.kill()
            self._connection.close()
            self._connection = None
            raise HandlerProcessError(
                f"The worker process ended with status {code} while it handled "
                f"{message.message_id} of {message.topic}. Look for a crash or the memory limit."
            ) from exc
        if error is not None:
            raise error

    def kill(self) -> None:
        """End the process, whatever it does; from any thread. Who waits for it is told."""
        if self._process is not None:
            self._process.kill()
            self._process.join(1.0)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far, self._pickled), name="keyshard-work", daemon=True
        )
        self._process.start()
        far.close()


def _serve(connection: Connection, pickled: bytes) -> None:
    # Ctrl-C reaches every process of a terminal; the one that asked for work decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handle = pickle.loads(pickled)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        error: BaseException | None = None
        try:
            handle(message)
        except Exception as exc:  # noqa: BLE001 - whatever a handler raises is its failure
            error = exc
        try:
            connection.send(error)
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send(RuntimeError(f"{type(error).__name__}: {error}"))


class ProcessWorkers(ThreadWorkers):
    """A fixed number of processes, each fed by a thread that waits for it.

    Args:
        desk: Where work comes from.
        count: Number of processes.
        handle: A picklable function.
        observed: Wraps what the feeding threads call.

    Raises:
        ConfigError: The handler cannot be pickled.
    """

    def __init__(
        self, desk: Desk, count: int, handle: Handle, observed: Callable[[Handle], Handle]
    ) -> None:
        try:
            pickled = pickle.dumps(handle)
        except (pickle.PicklingError, AttributeError, TypeError) as exc:
            raise ConfigError(
                f"The handler {handle!r} cannot be sent to a process: {exc}. Define it at the top "
                "of a module, or use executor='threads'."
            ) from exc
        self._processes: list[ProcessHandle] = []
        super().__init__(
            desk, count, lambda: observed(ProcessHandle(pickled, self._processes.append))
        )

    def grow(self, count: int) -> None:
        """More processes than cores would not do more."""

    def close(self, timeout_s: float) -> bool:
        ended = super().close(timeout_s)
        for process in self._processes:
            process.kill()
        return ended
