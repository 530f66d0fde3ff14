"""Random messages of the Java client, read over the wire with both decoders, field by field.

``python -m tests.proofs java --minutes 5`` publishes round after round, each by a
producer of its own; a round that is not read as it was published is named by its seed.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyshard.broker.port import Broker, StartPosition, SubscriptionSpec
from keyshard.broker.wire import native_decoder
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.messages import messages_of
from keyshard.config.connection import Connection
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.devbroker import DevBroker
from tests.proofs.runner import ENDLESS, Options, Outcomes, Proof, outcome_of
from tests.stored_entries import reference_only
from tests.support.deadlines import deadline, in_time
from tests.support.java_client import JavaClient
from tests.support.tested_pulsar import PULSAR

RANGES = 3
DEADLINE_S = deadline(60)
BYTES_MAX = 100_000
COMPRESSIONS = ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")
BATCHING = (None, "DEFAULT", "KEY_BASED")
CLOCK_MS = 1_000
"""Difference between two readings of one clock that proves nothing."""
_TEXT = ["", "k", "a=", "QUJD", "ключ", "鍵", "\U0001f511", "\0", " ", "é" * 40, "x" * 300]


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as it is handed to the Java client."""

    value: bytes | None
    is_set: bool
    """Whether a null value is given as such, or none at all."""
    key: str | bytes | None
    ordering_key: bytes | None
    properties: dict[str, str]
    event_ms: int

    @property
    def key_text(self) -> str | None:
        """The key as consumers get it."""
        return b64encode(self.key).decode() if isinstance(self.key, bytes) else self.key

    @property
    def slot(self) -> int | None:
        """Where the broker routes it."""
        routing_key = self.key if self.ordering_key is None else self.ordering_key
        return None if routing_key is None else key_slot(routing_key)


@dataclass(frozen=True, slots=True)
class Round:
    """The messages of one producer."""

    seed: int
    compression: str
    batching: str | None
    batch_max: int
    pairs: bool
    """Whether the values are pairs of key and value that Java's own schema splits."""
    sent: Sequence[Sent]


def round_of(seed: int, messages: int) -> Round:
    """The round of a seed."""
    draw = random.Random(seed)
    pairs = not draw.randrange(6)
    return Round(
        seed, draw.choice(COMPRESSIONS), draw.choice(BATCHING), draw.choice([1, 2, 5, 1_000]),
        pairs, [_drawn(draw, pairs=pairs) for _ in range(draw.randint(1, messages))],
    )  # fmt: skip


def _drawn(draw: random.Random, *, pairs: bool) -> Sent:
    size = draw.choice([0, 1, draw.randrange(100), draw.randrange(2_000)])
    if not draw.randrange(30):
        size = draw.randint(2_000, BYTES_MAX)
    value = draw.randbytes(size) if draw.randrange(2) else draw.randbytes(1) * size
    is_null = not draw.randrange(6)
    kind = draw.randrange(4)
    of_bytes = draw.randbytes(draw.randrange(9))
    key: str | bytes | None = None if not kind else draw.choice(_TEXT) if kind > 1 else of_bytes
    ordering_key = draw.choice(_TEXT).encode() if not draw.randrange(4) else None
    if not draw.randrange(20):
        ordering_key = draw.randbytes(4)
    names = draw.sample(_TEXT, draw.choice([0, 0, 0, 1, 3]))
    return Sent(
        None if is_null else value,
        not is_null or bool(draw.randrange(2)),
        (of_bytes if kind else None) if pairs else key,
        ordering_key,
        {name: draw.choice(_TEXT) for name in names},
        draw.choice([0, 0, 1, draw.randrange(1, 4_000_000_000_000)]),
    )


def publish(java: JavaClient, topic: str, made: Round) -> list[tuple[int, int, int]]:
    """Publish a round; where each message is stored: ledger, entry, index."""
    api = java.api
    schema = api.Schema.BYTES
    if made.pairs:
        separated = java.jvm.org.apache.pulsar.common.schema.KeyValueEncodingType.SEPARATED
        schema = api.Schema.KeyValue(schema, schema, separated)
    builder = (
        java.client.newProducer(schema)
        .topic(topic)
        .compressionType(getattr(api.CompressionType, made.compression))
        .enableBatching(made.batching is not None)
        .blockIfQueueFull(True)  # noqa: FBT003 - as Java has it
    )
    if made.batching is not None:
        builder = (
            builder.batcherBuilder(getattr(api.BatcherBuilder, made.batching))
            .batchingMaxMessages(made.batch_max)
            .batchingMaxPublishDelay(5, java.seconds)
        )
    producer = builder.create()
    pair = java.jvm.org.apache.pulsar.common.schema.KeyValue
    futures: list[Any] = []
    for one in made.sent:
        message = producer.newMessage()
        if made.pairs:
            message.value(pair(one.key, one.value))
        else:
            if one.is_set:
                message.value(one.value)
            if isinstance(one.key, bytes):
                message.keyBytes(one.key)
            elif one.key is not None:
                message.key(one.key)
        if one.ordering_key is not None:
            message.orderingKey(one.ordering_key)
        for name, text in one.properties.items():
            message.property(name, text)
        if one.event_ms:
            message.eventTime(one.event_ms)
        futures.append(message.sendAsync())
    producer.flush()
    found = [_position(future.join().toString()) for future in futures]
    producer.close()
    return found


