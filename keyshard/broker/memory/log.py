"""The storage of the in-memory broker: messages, entries, and the log of one topic partition.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

from base64 import b64decode
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from keyshard.broker.unreadable_entries import corrupt_entry, encrypted_entry
from keyshard.columns.content import entry_block, metadata_in
from keyshard.core.metadata_columns import DELIVER_AT, KEY_BYTES, PRODUCER, SEQUENCE_ID
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import key_slot, routing_key
from keyshard.errors import UnreadableEntryError

MARKER_SLOT = key_slot("pulsar.txn.marker--1")
"""Slot of every marker: a broker writes all of them with one producer name and sequence id."""
WHOLES_MAX, WHOLE_BYTES_MAX = 4_096, 1_024
"""Blocks of whole entries that are kept, and the largest payload of one, bytes."""
CORRUPT = "its checksum is wrong"
"""Defect of an entry that a test corrupted."""


class Batching(str, Enum):
    """How a producer batches the messages of one ``publish`` into entries."""

    NONE = "none"
    """Every message is its own entry."""
    BY_KEY = "by_key"
    """One producer batch per routing key."""
    MIXED = "mixed"
    """Producer batches in publish order, whatever the key; Pulsar's default."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as passed to a producer."""

    value: bytes | None
    """Payload; ``None`` for a null value."""
    key: str | None = None
    """Partition key; ``None`` for a keyless message, ``""`` for the empty key."""
    ordering_key: str | None = None
    """Ordering key; ``None`` as for ``key``."""
    properties: Mapping[str, str] = field(default_factory=dict)
    event_ms: int = 0
    """Event time, milliseconds since the epoch; 0 when unset."""
    key_is_base64: bool = False
    """Whether the partition key was set as bytes: ``key`` is their base64; the bytes are hashed."""
    schema_version: int | None = None
    """Version of the topic's schema, one per entry; ``None``: the producer states none."""
    deliver_at_ms: int | None = None
    """Time before which no shared subscription gets it, milliseconds since the epoch. Such a
    message is an entry of its own."""

    @property
    def routing_key(self) -> str | None:
        """The key that routes it: the ordering key, else the partition key."""
        return routing_key(self.key, self.ordering_key)

    @property
    def hashed(self) -> str | bytes | None:
        """The key that the broker hashes; ``None`` for a keyless message."""
        if self.key_is_base64 and self.ordering_key is None and self.key is not None:
            return b64decode(self.key)
        return self.routing_key

    @property
    def key_bytes(self) -> bytes | None:
        """The bytes of the partition key; of a text, its UTF-8."""
        if self.key is None:
            return None
        return b64decode(self.key) if self.key_is_base64 else self.key.encode()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a chunked message that an entry holds."""

    first: EntryId
    """Entry of the first part."""
    number: int
    """Index of this part, from 0."""
    count: int
    """Number of all parts."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredEntry:
    """One entry as the broker stores it; equal only to itself."""

    ordinal: int
    """Number of entries published to the topic partition before it; never reused."""
    id: EntryId
    slot: int
    batched: bool
    messages: tuple[Message, ...]
    publish_ms: int
    producer: str = ""
    sequence_id: int = 0
    """Sequence id of its first message; the others follow."""
    hidden: bool = False
    """Whether no consumer or Reader gets it: a marker, or data of an aborted transaction."""
    chunk: Chunk | None = None
    """The part of a chunked message that it holds as its only message."""
    encrypted: bool = False
    """Whether its producer encrypted it, so that only its slot is known."""

    @property
    def deliver_at_ms(self) -> int | None:
        """Time before which no shared subscription gets it, milliseconds; ``None``: at once."""
        return self.messages[0].deliver_at_ms if self.messages else None

    def block(
        self,
        indices: Sequence[int] | None = None,
        came_to: HashRange | None = None,
        columns: Collection[str] | None = None,
    ) -> EntryBlock:
        """Create a new block of its messages.

        Args:
            indices: Batch indices; ``None``: all messages.
            came_to: Range of the consumer that receives it; ``None`` for a Reader.
            columns: As in :class:`~keyshard.broker.port.ReadOptions`.
        """
        metadata = metadata_in(columns)
        if indices is None and came_to is None and self.payload_bytes <= WHOLE_BYTES_MAX:
            return copy(_whole(self, metadata))
        chosen = range(len(self.messages)) if indices is None else indices
        return self._block(chosen, came_to, metadata)

    @property
    def payload_bytes(self) -> int:
        """Sum of the lengths of the values."""
        return sum(len(message.value or b"") for message in self.messages)

    def _block(
        self, chosen: Sequence[int], came_to: HashRange | None, metadata: Sequence[str]
    ) -> EntryBlock:
        messages = [self.messages[index] for index in chosen]
        return entry_block(
            self.id,
            batch_size=len(self.messages),
            batched=self.batched,
            indices=list(chosen),
            values=[message.value for message in messages],
            partition_keys=[message.key for message in messages],
            ordering_keys=[message.ordering_key for message in messages],
            publish_ms=self.publish_ms,
            event_ms=[message.event_ms for message in messages],
            properties=[dict(message.properties) for message in messages],
            came_to=came_to,
            schema_version=self.messages[0].schema_version,
            metadata={name: self._metadata(name, chosen) for name in metadata},
        )

    def _metadata(self, name: str, indices: Sequence[int]) -> list[Any]:
        """Return a column of :data:`keyshard.columns.content.METADATA`."""
        if name == KEY_BYTES:
            return [self.messages[index].key_bytes for index in indices]
        if name == SEQUENCE_ID:
            return [self.sequence_id + index for index in indices]
        # This broker stores no other metadata.
        of_entry = {PRODUCER: self.producer, DELIVER_AT: self.deliver_at_ms}
        return [of_entry.get(name)] * len(indices)


