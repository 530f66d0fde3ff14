"""Names of things at the broker: topic partitions, entries, and the messages of an entry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from keyshard.core.ring.key_slot import key_slot, possible_slots, routing_key
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import shown

_PARTITION_SUFFIX = re.compile(r"(?P<topic>.+)-partition-(?P<partition>0|[1-9][0-9]{0,8})")
"""As Pulsar reads it: ``-partition-007`` ends the name of a topic."""
_TOPIC_PART = re.compile(r"^[^/\s]+$")

ROW_BYTES = 32
"""Memory of a message beside its bytes: offsets, times and validity of its columns."""
MIXED_SLOT_BYTES = 40
"""The same of its slot, where the messages of an entry have different ones."""
ENTRY_BYTES = 500
"""Memory of an entry beside its messages: its objects here and in the window."""
DELIVERY_BYTES = 5_000
"""Memory of one delivery's columns beside their rows: buffers and the objects around them."""
PART_BYTES = 200
"""Memory of one more part of an entry."""


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
            f"Topic {shown(name)} is non-persistent: all its messages have the same position, so "
            "they cannot be acknowledged on checkpoint. Use a persistent topic.",
            topic=name,
        )
    parts = rest.split("/")
    if domain != "persistent" or len(parts) != 3 or not all(map(_TOPIC_PART.fullmatch, parts)):
        raise ConfigError(
            f"{shown(name)} is not a topic name. Write 'topic', 'tenant/namespace/topic' or "
            "'persistent://tenant/namespace/topic'."
        )
    return f"persistent://{rest}"


def is_system_topic(topic: str) -> bool:
    """Whether a topic is Pulsar's own, such as ``__change_events``: its name says so."""
    return topic.rpartition("/")[2].startswith("__")


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One topic partition; ``partition`` is -1 for a topic that is not partitioned."""

    topic: str
    partition: int = -1

    @classmethod
    def parse(cls, name: str) -> TopicPartition:
        """Read a full name as the broker writes it, with or without ``-partition-N``."""
        match = _PARTITION_SUFFIX.fullmatch(name)
        return cls(match["topic"], int(match["partition"])) if match else cls(name)

    @property
    def name(self) -> str:
        """The broker's name for it."""
        return self.topic if self.partition < 0 else f"{self.topic}-partition-{self.partition}"

    def __str__(self) -> str:
        return self.name


class EntryId(NamedTuple):
    """Position of an entry in its topic partition; sorts in publish order."""

    ledger: int
    entry: int


class Part(NamedTuple):
    """Where the content of some messages is: ``rows`` rows from row ``start`` on."""

    content: Any
    """A ``pyarrow.RecordBatch`` of :data:`keyshard.arrow.content.CONTENT`, shared by all entries
    of one delivery. Decisions never look into it."""
    start: int
    rows: int
    kept: Any = None
    """Where the content is instead: a :class:`keyshard.broker.hosted.wire.Kept`; then only keys may
    be here."""


@dataclass(slots=True)
class EntryBlock:
    """Messages of one entry as one delivery brought them.

    A block that came with one ``receive`` may hold a part of its entry; an assembly joins parts.
    What is in a window is changed by that window alone, and only in who received it.
    """

    id: EntryId
    batch_size: int
    """Messages in the entry as published; 1 for an entry that is no producer batch."""
    batched: bool
    """Whether the entry is a producer batch; then acknowledging counts per index at the client."""
    indices: Sequence[int]
    """Batch indices, ascending; 0 alone for an entry that is no producer batch."""
    slot: int | None
    """Slot that routed the entry: that of its first message; ``None`` when keyless."""
    mixed_slots: list[int | None] | None
    """Slot of each message where they differ, because the producer does not batch by key."""
    publish_ms: int
    """Publish time, milliseconds since the epoch; a producer batch has one for all messages. 0 when
    it is unset or no time."""
    payload_bytes: int
    """Sum of the lengths of the values."""
    content: Any
    """Content of the messages, in the order of ``indices``: as in :class:`Part`, but for those of
    ``later_parts``."""
    start: int
    """Row of the content where they begin."""
    redelivered: bool = False
    """Whether the broker counts a delivery before this one; a consumer that went away is none."""
    keys_of_bytes: bool = False
    """Whether its keys are known to be set as bytes: by its metadata or, where the client hides
    that, by the range it came to."""
    unreadable: int = 0
    """Messages with a time, key or property that cannot be what it should; see
    :mod:`keyshard.arrow.metadata`."""
    schema_version: int | None = None
    """Version of the topic's schema that its messages were written with; ``None``: it says none."""
    other_bytes: int = 0
    """Bytes of what its messages have beside their values: keys, properties, metadata. Follows from
    the entry alone, as ``payload_bytes`` does: over the wire, the bytes that are stored of it."""
    kept: Any = None
    """As in :class:`Part`."""
    later_parts: tuple[Part, ...] = ()
    """Content of what was joined, in the order of ``indices``. An entry that came whole has none:
    each object of an entry costs the collector as much as decoding a message."""
    received_by: int = field(default=-1, compare=False)
    """Index of the range that it counts as received by, once it is in a window."""

    @property
    def rows(self) -> int:
        """Messages in this block."""
        return len(self.indices)

    @property
    def column_bytes(self) -> int:
        """Memory of its messages as columns, bytes; follows from the entry alone."""
        return self.payload_bytes + self.other_bytes + len(self.indices) * ROW_BYTES

    @property
    def memory_bytes(self) -> int:
        """Memory that holding it takes, bytes: what every limit in bytes counts.

        The first entry of a delivery counts what the delivery takes however few messages it has.
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
        """Where the content of the messages is, in the order of ``indices``."""
        rows = len(self.indices) - sum(part.rows for part in self.later_parts)
        return (Part(self.content, self.start, rows, self.kept), *self.later_parts)

    @property
    def whole(self) -> bool:
        """Whether every index of the entry is here."""
        return len(self.indices) == self.batch_size

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
        """Slots that may have routed the entry: not every Reader knows of keys set as bytes."""
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
        """Partition key of each message; ``None`` where it has none."""
        return self.column("__key")

    def joined(self, later: EntryBlock) -> EntryBlock:
        """This block and one with later indices of the same entry."""
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
        """A column of the content, one value for each message."""
        return [
            value
            for part in self.parts
            for value in part.content.column(name).slice(part.start, part.rows).to_pylist()
        ]
