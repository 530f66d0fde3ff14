"""Executors: threads, an event loop, or (:mod:`keyshard.handlers.process_executor`) processes.

All ask one :class:`WorkSource` for the next message, and report how each attempt ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Protocol

from keyshard.core.lanes.bulk import Bulk
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.retry_policy import FailedAttempt
from keyshard.core.message import Message, Produce
from keyshard.errors import KeyShardError
from keyshard.handlers import stacks
from keyshard.handlers.handler_call import CallersLoop, EventLoop, Handle
from keyshard.threads import begin, ending_source

ASYNC_NAME = "keyshard-work-async"
"""Name of the thread that runs coroutines."""


class WorkSource(Protocol):
    """Hands out messages and takes results; see :mod:`keyshard.handlers.dispatcher`."""

    changed: threading.Condition
    """Held by callers of :meth:`next`, :meth:`next_bulk`, :meth:`end_bulk`, :meth:`part` and
    :meth:`finish`; notified when there is work."""

    def next(self) -> Work | None:
        """Return the message to handle now; ``None`` if there is none."""

    def next_bulk(self) -> Bulk | None:
        """Return messages to handle in turn, if there is no single one; ``None`` without any."""

    def end_bulk(self, bulk: Bulk, *, failed: bool) -> Work | None:
        """Report that a bulk has no message left, or that its last one failed.

        Returns:
            The message to finish by itself: it failed, or the bulk was taken apart meanwhile.
        """

    def part(self, bulk: Bulk) -> Work:
        """Take a bulk apart whose last handler waits or uses its task; return its message.

        There are no bulks for a time.
        """

    def judge(self, work: Work, error: BaseException) -> FailedAttempt:
        """Decide on a handler's exception; called without the lock, because it runs user code."""

    def finish(
        self, work: Work, setback: FailedAttempt | None, produced: Sequence[Produce] = ()
    ) -> None:
        """Report the end of an attempt: its failure, or the messages to publish."""

    def wake(self) -> None:
        """Let executors start runnable messages; called with ``changed`` held."""

    def fail(self, error: KeyShardError) -> None:
        """End the source."""

    @property
    def closed(self) -> bool:
        """Whether no work is handed out any more."""


class Executor(Protocol):
    """An executor: runs handlers until the dispatcher is closed."""

    count: int
    """Number of threads or processes; 1 for an event loop."""
    takes_bulks: bool
    """Whether it handles bulks."""

    @property
    def resting(self) -> bool:
        """Whether a wake-up would have an effect; the dispatcher's lock is held."""

    def wake(self, messages: int) -> None:
        """Announce messages to start; the dispatcher's lock is held."""

    def look(self) -> bool:
        """Return whether handlers can run; called in each turn of the run, without the lock."""

    def grow(self, count: int) -> None:
        """Run more handlers at once, if the executor uses threads: there may be more lanes now."""

    def calls(self, work: Work) -> list[stacks.Call]:
        """Return the stack of a running handler; the dispatcher's lock is held.

        Raises:
            ConfigError: Handlers run in other processes.
        """

    def close(self, timeout_s: float) -> bool:
        """Wait for running handlers of a closed dispatcher; whether all have ended."""


