"""A future for outcomes that come in large numbers, and that few threads wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)
_lock = threading.Lock()
"""Guards the attributes that the class adds, of all futures. It is held for a moment."""


class LightFuture(Future[T]):
    """A future that is one object until a thread waits for it, or cancels it.

    A future of the base class is a dozen objects, which the garbage collector visits again and
    again while many are unresolved. They are made when one of them is needed: until then, their
    names are missing, and :meth:`__getattr__` runs.
    """

    _made = False
    """Whether the base class is initialised. It decides everything from then on."""
    _ended = False
    """Whether it was resolved before that."""
    _outcome: T
    _failure: BaseException | None = None
    _callback: Callable[[Future[T]], object] | None = None

    def __init__(self) -> None:
        """Initialize nothing: :meth:`__getattr__` initializes the base class when it is needed."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if not self._made:
                super().__init__()
                if not self._ended:
                    if self._callback is not None:
                        super().add_done_callback(self._callback)
                elif self._failure is not None:
                    super().set_exception(self._failure)
                else:
                    super().set_result(self._outcome)
                self._made = True
        return object.__getattribute__(self, name)

    def done(self) -> bool:
        """Return whether it is resolved or cancelled."""
        return super().done() if self._made else self._ended

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error. Wait for it."""
        if self._made or not self._ended:
            return super().result(timeout)
        if self._failure is not None:
            raise self._failure
        return self._outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error, ``None`` if there is a result. Wait for it."""
        if self._made or not self._ended:
            return super().exception(timeout)
        return self._failure

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function when it is resolved or cancelled; at once, if it already is."""
        with _lock:
            if not (self._made or self._ended or self._callback):
                self._callback = fn
                return
        super().add_done_callback(fn)

    def set_result(self, result: T) -> None:
        """Resolve it with a result."""
        self._resolve(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """Resolve it with an error."""
        self._resolve(None, exception)

    def _resolve(self, result: Any, failure: BaseException | None) -> None:
        with _lock:
            made = self._made
            if not made:
                if self._ended:
                    raise InvalidStateError(f"{type(self).__name__} is resolved already")
                self._outcome, self._failure = result, failure
                self._ended = True
        if made:
            if failure is None:
                super().set_result(result)
            else:
                super().set_exception(failure)
        elif self._callback is not None:
            try:
                self._callback(self)
            except Exception:  # noqa: BLE001 - as the base class does
                _log.exception("a callback of a future failed")
