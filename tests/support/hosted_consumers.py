"""A host of consumers on the in-memory broker, and entries that it delivers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.columns.content import entry_block
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.workers.host import ConsumerHost

QUEUE = 2
TEXTS = [None, "", "k", "é漢", "a\x00b", "😀"]


def block_of(chosen: Random) -> EntryBlock:
    """An entry, or a part of one, with every field of messages."""
    size = chosen.randint(1, 5)
    indices = sorted(chosen.sample(range(size), chosen.randint(1, size)))

    def each(what: Callable[[], object]) -> list[Any]:
        return [what() for _ in indices]

    block = entry_block(
        EntryId(chosen.getrandbits(chosen.choice([1, 63])), chosen.getrandbits(63)),
        batch_size=size,
        batched=chosen.random() < 0.5,
        indices=indices,
        values=each(lambda: chosen.randbytes(chosen.randint(0, 5))),
        partition_keys=each(lambda: chosen.choice(TEXTS)),
        ordering_keys=each(lambda: chosen.choice(TEXTS)),
        publish_ms=chosen.getrandbits(chosen.choice([1, 40, 63])),
        event_ms=each(lambda: chosen.getrandbits(chosen.choice([1, 40, 63]))),
        properties=each(lambda: {"p": "v"} if chosen.random() < 0.3 else {}),
        schema_version=chosen.choice([None, 0, 7, 2**63 - 1]),
    )
    block.redelivered = chosen.random() < 0.5
    block.complete |= chosen.random() < 0.5
    return block


class HostedSource:
    """A host over an in-memory cluster, with one consumer."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.topic = self.cluster.create_topic("orders")
        self.broker = MemoryBroker(self.cluster)
        self.host = ConsumerHost(self.broker)
        self.subscribe(1)

    def subscribe(self, number: int, queue: int = QUEUE, queue_bytes: int | None = None) -> None:
        self.host.subscribe(
            number=number, topic=self.topic, partition=-1, subscription="s", start=0, end=65_535,
            position="earliest", consumer_name="c", receiver_queue_size=queue,
            receiver_queue_bytes=queue_bytes,
        )  # fmt: skip

    def publish(self, count: int) -> None:
        self.cluster.publish(self.topic, *(Message(b"%d" % i, key="k") for i in range(count)))


@contextmanager
def hosted() -> Iterator[HostedSource]:
    made = HostedSource()
    try:
        yield made
    finally:
        made.host.close()
