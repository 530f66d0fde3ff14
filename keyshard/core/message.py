"""Messages, as handlers receive them, and as they produce them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple, Protocol

from keyshard.core.ring.key_slot import key_slot
from keyshard.errors import ConfigError
from keyshard.redaction import shown


class MessageId(NamedTuple):
    """Position of a message in its topic partition; not comparable across topic partitions."""

    ledger: int
    """Number of the ledger."""
    entry: int
    """Number of the entry in its ledger."""
    batch_index: int
    """Index in a producer batch; 0 if the entry is no producer batch."""

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.batch_index}"


NOTE_CHARS = 200
"""Maximum length of a note."""


Place = tuple[int, int, int, str, int]
"""Ledger, entry, batch index, topic and partition of a message, which identify it in a source."""


TakeNote = Callable[[Place, str], None]
"""Takes a note, and the place of the message whose handler set it."""


class HandlerContext(NamedTuple):
    """The parts of a run that a message needs while a handler has it."""

    read_data: Callable[[Message], Any] | None = None
    """Decoder of message values."""
    note: TakeNote | None = None
    """Takes the notes of handlers; ``None``: nothing shows them."""


NO_CONTEXT = HandlerContext()
CONTEXT: ContextVar[HandlerContext] = ContextVar("CONTEXT", default=NO_CONTEXT)
"""The context of the handler that runs in this thread or task."""


class Message(NamedTuple):
    """One message; immutable and picklable."""

    value: bytes | None
    """Payload; ``None`` for a null value, which marks the value of the key as deleted."""
    key: str | None
    """Partition key; ``None`` without a key, ``""`` for an empty one."""
    ordering_key: str | None
    """Ordering key; ``None`` without one, ``""`` for an empty one."""
    message_id: MessageId
    """Position in its topic partition."""
    topic: str
    """Full name, without the partition suffix."""
    partition: int
    """Topic partition; -1 if the topic is not partitioned."""
    publish_time: datetime
    """Publish time with a time zone. 1970-01-01 if the number is no valid time; property
    ``__publishTime`` then has the number."""
    event_time: datetime | None
    """Event time with a time zone, as set by the producer. ``None`` if unset or if the number is
    no valid time; property ``__eventTime`` then has the number."""
    properties: Mapping[str, str]
    """Properties that the producer set."""
    slot: int | None
    """Slot of the key on the ring, 1 to 65,535; ``None`` without a key."""
    redelivered: bool
    """Whether the broker counts an earlier delivery. It counts negative acknowledgements and
    time-outs, but not redeliveries after a consumer closed."""
    schema_version: int | None = None
    """Version of the topic's schema that the message was written with; ``None`` if the producer
    sets none."""
    key_bytes: bytes | None = None
    """Partition key as bytes; for a text key, its UTF-8. ``None`` without a key, or if
    ``metadata_columns`` of the source does not name ``__keyBytes``."""

    @property
    def data(self) -> Any:
        """The value, decoded by the schema of its topic; ``None`` for a null value.

        It is a dict or a scalar; without a schema, bytes. Works in a handler of ``source.run`` or
        ``ray_adapter.run``. The schema is fetched when the first message of a topic is decoded.
        Every access decodes again.

        Raises:
            MalformedMessageError: The value does not fit the schema.
            SchemaError: The schema cannot be used.
            UnfitHandlerError: Keys are stored apart from values, and the source does not name
                ``__keyBytes``.
            ConfigError: The message is not in such a handler.
        """
        read = CONTEXT.get().read_data
        if read is None:
            raise ConfigError(
                "message.data exists only in handlers of a source, in the thread or task of the "
                "call.",
                "Use message.value, or read message.data earlier.",
            )
        return read(self)

    def note(self, text: str) -> None:
        """Set a line about the current step of the handler, such as ``"step 3 of 5"``.

        ``keyshard stacks``, the page and the control socket show the newest note of the message
        while its handler runs; the page and the control socket also while it waits for a retry. A
        note costs one or two microseconds, and 30 if handlers run in processes.

        It works in a handler of ``source.run``, in the thread or task of the call. In other threads
        and in jobs of Ray, it does nothing.

        Args:
            text: The line. Characters after the first 200 are cut off.

        Raises:
            TypeError: ``text`` is no text.
        """
        set_note(CONTEXT.get(), self, text)

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
        """Make a message for the test of a handler.

        ::

            handle(Message.for_test(b"content", key="order-17"))

        Fields that are not given have fixed values; ``message._replace(partition=3)`` changes them.

        Raises:
            TypeError: The value is neither bytes nor ``None``.
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
        """The key that defines the order: the ordering key, else the partition key."""
        return self.ordering_key if self.ordering_key is not None else self.key


def place_of(message: Message) -> Place:
    """Return the place of a message."""
    return (*message.message_id, message.topic, message.partition)