class ThreadExecutor:
    """Runs handlers in daemon threads, whose number never shrinks.

    One thread is woken at a time, and wakes the next before its handler begins. So handlers that
    block all run soon, and fast handlers run in few threads: to wake a hundred threads for a
    hundred messages would cost more than to handle the messages.

    Args:
        dispatcher: Source of work.
        count: Number of threads to begin with.
        handles: Makes the function that a thread calls for each message.
    """

    takes_bulks = True

    def __init__(self, dispatcher: WorkSource, count: int, handles: Callable[[], Handle]) -> None:
        self.count = 0
        self._dispatcher = dispatcher
        self._handles = handles
        self._idle = 0
        self._called = False
        """Whether a thread was notified and does not run yet."""
        self._left_behind = False
        """Whether :meth:`close` no longer waits for handlers that still run."""
        self._threads: list[threading.Thread] = []
        self._taken: dict[int, Work | Bulk | None] = {}
        """Work of each thread, by its ident; guarded by the dispatcher's lock."""
        self._start_threads(count)

    def look(self) -> bool:
        return True

    def grow(self, count: int) -> None:
        self._start_threads(count)

    def _start_threads(self, count: int) -> None:
        for number in range(self.count, count):
            name = f"keyshard-work-{number}"
            self._threads.append(begin(name, self._run, fail=self._dispatcher.fail))
        self.count = max(self.count, count)

    @property
    def resting(self) -> bool:
        return self._idle > 0 and not self._called

    def calls(self, work: Work) -> list[stacks.Call]:
        for ident, taken in self._taken.items():
            if taken is work or (isinstance(taken, Bulk) and taken.work is work):
                return stacks.of_thread(ident, __file__)
        return []

    def wake(self, messages: int) -> None:
        if messages:
            self._called = True
            self._dispatcher.changed.notify()

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._dispatcher.changed:
            self._dispatcher.changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._left_behind = True
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        dispatcher, handle = self._dispatcher, self._handles()
        ident = threading.get_ident()
        work: Work | None = None
        setback: FailedAttempt | None = None
        produced: Sequence[Produce] = ()
        bulk: Bulk | None = None
        while True:
            with dispatcher.changed:
                if work is not None:
                    dispatcher.finish(work, setback, produced)
                while not ((work := dispatcher.next()) or (bulk := dispatcher.next_bulk())):
                    if dispatcher.closed:
                        return
                    self._taken[ident] = None
                    self._idle += 1
                    dispatcher.changed.wait()
                    self._idle -= 1
                    self._called = False
                self._taken[ident] = work or bulk
                if work is not None and self.resting:
                    dispatcher.wake()
            setback, produced = None, ()
            if work is None:
                assert bulk is not None
                work, setback = self._handle_bulk(bulk, handle)
                if self._left_behind:
                    return
                continue
            try:
                produced = handle(work.message) or ()
            except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
                setback = dispatcher.judge(work, exc)
            if self._left_behind:
                return

    def _handle_bulk(self, bulk: Bulk, handle: Handle) -> tuple[Work | None, FailedAttempt | None]:
        """Handle messages until none is left or one fails; return the one to finish by itself."""
        todo, ends, now, error = bulk.todo, bulk.ends, time.monotonic, None
        while todo:
            try:
                message = todo.popleft()
            except IndexError:  # it was taken apart between the two lines
                break
            try:
                handle(message)
            except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
                error = exc
                break
            ends.append(now())
        if self._left_behind:
            return None, None
        with self._dispatcher.changed:
            work = self._dispatcher.end_bulk(bulk, failed=error is not None)
        if work is None or error is None:
            return work, None
        return work, self._dispatcher.judge(work, error)


