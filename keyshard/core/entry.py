"""Names of things at the broker: topic partitions, entries, and the messages of an entry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from keyshard.core.key_slot import key_slot, routing_key
from keyshard.errors import ConfigError, NonPersistentTopicError

_PARTITION_SUFFIX = re.compile(r"^(?P<topic>.+)-partition-(?P<partition>\d+)$")
_TOPIC_PART = re.compile(r"^[^/\s]+$")


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
            f"Topic {name!r} is non-persistent: all its messages have the same position, so they "
            "cannot be acknowledged on checkpoint. Use a persistent topic.",
            topic=name,
        )
    parts = rest.split("/")
    if domain != "persistent" or len(parts) != 3 or not all(map(_TOPIC_PART.fullmatch, parts)):
        raise ConfigError(
            f"{name!r} is not a topic name. Write 'topic', 'tenant/namespace/topic' or "
            "'persistent://tenant/namespace/topic'."
        )
    return f"persistent://{rest}"


@dataclass(frozen=True, slots=True, order=True)
class TopicPartition:
    """One topic partition; ``partition`` is -1 for a topic that is not partitioned."""

    topic: str
    partition: int = -1

    @classmethod
    def parse(cls, name: str) -> TopicPartition:
        """Read a full name as the broker writes it, with or without ``-partition-N``."""
        match = _PARTITION_SUFFIX.match(name)
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


@dataclass(slots=True)
class EntryBlock:
    """Messages of one entry as one delivery brought them: columns of equal length, by index.

    A block that came with one ``receive`` may hold a part of its entry; an assembly joins parts.
    Blocks are not changed after they entered a window.
    """

    id: EntryId
    batch_size: int
    """Messages in the entry as published; 1 for an entry that is no producer batch."""
    batched: bool
    """Whether the entry is a producer batch; then acknowledging counts per index at the client."""
    indices: list[int]
    """Batch indices, ascending; ``[0]`` for an entry that is no producer batch."""
    values: list[bytes]
    partition_keys: list[str | None]
    ordering_keys: list[str | None]
    publish_ms: list[int]
    """Publish time of each message, milliseconds since the epoch."""
    event_ms: list[int]
    """Event time of each message, milliseconds since the epoch; 0 when unset."""
    properties: list[dict[str, str]]
    payload_bytes: int
    """Sum of the lengths of the values."""

    @property
    def rows(self) -> int:
        """Messages in this block."""
        return len(self.indices)

    @property
    def whole(self) -> bool:
        """Whether every index of the entry is here."""
        return len(self.indices) == self.batch_size

    @property
    def slot(self) -> int | None:
        """Slot that routed the entry: that of its first message; ``None`` when keyless."""
        key = routing_key(self.partition_keys[0], self.ordering_keys[0])
        return None if key is None else key_slot(key)

    def slots(self) -> list[int | None]:
        """Slot of each message, for producers that mix keys in one batch."""
        keys = map(routing_key, self.partition_keys, self.ordering_keys)
        return [None if key is None else key_slot(key) for key in keys]
