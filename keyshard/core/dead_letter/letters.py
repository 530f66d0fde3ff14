"""Dead letters: what a message in a dead-letter topic says of itself, in its properties.

Two things lie in a dead-letter topic. A *letter* is a message that no handler got done: value,
keys, event time and properties of the original, and what happened to it in properties that begin
with ``keyshard.``. A *marker* says that a letter is done, or all letters of a key up to a position,
or that those behind an original count as done no more.
Both tell the oldest letter that rested when they were written: where a topic begins behind it and
nothing later says that it is done, it was lost.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum

from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.key_slot import key_slot, routing_key
from keyshard.errors import CheckpointError

PREFIX = "keyshard."
"""Begins the name of every property that keyshard adds to a letter."""
ERROR_CHARS_MAX = 1_000
"""Most characters of an error that a letter keeps."""
REPLAYED = "replayed"
"""Kind of a marker."""
RUNS_AGAIN = "runs_again"
"""Kind of a message that takes markers back."""
NOTED = "noted"
"""Kind of a message that only tells which letter is the oldest."""
PART = "part"
"""Kind of a message that holds a part of an original which is too large for one letter."""
PARTS = f"{PREFIX}parts"
"""Property of a letter: positions of its parts; its own value is empty then, or null as it was."""
PARTS_MAX = 65_536
"""Most parts of a letter: 256 MiB of the smallest that are written."""
HEAD = f"{PREFIX}head"
"""Property of a letter in parts: how many of their bytes are the original's properties."""
OLDEST = f"{PREFIX}oldest"
"""Property of everything that is written: position of the oldest letter that rests."""
OWN = f"{PREFIX}own."
"""Stands before the name of an original's property that begins like keyshard's own."""


class LetterKind(str, Enum):
    """Why a message became a letter."""

    PARKED = "parked"
    """Its key is parked: it failed too often, or one before it did. It waits to be replayed."""
    REJECTED = "rejected"
    """The handler said that it never succeeds, it has no key and should have one, or it is what is
    stored of an entry that cannot be read."""
    DEAD_LETTER = "dead_letter"
    """It failed too often, and its key went on without it."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message on its way to a dead-letter topic, or back."""

    message: Message
    """The original, with its own topic, position and properties."""
    subscription: str
    """Subscription of the source that gave it up."""
    kind: LetterKind
    attempts: int
    """Failed attempts; 0 for one that no handler saw."""
    error: str
    """Why the newest attempt failed, or what it waits for."""

    @property
    def key(self) -> str | None:
        """Routing key of the original."""
        return self.message.routing_key

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the original was published."""
        return TopicPartition(self.message.topic, self.message.partition)

    @property
    def event_ms(self) -> int:
        """Event time of the original, milliseconds since the epoch; 0 when unset."""
        time = self.message.event_time
        return 0 if time is None else _milliseconds(time)

    def properties(self) -> dict[str, str]:
        """Properties of the message in the dead-letter topic: the original's, and the letter's."""
        kept = {_kept_name(name): value for name, value in self.message.properties.items()}
        return {**kept, **self.own_properties()}

    def own_properties(self) -> dict[str, str]:
        """What happened to it, without the properties of the original."""
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
        }
        if message.schema_version is not None:
            own["schemaVersion"] = str(message.schema_version)
        if message.key_bytes is not None:
            own["keyBytes"] = b64encode(message.key_bytes).decode()
        return {PREFIX + name: value for name, value in own.items()}

    def packed(self) -> tuple[bytes, int]:
        """Properties and value of the original, for parts; how many bytes the properties are."""
        head = json.dumps(dict(self.message.properties)).encode()
        return head + (self.message.value or b""), len(head)


@dataclass(frozen=True, slots=True)
class Resting:
    """A parked letter, read back."""

    position: EntryId
    """Where it lies in the dead-letter topic."""
    letter: Letter


@dataclass(frozen=True, slots=True)
class Marker:
    """The letter of an original is done: a handler got it done."""

    key: str
    subscription: str
    topic_partition: TopicPartition
    message_id: MessageId
    """Of the original."""

    def properties(self) -> dict[str, str]:
        """Properties of the message that is the marker; its partition key is the key."""
        return _about(REPLAYED, self)


@dataclass(frozen=True, slots=True)
class RunsAgain:
    """A message runs that is older than done letters of its key: those count as done no more."""

    key: str
    subscription: str
    topic_partition: TopicPartition
    message_id: MessageId

    def properties(self) -> dict[str, str]:
        """Properties of the message that says it; its partition key is the key."""
        return _about(RUNS_AGAIN, self)


@dataclass(frozen=True, slots=True)
class Sweep:
    """All letters of a key up to a position are done: replayed, or given up by somebody."""

    key: str
    subscription: str
    up_to: EntryId
    """Position in the dead-letter topic, inclusive."""

    def properties(self) -> dict[str, str]:
        """Properties of the message that says it; its partition key is the key."""
        own = {
            "kind": REPLAYED,
            "subscription": self.subscription,
            "upTo": position_text(self.up_to),
        }
        return {PREFIX + name: value for name, value in own.items()}


def parts_of(found: Message) -> EntrySet:
    """Where the parts of a letter lie; empty when it is whole.

    Raises:
        ValueError: That cannot be read, or nobody could count them; :func:`parse` raises it too.
    """
    text = found.properties.get(PARTS, "")
    try:
        parts = EntrySet.parse(text)
    except CheckpointError as exc:
        raise ValueError(f"property {PARTS} is {text[:60]!r}, which names no entries") from exc
    count = sum(last - first + 1 for _, first, last in parts.runs())
    if count > PARTS_MAX:
        raise ValueError(
            f"property {PARTS} names {count} entries, and no letter has more than {PARTS_MAX}"
        )
    return parts


def unpacked(letter: Letter, found: Message, packed: bytes) -> Letter:
    """A letter whose parts were read; raises ``ValueError`` when they are not what they were."""
    head = int(found.properties[HEAD])
    properties = json.loads(packed[:head])
    if not isinstance(properties, dict) or not all(
        isinstance(one, str) for one in properties.values()
    ):
        raise ValueError("its properties are no texts by name")
    return replace(letter, message=letter.message._replace(
        value=None if found.value is None else packed[head:], properties=properties
    ))  # fmt: skip


def oldest_of(found: Message) -> EntryId | None:
    """The letter that a message calls the oldest; raises ``ValueError``."""
    text = found.properties.get(OLDEST)
    return None if text is None else position_of_text(text)


def is_of(found: Message, subscription: str) -> bool:
    """Whether a subscription's source wrote a message of a dead-letter topic, or may have.

    It may have if the message has a kind and no subscription.
    """
    of = found.properties.get(f"{PREFIX}subscription")
    return of == subscription or (of is None and f"{PREFIX}kind" in found.properties)


def position_text(position: EntryId) -> str:
    """A position as properties have it; :func:`position_of_text` reads it."""
    return f"{position.ledger}:{position.entry}"


def position_of_text(text: str) -> EntryId:
    """Read :func:`position_text`'s form; raises ``ValueError``."""
    return EntryId(*_numbers(text, 2))


