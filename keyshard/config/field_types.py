"""Option names and a ``repr``, derived from the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from keyshard.redaction import REPR_MAX, shown


def of_type(config: type[Any], kind: type[Any]) -> frozenset[str]:
    """Return the names of fields of a type, optional or not."""
    hints = get_type_hints(config)
    return frozenset(name for name, hint in hints.items() if hint in (kind, kind | None))


def in_both(first: type[Any], second: type[Any]) -> tuple[str, ...]:
    """Return the names of fields that two dataclasses share, in the order of the first."""
    others = get_type_hints(second)
    return tuple(name for name in get_type_hints(first) if name in others)


def short_repr(config: Any, always: Collection[str] = (), never: Collection[str] = ()) -> str:
    """Return a ``repr`` of the options that differ from their default, short and without secrets.

    Args:
        config: The dataclass.
        always: Fields to show even at their default.
        never: Fields to leave out.
    """
    given = [f"{name}={text}" for name, text in given_fields(config, always, never)]
    return f"{type(config).__name__}({', '.join(given)})"


def given_fields(
    config: Any, always: Collection[str] = (), never: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Return name and ``repr`` of the options that :func:`short_repr` shows for these arguments."""
    given = []
    for one in fields(config):
        value = getattr(config, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if one.name not in never and (one.name in always or value != default):
            given.append((one.name, shown(value, REPR_MAX)))
    return given
