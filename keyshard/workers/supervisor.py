"""Supervises one worker: takes its consumers' deliveries, and replaces the worker if it dies."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from keyshard.base_error import AGAIN
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.reports import WorkerFacts
from keyshard.broker.retry import Retrier, Steps
from keyshard.core.position.entry import EntryId
from keyshard.core.process_end import ending, remedy
from keyshard.core.refusal_timer import RefusalTimer
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    WorkerUnreachableError,
)
from keyshard.threads import begin
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.encoding import DeliveredTotals, WorkerDelivery
from keyshard.workers.worker import Worker

START_AGAIN_S = 1.0
"""Wait before another attempt to start a worker, seconds."""
MARGIN_S = 5.0
"""Time that an answer gets in addition to the client's operation timeout, seconds."""

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


class WorkerSupervisor:
    """Implements :class:`~keyshard.workers.consumer.Supervisor` over a worker that may die.

    Args:
        start: Starts a worker; it stops waiting when the event that it gets is set.
        operation_timeout_s: Longest time of one request to the broker, seconds.
        name: Name of its thread.

    Raises:
        KeyShardError: The worker does not start, or the broker refuses it.
    """

    def __init__(
        self, start: Callable[[threading.Event], Worker], operation_timeout_s: float, name: str
    ) -> None:
        self._start = start
        self._timeout_s = operation_timeout_s + MARGIN_S
        self._lock = threading.Lock()
        self._consumers: dict[int, RemoteConsumer] = {}
        self._taken: dict[int, DeliveredTotals] = {}
        self._ending = threading.Event()
        self._restarts = 0
        self._refusals = RefusalTimer()
        """Outcome of the attempts to start a replacement."""
        self._why_none = ""
        self._retrier = Retrier(name="keyshard-resubscribe-worker")
        """Subscribes consumers again in the replacement; its lanes are topic partitions."""
        worker = start(self._ending)
        self._kind, self._keeps_content = worker.kind, worker.keeps_content
        self._set_worker(worker)
        self._thread = begin(name, self._run)

    def subscribe(
        self, spec: SubscriptionSpec, start: StartPosition, holders: EntryHolders
    ) -> RemoteConsumer:
        """Subscribe a consumer in this worker.

        Raises:
            BrokerError: The broker raised it, or the connection is closed.
            BrokerUnavailableError: There is no worker now (retriable).
        """
        worker, consumer = self._live_worker(), RemoteConsumer(spec, self, next(_numbers), holders)
        with self._lock:
            self._consumers[consumer.number] = consumer
        try:
            self._subscribe(worker, consumer, start)
        except BaseException:
            # A replacement of this worker may have the consumer by now, or be about to get it.
            consumer.ended()
            self._forget(consumer)
            now = self._worker
            if now is not None and now is not worker:
                self._close_quietly(now, consumer.number)
            raise
        return consumer

    def _forget(self, consumer: RemoteConsumer) -> None:
        """Forget a closed consumer, so that later deliveries under its number are dropped."""
        with self._lock:
            self._consumers.pop(consumer.number, None)
            self._taken.pop(consumer.number, None)

    def _subscribe(self, worker: Worker, consumer: RemoteConsumer, start: StartPosition) -> None:
        spec = consumer.spec
        self._request(
            worker, "subscribe", number=consumer.number, topic=spec.topic_partition.topic,
            partition=spec.topic_partition.partition, subscription=spec.subscription,
            start=spec.hash_range.start, end=spec.hash_range.end, position=start.value,
            consumer_name=spec.consumer_name, receiver_queue_size=spec.receiver_queue_size,
            receiver_queue_bytes=spec.receiver_queue_bytes, columns=spec.columns,
            message_bytes=spec.message_bytes,
        )  # fmt: skip

    # -- Called by the consumers -----------------------------------------------------------------

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None:
        self._request(self._live_worker(), "acknowledge", number=number, entries=entries)

    def last_entry(self, number: int) -> EntryId | None:
        last = self._request(self._live_worker(), "last_entry", number=number)
        return None if last is None else EntryId(*last)

    def close_consumer(self, number: int, *, for_another: bool) -> None:
        with self._lock:
            self._consumers.pop(number, None)
            self._taken.pop(number, None)
        worker = self._worker
        if worker is not None:
            self._request(worker, "close_consumer", number=number, for_another=for_another)

    def facts(self) -> WorkerFacts:
        """Return the facts that the status shows."""
        with self._lock:
            worker, consumers = self._worker, len(self._consumers)
            since_s, restarts = self._since_s, self._restarts
        pid, host = (None, None) if worker is None else (worker.pid, worker.machine)
        return WorkerFacts(self._kind, pid, host, consumers, since_s, restarts, self._keeps_content)

    def _set_worker(self, worker: Worker | None) -> None:
        self._worker: Worker | None = worker
        self._since_s = time.monotonic()

    def took(self, number: int, taken: DeliveredTotals) -> None:
        with self._lock:
            if number in self._consumers:
                # Two threads may report their counts out of order.
                self._taken[number] = max(taken, self._taken.get(number, taken))

    def _live_worker(self) -> Worker:
        worker = self._worker
        if self._ending.is_set():
            raise BrokerError("The connection and its workers are closed.")
        if worker is None:
            raise BrokerUnavailableError(
                "A worker has ended, and its replacement is not ready yet.", AGAIN
            )
        return worker

    def _request(self, worker: Worker, command: str, **arguments: Any) -> Any:
        try:
            return worker.request(command, self._timeout_s, **arguments)
        except WorkerUnreachableError as exc:
            # Whether the command ran is unknown, so the worker must lose its ranges.
            worker.kill()
            raise BrokerUnavailableError(exc.problem, exc.remedy) from exc

    # -- The supervisor thread -------------------------------------------------------------------

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
        status = worker.exit_status()
        worker.end(0.0)
        with self._lock:
            self._set_worker(None)
            lost = list(self._consumers.values())
            self._taken.clear()
        how, hint = ("has ended", "") if status is None else (ending(status), remedy(status))
        for consumer in lost:
            consumer.lost()
            consumer.report_problem(f"The {worker.name} {how}, and a replacement is starting.")
        _log.warning(
            "%s %s (%s): its %d consumers move to a replacement. %s",
            worker.name, how, error.message.rstrip("."), len(lost), hint,
        )  # fmt: skip

    def _replace(self) -> None:
        """Start a replacement, and give it the consumers of the dead worker."""
        try:
            worker = self._start(self._ending)
        except KeyShardError as exc:
            if self._ending.is_set():
                return
            again, self._why_none = exc.summary == self._why_none, exc.summary
            with self._lock:
                lost = list(self._consumers.values())
            refused = isinstance(exc, BrokerError)
            ends = refused and self._refusals.failed(exc, time.monotonic())
            for consumer in lost:
                consumer.report_problem(exc.message)
                if ends:
                    consumer.arrived(WorkerDelivery(consumer.number, (), exc))
            level = logging.DEBUG if again else logging.WARNING
            _log.log(level, "the replacement of a worker is not ready yet: %s", exc.summary)
            self._ending.wait(START_AGAIN_S)
            return
        with self._lock:
            ending = self._ending.is_set()
            self._restarts += 1
            self._why_none = ""
            # New numbers, because others may subscribe as soon as the worker is set.
            lost, self._consumers = list(self._consumers.values()), {}
            for consumer in lost:
                consumer.regaining(next(_numbers))
                self._consumers[consumer.number] = consumer
            self._set_worker(None if ending else worker)
        if ending:
            worker.end(0.0)
            return
        for consumer in lost:
            attempt = partial(self._brought_back, worker, consumer, RefusalTimer())
            self._retrier.until_true(attempt)

    def _brought_back(
        self, worker: Worker, consumer: RemoteConsumer, refusals: RefusalTimer
    ) -> Steps:
        """Subscribe a consumer again, until that succeeds, fails for good, or it is closed."""
        yield consumer.topic_partition
        if not consumer.closed and self._worker is worker and not self._ending.is_set():
            try:
                self._subscribe(worker, consumer, StartPosition.EARLIEST)
            except KeyShardError as exc:
                _log.debug(
                    "%s is not subscribed again yet: %s", consumer.topic_partition, exc.summary
                )
                consumer.report_problem(exc.message)
                ends = refusals.failed(exc, time.monotonic())
                if ends:
                    consumer.arrived(WorkerDelivery(consumer.number, (), exc))
                return ends
            consumer.report_problem("")
        if consumer.closed:
            self._forget(consumer)
            self._close_quietly(worker, consumer.number)
        return True

    def _close_quietly(self, worker: Worker, number: int) -> None:
        try:
            self._request(worker, "close_consumer", number=number, for_another=False)
        except BrokerError as exc:
            _log.debug("closing consumer %d of a worker failed: %s", number, exc.summary)

    def leave(self) -> None:
        """End all its consumers, and tell the worker to give its ranges back. Idempotent."""
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
        """Wait for the end of the worker, until a deadline on the monotonic clock. Idempotent."""
        self.leave()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(max(0.1, deadline_s - time.monotonic()))
        self._thread.join(max(0.1, deadline_s - time.monotonic()))
