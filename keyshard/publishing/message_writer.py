"""Publishes single messages: they are collected for a moment, and become entries of one key each.

The collected messages become columns, which are encoded and published together. So the cost of a
message is little more than that of its future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise

from keyshard.broker.light_future import LightFuture
from keyshard.broker.port import Broker, EntryProducer, PublishOptions
from keyshard.columns.outgoing import OutgoingMessage, outgoing_from
from keyshard.config.sink import MIB, SinkConfig
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId
from keyshard.core.publishing import entry_ends, key_partition
from keyshard.errors import BrokerError, KeyShardError
from keyshard.publishing.batch_part import ENTRY_OVERHEAD
from keyshard.publishing.counts import SinkCounts
from keyshard.threads import begin

KEYLESS_RUN = 100
"""Messages without a key that go to one topic partition before the next takes over."""
KEYS_KEPT = 10_000
"""Keys whose topic partition is remembered."""


class MessageWriter:
    """Publishes messages of any thread; the messages of one thread keep their order per key.

    Args:
        broker: An open connection.
        config: Options of the sink.
        counts: Counts what is published; ``None``: nothing counts it.
    """

    def __init__(
        self, broker: Broker, config: SinkConfig, counts: SinkCounts | None = None
    ) -> None:
        self._broker = broker
        self._config = config
        self._counts = counts
        self._partitions = broker.partitions(config.topic, create=True)
        self._changed = threading.Condition()
        self._partition_of = lru_cache(KEYS_KEPT)(
            partial(key_partition, partitions=len(self._partitions), scheme=config.hashing_scheme)
        )
        self._opening = [threading.Lock() for _ in self._partitions]
        """Held while the producer of a topic partition is opened, which may take long."""
        self._queues: dict[int, _PartitionQueue] = {}
        """By the number of the topic partition. It is replaced as a whole, under ``_changed``, so
        it can be read without."""
        self._keyless = 0
        self._lingering = False
        """Whether messages are collected that the thread has to publish."""
        self._thread: threading.Thread | None = None
        self._failed: KeyShardError | None = None
        """First failure of a message since the last flush."""
        self._closed = False

    def send(self, message: OutgoingMessage) -> Future[MessageId]:
        """Publish a message; see :meth:`keyshard.KeyShardSink.send`."""
        partition = self._next_keyless() if message.key is None else self._partition_of(message.key)
        queue = self._queues.get(partition)
        if queue is None or queue.producer.has_ended():
            queue = self._open_queue(partition)
        size = message.size()
        if size > queue.message_bytes_max:
            queue.producer.check(message)
        future = LightFuture[MessageId]()
        while not queue.add(message, size, future):
            queue = self._open_queue(partition)
        # The thread resets the flag before it publishes. While the flag is set, the thread still
        # has to publish this message.
        if not self._lingering:
            with self._changed:
                self._lingering = True
                self._changed.notify_all()
        return future

    def collected(self) -> tuple[int, int]:
        """Return the number of collected messages that are not published yet, and their bytes."""
        sizes = [queue.collected() for queue in self._queues.values()]
        return sum(messages for messages, _ in sizes), sum(size for _, size in sizes)

    def flush(self) -> None:
        """Publish the collected messages, and wait until everything is confirmed.

        Raises:
            KeyShardError: A message has failed since the last flush.
        """
        queues = self._queues.values()
        for queue in queues:
            queue.publish()
        for queue in queues:
            with suppress(KeyShardError):  # it has ended: its messages have failed
                queue.producer.flush()
        with self._changed:
            failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the thread and all producers. Unconfirmed messages fail. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for queue in self._queues.values():
            queue.close()

    def _next_keyless(self) -> int:
        with self._changed:
            self._keyless += 1
            return self._keyless // KEYLESS_RUN % len(self._partitions)

    def _open_queue(self, partition: int) -> _PartitionQueue:
        """Return the queue of a topic partition. If its producer has ended, open another one."""
        ended = None
        with self._changed:
            queue = self._queues.get(partition)
            if queue is not None and queue.producer.has_ended():
                ended = queue
                self._queues = {at: one for at, one in self._queues.items() if at != partition}
        if ended is not None:
            ended.close()
        with self._opening[partition]:
            with self._changed:
                if self._closed:
                    raise closed(self._config)
                if self._thread is None:
                    self._thread = begin("keyshard-sink", self._linger, fail=self._end)
                queue = self._queues.get(partition)
            return queue or self._new_queue(partition)

    def _new_queue(self, partition: int) -> _PartitionQueue:
        pending = max(MIB, self._config.pending_bytes_max // len(self._partitions))
        collected = min(self._config.entry_bytes_max, pending // 4)
        how = PublishOptions(
            send_timeout_s=self._config.send_timeout_ms / 1000,
            pending_messages_max=2**31,
            # The rest is for messages that are collected while others are encoded.
            pending_bytes_max=pending - 2 * collected,
            compression=self._config.compression,
        )
        producer = self._broker.entry_producer(self._partitions[partition], how)
        queue = _PartitionQueue(producer, self._config, collected, self._note, self._counts)
        with self._changed:
            if not self._closed:
                self._queues = {**self._queues, partition: queue}
                return queue
        queue.close()
        raise closed(self._config)

    def _linger(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lingering)
                if self._closed:
                    return
            time.sleep(self._config.linger_ms / 1000)
            with self._changed:
                self._lingering = False
            for queue in self._queues.values():
                queue.publish()

    def _note(self, error: KeyShardError) -> None:
        if self._counts is not None:
            self._counts.note_error(error)
        with self._changed:
            self._failed = self._failed or error

    def _end(self, error: KeyShardError) -> None:
        self._note(error)
        self.close()


def closed(config: SinkConfig) -> BrokerError:
    """Return the error of a sink that is closed."""
    return BrokerError(f"The sink of {config.topic} is closed.")


class _PartitionQueue:
    """Messages for one topic partition, in the order of the calls."""

    def __init__(
        self,
        producer: EntryProducer,
        config: SinkConfig,
        bytes_max: int,
        note: Callable[[KeyShardError], None],
        counts: SinkCounts | None = None,
    ) -> None:
        self.producer = producer
        self.message_bytes_max = producer.message_bytes_max - ENTRY_OVERHEAD
        """Largest size of a message that is surely accepted, bytes."""
        self._config = config
        self._bytes_max = bytes_max
        """Size of the collected messages from which they are published, bytes."""
        self._note = note
        self._counts = counts
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        """Keeps the order of publishing. Other threads collect messages meanwhile."""
        self._messages: list[OutgoingMessage] = []
        self._sizes: list[int] = []
        self._futures: list[Future[MessageId]] = []
        self._bytes = 0
        self._next_id = 0
        self._closed = False

    def add(self, message: OutgoingMessage, size: int, future: Future[MessageId]) -> bool:
        """Add a message; publish the collected ones if they fill an entry.

        Returns:
            Whether it was added: the queue is open.
        """
        with self._lock:
            if self._closed:
                return False
            self._messages.append(message)
            self._sizes.append(size)
            self._futures.append(future)
            self._bytes += size
            full = (
                len(self._messages) >= self._config.entry_messages_max
                or self._bytes >= self._bytes_max
            )
        if full:
            self.publish()
        return True

    def collected(self) -> tuple[int, int]:
        """Return the number of collected messages, and their bytes."""
        with self._lock:
            return len(self._messages), self._bytes

    def publish(self) -> None:
        """Publish the collected messages."""
        with self._publishing:
            with self._lock:
                messages, sizes, futures = self._messages, self._sizes, self._futures
                size = self._bytes
                self._messages, self._sizes, self._futures, self._bytes = [], [], [], 0
            if messages:
                self._publish(messages, sizes, futures, size)

    def close(self) -> None:
        """Close the producer. Unconfirmed messages fail."""
        with self._lock:
            self._closed = True
        with suppress(KeyShardError):
            self.producer.close()
        # The collected messages fail, because their producer is closed.
        self.publish()

    def _publish(
        self,
        messages: Sequence[OutgoingMessage],
        sizes: Sequence[int],
        futures: Sequence[Future[MessageId]],
        size: int,
    ) -> None:
        by_key: dict[str | None, list[int]] = {}
        for row, one in enumerate(messages):
            by_key.setdefault(one.routing_key, []).append(row)
        order = list(chain.from_iterable(by_key.values()))
        ordered = [messages[row] for row in order]
        delayed = [row for row, one in enumerate(ordered) if one.deliver_at_ms is not None]
        self.message_bytes_max = self.producer.message_bytes_max - ENTRY_OVERHEAD
        rows = outgoing_from(ordered)
        ends = entry_ends(
            list(accumulate(map(len, by_key.values()))),
            list(accumulate(sizes[row] for row in order)),
            self._config.entry_messages_max,
            min(self._config.entry_bytes_max, self.message_bytes_max - rows.keys_bytes_max()),
            delayed,
        )
        sent = self.producer.publish_all(rows, ends, self._next_id)
        self._next_id += len(order)
        if self._counts is not None:
            self._counts.add(self.producer.topic_partition, ends, size, sent)
        for (start, stop), done in zip(pairwise([0, *ends]), sent, strict=True):
            of_entry = [futures[row] for row in order[start:stop]]
            done.add_done_callback(partial(self._confirm, of_entry))

    def _confirm(self, futures: Sequence[Future[MessageId]], done: Future[EntryId | None]) -> None:
        error = done.exception()
        if error is not None:
            self._fail(futures, error)
            return
        stored = done.result() or _UNKNOWN
        for index, future in enumerate(futures):
            with suppress(InvalidStateError):
                future.set_result(MessageId(stored.ledger, stored.entry, index))

    def _fail(self, futures: Sequence[Future[MessageId]], error: BaseException) -> None:
        if isinstance(error, KeyShardError):
            self._note(error)
        for future in futures:
            with suppress(InvalidStateError):
                future.set_exception(error)


_UNKNOWN = EntryId(-1, -1)
"""Id of an entry that was stored before its connection was lost: the broker does not say which."""
