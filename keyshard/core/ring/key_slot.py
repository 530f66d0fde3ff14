"""The slot of a message: the place on the ring by which the broker routes it.

Rule of Pulsar 4.0 (``Murmur3_32Hash``, ``StickyKeyConsumerSelectorUtils``, ``Commands``): the
ordering key decides, else the partition key. The first message of a producer batch routes the whole
batch.

A partition key set as bytes is sent as base64 with a flag, and the broker hashes the bytes. The
client exposes the text but not the flag, and plain keys may look like base64 by chance. So the
range that received the entry decides; see :func:`slots_of`.
"""

from __future__ import annotations

from base64 import b64encode
from binascii import Error, a2b_base64
from collections.abc import Sequence

import mmh3

from keyshard.core.ring.hash_range import RING_SIZE, HashRange


def key_slot(key: str | bytes) -> int:
    """Return the slot of a routing key, 1 to 65,535; the broker maps slot 0 to 1.

    Args:
        key: Ordering key, else partition key. A string is hashed as the UTF-8 of
            :func:`broker_text`.
    """
    if isinstance(key, str):
        # mmh3 crashes on a string that cannot be encoded as UTF-8, so it gets only bytes.
        try:
            data = key.encode()
        except UnicodeEncodeError:
            data = broker_text(key).encode()
    else:
        data = key
    return (mmh3.hash(data, 0, signed=False) & 0x7FFFFFFF) % RING_SIZE or 1


def broker_text(key: str) -> str:
    """Return a key as the broker reads it; it differs only for lone surrogates.

    Python stores a byte of a command line that is not UTF-8 as a lone surrogate from U+DC80 to
    U+DCFF. The broker replaces such bytes by U+FFFD before it hashes a key. Java's client sends any
    other lone surrogate as a question mark.
    """
    try:
        return key.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:
        return key.encode(errors="replace").decode()


def routing_key(partition_key: str | None, ordering_key: str | None) -> str | None:
    """Return the key that routes a message: the ordering key, else the partition key."""
    return ordering_key if ordering_key is not None else partition_key


def bytes_slot(key: str) -> int | None:
    """Return the slot of a partition key set as bytes; ``None`` if it cannot have been.

    Args:
        key: The key that the client exposes. If it is not base64 in the Java client's form, it is
            plain text.
    """
    if len(key) % 4:
        return None
    try:
        decoded = a2b_base64(key)
    except (Error, ValueError):
        return None
    return key_slot(decoded) if b64encode(decoded).decode() == key else None


def possible_slots(key: str) -> tuple[int, ...]:
    """Return the slots that a key may have: as a text and, if possible, as bytes."""
    text, as_bytes = key_slot(key), bytes_slot(key)
    return (text,) if as_bytes is None else (text, as_bytes)


def slots_of(
    routing_keys: Sequence[str | bytes | None], came_to: HashRange | None = None
) -> tuple[int | None, list[int | None] | None, bool]:
    """Return the slots of the messages of one entry.

    The first message routed the entry into its range. If its slot as text is outside that range and
    its slot as bytes is inside, the keys were set as bytes. Otherwise the text counts, even if both
    are inside. So a smaller range may decide what a larger one left open. Code that keeps the order
    of a key must therefore use the key. The slot only shows the present owner.

    Args:
        routing_keys: Routing key of each message; ``None`` when keyless. At least one. Bytes for an
            ordering key that is no text.
        came_to: Range whose consumer received the entry, if a partition key routed it. ``None`` if
            unknown: then the texts count.

    Returns:
        (slot of the first message, which routes the entry; slot of each message if they differ,
            else ``None``; whether the keys are known to be set as bytes).
    """
    first = routing_keys[0]
    slot: int | None = None
    of_bytes = False
    if first is not None:
        slot = key_slot(first)
        # Runs for every entry: comparing the bounds of a range is cheaper than a method call.
        inside = came_to is None or came_to.start <= slot <= came_to.end
        if not inside and isinstance(first, str):
            other = bytes_slot(first)
            if other is not None and came_to is not None and other in came_to:
                slot, of_bytes = other, True
    if routing_keys.count(first) == len(routing_keys):
        return slot, None, of_bytes
    slots = [None if key is None else _slot(key, of_bytes) for key in routing_keys]
    return slot, differing(slots), of_bytes


def _slot(key: str | bytes, of_bytes: bool) -> int:
    slot = bytes_slot(key) if of_bytes and isinstance(key, str) else None
    return key_slot(key) if slot is None else slot


def differing(slots: list[int | None]) -> list[int | None] | None:
    """Return the slots of the messages of one entry, at least one; ``None`` if all are equal."""
    return slots if slots.count(slots[0]) < len(slots) else None
