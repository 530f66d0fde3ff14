"""Calls of pulsar-client: who has to wait for the broker waits in Python.

The client's own waiting calls have two faults. Some never return once the client is closed, such as
a subscription that waits for a lost connection. And a thread that is still in the client, or calls
back from it, while the interpreter ends is ended by it in the midst of the client's C++, which
aborts the process. So the forms with a callback are used, the end of the connection ends every
wait, and the end of the program ends every connection (:mod:`.at_exit`). Callbacks,
and the calls that return by themselves within moments, are waited for.
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
"""Longest wait for the client's answer, seconds; its own timeout, an hour at most, comes first."""
CLOSE_S = 3.0
"""Longest wait for the broker's answers to an orderly end; then connections are cut, seconds."""
LEAVE_S = 2.0
"""Longest wait for threads to leave the client at its end, seconds."""
LEAVE_LOOK_S = 0.002
"""Time between two looks whether they have, seconds."""

_log = logging.getLogger(__name__)


class Calls:
    """What the threads of a process ask of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future[tuple[pulsar.Result, Any]]] = set()
        self._inside = 0
        self._callbacks: set[weakref.ref[Callable[..., None]]] = set()
        """Those that the client has: it takes the interpreter's lock to let one go, too."""
        self._ended = False

    def answer_of(
        self, ask: Callable[[Callable[..., None]], None], wait_s: float = ANSWER_S
    ) -> Any:
        """What the client answers to a request.

        Its own waiting calls also give a value of no meaning instead of an error when the
        connection is lost meanwhile (``ResultDisconnected``): a Reader is then at the end, and a
        topic is empty.

        Args:
            ask: The request's form with a callback.
            wait_s: Longest wait, seconds.

        Raises:
            pulsar.PulsarException: The request failed; ``NotConnected`` when the connection was
                lost, ``AlreadyClosed`` when it was closed here.
        """
        answered: Future[tuple[pulsar.Result, Any]] = Future()

        asked = [answered]

        def take(result: pulsar.Result, value: Any = None) -> None:
            # On the client's thread. Nobody may be waiting any more. A Reader has this callback
            # for as long as it lives, so this must not have the Reader for as long.
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
        """A call that returns by itself within moments.

        Args:
            waiting: What its caller waits for afterwards.

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
        """A callback that the client is given now, and no one else has."""
        # A method of the extension lets it go: nothing can come between, as it could in Python.
        self._callbacks.add(weakref.ref(callback, self._callbacks.discard))
        return callback

    def end(self) -> None:
        """Ask nothing more, and wait for nothing that was asked."""
        with self._lock:
            self._ended = True
            waiting = list(self._waiting)
        for answered in waiting:
            with suppress(InvalidStateError):
                answered.set_exception(_closed())

    def left(self, wait_s: float) -> bool:
        """Wait until no thread is in a call, and the client has no callback; whether so it is."""
        end_s = time.monotonic() + wait_s
        while self._inside or self._callbacks:
            if time.monotonic() >= end_s:
                return False
            time.sleep(LEAVE_LOOK_S)
        return True


class _Waiting:
    """An object of the client's extension, whose ``close`` waits in Python."""

    def __init__(self, raw: Any, calls: Calls) -> None:
        self._raw = raw
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def close(self) -> None:
        self._calls.answer_of(self._raw.close_async)


class _WaitingClient(_Waiting):
    """In the place of the extension's client: all its calls that wait for the broker."""

    def subscribe(self, *what: Any) -> _Waiting:
        return self._made(self._raw.subscribe_async, what)

    def create_reader(self, *what: Any) -> _Waiting:
        return self._made(self._raw.create_reader_async, what)

    def create_producer(self, *what: Any) -> _Waiting:
        return self._made(self._raw.create_producer_async, what)

    def get_topic_partitions(self, topic: str) -> Any:
        return self._calls.answer_of(lambda take: self._raw.get_topic_partitions_async(topic, take))

    def close(self) -> None:
        """Close it, in order if the broker answers in time; then nobody is in it."""
        self._calls.end()
        closing = Calls()
        try:
            closing.answer_of(self._raw.close_async, CLOSE_S)
        finally:
            # Without it, its threads would go on for what was not closed in time.
            self._raw.shutdown()
            if not (self._calls.left(LEAVE_S) and closing.left(LEAVE_S)):
                _log.debug("the client keeps a callback after its end, or a thread")

    def _made(self, make: Callable[..., None], what: tuple[Any, ...]) -> _Waiting:
        return _Waiting(self._calls.answer_of(lambda take: make(*what, take)), self._calls)


def calls_of(client: pulsar.Client) -> Calls:
    """Make a client, and all that it opens, wait in Python."""
    calls = Calls()
    client._client = _WaitingClient(client._client, calls)
    return calls


def _closed() -> pulsar.PulsarException:
    return pulsar.AlreadyClosed("the connection is closed")
