"""Messages of the in-memory broker that are several entries.

Private to :mod:`keyshard.broker.memory`, which documents the whole.
"""

from __future__ import annotations

from keyshard.broker.memory.log import StoredEntry
from keyshard.broker.refused_entries import of_entry
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import ChunkedMessageError


class ChunkAssembly:
    """Joins the parts of chunked messages; one whose first part did not come is skipped."""

    def __init__(self) -> None:
        self._parts: dict[EntryId, int] = {}

    def is_incomplete(self, entry: StoredEntry) -> bool:
        """Take an entry; whether it is a part of a message that is not whole now."""
        chunk = entry.chunk
        if chunk is None:
            return False
        if chunk.number == 0:
            self._parts[chunk.first] = 0
        if self._parts.get(chunk.first) != chunk.number:
            return True
        self._parts[chunk.first] += 1
        if self._parts[chunk.first] < chunk.count:
            return True
        del self._parts[chunk.first]
        return False


def refused(entry: StoredEntry, where: TopicPartition) -> ChunkedMessageError:
    """What is raised for the last entry of a chunked message."""
    return of_entry(
        ChunkedMessageError,
        f"Message {entry.id.ledger}:{entry.id.entry} of {where} is chunked. Nothing of it was "
        "acknowledged. Switch chunking off at the producer.",
        where,
        entry.id,
    )
