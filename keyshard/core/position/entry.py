"""The broker's units: topic partitions, entries, and the messages of an entry."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from keyshard.core.ring.key_slot import key_slot, possible_slots, routing_key
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import shown

_PARTITION_SUFFIX = re.compile(r"(?P<topic>.+)-partition-(?P<partition>0|[1-9][0-9]{0,8})")
"""Pulsar's own rule: ``-partition-007``, with leading zeros, belongs to the name of the topic."""
_TOPIC_PART = re.compile(r"^[^/\s]+$")
_SCALABLE = {"topic": "a scalable topic", "segment": "a segment of a scalable topic"}
"""Domains of Pulsar 5, which brokers take in any case."""

ROW_BYTES = 32
"""Memory of a message beside its bytes: offsets, times and validity of its columns."""
MIXED_SLOT_BYTES = 40
"""Memory of a message's slot, if the messages of an entry have different slots."""
ENTRY_BYTES = 500
"""Memory of an entry beside its messages: its objects here and in the window."""
DELIVERY_BYTES = 5_000
"""Memory of one delivery's columns beside their rows: buffers and the objects around them."""
PART_BYTES = 200
"""Memory of each additional part of an entry."""


def full_topic_name(name: str) -> str:
    """Complete a topic name to ``persistent://tenant/namespace/topic``.

    Args:
        name: ``topic``, ``tenant/namespace/topic`` or the full name.

    Raises:
        NonPersistentTopicError: The topic is non-persistent: its messages have no position.
        ConfigError: The name is not a topic name.
    """
    domain, scheme, rest = name.partition("://")
    if not scheme:
        domain, rest = "persistent", name if "/" in name else f"public/default/{name}"
    if domain == "non-persistent":
        raise NonPersistentTopicError(
            f"Topic {shown(name)} is non-persistent. Its messages are not stored and have no "
            "position of their own, so nothing can be guaranteed.",
            "Use a persistent topic.",
            topic=name,
        )
    if (kind := _SCALABLE.get(domain.strip().lower())) is not None:
        raise ConfigError(
            f"{shown(name)} is {kind}, which keyshard consumes and reads, but does not publish to.",
            "Name a persistent topic.",
        )
    parts = rest.split("/")
    if domain != "persistent" or len(parts) != 3 or not all(map(_TOPIC_PART.fullmatch, parts)):
        raise ConfigError(
            f"{shown(name)} is not a topic name.",
            "Write 'topic', 'tenant/namespace/topic' or 'persistent://tenant/namespace/topic'.",
        )
    return f"persistent://{rest}"


def namespace_of(topic: str) -> str:
    """Return tenant and namespace of a full topic name, such as ``public/default``."""
    return "/".join(topic.partition("://")[2].split("/")[:2])


def is_system_topic(topic: str) -> bool:
    """Return whether the name is that of a system topic of Pulsar, such as ``__change_events``."""
    return topic.rpartition("/")[2].startswith("__")


NUMBER_MAX = 2**63 - 1
"""Highest number of a ledger or entry."""


class TopicPartition(NamedTuple):
    """One topic partition. ``partition`` is -1 if the topic is not partitioned.

    A tuple, because it is the key of most dictionaries: its hash and its order cost little.
    """

    topic: str
    partition: int = -1

    @classmethod
    def parse(cls, name: str) -> TopicPartition:
        """Parse a full name of the broker, with or without ``-partition-N``."""
        match = _PARTITION_SUFFIX.fullmatch(name)
        return cls(match["topic"], int(match["partition"])) if match else cls(name)

    @property
    def name(self) -> str:
        """The broker's name of the topic partition."""
        return self.topic if self.partition < 0 else f"{self.topic}-partition-{self.partition}"

    def __str__(self) -> str:
        return self.name


