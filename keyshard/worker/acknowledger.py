"""Acknowledges released entries in the background, by entry."""

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
"""Entries that may wait; more than the broker leaves unacknowledged by default."""

RETRY_S = 0.1
"""Pause when nothing of what waits can be handed over, seconds."""

_log = logging.getLogger(__name__)


class Acknowledger:
    """One daemon thread with a bounded queue.

    What waits of a topic partition is handed over together, from however many batches: where
    consumers are elsewhere, each time is a question over the network.

    Whoever received an entry, any consumer of its topic partition can acknowledge it. What the
    client takes and then loses in a crash is delivered again, recognised and acknowledged again.

    Args:
        consumer_of: A live consumer of a topic partition, or a retriable error; ``None`` for one
            that is gone, whose entries are dropped.
        still: Those of some entries that are still what was received, or a retriable error; the
            rest is dropped.
        timeout_s: Time after which a failing acknowledgement fails the source, seconds.
        fail: Told the error that ends this thread.
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
        """What waits, but for what is being handed over; who has waited longest comes first."""
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
            AcknowledgeError: Too many wait: the broker has not taken any for long.
        """
        with self._changed:
            if self._waiting + len(entries) > ENTRIES_WAITING_MAX:
                raise AcknowledgeError(
                    f"{self._waiting} entries wait to be acknowledged in {topic_partition} and "
                    "others. Check that the broker answers; nothing is lost, they are delivered "
                    "again and dropped.",
                    waiting=self._waiting,
                )
            self._queue.setdefault(topic_partition, []).extend(entries)
            self._waiting += len(entries)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits, at most ``timeout_s`` seconds; whether nothing does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._failed, timeout_s)
            return not self._waiting

    def stop(self, timeout_s: float) -> None:
        """Hand over what waits, for at most ``timeout_s`` seconds; then the thread ends."""
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
                    # The others do not wait for a topic partition that is away.
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
        """Give entries to the client; how many are done with."""
        done = 0
        while done < len(entries):
            turn = entries[done : done + ENTRIES_PER_TURN]
            try:
                consumer = self._consumer_of(topic_partition)
                if consumer is not None:
                    consumer.acknowledge(self._still(topic_partition, turn))
            except BrokerError as exc:
                # The consumer may just be re-opened: the next attempt asks for another one.
                self._check_time(topic_partition, entries, exc)
                break
            self._away_since_s.pop(topic_partition, None)
            done += len(turn)
            if consumer is None:
                _log.debug("%d entries of %s: nobody to tell", len(turn), topic_partition)
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
            f"{self._timeout_s:.0f} s: {error}. They are delivered again and dropped.",
            topic_partition=topic_partition.name,
        ) from error
