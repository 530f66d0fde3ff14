"""The common part of consumers, readers and producers: each is opened again when it is lost.

A handle is lost with its connection, or when the broker ends it: the broker unloads or moves the
topic, or deletes it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.retry import Retrier, Steps
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.errors import NOT_AUTHENTICATED, RefusedError, migrated
from keyshard.broker.wire.receiver_queue import QueueOverflow
from keyshard.core.position.entry import TopicPartition
from keyshard.core.refusal_timer import LIMITED_S, RefusalTimer
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    LimitReachedError,
)

RETRY_S = 0.1
"""Time between two attempts of a request while there is no connection, seconds."""

Answer = TypeVar("Answer")

_ids = itertools.count(1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """State that all handles of one broker connection share."""

    pool: ConnectionPool
    reconnects: Retrier
    """Opens handles again; its lanes are the addresses of brokers."""
    nudges: Retrier
    """Nudges silent brokers that may have stopped dispatching."""
    credentials: Credentials
    timeout_s: float
    """Longest time of one request, seconds."""
    excess: QueueOverflow = field(default_factory=QueueOverflow)
    """Excess bytes of the queues of all handles."""


def first_answer(
    attempt: Callable[[float], Answer],
    may_pass: Callable[[KeyShardError], bool],
    timeout_s: float,
) -> Answer:
    """Repeat a request until it is answered.

    Args:
        attempt: Makes the request once, within the given seconds.
        may_pass: Whether the request is repeated after an error.
        timeout_s: Longest time of all attempts, seconds; at most :data:`LIMITED_S` while a limit
            of the broker is reached.

    Raises:
        KeyShardError: The broker refuses, or does not answer in time.
    """
    began_s = time.monotonic()
    end_s = began_s + timeout_s
    cause: KeyShardError | None = None
    while True:
        try:
            return attempt(max(0.001, end_s - time.monotonic()))
        except KeyShardError as exc:
            if not may_pass(exc):
                raise
            if cause is None or not isinstance(exc, BrokerUnavailableError):
                cause = exc
            limited = isinstance(exc, LimitReachedError)
            patience_end_s = min(end_s, began_s + LIMITED_S) if limited else end_s
            if time.monotonic() + RETRY_S >= patience_end_s:
                if cause is exc:
                    raise
                # The last attempt may have had no time to learn the reason.
                raise cause from exc
            if isinstance(cause, BrokerUnavailableError):
                cause = exc
        time.sleep(RETRY_S)


class ReconnectingHandle(ABC):
    """A consumer, reader or producer of one topic partition.

    Args:
        shared: State that all handles share.
        topic_partition: The topic partition.
    """

    request_name: str
    """Command that opens the handle at the broker."""
    action: str
    """The action in errors, such as ``subscribe to``."""
    rest_s: float
    """Pause before the first attempt after the broker ended the handle, seconds."""

    def __init__(self, shared: Shared, topic_partition: TopicPartition) -> None:
        self.topic_partition = topic_partition
        self._shared = shared
        self._changed = threading.Condition()
        self._at: WireConnection | None = None
        self._id = 0
        """Consumer id or producer id at the connection; 0 while there is none."""
        self._lost_id = 0
        """Newest lost id, which may never have been established."""
        self._opening: tuple[int, Future[Any]] = 0, Future()
        """Id of the newest attempt to open, and the future of its answer."""
        self._waits_for: tuple[Address, float] | None = None
        """The broker that the current attempt waits for, and since when (monotonic seconds)."""
        self._refusals = RefusalTimer()
        """Outcome of the attempts to open it again."""
        self._ended: KeyShardError | None = None
        """Why the handle has ended for good."""
        self._closed = False

    def open(self) -> None:
        """Open the handle for the first time.

        Raises:
            KeyShardError: The broker refuses, or does not answer in time.
        """

        def attempt(left_s: float) -> None:
            for _ in self._open(left_s):
                pass

        first_answer(attempt, self._may_pass, self._shared.timeout_s)

    @abstractmethod
    def _may_pass(self, error: KeyShardError) -> bool:
        """Return whether :meth:`open` tries again after an error."""

    @abstractmethod
    def _request(self, handle_id: int) -> Any:
        """Make the request that opens the handle."""

    @abstractmethod
    def _opened(self, at: WireConnection, handle_id: int, answer: Any) -> None:
        """Start to use the opened handle; close it at the broker if it is not needed any more.

        Raises:
            KeyShardError: The handle was lost in the meantime, or is refused.
        """

    @abstractmethod
    def _end(self, error: KeyShardError) -> None:
        """End the handle for good."""

    @abstractmethod
    def _forget(self, at: WireConnection, handle_id: int) -> None:
        """Close the handle at its broker without waiting for the answer."""

    @abstractmethod
    def _refusal(self, action: str, refused: RefusedError) -> KeyShardError: ...

    def _before_opening(self, timeout_s: float) -> Generator[Address, None, None]:  # noqa: ARG002
        """Close an older handle before a new attempt. Yield as :meth:`_open` does."""
        yield from ()

    def _was_lost(self) -> None:  # noqa: B027 - a hook
        """Drop entries that the broker sends to the new handle again. Called under the lock."""

    def _fails_for_good(self, error: KeyShardError) -> bool:
        """Note a failed attempt to open the handle again; return whether to give up."""
        return self._refusals.failed(error, time.monotonic())

    def _open(self, timeout_s: float) -> Generator[Address, None, None]:
        """Open the handle. Yield the address of each broker before the wait for it."""
        handle_id, asked = self._opening = next(_ids), Future[Any]()
        at: WireConnection | None = None
        try:
            yield from self._before_opening(timeout_s)
            path = self._shared.pool.path(self.topic_partition.name, timeout_s)
            at, left_s = yield from path
            at.register(handle_id, self)
            answer = at.ask(
                self.request_name, self._request(handle_id), left_s, asked,
                undo=partial(self._forget, at, handle_id),
            )  # fmt: skip
        except (RefusedError, BrokerUnavailableError) as exc:
            if at is not None:
                at.unregister(handle_id)
                if isinstance(exc, RefusedError) and exc.code == NOT_AUTHENTICATED:
                    self._shared.pool.retire(at)
                if isinstance(exc, BrokerUnavailableError) and at.is_open:
                    # The broker may still answer. The handle must not stay open there.
                    self._forget(at, handle_id)
            raise self._error(self.action, exc) from exc
        self._opened(at, handle_id, answer)

    def _reconnect(self) -> Steps:
        try:
            for address in self._open(self._shared.timeout_s):
                self._waits_for = address, time.monotonic()
                yield address
                if self._is_over():
                    return True
        except KeyShardError as exc:
            _log.debug("%s is not open again yet: %s", self.topic_partition, exc.summary)
            if self._fails_for_good(exc):
                self._end(exc)
            return self._is_over()
        finally:
            self._waits_for = None
        self._refusals.succeeded()
        return True

    def _is_over(self) -> bool:
        return self._closed or self._ended is not None

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._closed:
            raise BrokerError(f"The handle of {self.topic_partition} is closed.")

    def _error(self, action: str, exc: RefusedError | BrokerUnavailableError) -> KeyShardError:
        if isinstance(exc, BrokerUnavailableError):
            return BrokerUnavailableError(
                f"Could not {action} {self.topic_partition}: {exc.problem}", exc.remedy
            )
        return self._refusal(action, exc)

    def unconfirmed(self, timeout_s: float) -> int:  # noqa: ARG002 - only consumers acknowledge
        """Wait for outstanding receipts of acknowledgements. Return how many are still missing."""
        return 0

    # -- Called by the connection ------------------------------------------------------------------

    def arrived(self, handle_id: int, entries: Sequence[RawEntry]) -> None:  # noqa: B027 - a hook
        """Ignore entries: a producer gets none. Subscriptions override this."""

    def next_frames(self) -> bytes | bytearray:
        return b""

    def receipts(self, commands: Sequence[Any]) -> None:  # noqa: B027 - a hook
        """Ignore send receipts: a subscription gets none. Producers override this."""

    def refused(self, command: Any) -> None:  # noqa: B027 - a hook
        """Ignore a refused entry: a subscription sends none. Producers override this."""

    def lost(self, handle_id: int, *, ended: bool) -> None:
        with self._changed:
            self._lost_id = max(self._lost_id, handle_id)
            if self._is_over() or self._id != handle_id:
                return
            self._at, self._id = None, 0
            self._was_lost()
        self._shared.reconnects.until_true(self._reconnect, self.rest_s if ended else 0.0)

    def migrated(self, handle_id: int, url: str) -> None:
        with self._changed:
            opening_id, asked = self._opening
            if handle_id not in (self._id, opening_id):
                return
        error = migrated(self.topic_partition, url)
        self._end(error)
        with suppress(InvalidStateError):
            asked.set_exception(error)
