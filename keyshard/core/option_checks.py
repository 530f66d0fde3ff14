"""Checks of single options. An error names the option, its value and a remedy in one sentence."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from keyshard.errors import ConfigError
from keyshard.redaction import shown

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_DURATION = re.compile(r"([0-9]{1,18})\s*([a-z]*)")
_UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
}  # fmt: skip


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a question with the nearest known name, ignoring case.

    Args:
        name: The given name.
        known: The existing names.
        otherwise: The text if none is near.
    """
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"Did you mean {names[near[0]]!r}?" if near else otherwise


def check_names(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Refuse unknown names of options."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known, f"The options are: {', '.join(sorted(known))}.")
            raise ConfigError(f"{what} has no option {shown(name)}.", hint)


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that a misspelt keyword argument raises an error with the nearest name.

    Its signature stays visible to editors and type checkers.
    """
    return _suggesting(function, lambda _: f"{function.__name__}()")


def suggesting_options(config: C) -> C:
    """Apply :func:`suggesting` to the constructor of a dataclass; errors name the class."""
    construct: Callable[..., None] = config.__init__  # type: ignore[misc]
    config.__init__ = _suggesting(  # type: ignore[misc]
        construct, lambda args: type(args[0]).__name__
    )
    return config


def _suggesting(
    function: Callable[P, R], what: Callable[[tuple[object, ...]], str]
) -> Callable[P, R]:
    known = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name != "self"
    ]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_names(what(args), kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Check for an ``int`` within limits; ``bool`` is refused."""
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}.")


def check_seconds(name: str, value: object, high: float) -> None:
    """Check for a finite number from 0 to ``high``."""
    number = value if type(value) in (int, float) else math.nan
    assert isinstance(number, (int, float))
    if not 0 <= number <= high:
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a number of seconds from 0 to {high:,}."
        )


def duration_ms(text: str, *, unit: str = "") -> int | None:
    """Parse a duration such as ``30s`` or ``15m`` to milliseconds; ``None`` if it is not valid.

    Args:
        text: An integer, and one of ``ms``, ``s``, ``m``, ``min``, ``h`` and ``d``.
        unit: Unit for a number without a suffix; empty: the number must have a suffix.
    """
    match = _DURATION.fullmatch(text)
    if match is None or (match[2] or unit) not in _UNITS_MS:
        return None
    return int(match[1]) * _UNITS_MS[match[2] or unit]


def check_bool(name: str, value: object) -> None:
    """Check for ``True`` or ``False``."""
    if type(value) is not bool:
        raise ConfigError(f"{name} is {shown(value)}; it must be true or false.")


def check_choice(name: str, value: object, *choices: str) -> None:
    """Check for one of several words."""
    if not isinstance(value, str) or value not in choices:
        wanted = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
        raise ConfigError(f"{name} is {shown(value)}.", f"Write {wanted}.")


def check_text(name: str, value: object, remedy: str) -> str:
    """Check for a text that is not empty, fits UTF-8 and has no control characters.

    Args:
        name: The option.
        value: Its value.
        remedy: Remedy of the error: a sentence.
    """
    if not isinstance(value, str) or not value or not _is_plain(value):
        raise ConfigError(f"{name} is {shown(value)}.", remedy)
    return value


FOLDER_CHARS_MAX = 4_096
"""Most characters of the path or URL of a folder."""


def check_folder(name: str, value: object) -> str:
    """Check the text of a path or an fsspec URL of a folder; the folder itself is not checked."""
    wanted = "Write a path or an fsspec URL of a folder"
    text = check_text(name, value, f"{wanted}.")
    if len(text) > FOLDER_CHARS_MAX:
        raise ConfigError(
            f"{name} has {len(text):,} characters.",
            f"{wanted} with at most {FOLDER_CHARS_MAX:,}.",
        )
    return text


def is_key(value: object) -> bool:
    """Return whether a value can be a partition key: a text without a lone surrogate."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


TOKEN_CHARS_MIN = 16
"""Fewest characters of a token that browsers give."""


def check_token(name: str, value: object) -> str:
    """Check for a token that fits into an HTTP header and is hard to guess.

    The error does not contain the value.

    Args:
        name: The option.
        value: Its value.
    """
    if (
        not isinstance(value, str)
        or len(value) < TOKEN_CHARS_MIN
        or not (value.isascii() and value.isprintable())
    ):
        raise ConfigError(
            f"{name} must be a text of at least {TOKEN_CHARS_MIN} printable ASCII characters.",
            "Make one: python -c 'import secrets; print(secrets.token_urlsafe())'.",
        )
    return value


def _is_plain(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return not any(character < " " or character == "\x7f" for character in text)
