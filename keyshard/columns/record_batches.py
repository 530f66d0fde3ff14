"""The columns of a source, and the conversion of entries into Arrow record batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter

import pyarrow as pa
from pyarrow import compute

from keyshard.columns.buffers import Groups, numbers, texts
from keyshard.columns.content import (
    CONTENT_NAMES,
    PROPERTIES,
    TIME,
    TYPES,
    gather,
    runs_of,
)
from keyshard.core import metadata_columns
from keyshard.core.metadata_columns import MESSAGE_ID_BYTES
from keyshard.core.position.entry import ROW_BYTES, Part, TopicPartition
from keyshard.core.position.serialized_id import batch_index_bytes, batch_size_bytes, entry_bytes
from keyshard.core.window.layout import Located

ROWS_PER_BATCH_MAX = 10_000
"""Most rows of a record batch, unless one entry has more."""
BYTES_PER_BATCH_MAX = 8 * 1024 * 1024
"""Size of the columns, with keys and properties, at which a record batch ends, bytes."""

SCHEMA = pa.schema([
    pa.field("value", pa.binary()),
    pa.field("__key", pa.string()),
    pa.field("__topic", pa.string()),
    pa.field("__partition", pa.int32()),
    pa.field("__messageId", pa.string()),
    pa.field("__publishTime", TIME),
    pa.field("__eventTime", TIME),
    pa.field("__properties", PROPERTIES),
    pa.field("__slot", pa.int32()),
    pa.field("__schemaVersion", pa.int64()),
])  # fmt: skip
"""The default columns:

- value
- partition key: null if there is none
- topic without partition suffix
- partition: -1 for a topic without partitions
- message id: ``ledger:entry:index``
- publish time and event time: null if unset or invalid; an invalid number becomes a property
- properties
- slot on the ring: null without a key. For a key set as bytes, the slot of its base64 text, because
  a batch that is read again must have the same rows
