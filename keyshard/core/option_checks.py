"""Checks of single options: each raises one sentence with the option, its value and a way out."""

from __future__ import annotations

import math

from keyshard.errors import ConfigError
from keyshard.redaction import shown


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """An ``int``, and no ``bool``, within limits."""
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}.")


def check_seconds(name: str, value: object, high: float) -> None:
    """A finite number that is not negative and at most ``high``."""
    number = value if type(value) in (int, float) else math.nan
    assert isinstance(number, (int, float))
    if not 0 <= number <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be 0 to {high:,} seconds.")


def check_bool(name: str, value: object) -> None:
    """``True`` or ``False``."""
    if type(value) is not bool:
        raise ConfigError(f"{name} is {shown(value)}; it must be true or false.")


def check_choice(name: str, value: object, *choices: str) -> None:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigError(f"{name} is {shown(value)}; write {wanted}.")


def check_text(name: str, value: object, wanted: str) -> str:
    """A text that is not empty and that UTF-8 can hold, without control characters.

    Args:
        name: The option.
        value: Its value.
        wanted: What to write, an imperative without a full stop.
    """
    if not isinstance(value, str) or not value or not _is_plain(value):
        raise ConfigError(f"{name} is {shown(value)}; {wanted}.")
    return value


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not any(character < " " or character == "\x7f" for character in text)
