"""An entry as it came, and what entries become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.errors import KeyShardError

PAYLOAD_AT_ONCE = 8 * 1024 * 1024
"""Memory of messages after which no more entries are decoded at once, bytes: what is compressed may
be a thousand times as large."""
ENTRY_MESSAGES_MAX = 1_000_000
"""Messages of an entry: more than fit uncompressed into 5 MiB, the largest entry by default."""
ENTRY_MEMORY_MAX = 256 * 1024 * 1024
"""Memory that the messages of an entry take, bytes: those below, payload, properties, the name of
the producer for each, and keys twice."""
MESSAGE_BYTES = 256
"""Memory of a message beside its content, in either decoder, bytes."""
PROPERTY_BYTES = 192
"""Memory of a property beside its name and value, bytes."""


KEPT_BYTES_MAX = 128 * 1024 * 1024
"""Largest frame of which more than its beginning is kept, bytes, whatever the broker allows."""
HEAD_BYTES = 64 * 1024
"""Bytes that are kept of a larger frame."""


class CutFrame(bytes):
    """The beginning of a frame that is larger than :data:`KEPT_BYTES_MAX`."""

    size = 0
    """Bytes of the whole frame."""


class RawEntry(NamedTuple):
    """An entry as it came: nothing of what is stored has been looked at."""

    id: EntryId
    redelivered: bool
    ack_set: Sequence[int]
    """Words of 64 bits, one bit for each message that is still to be delivered; empty: all are."""
    data: bytes
    """The frame it came in."""
    position: int
    """Where in it the stored bytes begin."""


class Decoded(NamedTuple):
    """What some entries became."""

    blocks: list[EntryBlock]
    """Of the entries before the first that is refused, in their order."""
    refused: KeyShardError | None
    """Why the next one is."""
    messages: int
    """Messages of the blocks and of what cannot be read, as the broker counts them."""
    seen: int
    """Entries that this is about: up to the one that is refused, it included, or to the one with
    which there was enough."""


class UnreadableError(Exception):
    """Why an entry cannot be read."""