def _position(text: str) -> tuple[int, int, int]:
    """An id as Java shows it: ledger, entry, partition and, in a batch, index."""
    numbers = [int(part) for part in text.split(":")]
    return numbers[0], numbers[1], max(0, numbers[3]) if len(numbers) > 3 else 0


def check(
    made: Round, ids: Sequence[tuple[int, int, int]], where: TopicPartition,
    blocks: Sequence[EntryBlock], began_ms: int,
) -> None:  # fmt: skip
    """Compare what was read with what was published."""
    found = [message for block in blocks for message in messages_of(where, block)]
    by_id = {tuple(message.message_id): message for message in found}
    assert len(by_id) == len(found) == len(made.sent), f"{len(found)} of {len(made.sent)} messages"
    for number, (one, position) in enumerate(zip(made.sent, ids, strict=True)):
        same(number, one, by_id[position], began_ms)


def same(number: int, one: Sent, got: Message, began_ms: int) -> None:
    """Compare a message with what was published of it."""
    ordering_key = one.ordering_key
    expected = {
        "value": one.value,
        "key": one.key_text,
        "ordering_key": None if ordering_key is None else ordering_key.decode(errors="replace"),
        "properties": one.properties,
        "event_ms": one.event_ms,
        "slot": one.slot,
        "redelivered": False,
        "in time": True,
    }
    event_ms = 0 if got.event_time is None else round(got.event_time.timestamp() * 1_000)
    published_ms = got.publish_time.timestamp() * 1_000
    output = {
        "value": got.value,
        "key": got.key,
        "ordering_key": got.ordering_key,
        "properties": dict(got.properties),
        "event_ms": event_ms,
        "slot": got.slot,
        "redelivered": got.redelivered,
        "in time": began_ms - CLOCK_MS <= published_ms <= time.time() * 1_000 + CLOCK_MS,
    }
    differ = {
        name: (expected[name], output[name]) for name in output if expected[name] != output[name]
    }
    assert not differ, f"message {number}: published and read differ: {differ}"


def read(broker: Broker, where: TopicPartition, messages: int) -> list[EntryBlock]:
    """Return the messages that a Reader reads."""
    reader = broker.reader(where, EntryId(0, 0))
    found: list[EntryBlock] = []
    deadline = time.monotonic() + DEADLINE_S
    while sum(block.rows for block in found) < messages:
        in_time(deadline, "the Reader did not get everything in time")
        found += reader.read(1_000)
    reader.close()
    return found


def consume(broker: Broker, where: TopicPartition, messages: int) -> list[EntryBlock]:
    """Return the messages of the consumers of a few ranges."""
    consumers = [
        broker.subscribe(
            SubscriptionSpec(
                where, "read", hash_range, consumer_name=str(hash_range), receiver_queue_size=1_000
            ),
            StartPosition.EARLIEST,
        )
        for hash_range in split_ring(RANGES)
    ]
    found: list[EntryBlock] = []
    deadline = time.monotonic() + DEADLINE_S
    while sum(block.rows for block in found) < messages:
        in_time(deadline, "the consumers did not get everything in time")
        for consumer in consumers:
            blocks = consumer.receive(20)
            for block in blocks:
                inside = block.slot is None or block.slot in consumer.hash_range
                assert inside, f"slot {block.slot} came to {consumer.hash_range}"
            found += blocks
    for consumer in consumers:
        consumer.close()
    return found


def hold(java: JavaClient, broker: Broker, made: Round) -> None:
    """Publish a round, and read it with both decoders."""
    where = TopicPartition(f"persistent://public/default/java-{uuid.uuid4().hex}")
    began_ms = time.time_ns() // 1_000_000
    try:
        ids = publish(java, where.name, made)
        with reference_only():
            check(made, ids, where, read(broker, where, len(made.sent)), began_ms)
        check(made, ids, where, consume(broker, where, len(made.sent)), began_ms)
    except Exception:
        print(
            f"round {made.seed}: {made.compression}, batching {made.batching}, "
            f"batches of {made.batch_max}, pairs {made.pairs}, {len(made.sent)} messages"
        )
        raise


def _outcomes(given: Options, seeds: range) -> Outcomes:
    print(f"compiled: {native_decoder.is_available()}")
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        url = opened.enter_context(DevBroker(PULSAR)).service_url
        java = opened.enter_context(closing(JavaClient(url, folder / "java.log")))
        broker = opened.enter_context(closing(WireBroker(Connection(url))))

        def run(seed: int) -> Counter[str]:
            made = round_of(seed, given.messages)
            hold(java, broker, made)
            return Counter(messages=len(made.sent))

        for seed in seeds:
            yield outcome_of(seed, run)


PROOF = Proof(
    _outcomes, seeds=ENDLESS, seed_start=0, minutes=1.0,
    options={"--messages": {"type": int, "default": 200, "help": "most of a round (200)"}},
)  # fmt: skip
