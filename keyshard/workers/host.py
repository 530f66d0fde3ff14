"""Hosts consumers inside a worker: receives from them, and buffers deliveries until taken."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add
from typing import Any

import pyarrow as pa

from keyshard.base_error import AGAIN
from keyshard.broker.port import Broker, Consumer, StartPosition, SubscriptionSpec
from keyshard.broker.retry import Retrier, Steps
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.refusal_timer import RefusalTimer, without_numbers
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, BrokerUnavailableError, KeyShardError, UnreadableEntryError
from keyshard.threads import FirstError, Pool, begin, owned_by, unexpected
from keyshard.workers.encoding import (
    NOTHING,
    DeliveredTotals,
    WorkerDelivery,
    encode_deliveries,
    keys_of,
)
from keyshard.workers.status import ConsumerStatus, HostStatus, WorkerError

FULL_WAIT_S = 0.02
"""Longest wait for deliveries while a consumer is full, seconds."""
CLOSED_MAX = 10_000
"""Number of closed consumers that are remembered, so that a late request opens none again."""
ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Memory of columns that closes an answer, bytes. If an entry stays in the window, its whole answer
stays in memory. Without workers, its whole delivery does."""
UNLIMITED_BYTES = 1 << 60
ANSWER_ROWS_MAX = 20_000
"""Messages that close an answer."""
RECEIVE_THREADS = 2
"""Number of receive threads."""
CLOSE_THREADS = 8
"""Maximum number of consumers that are closed concurrently."""
REOPEN_WAIT_S = 1.0
"""Longest wait between two attempts to resubscribe a consumer, seconds."""
LOOK_S = 0.25
"""Time between two checks of the connections, seconds."""
QUIET_S = 1.0
"""Silence after which a consumer has delivered all, even in the middle of an entry, seconds."""

_log = logging.getLogger(__name__)


class _HostedConsumer:
    """The state of one consumer."""

    def __init__(
        self, number: int, spec: SubscriptionSpec, consumer: Consumer, ahead_max: DeliveredTotals,
        another: Callable[[], Consumer],
    ) -> None:  # fmt: skip
        self.number = number
        self.spec = spec
        self.consumer = consumer
        self.another = another
        """Subscribes another consumer in its place."""
        self.lacking = False
        """Whether its consumer is closed and waits for a replacement."""
        self.refusals = RefusalTimer()
        """Outcome of the attempts to subscribe the replacement."""
        self.ahead_max = ahead_max
        self.using = threading.Lock()
        """Held during a receive and a close."""
        self.given = self.taken = DeliveredTotals()
        """Messages and bytes that it delivered, and those that were taken. They differ by at most
        its queue and the rest of a delivery."""
        self.connected, self.problem = True, ""
        """The state that was reported last."""
        self.open = False
        """Whether its deliveries end before the last index of an entry."""
        self.idle_since_s: float | None = None
        """Monotonic time since when it has been empty, with its current connection, in seconds."""
        self.closed = False

    @property
    def is_full(self) -> bool:
        """Whether it must not receive until more is taken."""
        (given, given_bytes), (taken, taken_bytes) = self.given, self.taken
        most, most_bytes = self.ahead_max
        return given - taken >= most or given_bytes - taken_bytes >= most_bytes


