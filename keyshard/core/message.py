"""A message as a handler sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, NamedTuple

from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ConfigError


class MessageId(NamedTuple):
    """Position of a message in its topic partition; not comparable across topic partitions."""

    ledger: int
    entry: int
    batch_index: int
    """Index in a producer batch; 0 in an entry that is none."""

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.batch_index}"


READ_DATA: ContextVar[Callable[[Message], Any] | None] = ContextVar("READ_DATA", default=None)
"""What decodes messages, where handlers are called."""


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
    schema_version: int | None = None
    """Version of the topic's schema that it was written with; ``None`` where its producer says
    none."""
    key_bytes: bytes | None = None
    """The bytes that the partition key was set as, of a text its UTF-8, where ``metadata_columns``
    of the source name ``__keyBytes``; else, and without key, ``None``."""

    @property
    def data(self) -> Any:
        """The value, decoded by the schema of its topic: a dict or a scalar; ``None`` for none.

        In a handler of ``source.run`` or ``ray_adapter.run``. The schema is asked for when the
        first message of a topic is decoded, and decoding happens at each access. Without a schema
        it is the bytes.

        Raises:
            MalformedMessageError: The schema does not fit.
            SchemaError: It cannot be used.
            UnfitHandlerError: Its keys stand apart, and the source does not name ``__keyBytes``.
            ConfigError: This is no handler of one of these.
        """
        read = READ_DATA.get()
        if read is None:
            raise ConfigError(
                "message.data is there in handlers of a source only, in the thread or task that "
                "was called; use message.value, or take message.data before."
            )
        return read(self)

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
