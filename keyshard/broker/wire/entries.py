"""An entry as it came, and what entries become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.errors import KeyShardError

PAYLOAD_AT_ONCE = 32 * 1024 * 1024
"""Payload, unpacked, after which no more entries are decoded at once, bytes: what is compressed may
be a thousand times as large."""


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
    left_out: EntryId | None
    """An encrypted entry that was left out, where that is allowed."""
    messages: int
    """Messages of the blocks, of what was left out and of what cannot be read, as the broker counts
    them."""
    seen: int
    """Entries that this is about: up to the one that is refused, it included, or to the one with
    which there was enough."""


class UnreadableError(Exception):
    """Why an entry cannot be read."""
