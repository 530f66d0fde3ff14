"""One worker and its consumers: takes what they receive, and replaces it when it dies."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keyshard.broker.hosted.consumer import Holders, HostedConsumer, Wanted
from keyshard.broker.hosted.worker import Worker
from keyshard.broker.port import StartPosition, WorkerFacts
from keyshard.core.position.entry import EntryId
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    KeyShardError,
    WorkerUnreachableError,
)

AGAIN_S = (0.1, 5.0)
"""Shortest and longest pause before the next attempt, seconds; it doubles."""
START_AGAIN_S = 1.0
"""Pause before another attempt to start a worker, seconds."""
THREADS_MAX = 8
"""Consumers subscribed again at the same time."""
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
        self._taken: dict[int, int] = {}
        self._ending = threading.Event()
        self._restarts = 0
        self._why_none = ""
        worker = start(self._ending)
        self._kind = worker.kind
        self._now_has(worker)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

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
            columns=wanted.columns,
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

    def took(self, number: int, count: int) -> None:
        with self._lock:
            if number in self._consumers:
                self._taken[number] = count

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
            except Exception:  # noqa: BLE001 - the loop goes on, with another worker
                _log.exception("asking a worker ended unexpectedly")
                self._lose(worker, None)
                self._ending.wait(START_AGAIN_S)

    def _take(self, worker: Worker) -> None:
        with self._lock:
            taken, self._taken = self._taken, {}
        for delivery in worker.take(taken):
            consumer = self._consumers.get(delivery.consumer)
            if consumer is not None:
                consumer.arrived(delivery)

    def _lose(self, worker: Worker | None, error: KeyShardError | None) -> None:
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
        _log.warning(
            "%s is gone (%s): its %d consumers go to another one",
            worker.name, "it answered nonsense" if error is None else error.message.rstrip("."),
            len(lost),
        )  # fmt: skip

    def _replace(self) -> None:
        """Start another worker, and give it the consumers of the one before."""
        try:
            worker = self._start(self._ending)
        except KeyShardError as exc:
            if self._ending.is_set():
                return
            again, self._why_none = str(exc) == self._why_none, str(exc)
            level = logging.DEBUG if again else logging.WARNING
            _log.log(level, "no worker in the place of the one that is gone yet: %s", exc)
            self._ending.wait(START_AGAIN_S)
            return
        with self._lock:
            ending = self._ending.is_set()
            self._restarts += 1
            self._why_none = ""
            self._now_has(None if ending else worker)
        if ending:
            worker.end(0.0)
            return
        threading.Thread(
            target=self._bring_back, args=(worker,), name="keyshard-bring-back", daemon=True
        ).start()

    def _bring_back(self, worker: Worker) -> None:
        """Subscribe again what the worker before had."""
        with self._lock:
            lost = list(self._consumers.values())
        with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-bring-back") as pool:
            for consumer in lost:
                pool.submit(self._bring_one_back, worker, consumer)

    def _bring_one_back(self, worker: Worker, consumer: HostedConsumer) -> None:
        """As a client does that lost its connection: it tries until it has it, or is closed."""
        with self._lock:
            if self._consumers.pop(consumer.number, None) is None:
                return
            consumer.regaining(next(_numbers))
            self._consumers[consumer.number] = consumer
        pause_s, most_s = AGAIN_S
        while not consumer.closed and self._worker is worker and not self._ending.is_set():
            try:
                self._subscribe(worker, consumer, StartPosition.EARLIEST)
            except KeyShardError as exc:
                _log.debug("%s is not subscribed again yet: %s", consumer.topic_partition, exc)
                self._ending.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, most_s)
                continue
            break
        if consumer.closed:
            self._forget(consumer)
            self._close_quietly(worker, consumer.number)

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