class EntryId(NamedTuple):
    """Position of an entry in its topic partition; sorts in publish order."""

    ledger: int
    entry: int

    @classmethod
    def parse(cls, text: str) -> EntryId:
        """Parse ``ledger:entry``.

        Raises:
            ValueError: The text is no entry id, not canonical, or has a number that no entry has.
        """
        ledger, _, entry = text.partition(":")
        result = cls(int(ledger), int(entry))
        if min(result) < 0 or max(result) > NUMBER_MAX or text != f"{result.ledger}:{result.entry}":
            raise ValueError(f"{text!r} is not an entry id")
        return result


entry_id_of: Callable[[tuple[int, int]], EntryId] = partial(tuple.__new__, EntryId)
"""Makes the id of a pair of ledger and entry. The call of the class takes three times as long."""


class Part(NamedTuple):
    """Content of some messages: ``rows`` rows of ``content``, beginning with row ``start``."""

    content: Any
    """A ``pyarrow.RecordBatch`` of :data:`keyshard.columns.content.CONTENT`, shared by all
    entries of one delivery. Decisions never look into it."""
    start: int
    rows: int
    remote: Any = None
    """A :class:`keyshard.workers.encoding.RemoteContent` if a worker keeps the content. Then
    this process may have only the keys."""


class EntryBlock(Struct, gc=False):
    """Messages of one entry, from one delivery.

    The garbage collector does not look into blocks: a window holds hundreds of thousands, and none
    is part of a cycle.

    A block may hold only a part of its entry; an assembly joins parts. Only the window changes a
    block that it holds: ``received_by``, and a missing ``publish_ms``.
    """

    id: EntryId
    batch_size: int
    """Messages in the entry as published; 1 if the entry is no producer batch."""
    batched: bool
    """Whether the entry is a producer batch. If so, the client counts acknowledgements per
    index."""
    indices: Sequence[int]
    """Batch indices, ascending; only 0 if the entry is no producer batch."""
    slot: int | None
    """Slot that routed the entry: the slot of its first message; ``None`` if keyless."""
    mixed_slots: list[int | None] | None
    """Slot of each message, if they differ because the producer does not batch by key."""
    publish_ms: int
    """Publish time, milliseconds since the epoch; the same for all messages of a producer batch.
    0 if unset or invalid."""
    payload_bytes: int
    """Sum of the lengths of the values."""
    content: Any
    """Content of the messages, in the order of ``indices``, as in :class:`Part`; without those
    in ``later_parts``."""
    start: int
    """First row of the messages in the content."""
    redelivered: bool = False
    """Whether the broker counts an earlier delivery. It does not count one to a consumer that
    closed."""
    keys_of_bytes: bool = False
    """Whether a key is known to be set as bytes. The metadata says so or, if the client hides the
    metadata, the range that received the entry."""
    unreadable: int = 0
    """Messages with an invalid time, key or property; see :mod:`keyshard.columns.content`."""
    schema_version: int | None = None
    """Version of the topic's schema that the messages were written with; ``None`` if unset."""
    other_bytes: int = 0
    """Bytes of keys, properties and metadata. Depends on the entry only, as ``payload_bytes``
    does. With the wire transport: the stored bytes."""
    complete: bool = False
    """Whether the block has all messages of the entry that the delivery has; missing ones were
    acknowledged before. If a client does not show where a delivery ends, only a block with every
    index is known to be complete."""
    remote: Any = None
    """As in :class:`Part`."""
    later_parts: tuple[Part, ...] = ()
    """Content of joined blocks, in the order of ``indices``. Empty for an entry that came whole,
    because each object per entry costs the garbage collector as much as decoding a message."""
    received_by: int = -1
    """Index of the range that received the entry; set in a window."""

    @property
    def rows(self) -> int:
        """Messages in this block."""
        return len(self.indices)

    @property
    def column_bytes(self) -> int:
        """Memory of the messages as columns, bytes. Depends on the entry only."""
        return self.payload_bytes + self.other_bytes + len(self.indices) * ROW_BYTES

    @property
    def memory_bytes(self) -> int:
        """Memory of the block, bytes. Every limit in bytes counts this.

        The first entry of a delivery includes the fixed memory of the delivery.
        """
        size = self.payload_bytes + self.other_bytes + len(self.indices) * ROW_BYTES + ENTRY_BYTES
        if not self.start:
            size += DELIVERY_BYTES
        if self.mixed_slots:
            size += len(self.indices) * MIXED_SLOT_BYTES
        if self.later_parts:
            size += len(self.later_parts) * PART_BYTES
        return size

    @property
    def parts(self) -> tuple[Part, ...]:
        """Content of the messages, in the order of ``indices``."""
        rows = len(self.indices) - sum(part.rows for part in self.later_parts)
        return (Part(self.content, self.start, rows, self.remote), *self.later_parts)

    @property
    def whole(self) -> bool:
        """Whether the block has every index of the entry."""
        return len(self.indices) == self.batch_size

    @property
    def ends(self) -> bool:
        """Whether no later block of the same delivery has messages of the entry."""
        return self.complete or self.indices[-1] == self.batch_size - 1

    @property
    def slots(self) -> list[int | None]:
        """Slot of each message."""
        return self.mixed_slots or [self.slot] * self.rows

    @property
    def text_slots(self) -> list[int | None]:
        """Slot of each message by the text of its key: the same from a Reader as from a range."""
        if not self.keys_of_bytes:
            return self.slots
        keys = map(routing_key, self.partition_keys, self.column("__orderingKey"))
        return [None if key is None else key_slot(key) for key in keys]

    @property
    def possible_slots(self) -> tuple[int, ...]:
        """Slots by which the broker may have routed the entry.

        A partition key that may have been set as bytes has two, because not every Reader shows it.
        """
        if self.slot is None:
            return ()
        key, ordering_key = (
            self.content.column(one)[self.start].as_py() for one in ("__key", "__orderingKey")
        )
        return (self.slot,) if key is None or ordering_key is not None else possible_slots(key)

    @property
    def values(self) -> list[bytes | None]:
        """Payload of each message; ``None`` for a null value."""
        return self.column("value")

    @property
    def partition_keys(self) -> list[str | None]:
        """Partition key of each message; ``None`` without one."""
        return self.column("__key")

    def joined(self, later: EntryBlock) -> EntryBlock:
        """Join this block and one with later indices of the same entry."""
        mixed = self.mixed_slots or later.mixed_slots or self.slot != later.slot
        return replace(
            self,
            indices=[*self.indices, *later.indices],
            mixed_slots=[*self.slots, *later.slots] if mixed else None,
            payload_bytes=self.payload_bytes + later.payload_bytes,
            other_bytes=self.other_bytes + later.other_bytes,
            later_parts=(*self.later_parts, *later.parts),
            keys_of_bytes=self.keys_of_bytes or later.keys_of_bytes,
            unreadable=self.unreadable + later.unreadable,
        )

    def column(self, name: str) -> list[Any]:
        """Return a column of the content, one value per message."""
        return [
            value
            for part in self.parts
            for value in part.content.column(name).slice(part.start, part.rows).to_pylist()
        ]


def memory_of(blocks: Sequence[EntryBlock]) -> int:
    """Return the sum of :attr:`EntryBlock.memory_bytes`, in a third of the time."""
    if any(map(_mixed_slots, blocks)) or any(map(_later_parts, blocks)):
        return sum([block.memory_bytes for block in blocks])
    size: int = sum(map(_payload_bytes, blocks)) + sum(map(_other_bytes, blocks))
    size += len(blocks) * ENTRY_BYTES + list(map(_start, blocks)).count(0) * DELIVERY_BYTES
    return size + sum(map(len, map(_indices, blocks))) * ROW_BYTES


_indices = attrgetter("indices")
_later_parts = attrgetter("later_parts")
_mixed_slots = attrgetter("mixed_slots")
_other_bytes = attrgetter("other_bytes")
_payload_bytes = attrgetter("payload_bytes")
_start = attrgetter("start")
