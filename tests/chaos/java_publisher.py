"""Publishes with the Java client: LZ4, batches by key, keys of bytes and keys beyond ASCII.

Or with its API V5, to a scalable topic.
"""

from __future__ import annotations

import queue
import random
import threading
import uuid
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError

from tests.chaos.publisher import BATCH_DELAY_MS, RUN, Publisher
from tests.support.java_client import JavaClient


def keys_of_bytes(seed: int, count: int) -> dict[str, bytes]:
    """Keys that are set as bytes, by the base64 that consumers get as their text."""
    chooser = random.Random(seed)
    keys = [chooser.randbytes(1 + number % 13) for number in range(count)]
    return {b64encode(key).decode(): key for key in keys}


def keys_of_text(count: int) -> list[str]:
    """Keys that are set as texts, beyond ASCII, or base64 by chance."""
    return [f"ключ-{n}" if n % 3 == 0 else f"鍵-{n}" if n % 3 == 1 else f"j{n:03}"
            for n in range(count)]  # fmt: skip


class _FuturesPublisher(Publisher):
    """Sends give futures of Java, which a thread of its own awaits in their order."""

    def __init__(
        self, topic: str, keys: Sequence[str], *, rate_per_s: float, seed: int,
        messages_max: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(topic, keys, rate_per_s=rate_per_s, seed=seed, messages_max=messages_max)
        self._producer: Any = None
        self._sent: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        """Messages without a confirmation, and their futures."""

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._await_answers, name="answers of Java", daemon=True).start()

    def _disconnect(self) -> None:
        self._producer.close()

    def _await_answers(self) -> None:
        while True:
            key, seq, future = self._sent.get()
            try:
                future.join()
            except Py4JJavaError as exc:
                self._answer(key, seq, str(exc.java_exception.getCause()))
            except (Py4JError, OSError) as exc:
                self._fail(exc)
                return
            else:
                self._answer(key, seq, None)


class JavaPublisher(_FuturesPublisher):
    """The Java client in a JVM of its own.

    Args:
        service_url: URL of the broker.
        topic: Full topic name.
        of_bytes: Keys that are set as bytes, by their names.
        of_text: Keys that are set as texts.
        rate_per_s: Messages per second.
        seed: Seed of the choice of keys.
        log: File for what the JVM says.
    """

    def __init__(
        self, service_url: str, topic: str, of_bytes: dict[str, bytes], of_text: Sequence[str], *,
        rate_per_s: float, seed: int, log: Path,
    ) -> None:  # fmt: skip
        super().__init__(topic, [*of_bytes, *of_text], rate_per_s=rate_per_s, seed=seed)
        self._thread.name = "publisher of Java"
        self._service_url = service_url
        self._of_bytes = of_bytes
        self._log = log
        self._java: JavaClient | None = None

    def start(self) -> None:
        self._java = JavaClient(self._service_url, self._log)
        super().start()

    def close(self) -> None:
        super().close()
        if self._java is not None:
            self._java.close()

    def _connect(self) -> None:
        java = self._java
        assert java is not None, "it was started"
        self._producer = (
            java.client.newProducer()
            .topic(self._topic)
            .producerName(f"chaos-{uuid.uuid4().hex}")
            .sendTimeout(0, java.seconds)
            .compressionType(java.api.CompressionType.LZ4)
            .autoUpdatePartitions(False)  # noqa: FBT003 - as Java has it
            .batcherBuilder(java.api.BatcherBuilder.KEY_BASED)
            .batchingMaxMessages(RUN)
            .batchingMaxPublishDelay(BATCH_DELAY_MS, java.milliseconds)
            .create()
        )

    def _send(self, key: str, seq: int) -> None:
        message = self._producer.newMessage()
        if key in self._of_bytes:
            message.keyBytes(self._of_bytes[key])
        else:
            message.key(key)
        message.value(f"{key}:{seq}:".encode())
        self._sent.put((key, seq, message.sendAsync()))


class V5Publisher(_FuturesPublisher):
    """A producer of API V5, which follows the segments of a scalable topic.

    Args:
        java: A JVM, which several publishers share.
        service_url: URL of the broker.
        topic: Name of the scalable topic.
        keys: Names of the keys; nobody else publishes these.
        rate_per_s: Messages per second.
        seed: Seed of the choice of keys.
        messages_max: Messages that it publishes, a multiple of three.
        batches: Whether a producer batch takes messages of different keys.
    """

    def __init__(
        self, java: JavaClient, service_url: str, topic: str, keys: Sequence[str], *,
        rate_per_s: float, seed: int, messages_max: int, batches: bool,
    ) -> None:  # fmt: skip
        super().__init__(topic, keys, rate_per_s=rate_per_s, seed=seed, messages_max=messages_max)
        self._java, self._service_url, self._batches = java, service_url, batches
        self._client: Any = None
        self._sender: Any = None

    def _connect(self) -> None:
        v5 = self._java.jvm.org.apache.pulsar.client.api.v5
        self._client = v5.PulsarClient.builder().serviceUrl(self._service_url).build()
        self._producer = (
            self._client.newProducer(v5.schema.Schema.bytes())
            .topic(self._topic)
            .producerName(f"chaos-{uuid.uuid4().hex}")
            .sendTimeout(self._java.jvm.java.time.Duration.ZERO)
            .blockIfQueueFull(True)  # noqa: FBT003 - as Java has it
            .batchingPolicy(v5.config.BatchingPolicy.builder().enabled(self._batches).build())
            .create()
        )
        self._sender = getattr(self._producer, "async")()

    def _disconnect(self) -> None:
        super()._disconnect()
        self._client.close()

    def _send(self, key: str, seq: int) -> None:
        message = self._sender.newMessage().key(key).value(f"{key}:{seq}:".encode())
        self._sent.put((key, seq, message.send()))
