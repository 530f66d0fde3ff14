"""A scheduler that runs one thread at a time and owns the clock.

Every simulated thread is a greenlet. It runs until it reaches a scheduling point: taking a lock,
waiting, notifying, starting a thread, sleeping, or calling the broker. There the seed decides which
thread continues. If none can, the clock jumps to the next timer: an hour of waiting costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from greenlet import getcurrent, greenlet

PREEMPT = (0.02, 0.15, 0.5)
"""Shares of the scheduling points at which another thread runs although this one could; each run
has one of them."""
POINTS_MAX = 2_000_000
"""Scheduling points of one run; more mean that it goes in a circle."""
STANDSTILL_MAX = 200_000
"""Scheduling points without any progress of the clock; more mean a busy loop."""


class Killed(BaseException):
    """Raised at the scheduling points of a process that is dead; nothing must catch it."""


class StuckError(AssertionError):
    """The run goes in a circle, or everybody waits for ever."""


class Process:
    """Threads that die together; a dead process acts no more, not even in a ``finally``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stopped = False
        self.held: list[Task] = []
        """Tasks that are to run when it goes on."""
        self.tasks: list[Task] = []


class Task:
    """One simulated thread."""

    def __init__(self, process: Process, name: str, number: int) -> None:
        self.process = process
        self.name = f"{process.name}/{name}#{number}"
        self.greenlet: greenlet | None = None
        self.done = False
        self.blocked = False
        self.timer = 0
        self.woken = False
        self.joiners: list[Task] = []


class Scheduler:
    """Runs tasks, one at a time, in an order that ``random`` decides.

    Args:
        random: Source of every decision.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self._preempt = random.choice(PREEMPT)
        self.now_s = 0.0
        """Virtual time since the beginning, seconds."""
        self.points = 0
        """Scheduling points so far."""
        self.current: Task | None = None
        self.failed_in = ""
        """Task whose error ended the run."""
        self._processes: list[Process] = []
        self._runnable: list[Task] = []
        self._timers: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count(1)
        self._hub: greenlet | None = None
        self._dying: list[Process] = []
        self._standstill_from = 0
        self._error: BaseException | None = None

    def run(self, process: Process, main: Callable[[], None]) -> None:
        """Run ``main`` as the first task, and the tasks that it starts, until ``main`` ends.

        Everything else is killed then.

        Raises:
            BaseException: ``main`` or another task raised it, and it was not caught.
        """
        self._hub = getcurrent()
        first = self.spawn(process, "main", main)
        try:
            while not first.done and self._error is None:
                self._reap()
                self._switch_to(self._next())
        finally:
            for other in self._processes:
                other.dead = True
            self._dying = list(self._processes)
            self._reap()
        if self._error is not None:
            raise self._error

    def process(self, name: str) -> Process:
        """Make a process without threads."""
        self._processes.append(Process(name))
        return self._processes[-1]

    # -- calls of tasks -----------------------------------------------------------------------

    def spawn(self, process: Process, name: str, action: Callable[[], None]) -> Task:
        """Make a task that can run from now on."""
        task = Task(process, name, next(self._numbers))

        def body() -> None:
            try:
                if not process.dead:
                    action()
            except Killed:
                pass
            except BaseException as exc:  # noqa: BLE001 - ends the run, with the task's name
                if self._error is None:
                    self._error, self.failed_in = exc, task.name
            finally:
                task.done = True
                for joiner in task.joiners:
                    self.wake(joiner)

        task.greenlet = greenlet(body, parent=self._hub)
        process.tasks = [one for one in process.tasks if not one.done]
        process.tasks.append(task)
        self._runnable.append(task)
        return task

    def point(self) -> None:
        """A scheduling point: another task may go on here."""
        task = self.current
        assert task is not None, "only simulated threads reach scheduling points"
        if task.process.dead:
            raise Killed
        self._count()
        if self._runnable and self.random.random() < self._preempt:
            self._runnable.append(task)
            self._leave()

    def pause(self) -> None:
        """Let other tasks run first."""
        task = self._me()
        self._runnable.append(task)
        self._leave()

    def sleep(self, seconds: float) -> None:
        """Wait for a time."""
        if seconds <= 0:
            self.point()
        else:
            self.block(seconds)

    def block(self, timeout_s: float | None = None) -> bool:
        """Wait to be woken, at most for a time; whether it was woken."""
        task = self._me()
        task.blocked, task.woken = True, False
        task.timer = next(self._numbers)
        if timeout_s is not None:
            heapq.heappush(self._timers, (self.now_s + max(0.0, timeout_s), task.timer, task))
        self._leave()
        return task.woken

    def wake(self, task: Task) -> None:
        """Wake a waiting task; other tasks are unaffected. This is no scheduling point."""
        if task.blocked and not task.done:
            task.blocked, task.woken = False, True
            self._runnable.append(task)

    def join(self, task: Task) -> None:
        """Wait for the end of a task."""
        while not task.done:
            task.joiners.append(self._me())
            self.block()

    def kill(self, process: Process) -> None:
        """End a process at once: none of its threads ever acts again."""
        if not process.dead:
            process.dead = True
            self._dying.append(process)
        task = self.current
        if task is not None and task.process is process:
            raise Killed
        self.pause()

    def stop(self, process: Process) -> None:
        """Stop all threads of another process until :meth:`go_on`."""
        process.stopped = True

    def go_on(self, process: Process) -> None:
        """Continue a stopped process."""
        process.stopped = False
        held, process.held = process.held, []
        self._runnable += held

    # -- inside ---------------------------------------------------------------------------------

    def _me(self) -> Task:
        task = self.current
        assert task is not None, "only simulated threads wait"
        if task.process.dead:
            raise Killed
        self._count()
        return task

    def _count(self) -> None:
        self.points += 1
        if self.points > POINTS_MAX or self.points - self._standstill_from > STANDSTILL_MAX:
            raise StuckError(
                f"{self.points} scheduling points, the clock stands at {self.now_s:.3f} s"
            )

    def _leave(self) -> None:
        assert self._hub is not None
        task = self.current
        self._hub.switch()
        assert task is self.current
        if task is not None and task.process.dead:
            raise Killed

    def _next(self) -> Task:
        while True:
            while self._runnable:
                index = int(self.random.random() * len(self._runnable))
                task = self._runnable[index]
                self._runnable[index] = self._runnable[-1]
                self._runnable.pop()
                if task.process.stopped:
                    task.process.held.append(task)
                elif not task.done:
                    return task
            if not self._timers:
                raise StuckError(f"everybody waits for ever, from {self.now_s:.3f} s on")
            due_s, timer, task = heapq.heappop(self._timers)
            if task.blocked and task.timer == timer and not task.done:
                if due_s > self.now_s:
                    self.now_s = due_s
                    self._standstill_from = self.points
                task.blocked = False
                self._runnable.append(task)

    def _switch_to(self, task: Task) -> None:
        self.current = task
        assert task.greenlet is not None
        task.greenlet.switch()
        self.current = None

    def _reap(self) -> None:
        """Unwind the threads of dead processes: each of their calls raises."""
        while self._dying:
            for task in self._dying.pop().tasks:
                assert task.greenlet is not None
                if not task.done and task.greenlet:
                    self.current = task
                    task.greenlet.throw(Killed)
                    self.current = None
                task.done = True
