"""Loads of the handler benchmarks: which keys, in which order, and how long each handler takes."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterable

import pulsar

from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot

SKEW = ((10, 1_000), (100, 100), (5_890, 9))
"""(keys, messages of each): the distribution of a public report about Key_Shared."""
SEED = 6
_DRAWS = 1 << 32


def skewed_keys() -> list[str]:
    """The routing key of each message of :data:`SKEW`, in publish order: evenly mixed."""
    keys: list[str] = []
    for kind, (count, messages) in enumerate(SKEW):
        keys += [f"s{kind}-{number}" for number in range(count) for _ in range(messages)]
    random.Random(SEED).shuffle(keys)
    return keys


def mixed_keys(count: int, messages: int) -> list[str]:
    """The routing key of each message: ``count`` keys in turn, each turn in another order."""
    names = [f"k{number}" for number in range(count)]
    order = random.Random(SEED)
    keys: list[str] = []
    while len(keys) < messages:
        keys += order.sample(names, count)
    return keys[:messages]


def even_keys(slices: int, per_slice: int) -> list[str]:
    """Keys of which equally many lie in each of ``slices`` equal parts of the ring.

    Those of different slices alternate, so that keys repeated in this order load all parts alike at
    any time.
    """
    found: list[list[str]] = [[] for _ in range(slices)]
    missing = slices * per_slice
    number = 0
    while missing:
        key = f"e{number}"
        number += 1
        of_slice = found[range_index(key_slot(key), slices)]
        if len(of_slice) < per_slice:
            of_slice.append(key)
            missing -= 1
    return [key for round_ in zip(*found, strict=True) for key in round_]


def values(keys: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    """Key and value ``key:seq:`` of each message; ``seq`` counts the messages of a key from 0."""
    following: Counter[str] = Counter()
    for key in keys:
        yield key, f"{key}:{following[key]}:".encode()
        following[key] += 1


def handler_s(value: bytes, low_ms: float, high_ms: float) -> float:
    """How long the handler of a message takes, seconds: uniform, the same for the same message.

    Args:
        value: ``key:seq:``, and what pads it.
        low_ms: Shortest time.
        high_ms: Longest time.
    """
    draw: float = zlib.crc32(value.rstrip(b"x")) / _DRAWS
    return (low_ms + draw * (high_ms - low_ms)) / 1e3


def efficiency(messages: int, seconds: float, at_once: int, mean_s: float) -> float:
    """Measured rate over the best one: ``at_once`` handlers of ``mean_s`` seconds all the time."""
    return messages * mean_s / (seconds * at_once)


def publish(service_url: str, topic: str, keys: Iterable[str], *, batched: bool = False) -> int:
    """Publish a load and wait for every confirmation; how many messages it is.

    Args:
        service_url: URL of the broker.
        topic: Topic name.
        keys: Routing key of each message.
        batched: Whether the producer batches by key, or not at all.
    """
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    answers: Counter[object] = Counter()

    def confirmed(result: object, _message_id: object) -> None:
        answers[result] += 1

    try:
        producer = client.create_producer(
            topic,
            batching_enabled=batched,
            batching_type=pulsar.BatchingType.KeyBased,
            batching_max_publish_delay_ms=50,
            block_if_queue_full=True,
            max_pending_messages=5_000,
        )
        for key, value in values(keys):
            producer.send_async(value, confirmed, partition_key=key)
        producer.flush()
    finally:
        client.close()
    if set(answers) != {pulsar.Result.Ok}:
        raise RuntimeError(f"publishing to {topic} was answered with {dict(answers)}")
    return answers.total()
