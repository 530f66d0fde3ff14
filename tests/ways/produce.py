"""The producers of drawn messages: raw entries, and Pulsar's Java client."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from keyshard.core.protobuf import Value, message
from tests.contract.raw_protocol import RawConnection
from tests.java_messages import BATCHING, COMPRESSIONS
from tests.stored_entries import batch_payload, keys_of, packed
from tests.streams.cluster import ASK_S, Broker
from tests.streams.values import INLINE, NONE, SEPARATED
from tests.support.java_client import JavaClient

RAW, JAVA = "raw", "java"
PRODUCER = "ways"
_ENCRYPTION_KEY = b"\n\x01k\x12\x01v"
"""``EncryptionKeys`` with a name and a value."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A message to publish."""

    number: int
    value: bytes | None
    key: str | bytes | None
    ordering_key: str | None
    event_ms: int
    properties: dict[str, str]
    deliver_ms: int | None = None
    locked: bool = False
    chunked: bool = False

    def row(self) -> dict[str, Any]:
        """Return it in the form of :mod:`tests.stored_entries`."""
        return {
            "value": self.value, "properties": self.properties, "event_ms": self.event_ms,
            "sequence_id": self.number, "ordering_key": self.ordering_key,
            "key": self.key if isinstance(self.key, str) else None,
            "key_bytes": self.key if isinstance(self.key, bytes) else None,
        }  # fmt: skip


Facts = dict[str, Any]
"""Columns of a message that its producer knows, by the names of :mod:`tests.ways.facts`."""


def raw_entries(
    drawn: random.Random, broker: Broker, name: str, entries: Sequence[Sequence[Draft]],
    version: int | None,
) -> dict[int, Facts]:  # fmt: skip
    """Publish producer batches to a topic partition; returns what is known of each message.

    The messages of a batch have one key. A batch of one message may be stored without a batch.
    """
    made, numbers = [], []
    for drafts in entries:
        batched = len(drafts) > 1 or (not drafts[0].chunked and drawn.random() < 0.5)
        published_ms = time.time_ns() // 1_000_000 - drawn.choice((0, 0, 86_400_000))
        entry = _entry(drafts, drawn.randrange(5), batched=batched)
        head: dict[int, Value] = {1: PRODUCER.encode(), 2: drafts[0].number, 3: published_ms}
        if version is not None:
            head[16] = version.to_bytes(8, "big")
        made.append((entry[0] | head, entry[1]))
        numbers.append((drafts, published_ms))
    host = urlsplit(broker.service_url)
    broker.ask("GET", f"persistent/public/default/{name}/stats", missing=True)
    httpx.get(f"{broker.admin_url}/lookup/v2/topic/persistent/public/default/{name}", timeout=ASK_S)
    assert host.port is not None
    with RawConnection("127.0.0.1", host.port) as connection:
        connection.publish(f"persistent://public/default/{name}", made)
        stored = connection.stored
    return {
        one.number: {
            "publish_us": published_ms * 1_000, "producer": PRODUCER, "schema_version": version,
            "id": (entry_id.ledger, entry_id.entry, index),
        }
        for (drafts, published_ms), entry_id in zip(numbers, stored, strict=True)
        for index, one in enumerate(drafts)
    }  # fmt: skip


def _entry(
    drafts: Sequence[Draft], compression: int, *, batched: bool
) -> tuple[dict[int, Value], bytes]:
    first = drafts[0]
    metadata: dict[int, Value] = dict(keys_of(first.row(), 6, 17, 18))
    if batched:
        payload = batch_payload([one.row() for one in drafts])
        metadata[11] = len(drafts)
    else:
        payload = first.value or b""
        # Properties are a repeated field; each draft has one.
        ((name, text),) = first.properties.items()
        metadata |= {4: message({1: name.encode(), 2: text.encode()}), 12: first.event_ms}
        metadata |= {25: 1} if first.value is None else {}
    metadata |= {8: compression, 9: len(payload)}
    if first.deliver_ms is not None:
        metadata[19] = first.deliver_ms
    if first.locked:
        metadata[13] = _ENCRYPTION_KEY
    if first.chunked:
        metadata |= {26: b"one-of-two", 27: 2, 28: 2 * len(payload), 29: 0}
    return metadata, packed(payload, compression)


class JavaProducers:
    """Pulsar's Java client, started when it is first used.

    Args:
        service_url: URL of the broker.
        directory: For its log.
    """

    def __init__(self, service_url: str, directory: Path) -> None:
        self._service_url = service_url
        self._log = directory / "java.log"
        self._java: JavaClient | None = None

    def close(self) -> None:
        """End the JVM, if there is one."""
        if self._java is not None:
            self._java.close()

    def publish(
        self, drawn: random.Random, kind: str, name: str, drafts: Sequence[Draft],
        version: int | None,
    ) -> dict[int, Facts]:  # fmt: skip
        """Publish messages to a topic partition; returns what is known of each."""
        if self._java is None:
            self._java = JavaClient(self._service_url, self._log)
        java, api = self._java, self._java.api
        pairs = kind in (INLINE, SEPARATED)
        schema = api.Schema.AUTO_PRODUCE_BYTES()
        if kind == NONE:
            schema = api.Schema.BYTES
        if pairs:
            forms = java.jvm.org.apache.pulsar.common.schema.KeyValueEncodingType
            schema = api.Schema.KeyValue(api.Schema.STRING, api.Schema.STRING, getattr(forms, kind))
        batching = drawn.choice(BATCHING)
        builder = (
            java.client.newProducer(schema)
            .topic(f"persistent://public/default/{name}")
            .producerName(PRODUCER)
            .compressionType(getattr(api.CompressionType, drawn.choice(COMPRESSIONS)))
            .enableBatching(batching is not None)
        )
        if batching is not None:
            builder = builder.batcherBuilder(getattr(api.BatcherBuilder, batching))
            builder = builder.batchingMaxMessages(drawn.choice((2, 5, 1_000)))
            # No batch ends by time, so a seed always makes the same batches.
            builder = builder.batchingMaxPublishDelay(60, java.seconds)
        producer = builder.create()
        pair = java.jvm.org.apache.pulsar.common.schema.KeyValue
        futures = [self._sent(producer, pair if pairs else None, one) for one in drafts]
        producer.flush()
        ids = [future.join().toString() for future in futures]
        producer.close()
        known: Facts = {"producer": PRODUCER} | ({} if pairs else {"schema_version": version})
        return {
            one.number: known | {"id": _position(at)} for one, at in zip(drafts, ids, strict=True)
        }

    @staticmethod
    def _sent(producer: Any, pair: Any, one: Draft) -> Any:
        made = producer.newMessage().sequenceId(one.number).eventTime(one.event_ms)
        if pair is not None:
            key = one.key.decode() if isinstance(one.key, bytes) else one.key
            made = made.value(pair(key, None if one.value is None else f"v{one.number}"))
        elif one.value is not None:
            made = made.value(one.value)
        if isinstance(one.key, str):
            made = made.key(one.key)
        elif one.key is not None and pair is None:
            made = made.keyBytes(one.key)
        if one.ordering_key is not None:
            made = made.orderingKey(one.ordering_key.encode())
        for name, text in one.properties.items():
            made = made.property(name, text)
        if one.deliver_ms is not None:
            made = made.deliverAt(one.deliver_ms)
        return made.sendAsync()


def _position(text: str) -> tuple[int, int, int]:
    """An id as Java shows it: ledger, entry, partition and, in a batch, index."""
    numbers = [int(part) for part in text.split(":")]
    return numbers[0], numbers[1], max(0, numbers[3]) if len(numbers) > 3 else 0