@lru_cache(maxsize=WHOLES_MAX)
def _whole(entry: StoredEntry, metadata: tuple[str, ...]) -> EntryBlock:
    """Return the block of all messages; Readers read the same entries again and again."""
    return entry._block(range(len(entry.messages)), None, metadata)


class EntryLog:
    """Entries of one topic partition, in ledgers.

    Inside the broker, ordinals name entries, so that ranges of entries need no ledger sizes. Ids
    are for clients.

    Args:
        new_ledger: Returns the next ledger id of the cluster.
        entries_per_ledger: Entries after which a ledger is closed and the next one is opened.
    """

    def __init__(self, new_ledger: Callable[[], int], entries_per_ledger: int) -> None:
        self._new_ledger = new_ledger
        self._entries_per_ledger = entries_per_ledger
        self._ids: list[EntryId] = []
        self._entries: list[StoredEntry | None] = []
        self.first_ledger = new_ledger()
        """Its first ledger id, which no other log of the cluster has."""
        self._next_id = EntryId(self.first_ledger, 0)
        self._sequence_ids: dict[str, int] = {}
        self._first = 0
        self.corrupt: set[EntryId] = set()
        """Entries that became unreadable."""
        self.on_append: list[Callable[[], None]] = []
        """Called after entries were appended; readers wait on it."""

    def __len__(self) -> int:
        """Number of published entries, including trimmed ones."""
        return len(self._entries)

    @property
    def last_id(self) -> EntryId | None:
        """Id of the last published entry that is not hidden; ``None`` if there is none."""
        for entry_id, entry in zip(reversed(self._ids), reversed(self._entries), strict=True):
            if entry is None or not entry.hidden:
                return entry_id
        return None

    @property
    def first(self) -> int:
        """Ordinal of the first stored entry, or the length if none is stored."""
        return self._first

    def append(
        self,
        messages: Sequence[Message],
        *,
        batched: bool,
        producer: str,
        publish_ms: int,
        encrypted: bool = False,
        sequence_id: int | None = None,
    ) -> StoredEntry:
        """Store one entry. Its first message routes it, by producer and sequence id if keyless."""
        if sequence_id is not None:
            self._sequence_ids[producer] = sequence_id
        sequence_id = self._sequence_ids.get(producer, 0)
        slot = self._slot(messages[0], producer, len(messages))
        return self._store(
            messages, slot, publish_ms, producer, sequence_id, batched=batched, encrypted=encrypted
        )

    def append_hidden(
        self, messages: Sequence[Message], *, producer: str, publish_ms: int
    ) -> StoredEntry:
        """Store an entry that no consumer receives; without messages, a marker."""
        slot = self._slot(messages[0], producer, len(messages)) if messages else MARKER_SLOT
        return self._store(messages, slot, publish_ms, hidden=True)

    def append_chunked(
        self, message: Message, chunks: int, *, producer: str, publish_ms: int
    ) -> list[StoredEntry]:
        """Store one message as several entries, all with its slot."""
        slot = self._slot(message, producer, 1)
        value = message.value or b""
        size = -(-len(value) // chunks)
        stored: list[StoredEntry] = []
        for number in range(chunks):
            part = replace(message, value=value[number * size : (number + 1) * size])
            self._roll_if_full()
            chunk = Chunk(stored[0].id if stored else self._next_id, number, chunks)
            stored.append(self._store([part], slot, publish_ms, chunk=chunk))
        return stored

    def _slot(self, message: Message, producer: str, messages: int) -> int:
        sequence_id = self._sequence_ids.get(producer, 0)
        self._sequence_ids[producer] = sequence_id + messages
        hashed = message.hashed
        return key_slot(f"{producer}-{sequence_id}" if hashed is None else hashed)

    def _store(
        self,
        messages: Sequence[Message],
        slot: int,
        publish_ms: int,
        producer: str = "",
        sequence_id: int = 0,
        *,
        batched: bool = False,
        hidden: bool = False,
        chunk: Chunk | None = None,
        encrypted: bool = False,
    ) -> StoredEntry:
        self._roll_if_full()
        entry = StoredEntry(
            ordinal=len(self._entries),
            id=self._next_id,
            slot=slot,
            batched=batched,
            messages=tuple(messages),
            publish_ms=publish_ms,
            producer=producer,
            sequence_id=sequence_id,
            hidden=hidden,
            chunk=chunk,
            encrypted=encrypted,
        )
        self._ids.append(entry.id)
        self._entries.append(entry)
        self._next_id = EntryId(entry.id.ledger, entry.id.entry + 1)
        return entry

    def _roll_if_full(self) -> None:
        if self._next_id.entry >= self._entries_per_ledger:
            self.roll_ledger()

    def roll_ledger(self) -> None:
        """Close the ledger; the next entry opens another."""
        self._next_id = EntryId(self._new_ledger(), 0)

    def get(self, ordinal: int) -> StoredEntry | None:
        """Return the entry, or ``None`` if it is trimmed."""
        return self._entries[ordinal]

    def refused(self, entry: StoredEntry, where: TopicPartition) -> UnreadableEntryError | None:
        """Return why an entry of this log cannot be read; ``None`` if it can."""
        stored = b"".join(one.value or b"" for one in entry.messages)
        if entry.id in self.corrupt:
            return corrupt_entry(where, entry.id, CORRUPT, stored)
        return encrypted_entry(where, entry.id, stored) if entry.encrypted else None

    @property
    def ledger_sizes(self) -> dict[int, int]:
        """Number of entries of each stored ledger, ascending; the last one takes the next entry."""
        sizes = {}
        for entry_id in self._ids[self._first :]:
            sizes[entry_id.ledger] = entry_id.entry + 1
        return {**sizes, self._next_id.ledger: self._next_id.entry}

    @property
    def last_written(self) -> EntryId:
        """The last entry, stored or not; of an empty log, the position before its first entry."""
        return self._ids[-1] if self._ids else EntryId(self._next_id.ledger, -1)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Stored ledgers, with the bytes of each."""
        sizes = dict.fromkeys(self.ledger_sizes, 0)
        for entry in self._entries[self._first :]:
            assert entry is not None, "only entries before the first are trimmed"
            sizes[entry.id.ledger] += entry.payload_bytes
        counts = self.ledger_sizes
        return tuple(Ledger(ledger, counts[ledger], size) for ledger, size in sizes.items())

    def position_at(self, time_ms: int) -> EntryId:
        """Find a position at which publish times reach ``time_ms``, as :meth:`ordinal_at`."""
        ordinal = self.ordinal_at(time_ms)
        return self._ids[ordinal] if ordinal < len(self._ids) else self._next_id

    def ordinal_at(self, time_ms: int) -> int:
        """Find an ordinal at which publish times reach ``time_ms``, by bisection as in Pulsar.

        If times are not in order, this is any such ordinal.
        """
        low, high = self._first, len(self._entries)
        if high > low and self._published(high - 1) < time_ms:
            low = high
        elif high > low and self._published(low) >= time_ms:
            high = low
        while low < high:
            middle = (low + high) // 2
            if self._published(middle) < time_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def published_from(self, ordinal: int) -> int | None:
        """Return when the first stored entry from an ordinal on was published, milliseconds."""
        ordinal = max(ordinal, self._first)
        return self._published(ordinal) if ordinal < len(self._entries) else None

    def _published(self, ordinal: int) -> int:
        entry = self._entries[ordinal]
        assert entry is not None, "only entries before the first are trimmed"
        return entry.publish_ms

    def id(self, ordinal: int) -> EntryId:
        """Return the id of an entry, stored or trimmed."""
        return self._ids[ordinal]

    def ordinal(self, entry_id: EntryId) -> int | None:
        """Return the ordinal of an id, or ``None`` if no entry ever had it."""
        ordinal = bisect_left(self._ids, entry_id)
        found = ordinal < len(self._ids) and self._ids[ordinal] == entry_id
        return ordinal if found else None

    def only_hidden_from(self, ordinal: int) -> bool:
        """Return whether all entries from an ordinal on are hidden."""
        rest = (self._entries[i] for i in range(max(ordinal, self._first), len(self._entries)))
        return all(entry is None or entry.hidden for entry in rest)

    def first_from(self, entry_id: EntryId) -> int:
        """Ordinal of the first stored entry at or after an id, or the length if there is none."""
        return max(self._first, bisect_left(self._ids, entry_id))

    def trim(self, before: EntryId) -> None:
        """Delete every entry before an id."""
        end = self.first_from(before)
        self._entries[self._first : end] = [None] * (end - self._first)
        self._first = end

    def validate(self) -> None:
        """Assert that ids ascend and that exactly the entries before ``first`` are deleted."""
        assert len(self._ids) == len(self._entries)
        assert all(a < b for a, b in zip(self._ids, self._ids[1:], strict=False)), "ids ascend"
        for ordinal, entry in enumerate(self._entries):
            assert (entry is None) == (ordinal < self._first), "trimmed up to first"
            assert entry is None or (entry.ordinal, entry.id) == (ordinal, self._ids[ordinal])


def batches(
    messages: Sequence[Message], batching: Batching, size_max: int
) -> Iterable[Sequence[Message]]:
    """Batch messages into entries, in the order of the entries' first messages."""
    groups: list[list[Message]] = []
    open_groups: dict[str | bytes | None, list[Message]] = {}
    for message in messages:
        key = message.hashed if batching is Batching.BY_KEY else None
        group = open_groups.get(key)
        if message.deliver_at_ms is not None:
            groups.append([message])
            continue
        if group is None or batching is Batching.NONE or len(group) >= size_max:
            group = open_groups[key] = []
            groups.append(group)
        group.append(message)
    return groups
