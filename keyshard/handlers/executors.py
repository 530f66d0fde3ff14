"""Executors run the handlers of a run: in threads (here), or by the modules beside this one:
:mod:`~keyshard.handlers.async_executor` and :mod:`~keyshard.handlers.process_executor`.

All ask one :class:`WorkSource` for the next message, and report how each attempt ended.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from keyshard.core.lanes.bulk import Bulk
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerSlots, handler_slots
from keyshard.core.lanes.retry_policy import FailedAttempt
from keyshard.core.message import Produce
from keyshard.errors import KeyShardError
from keyshard.handlers import stacks
from keyshard.handlers.handler_call import Handle
from keyshard.threads import begin


class WorkSource(Protocol):
    """Hands out messages and takes results; see :mod:`keyshard.handlers.dispatcher`."""

    changed: threading.Condition
    """Held by callers of :meth:`next`, :meth:`next_bulk`, :meth:`end_bulk`, :meth:`part` and
    :meth:`finish`; notified when there is work."""

    def next(self) -> Work | None:
        """Return the message to handle now; ``None`` if there is none."""

    def next_bulk(self) -> Bulk | None:
        """Return a bulk to handle, if :meth:`next` has no message; ``None`` if there is none.

        See :mod:`keyshard.core.lanes.bulk`.
        """

    def end_bulk(self, bulk: Bulk, *, failed: bool) -> Work | None:
        """Report that a bulk has no message left, or that its last one failed.

        Returns:
            The message to finish by itself: it failed, or the bulk was taken apart meanwhile.
        """

    def part(self, bulk: Bulk) -> Work:
        """Take a bulk apart, because its last handler waits or uses its task.

        For some time, :meth:`next_bulk` returns none.

        Returns:
            The message of that handler.
        """

    def judge(self, work: Work, error: BaseException) -> FailedAttempt:
        """Decide on a handler's exception; called without the lock, because it runs user code."""

    def finish(
        self,
        work: Work,
        seconds: float,
        setback: FailedAttempt | None,
        produced: Sequence[Produce] = (),
    ) -> None:
        """Report the end of an attempt: its duration, and its failure or the messages to publish.

        The duration is the handler's. A wait for ``changed`` is no part of it.
        """

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

    def slots(self, now_s: float) -> list[HandlerSlots]:
        """Return the slots of each process; the dispatcher's lock is held."""

    def close(self, timeout_s: float) -> bool:
        """Wait for running handlers of a closed dispatcher. Return whether all have ended."""


def shared_slots(total: float, used: int) -> list[HandlerSlots]:
    """Return the slots of this process, which its threads or coroutines share.

    Args:
        total: Number of slots; infinity: only lanes limit.
        used: Number of handlers that run.
    """
    process = os.getpid(), socket.gethostname()
    return [handler_slots(0, process, None if math.isinf(total) else int(total), used)]


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

    def slots(self, now_s: float) -> list[HandlerSlots]:  # noqa: ARG002
        used = sum(1 for taken in self._taken.values() if taken is not None)
        return shared_slots(self.count, used)

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
        seconds = 0.0
        setback: FailedAttempt | None = None
        produced: Sequence[Produce] = ()
        bulk: Bulk | None = None
        while True:
            with dispatcher.changed:
                if work is not None:
                    dispatcher.finish(work, seconds, setback, produced)
                while not ((work := dispatcher.next()) or (bulk := dispatcher.next_bulk())):
                    self._taken[ident] = None
                    if dispatcher.closed:
                        return
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
                work, seconds, setback = self._handle_bulk(bulk, handle)
                if self._left_behind:
                    return
                continue
            try:
                produced = handle(work.message) or ()
            except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
                setback = dispatcher.judge(work, exc)
            seconds = time.monotonic() - work.started_s
            if self._left_behind:
                return

    def _handle_bulk(
        self, bulk: Bulk, handle: Handle
    ) -> tuple[Work | None, float, FailedAttempt | None]:
        """Handle messages until none is left or one fails.

        Returns:
            The message to finish by itself, if there is one, its duration and its failure.
        """
        todo, ends, now, error = bulk.todo, bulk.ends, time.monotonic, None
        while todo:
            try:
                message = todo.popleft()
            except IndexError:  # the bulk was taken apart after the test of todo
                break
            try:
                handle(message)
            except BaseException as exc:  # noqa: BLE001 - any exception of a handler is its failure
                error = exc
                break
            ends.append(now())
        failed_s = now()
        if self._left_behind:
            return None, 0.0, None
        with self._dispatcher.changed:
            work = self._dispatcher.end_bulk(bulk, failed=error is not None)
        if work is None:
            return None, 0.0, None
        if error is None:
            return work, ends[-1] - work.started_s, None
        return work, failed_s - work.started_s, self._dispatcher.judge(work, error)
