"""Dead letters and markers: the properties of messages in a dead-letter topic.

A *dead letter* is a message that exhausted its retries. It has the value, key, event time and
properties of the original; properties that begin with ``keyshard.`` describe its origin and its
failure. A *marker* says one of three things: a dead letter is done; all dead letters of a key up to
a position are done; or those of a key after an original no longer count as done.

A dead letter *rests* until a marker says that it is done. Each dead letter and each marker names
the oldest dead letter that rested when it was written. If the topic no longer stores that dead
letter, and no later message says that it is done, the dead letter was lost.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum

from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.key_slot import key_slot, routing_key
from keyshard.errors import CheckpointError

PREFIX = "keyshard."
"""Prefix of every property that keyshard adds to a dead letter."""
ERROR_CHARS_MAX = 1_000
"""Most characters of an error that a dead letter keeps."""
REPLAYED = "replayed"
"""Kind of a marker."""
RUNS_AGAIN = "runs_again"
"""Kind of a marker that revokes others."""
NOTED = "noted"
"""Kind of a message that only names the oldest dead letter."""
PART = "part"
"""Kind of a message that holds a part of an original that is too large for one dead letter."""
PARTS = f"{PREFIX}parts"
"""Property of a dead letter: positions of its parts. Its own value is then empty, or null if the
original's value is null."""
PARTS_MAX = 65_536
"""Most parts of a dead letter: 256 MiB with the smallest parts."""
HEAD = f"{PREFIX}head"
"""Property of a dead letter in parts: number of their bytes that hold the original's properties."""
OLDEST = f"{PREFIX}oldest"
"""Property of every written message: position of the oldest dead letter that rests."""
REJECTED, WAITING, OTHER = "rejected", "waiting", "other"
"""Kinds of errors that have no class."""
OWN = f"{PREFIX}own."
"""Prefix for a property of the original whose name begins like keyshard's own."""


