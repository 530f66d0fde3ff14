"""The worker's side: consumers, the threads that receive from them, and what waits to be taken."""

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

from keyshard.broker.hosted.wire import NOTHING, Delivery, Taken, keys_of, packed
from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.broker.retrier import Retrier, Steps
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.refusals import Refusals, words_of
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError, BrokerUnavailableError, KeyShardError, UnreadableEntryError
from keyshard.threads import Pool, begin, unexpected

FULL_WAIT_S = 0.02
"""Longest wait for something to give while a consumer waits until more of it was taken, seconds."""
CLOSED_MAX = 10_000
"""Numbers of closed consumers that are remembered: a question that is late opens none again."""
ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Memory of columns after which an answer is closed, bytes. An entry that is held keeps its whole
answer in memory, as it keeps its delivery where the client is in the same process."""
UNLIMITED_BYTES = 1 << 60
ANSWER_ROWS_MAX = 20_000
"""Messages after which an answer is closed."""
RECEIVE_THREADS = 2
"""Threads that receive."""
CLOSE_THREADS = 8
"""Consumers closed at the same time."""
REOPEN_WAIT_S = 1.0
"""Longest wait between two attempts to subscribe a consumer anew, seconds."""
LOOK_S = 0.25
"""Time between two looks at who is connected, seconds."""
QUIET_S = 1.0
"""Silence after which a consumer has given all, also if that ends inside an entry, seconds."""

_log = logging.getLogger(__name__)


class _Hosted:
    """One consumer."""

    def __init__(
        self, number: int, consumer: Consumer, ahead_max: Taken, another: Callable[[], Consumer]
    ) -> None:
        self.number = number
        self.consumer = consumer
        self.another = another
        """Subscribes another consumer in its place."""
        self.lacking = False
        """Whether its consumer is closed, and another one is to take its place."""
        self.refusals = Refusals()
        """Outcome of the attempts to subscribe the other consumer."""
        self.ahead_max = ahead_max
        self.using = threading.Lock()
        """Held while it is received from, and while it is closed."""
        self.given = self.taken = Taken()
        """Messages and bytes that it gave, and those of them that were taken. They differ by at
        most its queue and the rest of a delivery."""
        self.connected, self.trouble = True, ""
        """As they were told last."""
        self.open = False
        """Whether what it gave ends before the last index of an entry."""
        self.idle_since_s: float | None = None
        """Since when it has nothing, with the connection that it has now."""
        self.closed = False

    @property
    def is_full(self) -> bool:
        """Whether it gives nothing until more is taken."""
        (given, given_bytes), (taken, taken_bytes) = self.given, self.taken
        most, most_bytes = self.ahead_max
        return given - taken >= most or given_bytes - taken_bytes >= most_bytes


class Host:
    """Consumers of one connection. Its methods may be called from any thread.

    Args:
        broker: The connection; it is closed with the host.
        keeps: Whether the content of messages stays here, under the number of its answer, until
            that is released.
    """

    def __init__(self, broker: Broker, *, keeps: bool = False) -> None:
        self._broker = broker
        self._keeps = keeps
        self._kept: dict[int, pa.RecordBatch] = {}
        self._changed = threading.Condition()
        self._hosted: dict[int, _Hosted] = {}
        self._opening: dict[int, threading.Lock] = {}
        """Of numbers that are subscribed or closed now; a question may come twice at once."""
        self._closed: deque[int] = deque(maxlen=CLOSED_MAX)
        self._ready: deque[_Hosted] = deque()
        self._retrier = Retrier(REOPEN_WAIT_S, name="keyshard-reopen")
        self._full: set[int] = set()
        """Who waits until more of it was taken."""
        self._open: set[int] = set()
        """Of whom is to be told that it has given all, once it has."""
        self._waiting: deque[tuple[Delivery, int, int]] = deque()
        self._looked_s = 0.0
        self._taking = threading.Lock()
        """Held while something is taken: a question that comes twice has one answer."""
        self._answered = 0
        self._answer: tuple[dict[str, Any], pa.RecordBatch] = ({}, NOTHING)
        self._ended = False
        self._error: KeyShardError | None = None
        """The error that ended one of its threads."""
        self._threads = [
            begin(f"keyshard-pump-{i}", self._pump, fail=self._fail) for i in range(RECEIVE_THREADS)
        ]

    # -- commands ---------------------------------------------------------------------------------

    # Each is called with what its JSON says.

    def subscribe(
        self, *, number: int, topic: str, partition: int, subscription: str, start: int, end: int,
        position: str, consumer_name: str, receiver_queue_size: int,
        receiver_queue_bytes: int | None = None, columns: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """Host a consumer under a number of the caller's choice. Idempotent.

        Raises:
            KeyShardError: What the broker raises.
        """
        with self._alone_with(number):
            if number in self._hosted or number in self._closed:
                return
            consumer_from = partial(
                self._broker.subscribe,
                TopicPartition(topic, partition), subscription, HashRange(start, end),
                consumer_name=consumer_name, receiver_queue_size=receiver_queue_size,
                receiver_queue_bytes=receiver_queue_bytes, columns=columns,
            )  # fmt: skip
            consumer = consumer_from(start=StartPosition(position))
            hosted = _Hosted(
                number, consumer,
                Taken(receiver_queue_size, receiver_queue_bytes or UNLIMITED_BYTES),
                partial(consumer_from, start=StartPosition.EARLIEST),
            )  # fmt: skip
            with self._changed:
                if not self._ended:
                    self._hosted[number] = hosted
                    self._waiting.append((Delivery(number, (), connected=True), 0, 0))
                    self._ready.append(hosted)
                    self._changed.notify_all()
                    return
            consumer.close()

    @contextmanager
    def _alone_with(self, number: int) -> Iterator[None]:
        """One question about a number at a time."""
        with self._changed:
            gate = self._opening.setdefault(number, threading.Lock())
        with gate:
            try:
                yield
            finally:
                with self._changed:
                    self._opening.pop(number, None)

    def acknowledge(self, *, number: int, entries: list[list[int]]) -> None:
        """As the port's."""
        self._one(number).consumer.acknowledge([EntryId(*one) for one in entries])

    def last_entry(self, *, number: int) -> list[int] | None:
        """As the port's."""
        last = self._one(number).consumer.last_entry()
        return None if last is None else list(last)

    def close_consumer(self, *, number: int, for_another: bool) -> None:
        """As the port's ``close``; nothing of it is given afterwards. Idempotent."""
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

    def _one(self, number: int) -> _Hosted:
        hosted = self._hosted.get(number)
        if hosted is None and number in self._closed:
            raise BrokerError(f"The worker hosts no consumer {number}: it is closed.")
        if hosted is None:
            # Another worker had it under that number, or it is subscribed just now.
            raise BrokerUnavailableError(f"The worker hosts no consumer {number} yet.")
        if hosted.lacking:
            raise BrokerUnavailableError(f"Consumer {number} of the worker is subscribed anew.")
        return hosted

    # -- what was received ------------------------------------------------------------------------

    def take(
        self, seq: int, taken: Mapping[int, Sequence[int]], wait_s: float,
        released: Sequence[int] = (),
    ) -> tuple[dict[str, Any], pa.RecordBatch]:  # fmt: skip
        """What was received since the answer before; waits for the first of it.

        Args:
            seq: Number of the answer that is asked for: 1 more than that of the last one that
                arrived. The same number has the same answer.
            taken: Messages and bytes taken of some consumers since their beginning.
            wait_s: Longest wait, seconds.
            released: Numbers of answers whose content nobody needs any more.

        Raises:
            BrokerError: An older answer is asked for: the asker is late.
            UnexpectedError: One of its threads ended.
        """
        with self._taking:
            if self._error is not None:
                raise self._error
            if seq == self._answered:
                return self._answer
            if seq != self._answered + 1:
                raise BrokerError(
                    f"Answer {seq} of a worker was asked for after answer {self._answered}."
                )
            for number in released:
                self._kept.pop(number, None)
            self._look()
            with self._changed:
                self._let_on(taken)
                if self._full:
                    wait_s = min(wait_s, FULL_WAIT_S)
                self._changed.wait_for(lambda: self._waiting or self._ended, wait_s)
                deliveries = self._next()
            listed, content = packed(deliveries)
            kept = self._keeps and content.num_rows > 0
            if kept:
                self._kept[seq] = content
                content = keys_of(deliveries, content)
            self._answered = seq
            self._answer = {"deliveries": listed, "kept": kept}, content
            return self._answer

    def content(self, runs: Sequence[Sequence[int]], columns: Sequence[str]) -> pa.RecordBatch:
        """Columns of what is kept.

        Args:
            runs: The number of an answer, the first row there, and how many; rows come in this
                order.
            columns: Names of columns.

        Raises:
            BrokerError: Some of it is kept no longer, or never was.
        """
        found: list[pa.RecordBatch] = []
        for number, start, rows in runs:
            kept = self._kept.get(number)
            if kept is None:
                raise BrokerError(f"The worker keeps no content {number}: it was released.")
            found.append(kept.select(columns).slice(start, rows))
        return pa.concat_batches(found)

    def _let_on(self, taken: Mapping[int, Sequence[int]]) -> None:
        """Receive again for those of whom enough was taken."""
        for number, count in taken.items():
            hosted = self._hosted.get(number)
            if hosted is not None:
                hosted.taken = max(hosted.taken, Taken(*count))
                if number in self._full and not hosted.is_full:
                    self._full.discard(number)
                    self._ready.append(hosted)
                    self._changed.notify_all()

    def _look(self) -> None:
        """Tell who has lost its connection, or has it again."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        with self._changed:
            all_hosted = list(self._hosted.values())
        for hosted in all_hosted:
            # Who receives from it tells it, too, and must not be told something older.
            if hosted.using.acquire(blocking=False):
                try:
                    # Without the other lock: a client may hold one here, and where it rings.
                    self._tell(hosted, hosted.consumer.is_connected(), _trouble_of(hosted))
                    self._tell_quiet(hosted, now_s)
                finally:
                    hosted.using.release()

    def _tell(self, hosted: _Hosted, connected: bool, trouble: str) -> None:
        """Record whether it has a connection, and its trouble if it has any."""
        with self._changed:
            changed = connected != hosted.connected
            if hosted.closed or (not changed and words_of(trouble) == words_of(hosted.trouble)):
                return
            hosted.connected, hosted.trouble = connected, trouble
            told = Delivery(hosted.number, (), connected=connected, trouble=trouble)
            self._waiting.append((told, 0, 0))
            if changed:
                if hosted.idle_since_s is not None:
                    # What a connection took with it comes again with the next.
                    hosted.idle_since_s = time.monotonic()
                if hosted.open:
                    self._open.add(hosted.number)

    def _tell_quiet(self, hosted: _Hosted, now_s: float) -> None:
        """Say once that it has given all, if that ends inside an entry.

        Who hears nothing of it cannot know: what came may wait here, while this process stands
        still.
        """
        with self._changed:
            since_s = hosted.idle_since_s
            if hosted.number not in self._open or not hosted.connected or since_s is None:
                return
            if now_s - since_s > QUIET_S:
                self._open.discard(hosted.number)
                self._waiting.append((Delivery(hosted.number, (), gave_all=True), 0, 0))

    def _next(self) -> list[Delivery]:
        deliveries: list[Delivery] = []
        rows = size_bytes = 0
        while self._waiting and rows < ANSWER_ROWS_MAX and size_bytes < ANSWER_BYTES_MAX:
            delivery, more_rows, more_bytes = self._waiting.popleft()
            deliveries.append(delivery)
            rows += more_rows
            size_bytes += more_bytes
        return deliveries

    # -- its own threads ---------------------------------------------------------------------------

    def _fail(self, error: KeyShardError) -> None:
        self._error = error

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
                self._give(hosted, Delivery(hosted.number, (), error))

    def _receive(self, hosted: _Hosted) -> None:
        with hosted.using:
            if hosted.closed or hosted.lacking:
                return
            connected = hosted.consumer.is_connected()
            self._tell(hosted, connected, _trouble_of(hosted))
            try:
                blocks = hosted.consumer.receive(0)
            except UnreadableEntryError as exc:
                # What lies behind it comes next.
                self._give(hosted, Delivery(hosted.number, (), exc))
                return
            if not blocks:
                hosted.idle_since_s = time.monotonic()
                hosted.consumer.when_ready(lambda: self._ring(hosted))
            elif connected:
                # Before anybody tells more of its connection: it is in order with that.
                self._give(hosted, Delivery(hosted.number, blocks))
            else:
                self._let_pass(hosted)

    def _let_pass(self, hosted: _Hosted) -> None:
        """Give nothing of what a client kept from before it lost its connection.

        The beginning of its first entry may have gone with the connection. It comes again with the
        next one, unless that came meanwhile and brought it: then another consumer gets all of it.
        """
        if hosted.consumer.is_connected():
            hosted.lacking = True
            self._retrier.until_true(partial(self._replaced, hosted))
        else:
            self._ring(hosted)

    def _replaced(self, hosted: _Hosted) -> Steps:
        """Let another consumer take the place of one that is to be closed."""
        yield hosted.consumer.topic_partition
        _close(hosted.consumer, for_another=True)
        if hosted.closed or self._ended:
            return True
        try:
            another = hosted.another()
        except KeyShardError as exc:
            _log.debug("consumer %d is not subscribed anew yet: %s", hosted.number, exc)
            if not hosted.refusals.failed(exc, time.monotonic()):
                return False
            self._give(hosted, Delivery(hosted.number, (), exc))
            return True
        hosted.refusals.succeeded()
        with hosted.using:
            if not hosted.closed:
                hosted.consumer, hosted.lacking = another, False
        if hosted.lacking:
            _close(another)
        else:
            self._ring(hosted)
        return True

    def _ring(self, hosted: _Hosted) -> None:
        with self._changed:
            hosted.idle_since_s = None
            self._ready.append(hosted)
            self._changed.notify_all()

    def _give(self, hosted: _Hosted, delivery: Delivery) -> None:
        more = Taken().plus(delivery)
        with self._changed:
            if hosted.closed:
                return
            self._waiting.append((delivery, *more))
            if delivery.blocks:
                last = delivery.blocks[-1]
                hosted.open = last.indices[-1] != last.batch_size - 1
                if hosted.open:
                    self._open.add(hosted.number)
                else:
                    self._open.discard(hosted.number)
            hosted.given = Taken(*map(add, hosted.given, more))
            if hosted.is_full:
                self._full.add(hosted.number)
            elif delivery.goes_on:
                self._ready.append(hosted)
            self._changed.notify_all()

    def close(self) -> None:
        """Give every range back. Idempotent."""
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


def _trouble_of(hosted: _Hosted) -> str:
    error = hosted.refusals.error
    return hosted.consumer.trouble() if error is None else error.message


def _close(consumer: Consumer, *, for_another: bool = False) -> None:
    try:
        consumer.close(for_another=for_another)
    except BrokerError as exc:
        _log.debug("closing a consumer of %s failed: %s", consumer.topic_partition, exc)
