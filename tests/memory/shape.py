"""Shapes that are drawn: messages, entries, and the way they are read."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.stored_entries import LZ4, NONE, ZSTD, batch, single

MIB = 1 << 20
ENTRY_BYTES_MAX = 4 * MIB
"""Largest entry, unpacked. Brokers take 5 MiB by default."""
WITHIN_BYTES = 80 * MIB
"""Most bytes of one entry for each consumer that fit into the limit without being named."""
CONSUMERS_BYTES_MAX = 320 * MIB
"""Most bytes of one entry for each consumer of a drawn shape."""
WAYS = ("embedded", "hosted", "spark", "batch", "ray")


@dataclass(frozen=True, slots=True)
class Shape:
    """Messages of one size and the entries that they come in, and a way to read them."""

    way: str
    window_bytes: int
    ranges: int
    partitions: int
    value_bytes: int
    key_bytes: int
    properties: int
    property_bytes: int
    entry_messages: int
    compression: int
    random_bytes: bool
    """Whether values are random, or compress to almost nothing."""
    small_first: int
    """Entries of one message of 100 bytes at the beginning of each range."""
    arrow: bool = False
    """Whether the handler of a job of Ray takes Arrow."""
    reads: bool = False
    """Whether Ray reads what topics hold, instead of running a job."""

    @property
    def limit(self) -> int:
        """Memory that a process of the source may take, bytes.

        Each consumer may hold one entry beside the window, as docs/scaling.md says.
        """
        beside = self.ranges * self.partitions * self.entry_bytes
        return 2 * self.window_bytes + 200_000_000 + (beside if beside > WITHIN_BYTES else 0)

    @property
    def entry_bytes(self) -> int:
        """About the bytes of an unpacked entry."""
        properties = self.properties * (self.property_bytes + 10)
        return self.entry_messages * (self.value_bytes + self.key_bytes + properties + 50)

    @property
    def named(self) -> str:
        """The way, and for Ray what runs there."""
        if self.way != "ray":
            return self.way
        return f"ray {'read' if self.reads else 'arrow' if self.arrow else 'job'}"

    def entry(self, key: str, *, small: bool) -> tuple[bytes, int]:
        """Stored bytes of an entry, and its number of messages."""
        draw = random.Random(self.value_bytes)
        value_bytes, count = (100, 1) if small else (self.value_bytes, self.entry_messages)
        value = draw.randbytes(value_bytes) if self.random_bytes else bytes(value_bytes)
        message = {
            "value": value, "key": key, "key_bytes": None, "ordering_key": None, "event_ms": 0,
            "properties": {} if small else {
                f"p{i}": "x" * self.property_bytes for i in range(self.properties)
            },
            "sequence_id": 1,
        }  # fmt: skip
        if count == 1:
            return single(message, self.compression), 1
        return batch([message] * count, self.compression), count

    def to_json(self) -> dict[str, Any]:
        """Return it as an argument of the measured process."""
        return asdict(self)


def drawn(seed: int, ways: tuple[str, ...] = WAYS) -> Shape:
    """The shape of a seed."""
    draw = random.Random(seed)
    properties, property_bytes = draw.choice(
        [(0, 0), (0, 0), (1, 10), (20, 0), (5, 1_000), (1, 100_000)]
    )
    value_bytes = draw.choice([0, 10, 100, 100, 1_000, 10_000, 100_000, MIB, 4 * MIB - 4_000])
    key_bytes = draw.choice([0, 0, 0, 1_000, 50_000])
    message_bytes = value_bytes + properties * (property_bytes + 10) + key_bytes + 50
    most = max(1, ENTRY_BYTES_MAX // message_bytes)
    if message_bytes > ENTRY_BYTES_MAX:
        properties = key_bytes = 0
    entry_messages = min(most, draw.choice([1, 1, 2, 10, 100, 1_000, 10_000]))
    partitions = draw.choice([1, 1, 2])
    consumers_max = CONSUMERS_BYTES_MAX // (entry_messages * message_bytes)
    return Shape(
        way=draw.choice(ways),
        window_bytes=draw.choice([8, 16, 16, 32, 64]) * MIB,
        ranges=max(1, min(draw.choice([1, 2, 4, 16, 64]), consumers_max // partitions)),
        partitions=partitions,
        value_bytes=value_bytes,
        key_bytes=key_bytes,
        properties=properties,
        property_bytes=property_bytes,
        entry_messages=entry_messages,
        compression=draw.choice([NONE, NONE, LZ4, ZSTD]),
        random_bytes=draw.random() < 0.6,
        small_first=draw.choice([0, 0, 0, 300]),
        arrow=draw.random() < 0.5,
        reads=draw.random() < 0.4,
    )  # fmt: skip
