"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from keyshard.core.ring.key_slot import key_slot


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

    value: bytes | None
    """Payload; ``None`` for a null value, by which a producer says that a key has none any more."""
    key: str | None
    """Partition key; ``None`` where it has none, ``""`` where it is empty."""
    ordering_key: str | None
    """As ``key``."""
    message_id: MessageId
    topic: str
    """Full name, without the partition suffix."""
    partition: int
    """Topic partition; -1 when the topic is not partitioned."""
    publish_time: datetime
    """When the producer sent it, with a time zone; 1970-01-01 for a number that is no time, which
    then is property ``__publishTime``."""
    event_time: datetime | None
    """What the producer says, with a time zone; ``None`` when unset, or for a number that is no
    time, which then is property ``__eventTime``."""
    properties: Mapping[str, str]
    slot: int | None
    """Where it lies on the ring, 1 to 65,535; ``None`` without a key."""
    redelivered: bool
    """Whether the broker counts a delivery before this one. It counts negative acknowledgements
    and time-outs of others, not what comes again because a consumer went away."""

    @classmethod
    def for_test(
        cls,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
    ) -> Message:
        """A message such as a handler gets, for the tests of a handler.

        ::

            handle(Message.for_test(b"content", key="order-17"))

        What is not given is the same each time; ``message._replace(partition=3)`` changes it.

        Raises:
            TypeError: The value is neither bytes nor ``None``, and in a source it always is.
        """
        if not isinstance(value, bytes | None):
            raise TypeError(f"The value of a message is bytes or None, not {type(value).__name__}.")
        routing = key if ordering_key is None else ordering_key
        return cls(
            value, key, ordering_key, MessageId(1, 0, 0), "persistent://public/default/test", 0,
            publish_time=datetime(2024, 1, 1, tzinfo=timezone.utc), event_time=event_time,
            properties={} if properties is None else dict(properties),
            slot=None if routing is None else key_slot(routing), redelivered=False,
        )  # fmt: skip

    @property
    def routing_key(self) -> str | None:
        """What keeps order: the ordering key, else the partition key, else ``None``."""
        return self.ordering_key if self.ordering_key is not None else self.key
