"""The conversion of rows to the columns of a query, in tasks.

The decoding plan is made with the query, by :mod:`spark_adapter.query_columns`. :class:`Rows`
carries it to the tasks. Rows without a plan need none of the modules that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.errors import SchemaError

if TYPE_CHECKING:
    from keyshard import KeyShardSource
    from keyshard.core.position.entry import TopicPartition
    from keyshard.core.position.entry_set import EntrySet
    from keyshard.reading.decoding_plan import Decoding

_log = logging.getLogger(__name__)
SEEN_MAX = 100
"""Ledgers of a topic partition that are remembered; the newest ones."""


@dataclass(frozen=True)
class Rows:
    """The columns of a query and how to make them. Picklable."""

    columns: Sequence[str]
    """Columns that the runtime returns."""
    output: pa.Schema | None = None
    """Columns of the query; ``None`` if they are :attr:`columns`."""
    plan: Decoding | None = None
    strict: pa.Schema | None = None
    """Columns of the query, if some of them are never null."""

    def source_of(self, source: KeyShardSource) -> KeyShardSource:
        """Return the source with exactly the metadata columns that these rows need.

        Raises:
            ConfigError: The source cannot have a column.
        """
        metadata = [name for name in METADATA_COLUMNS if name in self.columns]
        return replace(source, metadata_columns=metadata)

    def check(self, topics: Iterable[str] | None = None) -> None:
        """Check that the topics still have the schemas that the plan decodes.

        Args:
            topics: Topics to check; ``None`` for all.

        Raises:
            SchemaError: A topic was created again with another schema.
        """
        if self.plan is not None:
            from keyshard.reading.decoding_plan import check_same  # noqa: PLC0415 - few rows

            check_same(self.plan, topics)

    def after(self, ledgers: int) -> Rows:
        """Return these rows with their own schema cache, for the ledgers after a number of changes.

        If a topic is deleted and created again, a schema version may stand for another schema.

        Args:
            ledgers: Number of ledgers that the stream has moved on to; see :class:`Ledgers`.
        """
        if self.plan is None or not ledgers:
            return self
        return replace(self, plan=replace(self.plan, name=f"{self.plan.name} {ledgers}"))

    def of(
        self, raw: Iterable[pa.RecordBatch], report: Callable[[int], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Convert rows of :attr:`columns` to rows of the query, in a task.

        Args:
            raw: Rows to convert.
            report: Called with the number of malformed rows, if there are any.

        Raises:
            SchemaError: A value is null in a column that is NOT NULL.
        """
        made = self._made(raw, report)
        yield from made if self.strict is None else (never_null(one, self.strict) for one in made)

    def _made(
        self, raw: Iterable[pa.RecordBatch], report: Callable[[int], None] | None
    ) -> Iterator[pa.RecordBatch]:
        """Convert rows without the check for null values."""
        if self.plan is None:
            yield from raw
            return
        from keyshard.reading.decoder import RowDecoder  # noqa: PLC0415 - see above

        decoder = RowDecoder(self.plan, self.output)
        yield from decoder.decoded(raw)
        if decoder.malformed:
            (report or partial(_log_malformed, self.plan.mode))(decoder.malformed)


def _log_malformed(mode: str, rows: int) -> None:
    from keyshard.config.source import DROPMALFORMED  # noqa: PLC0415 - few rows

    so = "were left out" if mode == DROPMALFORMED else "have nulls"
    _log.warning("%d rows do not fit the schema of the query, and %s", rows, so)


def never_null(batch: pa.RecordBatch, strict: pa.Schema) -> pa.RecordBatch:
    """Check the NOT NULL columns of a batch, and return it with them. Spark's error is less clear.

    Raises:
        SchemaError: A value is null.
    """
    from keyshard.columns.projection import cast_values, null_in  # noqa: PLC0415 - few rows

    for field, values in zip(strict, batch.columns, strict=True):
        missing = null_in(field, values)
        if missing:
            raise SchemaError(
                f"Column {missing!r} is NOT NULL in schema(...), but a message has no value for "
                "it.",
                "Remove NOT NULL (nullable=True).",
            )
    columns = [cast_values(*pair) for pair in zip(batch.columns, strict.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=strict)


class Ledgers:
    """The ledgers of the entries of a stream.

    A topic that is deleted and created again has other ledgers. Consumers may receive from it
    before discovery finds it. Those entries must not be decoded with the old schemas.
    """

    def __init__(self) -> None:
        self._seen: dict[TopicPartition, set[int]] = {}
        self.followed = 0
        """Number of times that a topic partition moved on to other ledgers."""

    def new(self, batch: Mapping[TopicPartition, EntrySet]) -> set[str]:
        """Return the topics that have an entry of a batch in a new ledger.

        Args:
            batch: Entries of the batch.
        """
        found: set[str] = set()
        for where, entries in batch.items():
            seen = self._seen.setdefault(where, set())
            came = entries.last_entries.keys() - seen
            if came:
                found.add(where.topic)
                self.followed += bool(seen)
                seen |= came
                seen.difference_update(sorted(seen)[:-SEEN_MAX])
        return found
