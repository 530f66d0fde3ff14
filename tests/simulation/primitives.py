"""Simulated parts of ``threading``, ``time`` and ``concurrent.futures``.

Only the parts that keyshard uses; another one fails at once as a missing attribute.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from random import Random
from typing import Any, TypeAlias

from tests.simulation.scheduler import Scheduler, Task

EPOCH_S = 1_800_000_000.0
"""Wall-clock time at which every run begins, seconds."""
MONOTONIC_S = 1_000.0
"""Monotonic time at which every run begins, seconds."""


class Lock:
    """A lock; ``reentrant`` for an ``RLock``. Waiting tasks get it in random order.

    ``quiet`` locks are no scheduling point when they are free: they guard the broker's side, which
    acts in one piece.
    """

    def __init__(self, scheduler: Scheduler, *, reentrant: bool, quiet: bool) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._quiet = quiet
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        if self._reentrant and self._owner is me and self._depth:
            self._depth += 1
            return True
        if not self._quiet:
            scheduler.point()
        end = None if timeout < 0 else scheduler.now_s + timeout
        while self._depth:
            left = None if end is None else end - scheduler.now_s
            if not blocking or (left is not None and left <= 0):
                return False
            assert me is not None
            self._waiting.append(me)
            try:
                scheduler.block(left)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        me = self._scheduler.current
        if self._owner is not me or not self._depth:
            # The thread of a dead process that was waiting on a condition holds nothing.
            assert me is not None
            assert me.process.dead, "released by somebody else"
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                random = self._scheduler.random
                self._scheduler.wake(self._waiting.pop(random.randrange(len(self._waiting))))

    def locked(self) -> bool:
        if not self._quiet:
            self._scheduler.point()
        return self._depth > 0

    def release_all(self) -> int:
        """Give it back whatever the depth, as a condition does while it waits."""
        assert self._owner is self._scheduler.current
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def restore(self, depth: int) -> None:
        """Take it again as deep as it was."""
        self.acquire()
        self._depth = depth

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition variable; it notifies waiting tasks in random order."""

    def __init__(self, scheduler: Scheduler, lock: Lock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._waiting: list[Task] = []
        self.acquire = lock.acquire
        self.release = lock.release

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        assert me is not None
        depth = self._lock.release_all()
        self._waiting.append(me)
        try:
            woken = scheduler.block(timeout)
        finally:
            if me in self._waiting:
                self._waiting.remove(me)
        self._lock.restore(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now_s + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now_s
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            index = self._scheduler.random.randrange(len(self._waiting))
            self._scheduler.wake(self._waiting.pop(index))

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> Condition:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """An event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            self._scheduler.wake(task)
        self._waiting.clear()
        self._scheduler.point()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        assert me is not None
        end = None if timeout is None else scheduler.now_s + timeout
        if self._set:
            scheduler.point()
        while not self._set:
            left = None if end is None else end - scheduler.now_s
            if left is not None and left <= 0:
                break
            self._waiting.append(me)
            try:
                scheduler.block(left)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._set


class Thread:
    """A thread; it belongs to the process of its creator."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., object],
        name: str = "thread",
        args: Sequence[Any] = (),
        daemon: bool | None = None,  # noqa: ARG002 - all end with their process
    ) -> None:
        self._scheduler = scheduler
        self.name = name
        self._action = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        scheduler = self._scheduler
        assert scheduler.current is not None
        self._task = scheduler.spawn(scheduler.current.process, self.name, self._run)
        scheduler.point()

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None, "a thread is joined after its start"
        end = None if timeout is None else self._scheduler.now_s + timeout
        self._scheduler.point()
        while not task.done:
            left = None if end is None else end - self._scheduler.now_s
            if left is not None and left <= 0:
                return
            me = self._scheduler.current
            assert me is not None
            task.joiners.append(me)
            self._scheduler.block(left)
            # A task that no longer waits must not be woken from another wait.
            task.joiners.remove(me)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def _run(self) -> None:
        self._action()


_Lock: TypeAlias = Lock
"""The type; :class:`Threading` has a method of its name."""


class Threading:
    """Replaces the module ``threading``.

    Args:
        quiet: Whether a free lock is no scheduling point; see :class:`Lock`.
    """

    local = threading.local
    get_ident = staticmethod(threading.get_ident)

    def __init__(self, scheduler: Scheduler, *, quiet: bool = False) -> None:
        self._scheduler = scheduler
        self._quiet = quiet

    def Lock(self) -> Lock:  # noqa: N802
        return Lock(self._scheduler, reentrant=False, quiet=self._quiet)

    def RLock(self) -> _Lock:  # noqa: N802
        return Lock(self._scheduler, reentrant=True, quiet=self._quiet)

    def Condition(self, lock: _Lock | None = None) -> Condition:  # noqa: N802
        return Condition(self._scheduler, lock or self.RLock())

    def Event(self) -> Event:  # noqa: N802
        return Event(self._scheduler)

    def Thread(self, **arguments: Any) -> Thread:  # noqa: N802
        return Thread(self._scheduler, **arguments)

    def current_thread(self) -> Task | None:
        return self._scheduler.current

    def main_thread(self) -> None:
        """No simulated thread is the one that gets signals."""


class Time:
    """Replaces the module ``time``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return MONOTONIC_S + self._scheduler.now_s

    def thread_time(self) -> float:
        """Computing takes no time."""
        return 0.0

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def time(self) -> float:
        return EPOCH_S + self._scheduler.now_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)


class Future:
    """The outcome of a call in a pool."""

    def __init__(self, scheduler: Scheduler, number: int) -> None:
        self.number = number
        """The key of its order; sets would order by addresses."""
        self._done = Event(scheduler)
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], object]] = []

    def run(self, action: Callable[[], Any]) -> None:
        """Run the action and store its result or error. If the process dies, store nothing."""
        try:
            self._result = action()
        except Exception as exc:  # noqa: BLE001 - the caller of the result gets it
            self._error = exc
        self._end()

    def cancel(self) -> None:
        """Cancel a call that has not begun."""
        self._error = CancelledError()
        self._end()

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        if self._done.is_set():
            callback(self)
        else:
            self._callbacks.append(callback)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end. Return whether it came."""
        return self._done.wait(timeout)

    def _end(self) -> None:
        for callback in self._callbacks:
            callback(self)
        self._done.set()

    def exception(self) -> BaseException | None:
        self._done.wait()
        return self._error

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Pool:
    """Replaces :class:`keyshard.threads.Pool`."""

    def __init__(self, scheduler: Scheduler, threads_max: int, thread_name_prefix: str) -> None:
        self._scheduler = scheduler
        self._threads_max = threads_max
        self._name = thread_name_prefix
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._submitted = 0
        self._closed = False

    def submit(self, action: Callable[..., Any], *args: Any) -> Future:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._submitted += 1
        future = Future(self._scheduler, self._submitted)
        self._queue.append((future, lambda: action(*args)))
        if len(self._threads) < self._threads_max:
            thread = Thread(self._scheduler, target=self._work, name=self._name)
            self._threads.append(thread)
            thread.start()
        elif not any(thread.is_alive() for thread in self._threads):
            self._threads.clear()
            self._threads.append(Thread(self._scheduler, target=self._work, name=self._name))
            self._threads[0].start()
        return future

    def map(self, action: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        futures = [self.submit(action, *args) for args in zip(*iterables, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        while cancel_futures and self._queue:
            self._queue.popleft()[0].cancel()
        for thread in list(self._threads) if wait else ():
            thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in list(self._threads):
            thread.join()
        while self._queue:
            self._work()

    def _work(self) -> None:
        while self._queue:
            future, action = self._queue.popleft()
            future.run(action)


def wait(futures: Iterable[Future], timeout: float | None = None) -> None:
    """Replaces ``concurrent.futures.wait`` and :func:`keyshard.threads.wait_for`.

    Each future may take the whole time-out.
    """
    for future in sorted(futures, key=lambda one: one.number):
        future.wait(timeout)


class SecretsModule:
    """The module ``secrets``, as far as keyshard uses it, with ids that a seed decides."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def token_hex(self, size: int) -> str:
        return self._random.randbytes(size).hex()


class RandomModule:
    """Replaces the module ``random``."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.uniform = random.uniform
        self.random = random.random

    def Random(self, seed: int | None = None) -> Random:  # noqa: N802
        return Random(self._random.random() if seed is None else seed)
