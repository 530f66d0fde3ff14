"""Loads of benchmarks: keys, their order, the time of each handler, and a low rate."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterable

from keyshard import KeyShardSink
from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot

SKEW = ((10, 1_000), (100, 100), (5_890, 9))
"""(keys, messages of each): the distribution of a public report about Key_Shared."""
TRIGGER_RATE = 50.0
"""Messages a second of the benchmarks of tiny triggers."""
SEED = 6
_DRAWS = 1 << 32


def skewed_keys() -> list[str]:
    """Return the routing key of each message of :data:`SKEW`, evenly mixed, in publish order."""
    keys: list[str] = []
    for kind, (count, messages) in enumerate(SKEW):
        keys += [f"s{kind}-{number}" for number in range(count) for _ in range(messages)]
    random.Random(SEED).shuffle(keys)
    return keys


def mixed_keys(count: int, messages: int) -> list[str]:
    """Return routing keys of ``messages`` messages: ``count`` keys per turn, in changing order."""
    names = [f"k{number}" for number in range(count)]
    order = random.Random(SEED)
    keys: list[str] = []
    while len(keys) < messages:
        keys += order.sample(names, count)
    return keys[:messages]


def even_keys(slices: int, per_slice: int) -> list[str]:
    """Return keys of which equally many lie in each of ``slices`` equal parts of the ring.

    Keys of different parts alternate. So keys repeated in this order load all parts equally at any
    time.
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
    """Yield key and value ``key:seq:`` of each message; ``seq`` counts a key's messages from 0."""
    following: Counter[str] = Counter()
    for key in keys:
        yield key, f"{key}:{following[key]}:".encode()
        following[key] += 1


def handler_s(value: bytes, low_ms: float, high_ms: float) -> float:
    """Return the handler time of a message, seconds: uniform, and fixed for each message.

    Args:
        value: ``key:seq:`` and padding.
        low_ms: Shortest time.
        high_ms: Longest time.
    """
    draw: float = zlib.crc32(value.rstrip(b"x")) / _DRAWS
    return (low_ms + draw * (high_ms - low_ms)) / 1e3


def efficiency(messages: int, seconds: float, at_once: int, mean_s: float) -> float:
    """Return the measured rate over that of ``at_once`` handlers of ``mean_s`` seconds."""
    return messages * mean_s / (seconds * at_once)


def publish(service_url: str, topic: str, keys: Iterable[str], *, batched: bool = False) -> int:
    """Publish a load, wait for every confirmation, and return the number of messages.

    Args:
        service_url: URL of the broker.
        topic: Topic name.
        keys: Routing key of each message.
        batched: Whether entries have several messages of a key; otherwise each has one.
    """
    entry_messages = 1_000 if batched else 1
    sent = 0
    with KeyShardSink(
        topic, service_url=service_url, entry_messages_max=entry_messages, linger_ms=50
    ) as sink:
        for key, value in values(keys):
            sink.send(value, key=key)
            sent += 1
    return sent
