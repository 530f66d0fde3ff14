"""Calls of pulsar-client that wait for the broker in Python instead of in C++.

The client's blocking calls have two faults. Some never return once the client is closed, such as a
subscribe that waits for a lost connection. And if a thread is inside the client's C++ code, or in a
callback from it, while the interpreter ends, the process aborts. This module therefore uses the
calls with a callback. The end of the connection ends every wait, and the end of the program ends
every connection (:mod:`.at_exit`). The close of a client waits, for a limited time, until no short
call runs in the client and the client holds no callback.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import contextmanager, suppress
from typing import Any

import _pulsar
import pulsar

ANSWER_S = 4_000.0
"""Longest wait for the client's answer, seconds. The client's own timeout, at most an hour, is
shorter."""
CLOSE_S = 3.0
"""Longest wait for the broker's answers at a close, seconds. Then the connections are cut."""
LEAVE_S = 2.0
"""Longest wait at the end for threads to leave the client, seconds."""
LEAVE_LOOK_S = 0.002
"""Time between two checks for that, seconds."""

_log = logging.getLogger(__name__)


class Calls:
    """The calls of a process to one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future[tuple[pulsar.Result, Any]]] = set()
        self._inside = 0
        self._callbacks: set[weakref.ref[Callable[..., None]]] = set()
        """Callbacks that the client holds. It needs the interpreter lock even to release one."""
        self._ended = False

    def answer_of(
        self, ask: Callable[[Callable[..., None]], None], wait_s: float = ANSWER_S
    ) -> Any:
        """Send a request, and wait for its answer.

        If the connection is lost (``ResultDisconnected``), the client's blocking calls return a
        meaningless value instead of an error: a Reader is at the end, a topic is empty.

        Args:
            ask: The form of the request with a callback.
            wait_s: Longest wait, seconds.

        Raises:
            pulsar.PulsarException: The request failed; ``NotConnected`` if the connection was
                lost, ``AlreadyClosed`` if it was closed here.
        """
        answered: Future[tuple[pulsar.Result, Any]] = Future()

        asked = [answered]

        def take(result: pulsar.Result, value: Any = None) -> None:
            # Runs in the client's thread, perhaps after the wait has ended. A Reader keeps this
            # callback for its lifetime, so the callback must not keep the answer (the Reader).
            with suppress(InvalidStateError):
                asked.pop().set_result((result, value))

        try:
            with self.inside(answered):
                ask(self.lent(take))
            del take
            result, value = answered.result(wait_s)
        except NoAnswerError as exc:
            raise pulsar.Timeout("the client did not answer") from exc
        finally:
            with self._lock:
                self._waiting.discard(answered)
        if result == pulsar.Result.Ok:
            return value
        name = result.name if result.name in pulsar.Result.__members__ else "NotConnected"
        raise getattr(_pulsar, name, pulsar.UnknownError)(f"Pulsar error: {name}")

    @contextmanager
    def inside(self, waiting: Future[tuple[pulsar.Result, Any]] | None = None) -> Iterator[None]:
        """Count a short call into the client.

        Args:
            waiting: The future on which the caller waits afterwards.

        Raises:
            pulsar.AlreadyClosed: The connection was closed.
        """
        with self._lock:
            if self._ended:
                raise _closed()
            if waiting is not None:
                self._waiting.add(waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def lent(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Track a callback that is given to the client and has no other reference."""
        # A C method as the weakref callback: unlike Python code, it cannot be interrupted.
        self._callbacks.add(weakref.ref(callback, self._callbacks.discard))
        return callback

    def end(self) -> None:
        """Refuse further calls, and end all waits."""
        with self._lock:
            self._ended = True
            waiting = list(self._waiting)
        for answered in waiting:
            with suppress(InvalidStateError):
                answered.set_exception(_closed())

    def left(self, wait_s: float) -> bool:
        """Wait until no call is active and the client holds no callback; ``False`` if too late."""
        end_s = time.monotonic() + wait_s
        while self._inside or self._callbacks:
            if time.monotonic() >= end_s:
                return False
            time.sleep(LEAVE_LOOK_S)
        return True


class _Waiting:
    """Wraps an object of the client's extension; its ``close`` waits in Python."""

    def __init__(self, raw: Any, calls: Calls) -> None:
        self._raw = raw
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def close(self) -> None:
        self._calls.answer_of(self._raw.close_async)


class _WaitingClient(_Waiting):
    """Replaces the extension's client in all calls that wait for the broker."""

    def subscribe(self, *what: Any) -> _Waiting:
        return self._made(self._raw.subscribe_async, what)

    def create_reader(self, *what: Any) -> _Waiting:
        return self._made(self._raw.create_reader_async, what)

    def create_producer(self, *what: Any) -> _Waiting:
        return self._made(self._raw.create_producer_async, what)

    def get_topic_partitions(self, topic: str) -> Any:
        return self._calls.answer_of(lambda take: self._raw.get_topic_partitions_async(topic, take))

    def close(self) -> None:
        """Close the client; orderly if the broker answers in time. Then wait for its threads."""
        self._calls.end()
        closing = Calls()
        try:
            closing.answer_of(self._raw.close_async, CLOSE_S)
        finally:
            # Without a shutdown, its threads keep running for handles not closed in time.
            self._raw.shutdown()
            if not (self._calls.left(LEAVE_S) and closing.left(LEAVE_S)):
                _log.debug("the client still holds a callback or a thread after its end")

    def _made(self, make: Callable[..., None], what: tuple[Any, ...]) -> _Waiting:
        return _Waiting(self._calls.answer_of(lambda take: make(*what, take)), self._calls)


def calls_of(client: pulsar.Client) -> Calls:
    """Change a client so that it, and every handle that it opens, waits in Python.

    Returns:
        The calls to the client. Direct calls of its C++ objects must go through it.
    """
    calls = Calls()
    client._client = _WaitingClient(client._client, calls)
    return calls


def _closed() -> pulsar.PulsarException:
    return pulsar.AlreadyClosed("the connection is closed")
