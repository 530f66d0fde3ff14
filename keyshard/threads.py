"""The only module that starts threads. Each thread has a name and an owner, which gets its errors.

Every thread is a daemon. If its function raises, the error ends the source that owns the thread.
The owner is a function that takes the error: that of :func:`owned_by`, else that of the thread that
starts the new one.

:class:`Pool` replaces ``concurrent.futures.ThreadPoolExecutor``. The latter takes no work after the
main thread has ended, and keeps the program alive until its work has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from keyshard.errors import (
    KeyShardError,
    RuntimeStoppedError,
    ThreadStartError,
    UnexpectedError,
)

Fail = Callable[[KeyShardError], None]
"""Ends a source with an error. Any thread may call it, also more than once."""

SLICE_S = 0.2
"""Longest wait after which the main thread handles a signal that did not wake it, seconds."""

T = TypeVar("T")
_owner: ContextVar[Fail | None] = ContextVar("keyshard thread owner", default=None)
_log = logging.getLogger(__name__)


@contextmanager
def owned_by(fail: Fail) -> Iterator[None]:
    """Set the owner of threads that start inside the block, and of those that they start."""
    token = _owner.set(fail)
    try:
        yield
    finally:
        _owner.reset(token)


def owner() -> Fail | None:
    """Return the owner of the calling thread; ``None`` outside a source."""
    return _owner.get()


@contextmanager
def ending_source(name: str, fail: Fail | None) -> Iterator[None]:
    """End the source if the block raises; without an owner, the error is raised.

    Args:
        name: Name of the block's task, for the error.
        fail: The owner.
    """
    try:
        yield
    except RuntimeStoppedError:
        return
    except BaseException as exc:
        if fail is None:
            raise
        error = unexpected(name, exc)
        fail(error)
        if error is not exc:
            _log.error("%s ended unexpectedly", name, exc_info=exc)


def unexpected(name: str, exc: BaseException) -> KeyShardError:
    """Return the error that ends the source after an unexpected one."""
    if isinstance(exc, KeyShardError):
        return exc
    error = UnexpectedError(
        f"{name} ended unexpectedly: {exc!r}. This is a defect of keyshard. Messages that were "
        "not completed are not acknowledged, and are delivered again.",
        "Start the source again, and report the traceback in the log.",
    )
    error.__cause__ = exc
    return error


def logged_error(name: str, exc: BaseException) -> KeyShardError:
    """Return the error that answers a failed request, or ends a job. An unexpected one is logged.

    Args:
        name: Name of the request or the job, for the error.
        exc: The error that it raised.
    """
    error = unexpected(name, exc)
    if error is not exc:
        _log.error("%s ended unexpectedly", name, exc_info=exc)
    return error


def callback(name: str, run: Callable[..., object]) -> Callable[..., None]:
    """Return a callback for a future. If it raises, the source of the calling thread ends.

    A future only logs errors of its callbacks.
    """

    def guarded(*args: Any) -> None:
        with ending_source(name, owner()):
            run(*args)

    return guarded


class FirstError:
    """An owner that keeps the first error of its threads for a caller that raises it."""

    def __init__(self) -> None:
        self.error: KeyShardError | None = None

    def __call__(self, error: KeyShardError) -> None:
        """Keep the error of a thread."""
        self.error = self.error or error


def begin(
    name: str, run: Callable[..., object], *args: Any, fail: Fail | None = None
) -> threading.Thread:
    """Start a daemon thread.

    Args:
        name: Name of the thread.
        run: Function of the thread.
        *args: Arguments of ``run``.
        fail: The owner; default: the owner of the calling thread.

    Raises:
        ThreadStartError: The system cannot start a thread.
    """
    fail = fail or _owner.get()

    def guarded() -> None:
        _owner.set(fail)
        with ending_source(f"Thread {name}", fail):
            run(*args)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as exc:
        raise ThreadStartError(
            f"Thread {name} cannot be started: {exc}.",
            "If the main thread has ended, keep it alive while the source runs, for example by "
            "joining the thread of the source. Otherwise raise the thread limit of this process.",
        ) from exc
    return thread


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """Wait until all futures are done, in slices of :data:`SLICE_S`.

    Python handles a signal between two slices. The system may deliver it to another thread, or
    just before the main thread waits. Then a wait without slices would hold it back until its end.
    """
    waiting = [future for future in futures if not future.done()]
    while waiting:
        wait(waiting, SLICE_S)
        waiting = [future for future in waiting if not future.done()]


class Pool:
    """A few threads that share work. As a context manager, it waits for all work.

    If the system cannot start a thread, the caller does the work.

    Args:
        threads_max: Most threads; they start when there is work.
        name: Prefix of the threads' names; a number follows.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._fail = _owner.get()
        self._changed = threading.Condition()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, action: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread call ``action``; the future gets the outcome.

        Raises:
            RuntimeStoppedError: The pool is shut down.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeStoppedError(
                    f"Threads {self._name} accept no more work, because the source is stopped."
                )
            self._work.append((future, partial(action, *args)))
            self._changed.notify()
            if self._idle >= len(self._work) or len(self._threads) >= self._threads_max:
                return future
            try:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(begin(name, self._run, fail=self._fail))
            except ThreadStartError:
                if self._threads:
                    return future
                self._work.pop()
            else:
                return future
        _call(future, partial(action, *args))
        return future

    def map(self, action: Callable[..., T], *iterables: Iterable[Any]) -> Iterator[T]:
        """Return the outcomes of ``action`` for the items, in order; all are submitted at once.

        After an error, calls that have not started are cancelled.
        """
        futures = [self.submit(action, *args) for args in zip(*iterables, strict=False)]

        def outcomes() -> Iterator[T]:
            try:
                for future in futures:
                    wait_for([future])
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        return outcomes()

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Refuse further work. Idempotent.

        Args:
            wait: Whether to wait for submitted work.
            cancel_futures: Whether to cancel work that has not started.
        """
        with self._changed:
            self._closed = True
            dropped = [future for future, _ in self._work] if cancel_futures else []
            if cancel_futures:
                self._work.clear()
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        for thread in self._threads if wait else ():
            while thread.is_alive():
                thread.join(SLICE_S)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._work or self._closed)
                self._idle -= 1
                if not self._work:
                    return
                future, action = self._work.popleft()
            _call(future, action)
            del future, action


def _call(future: Future[Any], action: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(action())
    except BaseException as exc:  # noqa: BLE001 - it belongs to the owner of the future
        future.set_exception(exc)
