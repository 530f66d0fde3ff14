"""The columns of a source, and the conversion of entries into Arrow record batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

import pyarrow as pa
from pyarrow import compute

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
from keyshard.core.position.entry import EntryBlock, Part, TopicPartition
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


_INDICES = array("i", range(1_000))
"""The first batch indices. Most entries have all of their messages."""


def columns_of(metadata: Sequence[str]) -> list[str]:
    """Return the default columns and the requested ones."""
    return [*SCHEMA.names, *metadata]


def _repeated(values: pa.Array, rows: Iterable[int]) -> pa.Array:
    """Repeat each value by its number of rows."""
    ends = list(accumulate(rows))
    # From buffers: for arrays, Arrow imports pandas to convert the number of rows to a scalar.
    encoded = pa.RunEndEncodedArray.from_buffers(
        pa.run_end_encoded(pa.int32(), values.type), ends[-1], [None],
        children=[numbers(ends, pa.int32()), values],
    )  # fmt: skip
    return compute.run_end_decode(encoded)


def _of_entries(values: pa.Array, blocks: Sequence[Located]) -> pa.Array:
    """Repeat the value of each entry for all of its rows."""
    return _repeated(values, [len(block.indices) for _, block in blocks])


def _runs(blocks: Sequence[Located]) -> tuple[list[TopicPartition], list[int]]:
    """Return the topic partitions of adjacent entries, and the rows of each run."""
    found: list[TopicPartition] = []
    rows: list[int] = []
    for where, block in blocks:
        if not found or where is not found[-1]:
            found.append(where)
            rows.append(0)
        rows[-1] += len(block.indices)
    return found, rows


def _topics(blocks: Sequence[Located]) -> pa.Array:
    found, rows = _runs(blocks)
    return _repeated(texts([where.topic for where in found]), rows)


def _partitions(blocks: Sequence[Located]) -> pa.Array:
    found, rows = _runs(blocks)
    return _repeated(numbers([where.partition for where in found], pa.int32()), rows)


def _message_ids(blocks: Sequence[Located]) -> pa.Array:
    entries = texts([f"{block.id.ledger}:{block.id.entry}" for _, block in blocks])
    return compute.binary_join_element_wise(
        _of_entries(entries, blocks), _indices(blocks).cast(pa.string()), texts([":"])[0]
    )


def _indices(blocks: Sequence[Located]) -> pa.Array:
    """Return the batch indices of all rows."""
    found = array("i")
    for _, block in blocks:
        indices = block.indices
        rows = len(indices)
        if rows == 1:
            found.append(indices[0])
        elif rows <= len(_INDICES) and indices == range(rows):
            found += _INDICES[:rows]  # copied at once
        else:
            found.extend(indices)
    return pa.Array.from_buffers(pa.int32(), len(found), [None, pa.py_buffer(found)], 0)


def _message_id_bytes(blocks: Sequence[Located]) -> pa.Array:
    entries = [
        entry_bytes(block.id.ledger, block.id.entry, where.partition) for where, block in blocks
    ]
    sizes = [batch_size_bytes(block.batch_size if block.batched else 0) for _, block in blocks]
    # An entry that is no producer batch has no index.
    rows = [index if block.batched else None for _, block in blocks for index in block.indices]
    last = max((index for index in rows if index is not None), default=-1)
    known = pa.array(map(batch_index_bytes, range(last + 1)), pa.binary())
    indices = known.take(numbers(rows, pa.int32())).fill_null(b"")
    return compute.binary_join_element_wise(
        _of_entries(pa.array(entries, pa.binary()), blocks), indices,
        _of_entries(pa.array(sizes, pa.binary()), blocks), pa.array([b""], pa.binary())[0],
    )  # fmt: skip


def _publish_times(blocks: Sequence[Located]) -> pa.Array:
    times = [block.publish_ms or None for _, block in blocks]
    return _of_entries(numbers(times, pa.timestamp("ms", tz="UTC")), blocks).cast(TIME)


def _slots(blocks: Sequence[Located]) -> pa.Array:
    if not any(block.mixed_slots or block.keys_of_bytes for _, block in blocks):
        return _of_entries(numbers([block.slot for _, block in blocks], pa.int32()), blocks)
    return numbers([slot for _, block in blocks for slot in block.text_slots], pa.int32())


def _schema_versions(blocks: Sequence[Located]) -> pa.Array:
    versions = [block.schema_version for _, block in blocks]
    return _of_entries(numbers(versions, pa.int64()), blocks)


_BUILDERS: dict[str, Callable[[Sequence[Located]], pa.Array]] = {
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
        arrays = gather([block for _, block in part], content)
        arrays |= {name: _BUILDERS[name](part) for name in names if name in _BUILDERS}
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
        arrays = [_BUILDERS[name](part) for name in schema.names]
        yield (
            pa.RecordBatch.from_arrays(arrays, schema=schema),
            runs_of([block for _, block in part]),
        )


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
        block: EntryBlock = located[1]
        more_rows, more_size = len(block.indices), block.column_bytes
        rows += more_rows
        size += more_size
        if part and (rows > ROWS_PER_BATCH_MAX or size > BYTES_PER_BATCH_MAX):
            yield part
            part, rows, size = [], more_rows, more_size
        part.append(located)
    if part:
        yield part


# -- Arrow arrays from buffers --------------------------------------------------------------------
# ``pa.array`` and ``pa.scalar`` import pandas where it is installed, which costs half a second in a
# process that does not need it.


def numbers(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    """Make an array of integers, or of times as integers, with 32 or 64 bits; ``None`` is null."""
    nulls = values.count(None)
    validity: pa.Buffer | None = None
    if nulls:
        bits = "".join("0" if value is None else "1" for value in reversed(values))
        validity = pa.py_buffer(int(bits, 2).to_bytes((len(values) + 7) // 8, "little"))
    data = array("i" if kind.bit_width == 32 else "q", [value or 0 for value in values])
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data)], nulls)


def texts(values: Sequence[str]) -> pa.Array:
    """Make an array of strings."""
    data = [value.encode() for value in values]
    offsets = array("i", accumulate(map(len, data), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers, 0)
