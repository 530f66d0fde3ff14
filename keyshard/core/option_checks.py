"""Checks of single options: each raises one sentence with the option, its value and a way out."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from keyshard.errors import ConfigError
from keyshard.redaction import shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A question that names the nearest known name, in any case.

    Args:
        name: The name that was given.
        known: The names there are.
        otherwise: The text if none is near.
    """
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"Did you mean {names[near[0]]!r}?" if near else otherwise


def check_names(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown names of options."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, f"It has: {', '.join(sorted(known))}.")
            raise ConfigError(f"{what} has no option {shown(name)}. {hint}")


def suggesting(function: Callable[P, R], what: str = "") -> Callable[P, R]:
    """A function with keyword arguments that names the nearest one where one is misspelt.

    Its signature stays visible to editors and type checkers.
    """
    known = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name != "self"
    ]
    what = what or f"{function.__name__}()"

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(what, kwargs, known)
        return function(*args, **kwargs)

    return checked


def suggesting_options(config: C) -> C:
    """The same for the options of a dataclass."""
    config.__init__ = suggesting(config.__init__, config.__name__)  # type: ignore[misc]
    return config


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
