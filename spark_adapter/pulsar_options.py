"""Options of ``format("pulsar")``: from the JVM connector's names to those of keyshard."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keyshard.core.option_checks import did_you_mean
from keyshard.core.position.bounds import Edge
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.serialized import BYTES_MAX, SerializedId
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.bounded_options import is_of_streams
from spark_adapter.pulsar_table import (
    ADMIN,
    CLIENT,
    JVM_OPTIONS,
    PRODUCER,
    READER,
    JvmOption,
    Verdict,
)

_BY_NAME = {option.name.lower(): option for option in JVM_OPTIONS}
MADE_UP = "spark-pulsar-"
"""Beginning of the names that are made up, as the JVM connector makes them up."""
_SUBSCRIPTIONS = ("subscription", "predefinedSubscription", "subscriptionPrefix")
"""Options that name it; the second comes before the third."""


class Translated(NamedTuple):
    """Options of keyshard's own."""

    options: dict[str, str]
    names: dict[str, str]
    """How the user calls those that have another name, for errors."""
    made_up: bool
    """Whether a stream has no subscription, and so a name that was made up for it just now."""


def seems_stream(options: Mapping[str, str]) -> bool:
    """Whether something is given that only streams have; Spark does not tell."""
    return any(is_of_streams(name) and name.lower() not in _BY_NAME for name in options)


def translated(options: Mapping[str, str], *, stream: bool) -> Translated:
    """Options of ``format("keyshard")`` that say the same.

    What is no option of the JVM connector goes on as it is: it is one of keyshard's, or unknown.

    Raises:
        ConfigError: One cannot be had here, or is wrong; names it and says what to do.
    """
    given = {name.lower(): text for name, text in options.items()}
    found: dict[str, str] = {}
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, text in options.items():
        low = name.lower()
        if low.startswith(ADMIN):
            _check_admin(name, text, given)
        elif not low.startswith(PRODUCER) and _is_wanted(name, text, stream=stream):
            option = _BY_NAME.get(low)
            called = name if option is None else option.name
            convert = _CONVERTED.get(called)
            new, value = convert(called, text) if convert else (called, text)
            if value is not None:
                if new.lower() in taken:
                    raise ConfigError(f"Give only one of {taken[new.lower()]!r} and {called!r}.")
                taken[new.lower()] = names[new] = called
                found[new] = value
    if stream:
        found |= _subscription(given, names)
    made_up = stream and "subscription" not in names
    return Translated(found, {new: old for new, old in names.items() if new != old}, made_up)


def _is_wanted(name: str, text: str, *, stream: bool) -> bool:
    """Whether an option goes on to keyshard.

    Raises:
        ConfigError: It is refused.
    """
    option = _BY_NAME.get(name.lower())
    if option is None:
        if name.lower().startswith(READER):
            hint = did_you_mean(
                name,
                [one.name for one in JVM_OPTIONS],
                "All options of the JVM connector stand in docs/migrating.md.",
            )
            raise ConfigError(f"Option {shown(name)} is unknown. {hint}")
        return True
    _check_refused(option.name, option, text)
    if option.name in _SUBSCRIPTIONS or (option.of_streams and not stream):
        return False
    return option.verdict not in (Verdict.REFUSED, Verdict.NOT_NEEDED)


def _check_refused(name: str, option: JvmOption, text: str) -> None:
    if option.verdict is Verdict.REFUSED and not _says_nothing(option, text):
        raise ConfigError(
            f"Option {name!r} cannot be had: {option.meaning}. All options of the JVM connector "
            "stand in docs/migrating.md."
        )


def _says_nothing(option: JvmOption, text: str) -> bool:
    if option.verdict is Verdict.NOT_NEEDED:
        return True
    return bool(option.harmless) and text.strip().lower() == option.harmless


def _check_admin(name: str, text: str, given: Mapping[str, str]) -> None:
    """One connection holds for broker and admin interface.

    Raises:
        ConfigError: This option says that there are two.
    """
    same = CLIENT + name[len(ADMIN) :]
    option = _BY_NAME.get(same.lower())
    if option is not None:
        if _says_nothing(option, text):
            return
        _check_refused(name, option, text)
    if given.get(same.lower()) != text:
        raise ConfigError(
            f"Option {name!r} is given, and {same!r} is not, or has another value. keyshard has "
            "one connection for the broker and its admin interface: give both the same value, of "
            "who may use both."
        )


