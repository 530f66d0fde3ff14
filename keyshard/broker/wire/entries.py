"""Entries as received from the broker, and the result of decoding them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.errors import KeyShardError

PAYLOAD_AT_ONCE = 8 * 1024 * 1024
"""Memory of messages that ends a decoding step, bytes. A compressed entry may decompress to a
thousand times its size."""
ENTRY_MESSAGES_MAX = 1_000_000
"""Maximum messages of an entry: more than fit uncompressed into 5 MiB, the default limit."""
ENTRY_MEMORY_MAX = 256 * 1024 * 1024
"""Maximum memory of the messages of an entry, bytes: the fixed sizes below, payload, properties,
the producer name once per message, and keys twice."""
MESSAGE_BYTES = 256
"""Memory of a message in addition to its content, in either decoder, bytes."""
PROPERTY_BYTES = 192
"""Memory of a property in addition to its name and value, bytes."""


class RawEntry(Struct, frozen=True, gc=False):
    """An entry as received; its stored bytes are not parsed yet.

    The garbage collector does not look into entries, which are in no cycle.
    """

    id: EntryId
    data: bytes
    """The frame of the entry."""
    position: int
    """Offset of the stored bytes in the frame."""
    redelivered: bool = False
    ack_set: Sequence[int] = ()
    """64-bit words with one bit per message that is still to be delivered; empty: all of them."""


class Decoded(NamedTuple):
    """The result of decoding some entries."""

    blocks: list[EntryBlock]
    """Blocks of the entries before the first refused one, in order."""
    refused: KeyShardError | None
    """Why the next entry is refused; ``None`` if it is not."""
    messages: int
    """Messages of the blocks and of unreadable entries, as the broker counts them."""
    seen: int
    """Number of processed entries: up to and including a refused one, or the one that reached the
    limit of a decoding step."""


class UnreadableError(Exception):
    """The reason why an entry cannot be read."""