def parse(found: Message) -> Letter | Marker | RunsAgain | Sweep | None:
    """What a message of a dead-letter topic is; ``None`` when it is neither letter nor marker.

    Raises:
        ValueError: It says that it is one, but not all that belongs to it.
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
        return Letter(
            _original(found, own),
            own["subscription"],
            LetterKind(kind),
            int(own["attempts"]),
            own["error"],
        )
    except KeyError as exc:
        raise ValueError(f"property {PREFIX}{exc.args[0]} is missing") from exc
    except (OverflowError, OSError) as exc:
        raise ValueError(f"a number of it is out of range: {exc}") from exc


def _about(kind: str, says: Marker | RunsAgain) -> dict[str, str]:
    """Properties of a message that says something about one original."""
    where = says.topic_partition
    own = {
        "kind": kind,
        "subscription": says.subscription,
        "topic": where.topic,
        "partition": str(where.partition),
        "messageId": str(says.message_id),
    }
    return {PREFIX + name: value for name, value in own.items()}


def _marker(key: str | None, own: Mapping[str, str]) -> Marker | RunsAgain | Sweep:
    if key is None:
        raise ValueError("a marker without key")
    if "upTo" in own:
        return Sweep(key, own["subscription"], position_of_text(own["upTo"]))
    kind = RunsAgain if own["kind"] == RUNS_AGAIN else Marker
    return kind(
        key,
        own["subscription"],
        TopicPartition(own["topic"], int(own["partition"])),
        MessageId(*_numbers(own["messageId"], 3)),
    )


def _kept_name(name: str) -> str:
    """Under which name a letter keeps a property of its original."""
    return OWN + name if name.startswith(PREFIX) else name


def _original(found: Message, own: Mapping[str, str]) -> Message:
    """The message that became a letter."""
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
        raise ValueError(f"{text!r} is no position")
    return numbers


def _milliseconds(time: datetime) -> int:
    return round(time.timestamp() * 1000)