def _subscription(given: Mapping[str, str], names: dict[str, str]) -> dict[str, str]:
    """The name of a stream's subscription; a new one where none is said.

    Raises:
        ConfigError: It is empty, or there are two.
    """
    said = [name for name in _SUBSCRIPTIONS if given.get(name.lower())]
    if not said:
        for name in _SUBSCRIPTIONS:
            if name.lower() in given:
                raise ConfigError(
                    f"Option {name!r} is empty. Give the subscription a name, or remove the option."
                )
        return {"subscription": f"{MADE_UP}{uuid.uuid4()}"}
    if said[0] == "subscription" and len(said) > 1:
        raise ConfigError(f"Give only one of {said[0]!r} and {said[1]!r}.")
    names["subscription"] = said[0]
    return {"subscription": given[said[0].lower()]}


def _starting(name: str, text: str) -> tuple[str, str]:
    return name, _offsets(name, text, behind=False)


def _ending(name: str, text: str) -> tuple[str, str]:
    return name, _offsets(name, text, behind=True)


def _offsets(name: str, text: str, *, behind: bool) -> str:
    """Positions as keyshard writes them; a byte array is a message id of the Java client.

    Args:
        name: The option, for errors.
        text: Its value. What has no byte array stays, right or wrong.
        behind: Whether the entry of the message is still read.

    Raises:
        ConfigError: A byte array is no position of its topic partition.
    """
    if text.strip().lower() in (Edge.EARLIEST.value, Edge.LATEST.value):
        return text.strip().lower()
    try:
        pairs = json.loads(text, object_pairs_hook=list) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        pairs = None
    if pairs is None:
        return text
    # By hand: a topic partition that is named twice must not become one.
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
    """A position as text, of the bytes of a message id.

    Args:
        name: What it is, for errors.
        topic_partition: Where it is.
        given: The bytes, signed or not.
        behind: Whether what is behind the message's entry is meant.

    Raises:
        ConfigError: It is none, or one of another topic partition.
    """
    wanted = (
        "write a position 'ledger:entry', or the bytes of a message id as JsonUtils.topicOffsets "
        "does"
    )
    bytes_only = all(type(one) is int and -128 <= one < 256 for one in given)
    if not given or not bytes_only or len(given) > BYTES_MAX:
        raise ConfigError(f"{name} is {shown(given)}, no message id; {wanted}.")
    try:
        found = SerializedId.from_bytes(bytes(one % 256 for one in given))
    except ValueError as exc:
        raise ConfigError(f"{name} is {shown(given)}, and {exc}; {wanted}.") from None
    if found.earliest:
        return Edge.EARLIEST.value
    if found.latest:
        return Edge.LATEST.value
    partition = TopicPartition.parse(topic_partition).partition
    if found.partition not in (-1, partition):
        raise ConfigError(
            f"{name} is the id of a message in partition {found.partition}. Give each topic "
            "partition a position of its own."
        )
    if found.ledger < 0 or found.entry < -1:
        raise ConfigError(f"{name} is {shown(given)}, which no message has; {wanted}.")
    return f"{found.ledger}:{found.entry + 1 if behind else max(found.entry, 0)}"


def _time(name: str, text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        own = "startingOffsets" if name == "startingTime" else "endingOffsets"
        raise ConfigError(
            f"{name} is {shown(text)}; write one time for all topics, or give a position for each "
            f"topic partition in {own}."
        )
    return name, text


def _schemas(name: str, text: str) -> tuple[str, str | None]:
    raw = text.strip().lower()
    if raw not in ("true", "false"):
        raise ConfigError(f"Option {name!r} is {shown(text)}; it must be true or false.")
    return "valueFormat", "raw" if raw == "true" else None


def _limit(name: str, text: str) -> tuple[str, str | None]:
    return name, None if text.strip() == "0" else text


_CONVERTED: dict[str, Callable[[str, str], tuple[str, str | None]]] = {
    "startingOffsets": _starting,
    "endingOffsets": _ending,
    "startingTime": _time,
    "endingTime": _time,
    "allowDifferentTopicSchemas": _schemas,
    "maxBytesPerTrigger": _limit,
}
