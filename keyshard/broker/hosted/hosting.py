"""One worker and its consumers: takes what they receive, and replaces it when it dies."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from keyshard.broker.hosted.consumer import Holders, HostedConsumer, Wanted
from keyshard.broker.hosted.wire import Delivery, Taken
from keyshard.broker.hosted.worker import Worker
from keyshard.broker.port import StartPosition, WorkerFacts
from keyshard.broker.retrier import Retrier, Steps
from keyshard.core.position.entry import EntryId
from keyshard.core.refusals import Refusals
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    WorkerUnreachableError,
)
from keyshard.threads import begin

START_AGAIN_S = 1.0
"""Pause before another attempt to start a worker, seconds."""
MARGIN_S = 5.0
"""Time that an answer gets beyond what the client may take, seconds."""

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class WorkerHosting:
    """Implements :class:`~keyshard.broker.hosted.consumer.Hosting` over a worker that may die.

    Args:
        start: Starts a worker; the event ends the wait for it.
        operation_timeout_s: Longest time of one request to the broker, seconds.
        name: Of its thread.

    Raises:
        KeyShardError: The worker does not start, or the broker refuses it.
    """

    def __init__(
        self, start: Callable[[threading.Event], Worker], operation_timeout_s: float, name: str
    ) -> None:
        self._start = start
        self._timeout_s = operation_timeout_s + MARGIN_S
        self._lock = threading.Lock()
        self._consumers: dict[int, HostedConsumer] = {}
        self._taken: dict[int, Taken] = {}
        self._ending = threading.Event()
        self._restarts = 0
        self._refusals = Refusals()
        """Outcome of the attempts to start another worker."""
        self._why_none = ""
        self._retrier = Retrier(name="keyshard-bring-back")
        """Subscribes again in another worker; its lanes are topic partitions."""
        worker = start(self._ending)
        self._kind = worker.kind
        self._now_has(worker)
        self._thread = begin(name, self._run)

    def subscribe(self, wanted: Wanted, start: StartPosition, holders: Holders) -> HostedConsumer:
        """A consumer in this worker.

        Raises:
            BrokerError: What the broker raises, or the connection is closed.
            BrokerUnavailableError: There is no worker now (retriable).
        """
        worker, consumer = self._living(), HostedConsumer(wanted, self, next(_numbers), holders)
        with self._lock:
            self._consumers[consumer.number] = consumer
        try:
            self._subscribe(worker, consumer, start)
        except BaseException:
            # Another worker may have it by now, in the place of this one, or be about to.
            consumer.ended()
            self._forget(consumer)
            now = self._worker
            if now is not None and now is not worker:
                self._close_quietly(now, consumer.number)
            raise
        return consumer

    def _forget(self, consumer: HostedConsumer) -> None:
        """It is closed: what is said under its number counts for nobody."""
        with self._lock:
            self._consumers.pop(consumer.number, None)
            self._taken.pop(consumer.number, None)

    def _subscribe(self, worker: Worker, consumer: HostedConsumer, start: StartPosition) -> None:
        wanted = consumer.wanted
        self._ask(
            worker, "subscribe", number=consumer.number, topic=wanted.topic_partition.topic,
            partition=wanted.topic_partition.partition, subscription=wanted.subscription,
            start=wanted.hash_range.start, end=wanted.hash_range.end, position=start.value,
            consumer_name=wanted.consumer_name, receiver_queue_size=wanted.receiver_queue_size,
            receiver_queue_bytes=wanted.receiver_queue_bytes, columns=wanted.columns,
        )  # fmt: skip

    # -- for its consumers ------------------------------------------------------------------------

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None:
        self._ask(self._living(), "acknowledge", number=number, entries=entries)

    def last_entry(self, number: int) -> EntryId | None:
        last = self._ask(self._living(), "last_entry", number=number)
        return None if last is None else EntryId(*last)

    def close_consumer(self, number: int, *, for_another: bool) -> None:
        with self._lock:
            self._consumers.pop(number, None)
            self._taken.pop(number, None)
        worker = self._worker
        if worker is not None:
            self._ask(worker, "close_consumer", number=number, for_another=for_another)

    def facts(self) -> WorkerFacts:
        """What the status tells of it."""
        with self._lock:
            worker, consumers = self._worker, len(self._consumers)
            since_s, restarts = self._since_s, self._restarts
        pid, host = (None, None) if worker is None else (worker.pid, worker.machine)
        return WorkerFacts(self._kind, pid, host, consumers, since_s, restarts)

    def _now_has(self, worker: Worker | None) -> None:
        self._worker: Worker | None = worker
        self._since_s = time.monotonic()

    def took(self, number: int, taken: Taken) -> None:
        with self._lock:
            if number in self._consumers:
                # Two threads may tell it in another order than they took.
                self._taken[number] = max(taken, self._taken.get(number, taken))

    def _living(self) -> Worker:
        worker = self._worker
        if self._ending.is_set():
            raise BrokerError("The connection is closed, and its workers with it.")
        if worker is None:
            raise BrokerUnavailableError("A worker has ended, and the next one is not there yet.")
        return worker

    def _ask(self, worker: Worker, command: str, **arguments: Any) -> Any:
        try:
            return worker.ask(command, self._timeout_s, **arguments)
        except WorkerUnreachableError as exc:
            # Whether it was done is unknown: what it has is taken away from it.
            worker.kill()
            raise BrokerUnavailableError(exc.message) from exc

    # -- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.is_set():
            worker = self._worker
            try:
                if worker is None:
                    self._replace()
                else:
                    self._take(worker)
            except WorkerUnreachableError as exc:
                self._lose(worker, exc)

    def _take(self, worker: Worker) -> None:
        with self._lock:
            taken, self._taken = self._taken, {}
        for delivery in worker.take(taken):
            consumer = self._consumers.get(delivery.consumer)
            if consumer is not None:
                consumer.arrived(delivery)

    def _lose(self, worker: Worker | None, error: KeyShardError) -> None:
        if worker is None or self._ending.is_set():
            return
        worker.lost = True
        worker.end(0.0)
        with self._lock:
            self._now_has(None)
            lost = list(self._consumers.values())
            self._taken.clear()
        for consumer in lost:
            consumer.lost()
            consumer.troubled(f"The {worker.name} is gone, and another one is started.")
        _log.warning(
            "%s is gone (%s): its %d consumers go to another one",
            worker.name, error.message.rstrip("."), len(lost),
        )  # fmt: skip

    def _replace(self) -> None:
        """Start another worker, and give it the consumers of the one before."""
        try:
            worker = self._start(self._ending)
        except KeyShardError as exc:
            if self._ending.is_set():
                return
            again, self._why_none = str(exc) == self._why_none, str(exc)
            with self._lock:
                lost = list(self._consumers.values())
            refused = isinstance(exc, BrokerError)
            ends = refused and self._refusals.failed(exc, time.monotonic())
            for consumer in lost:
                consumer.troubled(exc.message)
                if ends:
                    consumer.arrived(Delivery(consumer.number, (), exc))
            level = logging.DEBUG if again else logging.WARNING
            _log.log(level, "no worker in the place of the one that is gone yet: %s", exc)
            self._ending.wait(START_AGAIN_S)
            return
        with self._lock:
            ending = self._ending.is_set()
            self._restarts += 1
            self._why_none = ""
            # Under numbers of their own: another one may subscribe as soon as the worker is there.
            lost, self._consumers = list(self._consumers.values()), {}
            for consumer in lost:
                consumer.regaining(next(_numbers))
                self._consumers[consumer.number] = consumer
            self._now_has(None if ending else worker)
        if ending:
            worker.end(0.0)
            return
        for consumer in lost:
            attempt = partial(self._brought_back, worker, consumer, Refusals())
            self._retrier.until_true(attempt)

    def _brought_back(self, worker: Worker, consumer: HostedConsumer, refusals: Refusals) -> Steps:
        """An attempt to subscribe again, until it succeeds or the consumer is closed."""
        yield consumer.topic_partition
        if not consumer.closed and self._worker is worker and not self._ending.is_set():
            try:
                self._subscribe(worker, consumer, StartPosition.EARLIEST)
            except KeyShardError as exc:
                _log.debug("%s is not subscribed again yet: %s", consumer.topic_partition, exc)
                consumer.troubled(exc.message)
                ends = refusals.failed(exc, time.monotonic())
                if ends:
                    consumer.arrived(Delivery(consumer.number, (), exc))
                return ends
            consumer.troubled("")
        if consumer.closed:
            self._forget(consumer)
            self._close_quietly(worker, consumer.number)
        return True

    def _close_quietly(self, worker: Worker, number: int) -> None:
        try:
            self._ask(worker, "close_consumer", number=number, for_another=False)
        except BrokerError as exc:
            _log.debug("closing consumer %d of a worker failed: %s", number, exc)

    def leave(self) -> None:
        """Close all its consumers, and tell the worker to give its ranges back. Idempotent."""
        with self._lock:
            self._ending.set()
            worker = self._worker
            consumers = list(self._consumers.values())
        self._retrier.close()
        for consumer in consumers:
            consumer.ended()
        if worker is not None:
            worker.leave()

    def close(self, deadline_s: float) -> None:
        """Wait for the end of the worker, until a monotonic time. Idempotent."""
        self.leave()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(max(0.1, deadline_s - time.monotonic()))
        self._thread.join(max(0.1, deadline_s - time.monotonic()))