- version of the topic's schema: null if unknown
"""
COLUMNS = pa.schema([
    *SCHEMA,
    *(pa.field(one.name, TYPES[one.kind]) for one in metadata_columns.COLUMNS),
])  # fmt: skip
"""The default columns, and those on request: :mod:`keyshard.core.metadata_columns`."""


def columns_of(metadata: Sequence[str]) -> list[str]:
    """Return the default columns and the requested ones."""
    return [*SCHEMA.names, *metadata]


class _Entries:
    """The entries of one record batch, and the rows of each."""

    def __init__(self, located: Sequence[Located]) -> None:
        self.wheres, self.blocks = zip(*located, strict=True)
        self.indices: list[Sequence[int]] = list(map(_indices, self.blocks))
        self.sizes = list(map(len, self.indices))
        self.groups = Groups(self.sizes)

    def each(self, values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
        """Return the number of each entry for all of its rows."""
        return self.groups.each(numbers(values, kind))


def _runs(entries: _Entries) -> tuple[list[TopicPartition], Groups]:
    """Return the topic partitions of adjacent entries, and the rows of each run."""
    first = entries.wheres[0]
    if entries.wheres.count(first) == len(entries.wheres):
        return [first], Groups([entries.groups.rows])
    found: list[TopicPartition] = []
    rows: list[int] = []
    for where, size in zip(entries.wheres, entries.sizes, strict=True):
        if not found or where is not found[-1]:
            found.append(where)
            rows.append(0)
        rows[-1] += size
    return found, Groups(rows)


def _topics(entries: _Entries) -> pa.Array:
    found, groups = _runs(entries)
    return groups.each(texts([where.topic for where in found]))


def _partitions(entries: _Entries) -> pa.Array:
    found, groups = _runs(entries)
    return groups.each(numbers([where.partition for where in found], pa.int32()))


def _message_ids(entries: _Entries) -> pa.Array:
    ledgers, numbered = zip(*map(_id, entries.blocks), strict=True)
    colon = texts([":"])[0]
    ids = compute.binary_join_element_wise(
        numbers(ledgers, pa.int64()).cast(pa.string()),
        numbers(numbered, pa.int64()).cast(pa.string()), colon,
    )  # fmt: skip
    return compute.binary_join_element_wise(
        entries.groups.each(ids), _batch_indices(entries).cast(pa.string()), colon
    )


def _batch_indices(entries: _Entries) -> pa.Array:
    """Return the batch indices of all rows."""
    # Indices ascend: an entry without a gap ends with its number of rows minus one.
    if sum(map(_last, entries.indices)) == entries.groups.rows - len(entries.indices):
        return entries.groups.counted(numbers([0] * len(entries.indices), pa.int32()))
    return numbers(list(chain.from_iterable(entries.indices)), pa.int32())


def _message_id_bytes(entries: _Entries) -> pa.Array:
    located = zip(entries.wheres, entries.blocks, strict=True)
    ids = [entry_bytes(one.id.ledger, one.id.entry, where.partition) for where, one in located]
    sizes = [batch_size_bytes(one.batch_size if one.batched else 0) for one in entries.blocks]
    # An entry that is no producer batch has no index.
    rows = [index if one.batched else None for one in entries.blocks for index in one.indices]
    last = max((index for index in rows if index is not None), default=-1)
    known = pa.array(map(batch_index_bytes, range(last + 1)), pa.binary())
    indices = known.take(numbers(rows, pa.int32())).fill_null(b"")
    return compute.binary_join_element_wise(
        entries.groups.each(pa.array(ids, pa.binary())), indices,
        entries.groups.each(pa.array(sizes, pa.binary())), pa.array([b""], pa.binary())[0],
    )  # fmt: skip


def _publish_times(entries: _Entries) -> pa.Array:
    times: list[int | None] = list(map(_publish_ms, entries.blocks))
    if 0 in times:
        times = [time or None for time in times]
    return entries.groups.each(numbers(times, pa.timestamp("ms", tz="UTC")).cast(TIME))


def _slots(entries: _Entries) -> pa.Array:
    if not any(block.mixed_slots or block.keys_of_bytes for block in entries.blocks):
        return entries.each(list(map(_slot, entries.blocks)), pa.int32())
    return numbers([slot for block in entries.blocks for slot in block.text_slots], pa.int32())


def _schema_versions(entries: _Entries) -> pa.Array:
    return entries.each(list(map(_version, entries.blocks)), pa.int64())


_id = attrgetter("id")
_indices = attrgetter("indices")
_publish_ms = attrgetter("publish_ms")
_slot = attrgetter("slot")
_version = attrgetter("schema_version")
_last = itemgetter(-1)

_BUILDERS: dict[str, Callable[[_Entries], pa.Array]] = {
    "__topic": _topics,
    "__partition": _partitions,
    "__messageId": _message_ids,
    MESSAGE_ID_BYTES: _message_id_bytes,
    "__publishTime": _publish_times,
    "__slot": _slots,
    "__schemaVersion": _schema_versions,
}


def select(names: Sequence[str]) -> pa.Schema:
    """Return the schema of the named columns, in their order; ``KeyError`` for an unknown name."""
    return pa.schema([COLUMNS.field(name) for name in names])


def record_batches(
    blocks: Iterable[Located], names: Sequence[str] = tuple(SCHEMA.names)
) -> Iterator[pa.RecordBatch]:
    """Convert entries, in their order, into record batches.

    Args:
        blocks: Entries with their topic partition, in any order.
        names: Columns wanted; the others are not built.

    Yields:
        Batches of at most :data:`ROWS_PER_BATCH_MAX` rows and about :data:`BYTES_PER_BATCH_MAX` of
        columns, unless one entry is larger.
    """
    schema = select(names)
    content = [name for name in names if name in CONTENT_NAMES]
    for part in _portions(blocks):
        entries = _Entries(part)
        arrays = gather(entries.blocks, content)
        arrays |= {name: _BUILDERS[name](entries) for name in names if name in _BUILDERS}
        yield pa.RecordBatch.from_arrays([arrays[name] for name in names], schema=schema)


def described(
    blocks: Iterable[Located], names: Sequence[str]
) -> Iterator[tuple[pa.RecordBatch, list[Part]]]:
    """Convert entries whose content workers keep, as :func:`record_batches` does.

    Yields:
        The columns without content, and the parts of the content of the same rows, in their order.
    """
    schema = select([name for name in names if name not in CONTENT_NAMES])
    for part in _portions(blocks):
        entries = _Entries(part)
        arrays = [_BUILDERS[name](entries) for name in schema.names]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema), runs_of(entries.blocks)


def put_together(
    others: pa.RecordBatch, content: pa.RecordBatch | None, names: Sequence[str]
) -> pa.RecordBatch:
    """Join columns without content and content columns of the same rows.

    Args:
        others: Columns from :func:`described`.
        content: Content columns; ``None`` if none is wanted.
        names: All columns wanted.
    """
    arrays = [
        (others if content is None or name not in CONTENT_NAMES else content).column(name)
        for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=select(names))


def _portions(blocks: Iterable[Located]) -> Iterator[list[Located]]:
    part: list[Located] = []
    rows = size = 0
    for located in blocks:
        block = located[1]
        more_rows = len(block.indices)
        # ``block.column_bytes``, inlined: the property takes as long as the rest of the loop.
        more_size = block.payload_bytes + block.other_bytes + more_rows * ROW_BYTES
        rows += more_rows
        size += more_size
        if part and (rows > ROWS_PER_BATCH_MAX or size > BYTES_PER_BATCH_MAX):
            yield part
            part, rows, size = [], more_rows, more_size
        part.append(located)
    if part:
        yield part
