"""Options of ``format("pulsar")``: translate names of the JVM connector to those of keyshard."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import NamedTuple

from keyshard.core.option_checks import did_you_mean
from keyshard.errors import ConfigError
from keyshard.redaction import shown
from spark_adapter.option_parsing import is_of_streams
from spark_adapter.pulsar.table import (
    ADMIN,
    CLIENT,
    JVM_OPTIONS,
    PRODUCER,
    READER,
    JvmOption,
    Treatment,
)

_BY_NAME = {option.name.lower(): option for option in JVM_OPTIONS}
MADE_UP = "spark-pulsar-"
"""Prefix of generated subscription names; the same as in the JVM connector."""
_SUBSCRIPTIONS = ("subscription", "predefinedSubscription", "subscriptionPrefix")
"""Options that name the subscription; ``predefinedSubscription`` wins over the prefix."""


class Translated(NamedTuple):
    """Options of ``format("keyshard")``."""

    options: dict[str, str]
    names: dict[str, str]
    """The user's option names by keyshard's, where they differ; for errors."""
    made_up: bool = False
    """Whether the stream names no subscription, so that its name was generated now."""


def seems_stream(options: Mapping[str, str]) -> bool:
    """Whether the options include one of keyshard that only streams have.

    Spark asks for the schema without saying whether the query is a stream.
    """
    return any(is_of_streams(name) and name.lower() not in _BY_NAME for name in options)


def translated(options: Mapping[str, str], *, stream: bool) -> Translated:
    """Translate options to those of ``format("keyshard")``.

    An option that the JVM connector does not have passes through: keyshard has it, or refuses it.

    Raises:
        ConfigError: An option is not supported, or wrong. The error says what to do.
    """
    given = {name.lower(): text for name, text in options.items()}
    found: dict[str, str] = {}
    names: dict[str, str] = {}
    for name, text in options.items():
        low = name.lower()
        if low.startswith(ADMIN):
            check_admin(name, text, given)
        elif not low.startswith(PRODUCER) and passes_on(name, text, stream=stream):
            option = _BY_NAME.get(low)
            called = name if option is None else option.name
            convert = None if option is None else option.convert
            new, value = convert(called, text) if convert else (called, text)
            if value is not None:
                check_once(new, called, names)
                names[new], found[new] = called, value
    if stream:
        found |= _subscription(given, names)
    made_up = stream and "subscription" not in names
    return Translated(found, {new: old for new, old in names.items() if new != old}, made_up)


def check_once(new: str, called: str, names: Mapping[str, str]) -> None:
    """Check that no option was given for a setting that another option sets.

    Args:
        new: keyshard's name of the setting.
        called: The user's name.
        names: The user's names by keyshard's, of the options before.

    Raises:
        ConfigError: Both are given.
    """
    for one, before in names.items():
        if one.lower() == new.lower():
            both = f"{before!r} and {called!r}"
            raise ConfigError(f"Options {both} are both given.", "Give only one of them.")


def passes_on(name: str, text: str, *, stream: bool) -> bool:
    """Whether an option is passed to keyshard.

    Raises:
        ConfigError: The option is unknown, or keyshard refuses it.
    """
    option = _BY_NAME.get(name.lower())
    if option is None:
        if name.lower().startswith(READER):
            hint = did_you_mean(
                name,
                [one.name for one in JVM_OPTIONS],
                "See docs/migrating.md for the options of the JVM connector.",
            )
            raise ConfigError(f"Option {shown(name)} is unknown.", hint)
        return True
    check_refused(option.name, option, text)
    if option.name in _SUBSCRIPTIONS or (option.of_streams and not stream):
        return False
    return option.treatment not in (Treatment.REFUSED, Treatment.NOT_NEEDED)


def check_refused(name: str, option: JvmOption, text: str) -> None:
    if option.treatment is Treatment.REFUSED and not _says_nothing(option, text):
        raise ConfigError(
            f"Option {name!r} is not supported.",
            f"{option.meaning} See docs/migrating.md for the options of the JVM connector.",
        )


def _says_nothing(option: JvmOption, text: str) -> bool:
    if option.treatment is Treatment.NOT_NEEDED:
        return True
    return bool(option.harmless) and text.strip().lower() == option.harmless


def check_admin(name: str, text: str, given: Mapping[str, str]) -> None:
    """Check that an admin option equals its client option: keyshard has one connection for both.

    Raises:
        ConfigError: The options differ, or this one is not supported.
    """
    same = CLIENT + name[len(ADMIN) :]
    option = _BY_NAME.get(same.lower())
    if option is not None:
        if _says_nothing(option, text):
            return
        check_refused(name, option, text)
    if given.get(same.lower()) != text:
        raise ConfigError(
            f"Option {name!r} is given, and {same!r} is not, or has another value. keyshard has "
            "one connection for the broker and its admin interface.",
            "Give both options the same value, of a role that may use both.",
        )


def _subscription(given: Mapping[str, str], names: dict[str, str]) -> dict[str, str]:
    """Return the option for a stream's subscription; generate a name if none is given.

    Raises:
        ConfigError: The name is empty, or there are two.
    """
    said = [name for name in _SUBSCRIPTIONS if given.get(name.lower())]
    if not said:
        for name in _SUBSCRIPTIONS:
            if name.lower() in given:
                raise ConfigError(
                    f"Option {name!r} is empty.",
                    "Give the subscription a name, or remove the option.",
                )
        return {"subscription": f"{MADE_UP}{uuid.uuid4()}"}
    if said[0] == "subscription" and len(said) > 1:
        both = f"{said[0]!r} and {said[1]!r}"
        raise ConfigError(f"Options {both} are both given.", "Give only one of them.")
    names["subscription"] = said[0]
    return {"subscription": given[said[0].lower()]}
