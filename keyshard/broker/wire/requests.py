"""The requests of a connection that wait for their answers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from keyshard.broker.framing import ProtocolError
from keyshard.broker.wire.errors import RefusedError
from keyshard.errors import BrokerUnavailableError

_ANSWER_TO = {
    "partitioned_metadata": "partitioned_metadata_response", "lookup": "lookup_response",
    "subscribe": "success", "seek": "success", "close_consumer": "success", "ack": "ack_response",
    "get_last_message_id": "get_last_message_id_response", "get_schema": "get_schema_response",
    "producer": "producer_success", "close_producer": "success",
    "watch_topic_list": "watch_topic_list_success",
}  # fmt: skip
ANSWERS = frozenset(_ANSWER_TO.values())
"""Names of the commands that answer a request."""
_GIVEN_UP_EARLY = {
    "partitioned_metadata_response", "lookup_response", "success", "get_schema_response",
}  # fmt: skip
"""Answers whose waits end early if the broker is unresponsive. Other requests keep their
timeouts."""
_MAY_FAIL = ANSWERS - {
    "success", "get_last_message_id_response", "producer_success", "watch_topic_list_success",
}  # fmt: skip

_ids = itertools.count(1)


class PendingRequests:
    """Requests by id, each with the name of the expected answer and its future. Thread-safe.

    A broker that was frozen may execute a request long after its caller has given it up. If the
    request opens a handle, a close request may be too early: Pulsar registers a producer only after
    other work. So ``undo`` closes the handle when the late answer comes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}
        self._undo: dict[int, Callable[[], None]] = {}
        """Functions by request id, also of requests that were given up."""

    def add(
        self,
        request_id: int,
        name: str,
        answered: Future[Any],
        undo: Callable[[], None] | None = None,
    ) -> None:
        """Wait for the answer to a request.

        Args:
            request_id: An id of :func:`new_id`.
            name: Name of the command.
            answered: Future of its answer.
            undo: Called if the answer comes when nothing waits for it; returns at once.
        """
        with self._lock:
            self._waiting[request_id] = _ANSWER_TO[name], answered
            if undo is not None:
                self._undo[request_id] = undo

    def forget(self, request_id: int) -> None:
        """Stop waiting for an answer. Idempotent."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def refused(self, request_id: int) -> Future[Any] | None:
        """Return the future of a request that the broker refuses, if it is pending."""
        with self._lock:
            self._undo.pop(request_id, None)
            return self._waiting.pop(request_id, ("", None))[1]

    def answer(self, name: str, command: Any) -> None:
        """Take an answer of the broker; ignore it if no request waits for it.

        Raises:
            ProtocolError: It answers another kind of request.
        """
        with self._lock:
            undo = self._undo.pop(command.request_id, None)
            wanted, answered = self._waiting.get(command.request_id, ("", None))
            if answered is not None:
                if name != wanted:
                    raise ProtocolError(f"received {name!r} instead of {wanted!r}")
                del self._waiting[command.request_id]
        if answered is None:
            if undo is not None:
                undo()
            return
        with suppress(InvalidStateError):
            if name in _MAY_FAIL and command.HasField("error"):
                answered.set_exception(RefusedError(command.error, command.message))
            else:
                answered.set_result(command)

    def give_up_early(self, error: BrokerUnavailableError) -> None:
        """Fail pending questions and subscriptions, so that callers can try another broker."""
        with self._lock:
            given_up = {
                number: answered
                for number, (wanted, answered) in self._waiting.items()
                if wanted in _GIVEN_UP_EARLY
            }
            for number in given_up:
                del self._waiting[number]
        fail(given_up.values(), error)

    def fail_all(self, error: BrokerUnavailableError) -> None:
        """Fail every pending request; its caller forgets it."""
        with self._lock:
            waiting = [answered for _, answered in self._waiting.values()]
        fail(waiting, error)


def new_id() -> int:
    """Return an id that no request of this process has had."""
    return next(_ids)


def fail(waiting: Iterable[Future[Any]], error: Exception) -> None:
    """Set the error of futures that have no result yet."""
    for answered in waiting:
        with suppress(InvalidStateError):
            answered.set_exception(error)