class ConsumerHost:
    """Hosts the consumers of one connection. Any thread may call its methods.

    Args:
        broker: The connection; it is closed with the host.
        keeps: Whether the content of messages stays here until it is released. It is kept by the
            number of the :meth:`take` answer that delivered its entries.
        failed: Owner of the threads of the connection; :meth:`take` raises its error.
    """

    def __init__(
        self, broker: Broker, *, keeps: bool = False, failed: FirstError | None = None
    ) -> None:
        self._broker, self._failed = broker, failed or FirstError()
        self._keeps = keeps
        self._kept: dict[int, pa.RecordBatch] = {}
        self._changed = threading.Condition()
        self._hosted: dict[int, _HostedConsumer] = {}
        self._opening: dict[int, threading.Lock] = {}
        """Locks of the numbers that are subscribed or closed now; a request may arrive twice."""
        self._closed: deque[int] = deque(maxlen=CLOSED_MAX)
        self._ready: deque[_HostedConsumer] = deque()
        with owned_by(self._failed):
            self._retrier = Retrier(REOPEN_WAIT_S, name="keyshard-reopen")
        self._full: set[int] = set()
        """Consumers that wait until more is taken."""
        self._open: set[int] = set()
        """Consumers in the middle of an entry that must report when they have delivered all."""
        self._waiting: deque[tuple[WorkerDelivery, int, int]] = deque()
        self._checked_s = 0.0
        self._taking = threading.Lock()
        """Held during :meth:`take`, so that a repeated request gets the same answer."""
        self._answered = 0
        self._answer: tuple[dict[str, Any], pa.RecordBatch] = ({}, NOTHING)
        self._ended = False
        self.subscription = ""
        """Subscription of its consumers; empty before the first."""
        self._newest_error: tuple[str, float] | None = None
        """Text and monotonic time of the newest error of a consumer, seconds."""
        self._threads = [
            begin(f"keyshard-hosted-receive-{i}", self._pump, fail=self._failed)
            for i in range(RECEIVE_THREADS)
        ]

    # -- Commands, called with the arguments of their JSON ----------------------------------------

    def subscribe(
        self, *, number: int, topic: str, partition: int, subscription: str, start: int, end: int,
        position: str, consumer_name: str, receiver_queue_size: int,
        receiver_queue_bytes: int | None = None, columns: Sequence[str] | None = None,
        message_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Host a consumer under a number that the caller chooses. Idempotent.

        Raises:
            KeyShardError: The error that the broker raised.
        """
        with self._alone_with(number):
            if number in self._hosted or number in self._closed:
                return
            spec = SubscriptionSpec(
                TopicPartition(topic, partition), subscription, HashRange(start, end),
                consumer_name, receiver_queue_size, receiver_queue_bytes, columns, message_bytes,
            )  # fmt: skip
            consumer = self._broker.subscribe(spec, StartPosition(position))
            hosted = _HostedConsumer(
                number, spec, consumer,
                DeliveredTotals(receiver_queue_size, receiver_queue_bytes or UNLIMITED_BYTES),
                partial(self._broker.subscribe, spec, StartPosition.EARLIEST),
            )  # fmt: skip
            with self._changed:
                if not self._ended:
                    self.subscription = subscription
                    self._hosted[number] = hosted
                    self._waiting.append((WorkerDelivery(number, (), connected=True), 0, 0))
                    self._ready.append(hosted)
                    self._changed.notify_all()
                    return
            consumer.close()

    @contextmanager
    def _alone_with(self, number: int) -> Iterator[None]:
        """Serialize the requests for one number."""
        with self._changed:
            gate = self._opening.setdefault(number, threading.Lock())
        with gate:
            try:
                yield
            finally:
                with self._changed:
                    self._opening.pop(number, None)

    def acknowledge(self, *, number: int, entries: list[list[int]]) -> None:
        """See :meth:`Consumer.acknowledge`."""
        self._one(number).consumer.acknowledge([EntryId(*one) for one in entries])

    def last_entry(self, *, number: int) -> list[int] | None:
        """See :meth:`Consumer.last_entry`."""
        last = self._one(number).consumer.last_entry()
        return None if last is None else list(last)

    def close_consumer(self, *, number: int, for_another: bool) -> None:
        """Close a consumer as :meth:`Consumer.close` does, and drop its deliveries. Idempotent."""
        with self._alone_with(number):
            with self._changed:
                self._closed.append(number)
                hosted = self._hosted.pop(number, None)
                if hosted is None:
                    return
                hosted.closed = True
                self._full.discard(number)
                self._open.discard(number)
                self._waiting = deque(one for one in self._waiting if one[0].consumer != number)
            with hosted.using:
                hosted.consumer.close(for_another=for_another)

    def _one(self, number: int) -> _HostedConsumer:
        hosted = self._hosted.get(number)
        if hosted is None and number in self._closed:
            raise BrokerError(f"The worker has no consumer {number}, because it is closed.")
        if hosted is None or hosted.lacking:
            # Another worker had it under that number, or it is being subscribed.
            raise BrokerUnavailableError(f"The worker subscribes consumer {number}.", AGAIN)
        return hosted

    # -- Deliveries -------------------------------------------------------------------------------

    def take(
        self, seq: int, taken: Mapping[int, Sequence[int]], wait_s: float,
        released: Sequence[int] = (),
    ) -> tuple[dict[str, Any], pa.RecordBatch]:  # fmt: skip
        """Return the deliveries since the previous answer. Wait for the first one.

        Args:
            seq: Number of the requested answer: the last number that arrived, plus 1. The same
                number gets the same answer.
            taken: Per consumer, the messages and bytes taken since it began.
            wait_s: Longest wait, seconds.
            released: Numbers of answers whose content is no longer needed.

        Raises:
            BrokerError: The request is late: it names an older answer.
            UnexpectedError: One of its threads ended.
        """
        with self._taking:
            if self._failed.error is not None:
                raise self._failed.error
            if seq == self._answered:
                return self._answer
            if seq != self._answered + 1:
                raise BrokerError(
                    f"Answer {seq} of a worker was requested after answer {self._answered}."
                )
            for number in released:
                self._kept.pop(number, None)
            self._check_connections()
            with self._changed:
                self._resume(taken)
                if self._full:
                    wait_s = min(wait_s, FULL_WAIT_S)
                self._changed.wait_for(lambda: self._waiting or self._ended, wait_s)
                deliveries = self._next()
            listed, content = encode_deliveries(deliveries)
            kept = self._keeps and content.num_rows > 0
            if kept:
                self._kept[seq] = content
                content = keys_of(deliveries, content)
            self._answered = seq
            self._answer = {"deliveries": listed, "kept": kept}, content
            return self._answer

    def content(self, runs: Sequence[Sequence[int]], columns: Sequence[str]) -> pa.RecordBatch:
        """Return columns of the content that this host keeps.

        Args:
            runs: The number of an answer, the first row in it, and the number of rows. The
                result has the rows in this order.
            columns: Names of columns.

        Raises:
            BrokerError: Part of the content was released, or was never kept.
        """
        found: list[pa.RecordBatch] = []
        for number, start, rows in runs:
            kept = self._kept.get(number)
            if kept is None:
                raise BrokerError(f"The worker has released content {number}.")
            found.append(kept.select(columns).slice(start, rows))
        return pa.concat_batches(found)

    def _resume(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Receive again from full consumers of which enough was taken."""
        for number, count in taken.items():
            hosted = self._hosted.get(number)
            if hosted is not None:
                hosted.taken = max(hosted.taken, DeliveredTotals(*count))
                if number in self._full and not hosted.is_full:
                    self._full.discard(number)
                    self._ready.append(hosted)
                    self._changed.notify_all()

    def _check_connections(self) -> None:
        """Report the consumers that lost or regained their connection."""
        now_s = time.monotonic()
        if now_s - self._checked_s < LOOK_S:
            return
        self._checked_s = now_s
        with self._changed:
            all_hosted = list(self._hosted.values())
        for hosted in all_hosted:
            # A receive thread also reports the state, under ``using``, so reports stay in order.
            if hosted.using.acquire(blocking=False):
                try:
                    # Not under ``_changed``: client callbacks take it, under the client's lock.
                    self._report_connection(
                        hosted, hosted.consumer.is_connected(), _problem_of(hosted)
                    )
                    self._report_quiet(hosted, now_s)
                finally:
                    hosted.using.release()

    def _report_connection(self, hosted: _HostedConsumer, connected: bool, problem: str) -> None:
        """Queue a report if the connection or the problem of a consumer changed."""
        with self._changed:
            changed = connected != hosted.connected
            if hosted.closed or (
                not changed and without_numbers(problem) == without_numbers(hosted.problem)
            ):
                return
            hosted.connected, hosted.problem = connected, problem
            report = WorkerDelivery(hosted.number, (), connected=connected, problem=problem)
            self._waiting.append((report, 0, 0))
            if changed:
                if hosted.idle_since_s is not None:
                    # The next connection redelivers what this one lost.
                    hosted.idle_since_s = time.monotonic()
                if hosted.open:
                    self._open.add(hosted.number)

    def _report_quiet(self, hosted: _HostedConsumer, now_s: float) -> None:
        """Report once that a consumer has delivered all, if its last entry is incomplete.

        The parent cannot conclude this from silence: messages may wait here while this process
        is suspended.
        """
        with self._changed:
            since_s = hosted.idle_since_s
            if hosted.number not in self._open or not hosted.connected or since_s is None:
                return
            if now_s - since_s > QUIET_S:
                self._open.discard(hosted.number)
                self._waiting.append((WorkerDelivery(hosted.number, (), gave_all=True), 0, 0))

    def _next(self) -> list[WorkerDelivery]:
        deliveries: list[WorkerDelivery] = []
        rows = size_bytes = 0
        while self._waiting and rows < ANSWER_ROWS_MAX and size_bytes < ANSWER_BYTES_MAX:
            delivery, more_rows, more_bytes = self._waiting.popleft()
            deliveries.append(delivery)
            rows += more_rows
            size_bytes += more_bytes
        return deliveries

    # -- Threads ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if self._ended:
                    return
                hosted = self._ready.popleft()
            try:
                self._receive(hosted)
            except Exception as exc:  # noqa: BLE001 - the caller's next receive raises it
                error = unexpected("Receiving in a worker", exc)
                self._queue(hosted, WorkerDelivery(hosted.number, (), error))

    def _receive(self, hosted: _HostedConsumer) -> None:
        with hosted.using:
            if hosted.closed or hosted.lacking:
                return
            connected = hosted.consumer.is_connected()
            self._report_connection(hosted, connected, _problem_of(hosted))
            try:
                blocks = hosted.consumer.receive(0)
            except UnreadableEntryError as exc:
                # The next receive continues after the entry.
                self._queue(hosted, WorkerDelivery(hosted.number, (), exc))
                return
            if not blocks:
                hosted.idle_since_s = time.monotonic()
                hosted.consumer.when_ready(lambda: self._make_ready(hosted))
            elif connected:
                # Still under ``using``, so that later reports of its connection follow it.
                self._queue(hosted, WorkerDelivery(hosted.number, blocks))
            else:
                self._drop_stale(hosted)

    def _drop_stale(self, hosted: _HostedConsumer) -> None:
        """Discard the messages that a client received before it lost its connection.

        The lost connection may have held the beginning of its first entry. The next connection
        delivers the whole entry again. If the client has already reconnected, the discarded
        messages may be those of the new connection. Another consumer then replaces this one, and
        receives all of them again.
        """
        if hosted.consumer.is_connected():
            hosted.lacking = True
            self._retrier.until_true(partial(self._replace, hosted))
        else:
            self._make_ready(hosted)

    def _replace(self, hosted: _HostedConsumer) -> Steps:
        """Close a consumer, and subscribe another one in its place."""
        yield hosted.consumer.topic_partition
        _close(hosted.consumer, for_another=True)
        if hosted.closed or self._ended:
            return True
        try:
            another = hosted.another()
        except KeyShardError as exc:
            _log.debug("consumer %d is not subscribed again yet: %s", hosted.number, exc.summary)
            if not hosted.refusals.failed(exc, time.monotonic()):
                return False
            self._queue(hosted, WorkerDelivery(hosted.number, (), exc))
            return True
        hosted.refusals.succeeded()
        with hosted.using:
            if not hosted.closed:
                hosted.consumer, hosted.lacking = another, False
        if hosted.lacking:
            _close(another)
        else:
            self._make_ready(hosted)
        return True

    def _make_ready(self, hosted: _HostedConsumer) -> None:
        with self._changed:
            hosted.idle_since_s = None
            self._ready.append(hosted)
            self._changed.notify_all()

    def _queue(self, hosted: _HostedConsumer, delivery: WorkerDelivery) -> None:
        more = DeliveredTotals().plus(delivery)
        with self._changed:
            if hosted.closed:
                return
            self._waiting.append((delivery, *more))
            if delivery.error is not None:
                self._newest_error = delivery.error.message, time.monotonic()
            if delivery.blocks:
                hosted.open = not delivery.blocks[-1].ends
                if hosted.open:
                    self._open.add(hosted.number)
                else:
                    self._open.discard(hosted.number)
            hosted.given = DeliveredTotals(*map(add, hosted.given, more))
            if hosted.is_full:
                self._full.add(hosted.number)
            elif delivery.continues:
                self._ready.append(hosted)
            self._changed.notify_all()

    def status(self) -> HostStatus:
        """Return the state of the host, as plain JSON values. It never waits for a request."""
        kept = list(self._kept.values())
        with self._changed:
            all_hosted = list(self._hosted.values())
            waiting, newest = list(self._waiting), self._newest_error
        problems = [(hosted, _problem_of(hosted)) for hosted in all_hosted]
        lasting = next((problem for _, problem in problems if problem), "")
        error: WorkerError | None = {"error": lasting, "secondsAgo": None} if lasting else None
        if error is None and newest is not None:
            text, at_s = newest
            error = {"error": text, "secondsAgo": round(time.monotonic() - at_s, 1)}
        return {
            "subscription": self.subscription,
            "consumers": [_status_of(hosted, problem) for hosted, problem in problems],
            "waiting": {
                "entries": sum(len(delivery.blocks) for delivery, _, _ in waiting),
                "messages": sum(rows for _, rows, _ in waiting),
                "bytes": sum(size for _, _, size in waiting),
            },
            "kept": {
                "messages": sum(one.num_rows for one in kept),
                "bytes": sum(one.nbytes for one in kept),
            },
            "newestError": error,
        }

    def close(self) -> None:
        """Close all consumers and the connection. Idempotent."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            hosted = list(self._hosted.values())
            self._hosted.clear()
            self._changed.notify_all()
        self._retrier.close()
        for thread in self._threads:
            thread.join(1.0)
        with Pool(CLOSE_THREADS, "keyshard-close") as pool:
            for one in hosted:
                pool.submit(_close, one.consumer)
        self._broker.close()


def _problem_of(hosted: _HostedConsumer) -> str:
    error = hosted.refusals.error
    return hosted.consumer.problem() if error is None else error.message


def _status_of(hosted: _HostedConsumer, problem: str) -> ConsumerStatus:
    where = hosted.spec.topic_partition
    (given, given_bytes), (taken, taken_bytes) = hosted.given, hosted.taken
    return {
        "topic": where.topic,
        "partition": where.partition,
        "hashRange": str(hosted.spec.hash_range),
        "connected": hosted.connected and not hosted.lacking,
        "problem": problem,
        "messages": max(0, given - taken),
        "bytes": max(0, given_bytes - taken_bytes),
    }


def _close(consumer: Consumer, *, for_another: bool = False) -> None:
    try:
        consumer.close(for_another=for_another)
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", consumer.topic_partition, exc.summary)
