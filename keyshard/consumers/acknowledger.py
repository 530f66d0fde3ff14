"""Acknowledges released entries in the background, one by one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from keyshard.broker.port import Consumer
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import AcknowledgeError, BrokerError, KeyShardError
from keyshard.threads import begin

ENTRIES_PER_TURN = 1_000
"""Entries handed to the client at once."""
ENTRIES_WAITING_MAX = 5_000_000
"""Most entries that wait; more than the broker leaves unacknowledged by default."""

RETRY_S = 0.1
"""Time between two attempts while no consumer accepts a waiting entry, seconds."""

_log = logging.getLogger(__name__)


class Acknowledger:
    """Acknowledges queued entries in one daemon thread.

    The thread passes all waiting entries of a topic partition to a consumer together, from any
    number of batches. If consumers are in workers, each call is a request over the network.

    Any consumer of a topic partition can acknowledge an entry, also one that another consumer
    received. If the client loses acknowledgements in a crash, the broker delivers the entries
    again. They are recognised and acknowledged again.

    Args:
        consumer_of: Returns a connected consumer of a topic partition, or raises a retriable error;
            ``None`` for a deleted topic partition, whose entries are dropped.
        still: Returns the entries that are stored as they were received, or raises a retriable
            error; the other entries are dropped.
        timeout_s: Time after which a failing acknowledgement ends the source, seconds.
        fail: Called with the error that ends this thread.
    """

    def __init__(
        self,
        consumer_of: Callable[[TopicPartition], Consumer | None],
        still: Callable[[TopicPartition, Sequence[EntryId]], Sequence[EntryId]],
        timeout_s: float,
        fail: Callable[[KeyShardError], None],
    ) -> None:
        self._consumer_of = consumer_of
        self._still = still
        self._timeout_s = timeout_s
        self._queue: dict[TopicPartition, list[EntryId]] = {}
        """Waiting entries, without those that are being handed over. The longest wait comes
        first."""
        self._waiting = 0
        self._away_since_s: dict[TopicPartition, float] = {}
        self._changed = threading.Condition()
        self._fail = fail
        self._stopping = threading.Event()
        self._failed = False
        self.acknowledged = 0
        """Entries handed to the client so far."""
        self._thread = begin("keyshard-ack", self._run, fail=self._ended_by)

    @property
    def waiting(self) -> int:
        """Entries not yet handed to the client."""
        return self._waiting

    def submit(self, topic_partition: TopicPartition, entries: Sequence[EntryId]) -> None:
        """Queue entries of committed batches; never waits.

        Raises:
            AcknowledgeError: Too many entries wait: the broker has taken none for long.
        """
        with self._changed:
            if self._waiting + len(entries) > ENTRIES_WAITING_MAX:
                raise AcknowledgeError(
                    f"{self._waiting} entries wait for their acknowledgement in {topic_partition} "
                    "and other topic partitions.",
                    waiting=self._waiting,
                )
            self._queue.setdefault(topic_partition, []).extend(entries)
            self._waiting += len(entries)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all entries are handed over, at most ``timeout_s`` seconds.

        Returns:
            Whether all entries are handed over.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._failed, timeout_s)
            return not self._waiting

    def stop(self, timeout_s: float) -> None:
        """Hand over waiting entries for at most ``timeout_s`` seconds, then end the thread."""
        self.flush(timeout_s)
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _ended_by(self, error: KeyShardError) -> None:
        with self._changed:
            self._failed = True
            self._changed.notify_all()
        self._fail(error)

    def _run(self) -> None:
        stuck = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping.is_set())
                if self._stopping.is_set():
                    return
                topic_partition = next(iter(self._queue))
                entries = self._queue.pop(topic_partition)
            done = self._hand_over(topic_partition, entries)
            with self._changed:
                if done < len(entries):
                    # Other topic partitions must not wait for one that is not reachable.
                    self._queue[topic_partition] = entries[done:] + self._queue.pop(
                        topic_partition, []
                    )
                self._waiting -= done
                self._changed.notify_all()
                stuck = 0 if done else stuck + 1
                all_stuck = stuck >= len(self._queue) > 0
            if all_stuck:
                stuck = 0
                self._stopping.wait(RETRY_S)

    def _hand_over(self, topic_partition: TopicPartition, entries: Sequence[EntryId]) -> int:
        """Give entries to the client; return how many are done."""
        done = 0
        while done < len(entries):
            turn = entries[done : done + ENTRIES_PER_TURN]
            try:
                consumer = self._consumer_of(topic_partition)
                if consumer is not None:
                    consumer.acknowledge(self._still(topic_partition, turn))
            except BrokerError as exc:
                # The consumer may be closed for a new one; the next attempt asks for it.
                self._check_time(topic_partition, entries, exc)
                break
            self._away_since_s.pop(topic_partition, None)
            done += len(turn)
            if consumer is None:
                _log.debug(
                    "dropped %d acknowledgements of %s, because no consumer is left",
                    len(turn),
                    topic_partition,
                )
                continue
            self.acknowledged += len(turn)
        return done

    def _check_time(
        self, topic_partition: TopicPartition, entries: Sequence[EntryId], error: BrokerError
    ) -> None:
        now_s = time.monotonic()
        if now_s - self._away_since_s.setdefault(topic_partition, now_s) < self._timeout_s:
            return
        raise AcknowledgeError(
            f"Could not acknowledge {len(entries)} entries of {topic_partition} for "
            f"{self._timeout_s:.0f} s: {error.summary}.",
            topic_partition=topic_partition.name,
        ) from error
