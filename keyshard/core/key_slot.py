"""The slot of a message: where on the ring the broker routes it.

Rule of Pulsar 4.0 (``Murmur3_32Hash``, ``StickyKeyConsumerSelectorUtils``, ``Commands``): the
ordering key decides, else the partition key; a producer batch is routed whole by its first message.
"""

from __future__ import annotations

from collections.abc import Sequence

import mmh3

from keyshard.core.hash_range import RING_SIZE


def key_slot(key: str | bytes) -> int:
    """Slot of a routing key, 1 to 65,535; the broker maps slot 0 to 1.

    Args:
        key: Ordering key, else partition key; a string is hashed as UTF-8.
    """
    return (mmh3.hash(key, 0, signed=False) & 0x7FFFFFFF) % RING_SIZE or 1


def routing_key(partition_key: str | None, ordering_key: str | None) -> str | None:
    """The key that routes a message: the ordering key, else the partition key, else ``None``."""
    return ordering_key if ordering_key is not None else partition_key


def slots_of(routing_keys: Sequence[str | None]) -> tuple[int | None, list[int | None] | None]:
    """Slots of the messages of one entry.

    Args:
        routing_keys: Routing key of each message; ``None`` when keyless. At least one.

    Returns:
        (slot of the first message, which routes the entry; slot of each message where they differ,
        else ``None``).
    """
    first = routing_keys[0]
    slot = None if first is None else key_slot(first)
    if routing_keys.count(first) == len(routing_keys):
        return slot, None
    return slot, differing([None if key is None else key_slot(key) for key in routing_keys])


def differing(slots: list[int | None]) -> list[int | None] | None:
    """Slots of the messages of one entry, at least one; ``None`` when all are the same."""
    return slots if slots.count(slots[0]) < len(slots) else None
