"""Publishes keyed messages all the time, whatever happens to the broker."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pulsar

from keyshard.verify.history import Event

_RUN = 3
"""Messages of one key that make one entry."""
_PENDING_MAX = 20_000
_BATCH_DELAY_MS = 1_000


class Publisher:
    """A thread that publishes entries of three messages of one key, at a steady rate.

    The broker removes duplicates (deduplication is on), and a send never times out: the client
    sends again what was not confirmed, under the same number and in the same order. So nothing is
    stored twice, and what is confirmed is stored. Deduplication wants numbers that ascend; batching
    by key would send them out of order, were not every batch full as soon as it is begun.

    Args:
        service_url: URL of the broker.
        topic: Full topic name.
        keys: Number of keys.
        rate_per_s: Messages per second.
        seed: Seed of the choice of keys.
        log: File for what the client says.
    """

    def __init__(
        self, service_url: str, topic: str, *, keys: int, rate_per_s: float, seed: int, log: Path
    ) -> None:
        self._topic = topic
        self._keys = keys
        self._rate_per_s = rate_per_s
        self._chooser = random.Random(seed)
        self._next: Counter[str] = Counter()
        self._lock = threading.Lock()
        """Held while a run is handed over, and while the producer is another one."""
        self._answered = threading.Condition()
        self._pending = 0
        self.confirmed: list[Event] = []
        """A ``sent`` for each message that the broker confirmed."""
        self.refused: Counter[str] = Counter()
        """Answers other than a confirmation, by name: the outcome is unknown."""
        self._stopping = threading.Event()
        self._client = pulsar.Client(
            service_url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, str(log))
        )
        self._producer: Any = None
        self._thread = threading.Thread(target=self._publish, name="publisher", daemon=True)

    def start(self) -> None:
        """Connect and begin."""
        self._producer = self._connect()
        self._thread.start()

    def reopen(self, deadline: float, before: Callable[[], None]) -> None:
        """Use what ``before`` adds to the topic, once all that was sent is confirmed.

        Args:
            deadline: On the monotonic clock, seconds.
            before: Adds partitions.

        Raises:
            TimeoutError: The broker did not confirm in time.
        """
        with self._lock:
            self._drain(deadline)
            before()
            self._producer.close()
            self._producer = self._connect()

    def stop(self, deadline: float) -> None:
        """Publish no more, and wait until everything is confirmed.

        Raises:
            TimeoutError: The broker did not confirm in time.
        """
        self._stopping.set()
        with self._lock:
            self._drain(deadline)

    def close(self) -> None:
        """End at once, whatever is not confirmed."""
        self._stopping.set()
        self._client.shutdown()

    def _connect(self) -> Any:
        return self._client.create_producer(
            self._topic,
            producer_name=f"chaos-{uuid.uuid4().hex}",
            send_timeout_millis=0,
            max_pending_messages=_PENDING_MAX,
            block_if_queue_full=True,
            batching_enabled=True,
            batching_type=pulsar.BatchingType.KeyBased,
            batching_max_messages=_RUN,
            batching_max_publish_delay_ms=_BATCH_DELAY_MS,
        )

    def _publish(self) -> None:
        began, sent = time.monotonic(), 0
        while not self._stopping.is_set():
            with self._lock:
                key = f"k{self._chooser.randrange(self._keys)}"
                with self._answered:
                    self._pending += _RUN
                for seq in range(self._next[key], self._next[key] + _RUN):
                    self._producer.send_async(
                        f"{key}:{seq}:".encode(),
                        partial(self._answer, key, seq),
                        partition_key=key,
                    )
                self._next[key] += _RUN
                sent += _RUN
            self._stopping.wait(max(0.0, sent / self._rate_per_s - (time.monotonic() - began)))

    def _answer(self, key: str, seq: int, result: Any, _message_id: Any) -> None:
        """On the client's thread."""
        with self._answered:
            self._pending -= 1
            if result == pulsar.Result.Ok:
                event = Event(time.time(), "sent", topic=self._topic, key=key, seq=seq)
                self.confirmed.append(event)
            else:
                self.refused[result.name] += 1
            self._answered.notify_all()

    def _drain(self, deadline: float) -> None:
        with self._answered:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._answered.wait_for(lambda: not self._pending, left_s):
                raise TimeoutError(f"the broker did not confirm {self._pending} messages in time")
