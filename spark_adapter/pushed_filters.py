"""Filters that Spark hands over (``pushFilters``), as what of a batch read they leave.

Taken are only those that are decided exactly by what is known before a message is a row: Spark does
not look again at what was taken. Everything else stays with Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from keyshard.core.position.split import Split

PUBLISH_TIME = "__publishTime"
_CHOSEN = {"__topic": ("topics", str), "__partition": ("partitions", int), "__key": ("keys", str)}
"""Field of :class:`Pushed` and type of the columns that are compared with values."""
_NEVER_NULL = ("__topic", "__partition")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)


@dataclass(frozen=True)
class Pushed:
    """What filters leave; ``None``: all."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    keys: frozenset[str] | None = None
    start_ms: int | None = None
    """Publish time, milliseconds since the epoch, from which on messages are wanted."""
    end_ms: int | None = None
    """Publish time up to which they are, exclusive."""

    def take(self, one: Filter) -> Pushed | None:
        """With one filter more; ``None``: it is not one of those that are taken."""
        column = ".".join(getattr(one, "attribute", ()))
        if isinstance(one, IsNotNull):
            return self if column in _NEVER_NULL else None
        if isinstance(one, In) and column in _CHOSEN:
            return self._one_of(column, one.value)
        if isinstance(one, EqualTo) and column in _CHOSEN:
            return self._one_of(column, [one.value])
        if column == PUBLISH_TIME:
            return self._published(one)
        return None

    def _one_of(self, column: str, values: Collection[object]) -> Pushed | None:
        name, kind = _CHOSEN[column]
        # Nothing equals null.
        wanted = frozenset(value for value in values if value is not None)
        if not all(type(value) is kind for value in wanted):
            return None
        before = getattr(self, name)
        left: dict[str, Any] = {name: wanted if before is None else before & wanted}
        return replace(self, **left)

    def _published(self, one: Filter) -> Pushed | None:
        value = getattr(one, "value", None)
        if not isinstance(value, datetime) or value.tzinfo is None:
            return None
        since = value - _EPOCH
        # Publish times are whole milliseconds: the first not before the value, the first behind it.
        not_before, behind = -(-since // _MS), since // _MS + 1
        if isinstance(one, GreaterThanOrEqual):
            return self._between(not_before, None)
        if isinstance(one, GreaterThan):
            return self._between(behind, None)
        if isinstance(one, LessThan):
            return self._between(None, not_before)
        if isinstance(one, LessThanOrEqual):
            return self._between(None, behind)
        return self._between(not_before, behind) if isinstance(one, EqualTo) else None

    def _between(self, start_ms: int | None, end_ms: int | None) -> Pushed:
        starts = [ms for ms in (self.start_ms, start_ms) if ms is not None]
        ends = [ms for ms in (self.end_ms, end_ms) if ms is not None]
        return replace(self, start_ms=max(starts, default=None), end_ms=min(ends, default=None))

    def of(self, stretches: Iterable[Split]) -> list[Split]:
        """Those stretches of a read in which wanted messages may lie."""
        if self.keys is not None and not self.keys:
            return []
        if self.start_ms is not None and self.end_ms is not None and self.start_ms >= self.end_ms:
            return []
        return [
            one
            for one in stretches
            if (self.topics is None or one.topic_partition.topic in self.topics)
            and (self.partitions is None or one.topic_partition.partition in self.partitions)
        ]
