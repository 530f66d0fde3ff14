"""Runs coroutine handlers as tasks of one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any

from keyshard.core.lanes.bulk import Bulk
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerSlots
from keyshard.core.lanes.retry_policy import FailedAttempt
from keyshard.core.message import Message, Produce
from keyshard.errors import KeyShardError
from keyshard.handlers import stacks
from keyshard.handlers.executors import WorkSource, shared_slots
from keyshard.handlers.handler_call import CallersLoop, EventLoop
from keyshard.threads import ending_source

ASYNC_NAME = "keyshard-work-async"
"""Name of the thread that runs coroutines."""
TURN_S = 0.005
"""Time after which a bulk lets the other tasks of its event loop run, seconds."""


class AsyncExecutor:
    """Runs handlers in one event loop; at most one task for each lane.

    Each message has a context of its own. It also has a task of its own, unless it is in a bulk
    (:mod:`keyshard.core.lanes.bulk`): one task handles the messages of a bulk until a handler
    waits. Then the task continues with that message alone, because a timeout in the handler may
    refer to the task.

    Args:
        dispatcher: Source of work.
        handle: A coroutine function.
        running_max: Maximum number of coroutines at the same time; ``None``: one for each lane.
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
        self._spawning = False
        """Whether a task is being made; the lock is held then."""
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
            # The handler does not wait: the thread of the event loop executes it now.
            return stacks.of_thread(self._ident, __file__)
        return stacks.of_coroutine(coroutine, __file__)

    def slots(self, now_s: float) -> list[HandlerSlots]:  # noqa: ARG002
        return shared_slots(self._running_max, self._running)

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
        """Start a task for the next message or bulk. The lock is held.

        Returns:
            Whether there was one.
        """
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
        self._spawning = True
        try:
            task = self._context.run(self._loop.loop.create_task, coroutine)
        finally:
            self._spawning = False
        # An event loop keeps only weak references to its tasks.
        self._tasks[id(of)] = task

    async def _serve(self, work: Work) -> None:
        if self._spawning:  # the loop of the caller starts tasks at once, inside create_task()
            await asyncio.sleep(0)
        # The time for which the task waited for the event loop is no part of the duration.
        work.started_s = time.monotonic()
        task = asyncio.current_task()
        try:
            await self._attempt(work, self._handle(work.message))
        except GeneratorExit:  # the loop was closed, and the task is deleted
            raise
        except BaseException:
            # Entered only after an exception, because it would cost time for each message.
            with ending_source(ASYNC_NAME, self._unless_closing):
                raise
        finally:
            # If the attempt failed, the next attempt may have a task already.
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
        self._finish(work, time.monotonic() - work.started_s, setback, produced)

    def _finish(
        self,
        work: Work,
        seconds: float,
        setback: FailedAttempt | None,
        produced: Sequence[Produce] = (),
    ) -> None:
        """Report the end of an attempt, and start what follows."""
        with self._dispatcher.changed:
            self._dispatcher.finish(work, seconds, setback, produced)
            self._running -= not self._spawn_next()

    def _unless_closing(self, error: KeyShardError) -> None:
        if not self._closing:
            self._dispatcher.fail(error)

    # -- bulks -------------------------------------------------------------------------------------

    async def _serve_bulk(self, bulk: Bulk) -> None:
        if self._spawning:
            await asyncio.sleep(0)
        dispatcher = self._dispatcher
        work: Work | None = None
        try:
            waits, error = await self._handle_bulk(bulk)
            ended_s = bulk.ends[-1] if error is None and bulk.ends else time.monotonic()
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
            setback = None if error is None else dispatcher.judge(work, error)
            self._finish(work, ended_s - work.started_s, setback)
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

    async def _handle_bulk(self, bulk: Bulk) -> tuple[_Waits | None, BaseException | None]:
        """Handle messages until none is left, or a handler waits, fails, or uses the task.

        Every ``TURN_S`` seconds, it lets the other tasks of the event loop run.
        """
        todo, ends, now = bulk.todo, bulk.ends, time.monotonic
        task = asyncio.current_task()
        assert task is not None, "it runs in one"
        unused = _use_of(task)
        bulk.began_s = now()
        turn_ends_s = bulk.began_s + TURN_S
        while todo and _use_of(task) == unused:
            if ends and ends[-1] >= turn_ends_s:
                bulk.rest()
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    break
                bulk.go_on(now())
                turn_ends_s = ends[-1] + TURN_S
            try:
                message = todo.popleft()
            except IndexError:  # the bulk was taken apart after the test of todo
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
    """Awaitable for the coroutine of a handler that began in a bulk, and waits.

    Args:
        coroutine: The coroutine.
        context: Its context.
        waits_for: The future that the coroutine yielded; ``None``: it waits for the next turn of
            the event loop.
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
