"""Values of the JVM connector's options, converted to names and values of keyshard's options.

The value ``None`` leaves the option out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.read_bounds import Edge
from keyshard.core.position.serialized_id import BYTES_MAX, SerializedId
from keyshard.errors import ConfigError
from keyshard.redaction import shown


def as_option(option: str, *, lower: bool = False) -> Callable[[str, str], tuple[str, str | None]]:
    """Return a conversion to another name."""
    return lambda _name, text: (option, text.strip().lower() if lower else text)


def batching(name: str, text: str) -> tuple[str, str | None]:
    """Convert ``pulsar.producer.batchingEnabled``."""
    said = text.strip().lower()
    if said not in ("true", "false"):
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be true or false.")
    return "entryMaxMessages", "1" if said == "false" else None


def hashing(name: str, text: str) -> tuple[str, str | None]:
    """Convert ``pulsar.producer.hashingScheme``."""
    schemes = {"javastringhash": "java", "murmur3_32hash": "murmur3"}
    if text.strip().lower() not in schemes:
        raise ConfigError(
            f"Option {name!r} is {shown(text)}; it must be JavaStringHash or Murmur3_32Hash."
        )
    return "hashingScheme", schemes[text.strip().lower()]


def starting(name: str, text: str) -> tuple[str, str | None]:
    """Convert ``startingOffsets``."""
    return name, _offsets(name, text, behind=False)


def ending(name: str, text: str) -> tuple[str, str | None]:
    """Convert ``endingOffsets``: the entry of a message id is read."""
    return name, _offsets(name, text, behind=True)


def _offsets(name: str, text: str, *, behind: bool) -> str:
    """Convert the byte arrays in an option, which are message ids of the Java client, to positions.

    Args:
        name: The option, for errors.
        text: Its value. Text without byte arrays passes through unchecked.
        behind: Whether the position is after the message's entry, so that the entry is read.

    Raises:
        ConfigError: A byte array is not a position of its topic partition.
    """
    if text.strip().lower() in (Edge.EARLIEST.value, Edge.LATEST.value):
        return text.strip().lower()
    try:
        pairs = json.loads(text, object_pairs_hook=list) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        pairs = None
    if pairs is None:
        return text
    # Without a dict: a topic partition that is given twice must not become one.
    return "{" + ", ".join(
        f"{json.dumps(key)}: "
        + json.dumps(
            position_of(f"{name} of {shown(key)}", key, one, behind=behind)
            if isinstance(one, list)
            else one
        )
        for key, one in pairs
    ) + "}"  # fmt: skip


def position_of(name: str, topic_partition: str, given: list[Any], *, behind: bool) -> str:
    """Convert the bytes of a message id to a position as text.

    Args:
        name: Subject of the position, for errors.
        topic_partition: Full name of the topic partition.
        given: Bytes of the id, signed or unsigned.
        behind: Whether to return the position after the message's entry.

    Raises:
        ConfigError: The bytes are not a message id, or the message is in another topic partition.
    """
    wanted = (
        "Write a position 'ledger:entry', or the bytes of a message id as JsonUtils.topicOffsets "
        "does."
    )
    bytes_only = all(type(one) is int and -128 <= one < 256 for one in given)
    if not given or not bytes_only or len(given) > BYTES_MAX:
        raise ConfigError(f"{name} is {shown(given)}, no message id.", wanted)
    try:
        found = SerializedId.from_bytes(bytes(one % 256 for one in given))
    except ValueError as exc:
        raise ConfigError(f"{name} is {shown(given)}, and {exc}.", wanted) from None
    if found.earliest:
        return Edge.EARLIEST.value
    if found.latest:
        return Edge.LATEST.value
    partition = TopicPartition.parse(topic_partition).partition
    if found.partition not in (-1, partition):
        raise ConfigError(
            f"{name} is the id of a message in partition {found.partition}.",
            "Give each topic partition a position of its own.",
        )
    if found.ledger < 0 or found.entry < -1:
        raise ConfigError(f"{name} is {shown(given)}, which no message has.", wanted)
    return f"{found.ledger}:{found.entry + 1 if behind else max(found.entry, 0)}"


def time(name: str, text: str) -> tuple[str, str | None]:
    """Refuse JSON with a time for each topic.

    Raises:
        ConfigError: The text is JSON.
    """
    if text.lstrip().startswith("{"):
        own = "startingOffsets" if name == "startingTime" else "endingOffsets"
        raise ConfigError(
            f"{name} is {shown(text)}.",
            f"Write one time for all topics, or give a position for each topic partition in {own}.",
        )
    return name, text


def schemas(name: str, text: str) -> tuple[str, str | None]:
    """Convert ``allowDifferentTopicSchemas`` to ``valueFormat``.

    Raises:
        ConfigError: The text is neither true nor false.
    """
    raw = text.strip().lower()
    if raw not in ("true", "false"):
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be true or false.")
    return "valueFormat", "raw" if raw == "true" else None


def limit(name: str, text: str) -> tuple[str, str | None]:
    """Leave out a limit of 0: it means no limit."""
    return name, None if text.strip() == "0" else text
