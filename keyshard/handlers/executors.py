"""Where handlers run: threads, an event loop, or (:mod:`keyshard.handlers.processes`) processes.

All ask one :class:`Desk` for the next message and tell it how the handler ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from keyshard.core.lanes.queues import Work
from keyshard.core.lanes.retrying import Setback
from keyshard.core.message import Message
from keyshard.errors import KeyShardError
from keyshard.handlers.calling import Handle
from keyshard.handlers.event_loop import EventLoop
from keyshard.threads import begin, ending_source

ASYNC_NAME = "keyshard-work-async"
"""Of the thread that runs coroutines."""


class Desk(Protocol):
    """Hands out messages and takes results; see :mod:`keyshard.handlers.lane_desk`."""

    changed: threading.Condition
    """Held by who calls :meth:`next` and :meth:`finish`; notified when there is work."""

    def next(self) -> Work | None:
        """The message to handle now; ``None`` when there is none."""

    def judge(self, work: Work, error: BaseException) -> Setback:
        """What the handler raised means; called without the lock, because it asks user code."""

    def finish(self, work: Work, setback: Setback | None) -> None:
        """An attempt ended; ``setback``: why it failed."""

    def wake(self) -> None:
        """Let workers start what is runnable; called with ``changed`` held."""

    def fail(self, error: KeyShardError) -> None:
        """End the source."""

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

    One of them is called at a time, and calls the next before its handler begins: handlers that
    wait all run soon, and those that take no time run in few threads. To wake a hundred of them for
    a hundred messages would cost more than to handle those.

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
        self._called = False
        """Whether a thread was woken that has not gone on yet."""
        self._left_behind = False
        """Whether nobody waits any more for handlers that still run."""
        self._threads: list[threading.Thread] = []
        self._start_threads(count)

    def grow(self, count: int) -> None:
        self._start_threads(count)

    def _start_threads(self, count: int) -> None:
        for number in range(self.count, count):
            name = f"keyshard-work-{number}"
            self._threads.append(begin(name, self._run, fail=self._desk.fail))
        self.count = max(self.count, count)

    @property
    def resting(self) -> bool:
        return self._idle > 0 and not self._called

    def wake(self, messages: int) -> None:
        if messages:
            self._called = True
            self._desk.changed.notify()

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
        setback: Setback | None = None
        while True:
            with desk.changed:
                if work is not None:
                    desk.finish(work, setback)
                while (work := desk.next()) is None:
                    if desk.closed:
                        return
                    self._idle += 1
                    desk.changed.wait()
                    self._idle -= 1
                    self._called = False
                if self.resting:
                    desk.wake()
            setback = None
            try:
                handle(work.message)
            except BaseException as exc:  # noqa: BLE001 - whatever a handler raises is its failure
                setback = desk.judge(work, exc)
            if self._left_behind:
                return


class AsyncWorkers:
    """One event loop in a daemon thread; a task for each message, one for each lane at most.

    Args:
        desk: Where work comes from.
        handle: A coroutine function.
        running_max: Most coroutines at the same time; ``None``: one for each lane.
    """

    def __init__(
        self, desk: Desk, handle: Callable[[Message], Awaitable[None]], running_max: int | None
    ) -> None:
        self.count = 1
        self._desk = desk
        self._handle = handle
        self._running_max = math.inf if running_max is None else running_max
        self._running = 0
        """Coroutines that handle messages; the desk's lock guards it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()
        self._awake = False
        self._closing = False
        self._loop = EventLoop(ASYNC_NAME)

    @property
    def resting(self) -> bool:
        return not self._awake

    def wake(self, messages: int) -> None:
        if messages:
            self._awake = True
            self._loop.call(self._start)

    def grow(self, count: int) -> None:
        """Coroutines need no threads."""

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        ended = not self._tasks
        self._closing = True
        self._loop.close()
        return ended

    def _start(self) -> None:
        with ending_source(ASYNC_NAME, self._desk.fail), self._desk.changed:
            self._awake = False
            while self._running < self._running_max and (work := self._desk.next()):
                self._running += 1
                self._spawn(work)

    def _spawn(self, work: Work) -> None:
        """Handle a message in a task and a context of its own."""
        task = self._context.run(self._loop.loop.create_task, self._serve(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, work: Work) -> None:
        setback: Setback | None = None
        with ending_source(ASYNC_NAME, self._unless_closing):
            try:
                await self._handle(work.message)
            except BaseException as exc:  # noqa: BLE001 - whatever a handler raises is its failure
                if self._closing:
                    return
                setback = self._desk.judge(work, exc)
            with self._desk.changed:
                self._desk.finish(work, setback)
                following = self._desk.next()
                if following is None:
                    self._running -= 1
                else:
                    self._spawn(following)

    def _unless_closing(self, error: KeyShardError) -> None:
        if not self._closing:
            self._desk.fail(error)