class AsyncExecutor:
    """Runs handlers in one event loop; at most one task for each lane.

    Each message has a context of its own. It also has a task of its own, unless it is in a bulk:
    one task handles the messages of a bulk until one of them waits. Then the task goes on with that
    message alone, because a timeout of its handler may refer to the task.

    Args:
        dispatcher: Source of work.
        handle: A coroutine function.
        running_max: Most coroutines at the same time; ``None``: one for each lane.
        loop: The event loop of a caller; ``None``: one in a daemon thread.
    """

    takes_bulks = True

    def __init__(
        self,
        dispatcher: WorkSource,
        handle: Callable[[Message], Coroutine[Any, Any, Any]],
        running_max: int | None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.count = 1
        self._dispatcher = dispatcher
        self._handle = handle
        self._running_max = math.inf if running_max is None else running_max
        self._running = 0
        """Tasks; guarded by the dispatcher's lock."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks by the id of their message or bulk."""
        self._waiting: dict[int, Coroutine[Any, Any, Any]] = {}
        """Coroutines that began in a bulk and wait, by the id of their message."""
        self._bulk: Bulk | None = None
        """The newest bulk."""
        self._ident: int | None = None
        """The thread of the event loop."""
        self._context = contextvars.copy_context()
        self._awake = False
        self._closing = False
        self._loop = EventLoop(ASYNC_NAME) if loop is None else CallersLoop(loop)

    @property
    def resting(self) -> bool:
        return not self._awake

    def calls(self, work: Work) -> list[stacks.Call]:
        task = self._tasks.get(id(work))
        coroutine: Any = self._waiting.get(id(work)) or (task and task.get_coro())
        in_bulk = coroutine is None and self._bulk is not None and self._bulk.work is work
        if in_bulk or (coroutine is not None and coroutine.cr_running):
            # It does not wait: the event loop executes it now.
            return stacks.of_thread(self._ident, __file__)
        return stacks.of_coroutine(coroutine, __file__)

    def wake(self, messages: int) -> None:
        if messages:
            self._awake = True
            self._loop.call(self._start)

    def look(self) -> bool:
        return not self._loop.loop.is_closed()

    def grow(self, count: int) -> None:
        """Do nothing: coroutines need no threads."""

    def close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._tasks and self.look() and time.monotonic() < deadline:
            time.sleep(0.005)
        ended = not self._tasks
        self._closing = True
        if isinstance(self._loop, CallersLoop):
            self._loop.call(self._cancel)
        self._loop.close()
        return ended

    def _cancel(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    def _start(self) -> None:
        with ending_source(ASYNC_NAME, self._dispatcher.fail), self._dispatcher.changed:
            self._awake, self._ident = False, threading.get_ident()
            self._fill()

    def _fill(self) -> None:
        """Start tasks until all lanes are busy or nothing waits. The lock is held."""
        while self._running < self._running_max and self._spawn_next():
            self._running += 1

    def _spawn_next(self) -> bool:
        """Start a task for the next message or bulk; whether there is one. The lock is held."""
        if (work := self._dispatcher.next()) is not None:
            self._spawn(self._serve(work), work)
        elif (bulk := self._dispatcher.next_bulk()) is not None:
            self._bulk = bulk
            self._spawn(self._serve_bulk(bulk), bulk)
        else:
            return False
        return True

    def _spawn(self, coroutine: Coroutine[Any, Any, None], of: Work | Bulk) -> None:
        """Run a coroutine in its own task and context."""
        task = self._context.run(self._loop.loop.create_task, coroutine)
        # An event loop keeps only weak references to its tasks.
        self._tasks[id(of)] = task

    async def _serve(self, work: Work) -> None:
        # It may have waited for the event loop, and that says nothing about the handler.
        work.started_s = time.monotonic()
        task = asyncio.current_task()
        try:
            await self._attempt(work, self._handle(work.message))
        except GeneratorExit:  # the loop was closed, and the task is deleted
            raise
        except BaseException:
            # Entered only after an exception, because entering it takes time for each message.
            with ending_source(ASYNC_NAME, self._unless_closing):
                raise
        finally:
            # If it failed, the next attempt may have a task already.
            if self._tasks[id(work)] is task:
                del self._tasks[id(work)]

    async def _attempt(self, work: Work, handling: Awaitable[Any]) -> None:
        setback: FailedAttempt | None = None
        produced: Sequence[Produce] = ()
        try:
            produced = await handling or ()
        except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
            if self._closing:
                return
            setback = self._dispatcher.judge(work, exc)
        self._finish(work, setback, produced)

    def _finish(
        self, work: Work, setback: FailedAttempt | None, produced: Sequence[Produce] = ()
    ) -> None:
        """Report the end of an attempt, and start what follows."""
        with self._dispatcher.changed:
            self._dispatcher.finish(work, setback, produced)
            self._running -= not self._spawn_next()

    def _unless_closing(self, error: KeyShardError) -> None:
        if not self._closing:
            self._dispatcher.fail(error)

    # -- bulks -------------------------------------------------------------------------------------

    async def _serve_bulk(self, bulk: Bulk) -> None:
        dispatcher = self._dispatcher
        work: Work | None = None
        try:
            waits, error = self._handle_bulk(bulk)
            if self._closing and waits is None:
                return
            with dispatcher.changed:
                if waits is not None:
                    work = dispatcher.part(bulk)
                    self._waiting[id(work)] = waits.coroutine
                    self._fill()
                elif error is None and bulk.todo:
                    work = dispatcher.part(bulk)
                else:
                    work = dispatcher.end_bulk(bulk, failed=error is not None)
                if work is None:
                    self._running -= not self._spawn_next()
                    return
            if waits is not None:
                await self._attempt(work, waits)
                return
            self._finish(work, None if error is None else dispatcher.judge(work, error))
            with dispatcher.changed:
                self._fill()
        except GeneratorExit:
            raise
        except BaseException:
            with ending_source(ASYNC_NAME, self._unless_closing):
                raise
        finally:
            del self._tasks[id(bulk)]
            self._waiting.pop(id(work), None)
            if self._bulk is bulk:
                self._bulk = None

    def _handle_bulk(self, bulk: Bulk) -> tuple[_Waits | None, BaseException | None]:
        """Handle messages until none is left, or a handler waits, fails, or uses the task."""
        todo, ends, now = bulk.todo, bulk.ends, time.monotonic
        task = asyncio.current_task()
        assert task is not None, "it runs in one"
        unused = _use_of(task)
        bulk.began_s = now()
        while todo and _use_of(task) == unused:
            try:
                message = todo.popleft()
            except IndexError:  # it was taken apart between the two lines
                break
            coroutine, context = self._handle(message), self._context.copy()
            try:
                waits_for = context.run(coroutine.send, None)
            except StopIteration:
                ends.append(now())
            except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
                return None, exc
            else:
                return _Waits(coroutine, context, waits_for), None
        return None, None


def _use_of(task: asyncio.Task[Any]) -> tuple[object, int, int]:
    """Return facts of a task that change if a handler cancels it, keeps it, or waits for its end.

    Then no further message may have the task: it could be cancelled for the previous one.
    """
    callbacks = getattr(task, "_callbacks", None)
    return getattr(task, "_must_cancel", False), len(callbacks or ()), sys.getrefcount(task)


class _Waits:
    """Awaits a coroutine that has begun in a context of its own, and waits.

    Args:
        coroutine: The coroutine.
        context: Its context.
        waits_for: The future that it yielded to the event loop; ``None``: its next turn.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context, waits_for: Any
    ) -> None:
        self.coroutine = coroutine
        self._context = context
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        waits_for, go_on = self._waits_for, self._context.run
        while True:
            resume: Callable[[], Any]
            try:
                resume = partial(self.coroutine.send, (yield waits_for))
            except BaseException as exc:  # noqa: BLE001 - such as a cancellation of the task
                resume = partial(self.coroutine.throw, exc)
            try:
                waits_for = go_on(resume)
            except StopIteration as end:
                return end.value
