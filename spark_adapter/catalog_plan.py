"""What a catalog lacks of the topics there are, and what it has too much of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TableName(NamedTuple):
    """A table and its database."""

    database: str
    table: str

    def __str__(self) -> str:
        return ".".join("`" + part.replace("`", "``") + "`" for part in self)


@dataclass(frozen=True)
class Table:
    """A table that is there."""

    ours: bool
    """Whether a sync with this cluster made it."""
    columns: object
    """As JSON, read."""


@dataclass(frozen=True)
class Steps:
    """What makes the tables that are there those that are wanted."""

    create: list[TableName] = field(default_factory=list)
    change: list[TableName] = field(default_factory=list)
    drop: list[TableName] = field(default_factory=list)
    taken: list[TableName] = field(default_factory=list)
    """Somebody else's tables where one is wanted."""


def steps(wanted: Mapping[TableName, object], there: Mapping[TableName, Table]) -> Steps:
    """What to do; nobody else's table is touched.

    Args:
        wanted: Columns as JSON, read.
        there: What the databases have.
    """
    found = Steps()
    for name, columns in sorted(wanted.items()):
        table = there.get(name)
        if table is None:
            found.create.append(name)
        elif not table.ours:
            found.taken.append(name)
        elif table.columns != columns:
            found.change.append(name)
    found.drop.extend(sorted(name for name in there.keys() - wanted.keys() if there[name].ours))
    return found


def named(originals: Iterable[str], *, case_sensitive: bool) -> tuple[dict[str, str], list[str]]:
    """Originals by the name that Spark looks for, and those that have none.

    Where some differ in case only, and Spark does not tell them apart, the one that is written as
    Spark writes it has the name, or none has: which one is meant must not depend on the others.
    """
    if case_sensitive:
        return {one: one for one in originals}, []
    alike: dict[str, list[str]] = {}
    for one in originals:
        alike.setdefault(one.lower(), []).append(one)
    chosen = {
        name: name if name in some else some[0]
        for name, some in alike.items()
        if len(some) == 1 or name in some
    }
    return chosen, sorted(
        one for name, some in alike.items() for one in some if chosen.get(name) != one
    )


def columns_alike(names: Iterable[Any], *, case_sensitive: bool) -> str | None:
    """A column whose name Spark does not tell from another one's."""
    seen: set[str] = set()
    for name in names:
        looked_for = name if case_sensitive else name.lower()
        if looked_for in seen:
            return str(name)
        seen.add(looked_for)
    return None