class DeadLetterKind(str, Enum):
    """The reason why a message became a dead letter."""

    PARKED = "parked"
    """Its key is parked: this message, or an earlier one, exhausted its retries. It waits for
    its replay."""
    REJECTED = "rejected"
    """The handler rejected it, it has no key though one is required, or it is the stored form of
    an unreadable entry."""
    DEAD_LETTER = "dead_letter"
    """It exhausted its retries, and its key continued without it."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message on its way to a dead-letter topic, or back."""

    message: Message
    """The original, with its own topic, position and properties."""
    subscription: str
    """Subscription of the source that wrote it."""
    kind: DeadLetterKind
    attempts: int
    """Failed attempts; 0 if no handler was called with it."""
    error: str
    """Error of the newest attempt, or the reason why no handler was called."""
    written_at: datetime | None = field(default=None, compare=False)
    """Time at which it was written; ``None`` before that."""

    @property
    def key(self) -> str | None:
        """Routing key of the original."""
        return self.message.routing_key

    @property
    def topic_partition(self) -> TopicPartition:
        """Topic partition of the original."""
        return TopicPartition(self.message.topic, self.message.partition)

    @property
    def error_kind(self) -> str:
        """Class of the error, such as ``ValueError``, or one of these words.

        ``rejected``: the message was rejected. ``waiting``: no handler was called with it, because
        an earlier message of its key is a dead letter. ``other``: the error has no class, as after
        ``RetryLater``.
        """
        if self.kind is DeadLetterKind.REJECTED:
            return REJECTED
        if not self.attempts:
            return WAITING
        name, colon, _ = self.error.partition(":")
        return name if colon and name.isidentifier() else OTHER

    @property
    def event_ms(self) -> int:
        """Event time of the original, milliseconds since the epoch; 0 when unset."""
        time = self.message.event_time
        return 0 if time is None else _milliseconds(time)

    def properties(self) -> dict[str, str]:
        """Return the properties of the stored message: the original's, and those of keyshard."""
        kept = {_kept_name(name): value for name, value in self.message.properties.items()}
        return {**kept, **self.own_properties()}

    def own_properties(self) -> dict[str, str]:
        """Return the properties that keyshard adds to those of the original."""
        message = self.message
        own = {
            "kind": self.kind.value,
            "subscription": self.subscription,
            "topic": message.topic,
            "partition": str(message.partition),
            "messageId": str(message.message_id),
            "publishTime": str(_milliseconds(message.publish_time)),
            "attempts": str(self.attempts),
            "error": self.error[:ERROR_CHARS_MAX],
            "errorKind": self.error_kind,
        }
        if message.schema_version is not None:
            own["schemaVersion"] = str(message.schema_version)
        if message.key_bytes is not None:
            own["keyBytes"] = b64encode(message.key_bytes).decode()
        return {PREFIX + name: value for name, value in own.items()}

    def without_content(self) -> DeadLetter:
        """Return the dead letter without value and properties of the original."""
        return replace(self, message=self.message._replace(value=None, properties={}))

    def packed(self) -> tuple[bytes, int]:
        """Return the original's properties and value as bytes, and the size of the properties."""
        head = json.dumps(dict(self.message.properties)).encode()
        return head + (self.message.value or b""), len(head)


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter of a parked key, as read from the dead-letter topic."""

    position: EntryId
    """Its position in the dead-letter topic."""
    dead_letter: DeadLetter


@dataclass(frozen=True, slots=True)
class DoneMarker:
    """A marker: the dead letter of an original is done, replayed or discarded."""

    key: str
    subscription: str
    topic_partition: TopicPartition
    message_id: MessageId
    """Id of the original."""

    def properties(self) -> dict[str, str]:
        """Return the properties of the marker; its message has the partition key ``key``."""
        return _about(REPLAYED, self)


@dataclass(frozen=True, slots=True)
class RunsAgainNote:
    """A marker: dead letters of a key after an original no longer count as done.

    It is written before a handler gets that original. If the later originals come again, they run
    after it.
    """

    key: str
    subscription: str
    topic_partition: TopicPartition
    message_id: MessageId

    def properties(self) -> dict[str, str]:
        """Return the properties of the marker; its message has the partition key ``key``."""
        return _about(RUNS_AGAIN, self)


@dataclass(frozen=True, slots=True)
class DoneUpToMarker:
    """A marker: all dead letters of a key up to a position are done, replayed or discarded."""

    key: str
    subscription: str
    up_to: EntryId
    """Position in the dead-letter topic, inclusive."""

    def properties(self) -> dict[str, str]:
        """Return the properties of the marker; its message has the partition key ``key``."""
        own = {
            "kind": REPLAYED,
            "subscription": self.subscription,
            "upTo": position_text(self.up_to),
        }
        return {PREFIX + name: value for name, value in own.items()}


def parts_of(found: Message) -> EntrySet:
    """Return the positions of the parts of a dead letter; empty if it is whole.

    Raises:
        ValueError: The property is malformed or names too many parts; :func:`parse` raises it too.
    """
    text = found.properties.get(PARTS, "")
    try:
        parts = EntrySet.parse(text)
    except CheckpointError as exc:
        raise ValueError(
            f"property {PARTS} is {text[:60]!r}, which is not a set of entries"
        ) from exc
    count = len(parts)
    if count > PARTS_MAX:
        raise ValueError(
            f"property {PARTS} names {count} entries, but the limit of a dead letter is {PARTS_MAX}"
        )
    return parts


def unpacked(dead_letter: DeadLetter, found: Message, packed: bytes) -> DeadLetter:
    """Return a dead letter with the value and properties of its parts.

    Raises:
        ValueError: The parts are not those that were written.
    """
    head = int(found.properties[HEAD])
    properties = json.loads(packed[:head])
    if not isinstance(properties, dict) or not all(
        isinstance(one, str) for one in properties.values()
    ):
        raise ValueError("its properties are not a mapping of texts")
    return replace(dead_letter, message=dead_letter.message._replace(
        value=None if found.value is None else packed[head:], properties=properties
    ))  # fmt: skip


def oldest_of(found: Message) -> EntryId | None:
    """Return the oldest dead letter that a message names; raises ``ValueError``."""
    text = found.properties.get(OLDEST)
    return None if text is None else position_of_text(text)


def is_of(found: Message, subscription: str) -> bool:
    """Return whether a subscription's source wrote a message of a dead-letter topic, or may have.

    It may have if the message has a kind and no subscription.
    """
    of = found.properties.get(f"{PREFIX}subscription")
    return of == subscription or (of is None and f"{PREFIX}kind" in found.properties)


def position_text(position: EntryId) -> str:
    """Return a position as a property; :func:`position_of_text` parses it."""
    return f"{position.ledger}:{position.entry}"


def position_of_text(text: str) -> EntryId:
    """Parse the form of :func:`position_text`; raises ``ValueError``."""
    return EntryId(*_numbers(text, 2))


def parse(found: Message) -> DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker | None:
    """Parse a message of a dead-letter topic; ``None`` if it is neither dead letter nor marker.

    Raises:
        ValueError: The message has a kind, but required properties are missing or wrong.
    """
    own = {
        name.removeprefix(PREFIX): value
        for name, value in found.properties.items()
        if name.startswith(PREFIX)
    }
    kind = own.get("kind")
    if kind in (None, NOTED, PART):
        return None
    try:
        if kind in (REPLAYED, RUNS_AGAIN):
            return _marker(found.key, own)
        if parts_of(found):
            int(own["head"])
        return DeadLetter(
            _original(found, own),
            own["subscription"],
            DeadLetterKind(kind),
            int(own["attempts"]),
            own["error"],
            found.publish_time,
        )
    except KeyError as exc:
        raise ValueError(f"property {PREFIX}{exc.args[0]} is missing") from exc
    except (OverflowError, OSError) as exc:
        raise ValueError(f"one of its numbers is out of range: {exc}") from exc


def _about(kind: str, says: DoneMarker | RunsAgainNote) -> dict[str, str]:
    """Return the properties of a message about one original."""
    where = says.topic_partition
    own = {
        "kind": kind,
        "subscription": says.subscription,
        "topic": where.topic,
        "partition": str(where.partition),
        "messageId": str(says.message_id),
    }
    return {PREFIX + name: value for name, value in own.items()}


def _marker(key: str | None, own: Mapping[str, str]) -> DoneMarker | RunsAgainNote | DoneUpToMarker:
    if key is None:
        raise ValueError("it is a marker without a key")
    if "upTo" in own:
        return DoneUpToMarker(key, own["subscription"], position_of_text(own["upTo"]))
    kind = RunsAgainNote if own["kind"] == RUNS_AGAIN else DoneMarker
    return kind(
        key,
        own["subscription"],
        TopicPartition(own["topic"], int(own["partition"])),
        MessageId(*_numbers(own["messageId"], 3)),
    )


def _kept_name(name: str) -> str:
    """Return the name under which a dead letter keeps a property of its original."""
    return OWN + name if name.startswith(PREFIX) else name


def _original(found: Message, own: Mapping[str, str]) -> Message:
    """Return the message that became a dead letter."""
    key = routing_key(found.key, found.ordering_key)
    return Message(
        found.value,
        found.key,
        found.ordering_key,
        MessageId(*_numbers(own["messageId"], 3)),
        own["topic"],
        int(own["partition"]),
        datetime.fromtimestamp(int(own["publishTime"]) / 1000, timezone.utc),
        found.event_time,
        {
            name.removeprefix(OWN): value
            for name, value in found.properties.items()
            if name.startswith(OWN) or not name.startswith(PREFIX)
        },
        None if key is None else key_slot(key),
        redelivered=True,
        schema_version=int(own["schemaVersion"]) if "schemaVersion" in own else None,
        key_bytes=b64decode(own["keyBytes"], validate=True) if "keyBytes" in own else None,
    )


def _numbers(text: str, count: int) -> list[int]:
    numbers = [int(part) for part in text.split(":")]
    if len(numbers) != count or min(numbers) < 0:
        raise ValueError(f"{text!r} is not a position")
    return numbers


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
