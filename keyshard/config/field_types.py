"""Lists of option names that follow from the fields of a dataclass."""

from __future__ import annotations

from typing import Any, get_type_hints


def of_type(config: type[Any], kind: type[Any]) -> frozenset[str]:
    """Names of the fields that hold a value of a type, or that or ``None``."""
    hints = get_type_hints(config)
    return frozenset(name for name, hint in hints.items() if hint in (kind, kind | None))


def in_both(first: type[Any], second: type[Any]) -> tuple[str, ...]:
    """Names of the fields that two dataclasses share, in the order of the first."""
    others = get_type_hints(second)
    return tuple(name for name in get_type_hints(first) if name in others)
