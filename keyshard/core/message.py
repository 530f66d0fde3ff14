"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple


class MessageId(NamedTuple):
    """Position of a message in its topic partition; not comparable across topic partitions."""

    ledger: int
    entry: int
    batch_index: int
    """Index in a producer batch; 0 in an entry that is none."""

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.batch_index}"


class Message(NamedTuple):
    """One message; immutable and picklable."""

    value: bytes
    key: str | None
    """Partition key; ``None`` where it has none."""
    ordering_key: str | None
    message_id: MessageId
    topic: str
    """Full name, without the partition suffix."""
    partition: int
    """Topic partition; -1 when the topic is not partitioned."""
    publish_time: datetime
    """When the broker stored it, with a time zone."""
    event_time: datetime | None
    """What the producer says, with a time zone; ``None`` when unset."""
    properties: Mapping[str, str]
    slot: int | None
    """Where it lies on the ring, 1 to 65,535; ``None`` without a key."""
    redelivered: bool
    """Whether the broker counts a delivery before this one. It counts negative acknowledgements
    and time-outs of others, not what comes again because a consumer went away."""

    @property
    def routing_key(self) -> str | None:
        """What keeps order: the ordering key, else the partition key, else ``None``."""
        return self.ordering_key if self.ordering_key is not None else self.key