def set_note(context: HandlerContext, message: Message, text: str) -> None:
    """Give a note to a run, if there is one."""
    if not isinstance(text, str):
        raise TypeError(f"A note is a text, not {type(text).__name__}.")
    if context.note is not None:
        # A subclass of str may return anything from its own methods.
        context.note(place_of(message), str.__getitem__(text, slice(NOTE_CHARS)))


class Attempt(Protocol):
    """One attempt to handle a message that a program took with ``async for``."""

    @property
    def context(self) -> HandlerContext:
        """The context of the run."""

    def end(self, error: BaseException | None) -> None:
        """End the attempt with its outcome; ``None``: the message is completed."""


class TakenMessage(Message):
    """A message that ``async for`` gave out; it is acknowledged only after :meth:`done`.

    The next message of its key comes after that. If the program drops its last reference to the
    message before :meth:`done` or :meth:`failed`, the source ends with an error, because nothing
    can complete the message any more.
    """

    attempt: Attempt | None = None
    """Internal: takes the outcome."""

    async def done(self) -> None:
        """Say that the message is completed. Idempotent; any thread or event loop may run it.

        Raises:
            RuntimeStoppedError: The source ended before. The message is delivered again.
        """
        self._own().end(None)

    async def failed(self, error: BaseException) -> None:
        """Say that the message failed, as if a handler had raised ``error``. Idempotent.

        The retry policy decides: the message comes again, or becomes a dead letter. An error may be
        a :class:`keyshard.RetryLater` or a :class:`keyshard.Reject`.

        Raises:
            ConfigError: ``error`` is no exception.
            RuntimeStoppedError: As for :meth:`done`.
        """
        if not isinstance(error, BaseException):
            raise ConfigError(f"error is {shown(error)}.", "Give an exception.")
        self._own().end(error)

    @property
    def data(self) -> Any:
        """The value, decoded by the schema of its topic; see :attr:`keyshard.Message.data`."""
        token = CONTEXT.set(self._own().context)
        try:
            return super().data
        finally:
            CONTEXT.reset(token)

    def note(self, text: str) -> None:
        """Set a line about the current step of the program; see :meth:`keyshard.Message.note`.

        A copy of the message takes no note.
        """
        set_note(NO_CONTEXT if self.attempt is None else self.attempt.context, self, text)

    def __reduce__(self) -> tuple[type[Message], tuple[Any, ...]]:
        return Message, tuple(self)

    def _own(self) -> Attempt:
        if self.attempt is None:
            raise ConfigError(
                "This message is a copy.", "Call done() on the message that the iteration gave out."
            )
        return self.attempt


@dataclass(frozen=True, slots=True)
class Produce:
    """A message to publish, which a handler returns or yields.

    Raises:
        ConfigError: A field has the wrong type.
    """

    value: bytes | None
    """Payload; ``None`` for a null value."""
    key: str | None = field(default=None, kw_only=True)
    """Partition key; ``None`` for no key."""
    ordering_key: str | None = field(default=None, kw_only=True)
    """Ordering key; ``None`` for none."""
    properties: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Properties; ``None`` for none."""
    event_time: datetime | None = field(default=None, kw_only=True)
    """Event time with a time zone."""
    deliver_at: datetime | None = field(default=None, kw_only=True)
    """Delivery time with a time zone, for shared subscriptions."""
    topic: str | None = field(default=None, kw_only=True)
    """Name of the topic; ``None`` for the topic of the sink."""

    def __post_init__(self) -> None:
        if not isinstance(self.value, bytes | None):
            raise ConfigError(f"value is {shown(self.value)}.", "Give bytes or None.")
        for name in ("key", "ordering_key", "topic"):
            text = getattr(self, name)
            if text is not None and not _is_text(text):
                raise ConfigError(f"{name} is {shown(text)}.", "Give a text or None.")
        if self.properties is not None:
            object.__setattr__(self, "properties", _texts(self.properties))
        for name in ("event_time", "deliver_at"):
            time = getattr(self, name)
            if time is None:
                continue
            if not isinstance(time, datetime) or time.tzinfo is None:
                raise ConfigError(
                    f"{name} is {shown(time)}; it must be a datetime with a time zone."
                )
            if time.timestamp() < 0.001:
                raise ConfigError(f"{name} is {shown(time)}; it must be after 1970-01-01.")


def _texts(properties: object) -> dict[str, str]:
    if not isinstance(properties, Mapping) or not all(
        _is_text(text) for pair in properties.items() for text in pair
    ):
        raise ConfigError(f"properties is {shown(properties)}.", "Give texts.")
    return dict(properties)


def _is_text(text: object) -> bool:
    """Return whether a value is a text that UTF-8 can encode; a lone surrogate is not."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
