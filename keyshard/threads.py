"""The one place that starts threads: each has a name and an owner, and none ends in silence.

Every thread is a daemon. If its function raises, the error ends the source that owns the thread.
The owner is a function that takes the error: that of :func:`owned_by`, else that of the thread
that starts the new one.

:class:`Pool` stands for ``concurrent.futures.ThreadPoolExecutor``. That one takes no work once the
main thread has ended, and keeps the program from ending until its work has ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
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
"""Ends a source by an error; callable from any thread, also more than once."""

T = TypeVar("T")
_owner: ContextVar[Fail | None] = ContextVar("keyshard thread owner", default=None)
_log = logging.getLogger(__name__)


@contextmanager
def owned_by(fail: Fail) -> Iterator[None]:
    """Threads that start inside the block, and those that they start, belong to an owner."""
    token = _owner.set(fail)
    try:
        yield
    finally:
        _owner.reset(token)


def owner() -> Fail | None:
    """The owner of the calling thread; ``None`` outside a source."""
    return _owner.get()


@contextmanager
def ending_source(name: str, fail: Fail | None) -> Iterator[None]:
    """An error of the block ends the source; without an owner it is raised.

    Args:
        name: What the block does, for the error.
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
    """The error that ends the source after an unexpected one."""
    if isinstance(exc, KeyShardError):
        return exc
    error = UnexpectedError(
        f"{name} ended unexpectedly: {exc!r}. Messages that were not completed are not "
        "acknowledged and come again. Start the source again, and report the traceback in the "
        "log: this is a defect."
    )
    error.__cause__ = exc
    return error


def begin(
    name: str, run: Callable[..., object], *args: Any, fail: Fail | None = None
) -> threading.Thread:
    """Start a daemon thread.

    Args:
        name: Of the thread.
        run: What it does.
        *args: For ``run``.
        fail: The owner; default: that of the calling thread.

    Raises:
        ThreadStartError: The system starts no thread.
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
            f"Thread {name} cannot be started: {exc}. If the main thread has ended, keep it alive "
            "for as long as the source runs, for example by joining the thread that runs it; "
            "otherwise raise the limit of threads of this process."
        ) from exc
    return thread


class Pool:
    """A few threads that share work, for one purpose; a context manager that waits for all of it.

    Where the system starts no thread, the caller does the work.

    Args:
        threads_max: Most threads; they start when there is work for them.
        name: Of the threads, before a number.
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
        """Have a thread call ``action``; its outcome comes to the future.

        Raises:
            RuntimeStoppedError: The pool is shut down.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeStoppedError(f"Threads {self._name} take no work any more.")
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
        """The outcomes of ``action`` for the items, in their order; all are submitted at once.

        After an error, what has not begun is left out.
        """
        futures = [self.submit(action, *args) for args in zip(*iterables, strict=False)]

        def outcomes() -> Iterator[T]:
            try:
                for future in futures:
                    yield future.result()
            finally:
                for future in futures:
                    future.cancel()

        return outcomes()

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Take no more work. Idempotent.

        Args:
            wait: Whether to wait until what was submitted has ended.
            cancel_futures: Whether to leave out what has not begun.
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
            thread.join()

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
