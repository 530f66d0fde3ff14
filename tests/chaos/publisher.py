"""Publishes keyed messages with the Python client, also while the broker fails."""

from __future__ import annotations

import random
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pulsar

from keyshard.testing.verify.history import Event

RUN = 3
"""Messages of one key that make one entry."""
BATCH_DELAY_MS = 1_000

_PENDING_MAX = 20_000


class PublisherFailedError(Exception):
    """A publisher cannot continue, and no fault explains it."""


class Publisher(ABC):
    """A thread that publishes entries of three messages of one key, at a steady rate.

    The broker removes duplicates (deduplication is on), and a send never times out: the client
    sends again what was not confirmed, under the same number and in the same order. So nothing is
    stored twice, and what is confirmed is stored. Deduplication needs ascending numbers. Batching
    by key keeps their order here, because every batch is full as soon as it begins.

    Args:
        topic: Full topic name.
        keys: Names of the keys; nobody else publishes these.
        rate_per_s: Messages per second.
        seed: Seed of the choice of keys.
        messages_max: It publishes so many messages, a multiple of three; ``None``: no limit.
    """

    def __init__(
        self,
        topic: str,
        keys: Sequence[str],
        *,
        rate_per_s: float,
        seed: int,
        messages_max: int | None = None,
    ) -> None:
        self._topic = topic
        self._keys = keys
        self._rate_per_s = rate_per_s
        self.messages_max = messages_max
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
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Connect and begin."""
        self._connect()
        self._thread.start()

    def reopen(self, deadline: float, before: Callable[[], None]) -> None:
        """Use what ``before`` adds to the topic, once all that was sent is confirmed.

        Args:
            deadline: On the monotonic clock, seconds.
            before: Adds partitions.

        Raises:
            TimeoutError: The broker did not confirm in time.
            PublisherFailedError: It does not publish any more.
        """
        with self._lock:
            self._drain(deadline)
            before()
            self._disconnect()
            self._connect()

    def stop(self, deadline: float) -> None:
        """Publish no more, and wait until everything is confirmed.

        Raises:
            TimeoutError: The broker did not confirm in time.
            PublisherFailedError: It does not publish any more.
        """
        self._stopping.set()
        with self._lock:
            self._drain(deadline)

    def close(self) -> None:
        """End at once, without waiting for confirmations."""
        self._stopping.set()

    @abstractmethod
    def _connect(self) -> None:
        """Create a producer under a new name."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the producer; nothing is under way."""

    @abstractmethod
    def _send(self, key: str, seq: int) -> None:
        """Hand a message over; ends in :meth:`_answer`."""

    def _run(self) -> None:
        try:
            self._publish()
        except Exception as exc:  # noqa: BLE001 - the waiting caller gets it
            self._fail(exc)

    def _publish(self) -> None:
        began, sent = time.monotonic(), 0
        while not self._stopping.is_set() and sent != self.messages_max:
            with self._lock:
                key = self._chooser.choice(self._keys)
                with self._answered:
                    self._pending += RUN
                for seq in range(self._next[key], self._next[key] + RUN):
                    self._send(key, seq)
                self._next[key] += RUN
                sent += RUN
            self._stopping.wait(max(0.0, sent / self._rate_per_s - (time.monotonic() - began)))

    def _answer(self, key: str, seq: int, refusal: str | None) -> None:
        """A message was confirmed (``None``) or refused; from any thread."""
        with self._answered:
            self._pending -= 1
            if refusal is None:
                event = Event(time.time(), "sent", topic=self._topic, key=key, seq=seq)
                self.confirmed.append(event)
            else:
                self.refused[refusal] += 1
            self._answered.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._answered:
            self._error = self._error or error
            self._answered.notify_all()

    def _drain(self, deadline: float) -> None:
        with self._answered:
            left_s = max(0.0, deadline - time.monotonic())
            done = self._answered.wait_for(lambda: self._error or not self._pending, left_s)
            if self._error is not None:
                raise PublisherFailedError(f"{self._thread.name} failed: {self._error!r}")
            if not done:
                raise TimeoutError(f"the broker did not confirm {self._pending} messages in time")


class PythonPublisher(Publisher):
    """Python's client; its core is the C++ client.

    Args:
        service_url: URL of the broker.
        topic: Full topic name.
        keys: Names of the keys.
        rate_per_s: Messages per second.
        seed: Seed of the choice of keys.
        log: Log file of the client.
    """

    def __init__(
        self, service_url: str, topic: str, keys: Sequence[str], *,
        rate_per_s: float, seed: int, log: Path,
    ) -> None:  # fmt: skip
        super().__init__(topic, keys, rate_per_s=rate_per_s, seed=seed)
        self._client = pulsar.Client(
            service_url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Warn, str(log))
        )
        self._producer: Any = None

    def close(self) -> None:
        super().close()
        self._client.shutdown()

    def _connect(self) -> None:
        self._producer = self._client.create_producer(
            self._topic,
            producer_name=f"chaos-{uuid.uuid4().hex}",
            send_timeout_millis=0,
            max_pending_messages=_PENDING_MAX,
            block_if_queue_full=True,
            batching_enabled=True,
            batching_type=pulsar.BatchingType.KeyBased,
            batching_max_messages=RUN,
            batching_max_publish_delay_ms=BATCH_DELAY_MS,
        )

    def _disconnect(self) -> None:
        self._producer.close()

    def _send(self, key: str, seq: int) -> None:
        output = partial(self._told, key, seq)
        self._producer.send_async(f"{key}:{seq}:".encode(), output, partition_key=key)

    def _told(self, key: str, seq: int, result: Any, _message_id: Any) -> None:
        """On the client's thread."""
        self._answer(key, seq, None if result == pulsar.Result.Ok else result.name)
