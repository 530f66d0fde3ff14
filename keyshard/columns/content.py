"""The content of messages, packed into Arrow columns on arrival.

A window holds hundreds of thousands of messages. As columns they take little more than their bytes,
and the garbage collector does not scan them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, groupby
from operator import add, attrgetter, ne
from typing import Any

import pyarrow as pa

from keyshard.columns.buffers import Groups, numbers
from keyshard.core.metadata_columns import STORED, Kind
from keyshard.core.position.entry import EntryBlock, EntryId, Part
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.ring.key_slot import routing_key, slots_of

TIME = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())
CONTENT = pa.schema([
    pa.field("value", pa.binary()),
    pa.field("__key", pa.string()),
    pa.field("__orderingKey", pa.string()),
    pa.field("__eventTime", TIME),
    pa.field("__properties", PROPERTIES),
])  # fmt: skip
"""Columns that come from the messages; the other columns follow from the position of the entry."""
TYPES = {
    Kind.BYTES: pa.binary(), Kind.TEXT: pa.string(), Kind.NUMBER: pa.int64(), Kind.TIME: TIME,
}  # fmt: skip
"""Types of metadata columns."""
METADATA = pa.schema([pa.field(one.name, TYPES[one.kind]) for one in STORED])
"""Columns that come from the messages on request only; they follow the others."""
CONTENT_NAMES = frozenset([*CONTENT.names, *METADATA.names])
_TIMES = frozenset(one.name for one in STORED if one.kind is Kind.TIME)
_FIXED = frozenset(one.name for one in STORED if one.fixed)
PAIR_BYTES = 8
"""Bytes of a property in addition to its name and value."""
INTERLEAVED_MIN = 16
"""Fewest runs of rows that are put in order by copying columns twice."""
TAKEN_MIN = 6
"""Fewest runs of one content that are taken row by row. Fewer slices cost less."""
RUN_BYTES_MAX = 4096
"""Largest mean size of such runs, bytes."""
PROPERTYLESS_MAX = 10_000
"""Most messages of a delivery that share one empty column if none has a property. To make such a
column costs as much as the keys and values of a hundred messages."""


def pack(
    values: Sequence[bytes | None] | None,
    partition_keys: Sequence[str | None],
    ordering_keys: Sequence[str | None],
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
    *,
    metadata: Mapping[str, Sequence[Any]] = {},
) -> pa.RecordBatch:
    """Pack the content of the messages of one delivery, in their order.

    Args:
        values: Payloads, with ``None`` for a null value; ``None`` if they are not wanted.
        partition_keys: ``None`` for a message without one.
        ordering_keys: ``None`` for a message without one.
        event_ms: Valid event times, milliseconds since the epoch; 0 if unset.
        properties: Properties, mostly empty.
        metadata: Requested columns of :data:`METADATA`, by name; times in milliseconds.

    Returns:
        A record batch of :data:`CONTENT`, and of the columns in ``metadata``.
    """
    no_values = values is None
    arrays = [
        pa.nulls(len(partition_keys), pa.binary()) if no_values else pa.array(values, pa.binary()),
        pa.array(partition_keys, pa.string()),
        _ordering_keys(ordering_keys),
        _event_times(event_ms),
        _properties(properties),
    ]
    arrays += [
        _times(values) if name in _TIMES else pa.array(values, METADATA.field(name).type)
        for name, values in metadata.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=content_with(tuple(metadata)))


def metadata_in(columns: Collection[str] | None) -> tuple[str, ...]:
    """Return the columns of :data:`METADATA` among ``columns``; none for ``None``."""
    return () if columns is None else tuple(name for name in METADATA.names if name in columns)


def content_columns(names: Collection[str]) -> Collection[str] | None:
    """Return the columns to request from a broker for :data:`CONTENT` and metadata in ``names``."""
    metadata = metadata_in(names)
    return (*CONTENT.names, *metadata) if metadata else None


@cache
def content_with(metadata: tuple[str, ...]) -> pa.Schema:
    """Return :data:`CONTENT`, followed by some columns of :data:`METADATA`."""
    return pa.schema([*CONTENT, *map(METADATA.field, metadata)]) if metadata else CONTENT


def entry_block(
    entry_id: EntryId,
    *,
    batch_size: int,
    batched: bool,
    indices: Sequence[int],
    values: Sequence[bytes | None],
    partition_keys: Sequence[str | None],
    ordering_keys: Sequence[str | None],
    publish_ms: int,
    event_ms: Sequence[int],
    properties: Sequence[Mapping[str, str]],
    came_to: HashRange | None = None,
    schema_version: int | None = None,
    metadata: Mapping[str, Sequence[Any]] = {},
) -> EntryBlock:
    """Make a block with its own content; see :class:`~keyshard.core.position.entry.EntryBlock`.

    Args:
        values: Payloads; ``None`` for a null value.
        ordering_keys: ``None`` for a message without one.
        came_to: Hash range of the consumer that received it; ``None`` for a Reader.
        metadata: As for :func:`pack`.
    """
    slot, mixed_slots, keys_of_bytes = slots_of(
        list(map(routing_key, partition_keys, ordering_keys)),
        came_to if ordering_keys[0] is None else None,
    )
    unreadable = 0
    if not (all(map(is_time, event_ms)) and is_time(publish_ms)):
        times = readable_times(event_ms, [publish_ms] * len(values), list(map(dict, properties)))
        event_ms, (publish_ms, *_), properties, wrong = times
        unreadable = sum(wrong)
    content = pack(values, partition_keys, ordering_keys, event_ms, properties, metadata=metadata)
    rows = len(values)
    return EntryBlock(
        entry_id,
        batch_size,
        batched,
        indices,
        slot,
        mixed_slots,
        publish_ms,
        sum(len(value or b"") for value in values),
        content,
        0,
        keys_of_bytes=keys_of_bytes,
        unreadable=unreadable,
        schema_version=schema_version,
        other_bytes=other_bytes(content)(0, rows),
        complete=len(indices) == batch_size,
    )


def other_bytes(
    content: pa.RecordBatch, names: Collection[str] | None = None
) -> Callable[[int, int], int]:
    """Return a function that sums the bytes of keys, properties and metadata from a row to another.

    Args:
        content: Packed content of a delivery.
        names: Columns that count; ``None``: all but the values.
    """
    ends: list[memoryview] = []
    pairs: list[tuple[memoryview, memoryview, memoryview]] = []
    row_bytes = 0
    for name, column in zip(content.schema.names, content.columns, strict=True):
        if name == "value" or (names is not None and name not in names):
            continue
        if name == "__properties":
            if len(column.keys):
                pairs.append((ends_of(column), ends_of(column.keys), ends_of(column.items)))
        elif name in _FIXED:
            row_bytes += 8
        elif name != "__eventTime" and column.null_count < len(column):
            ends.append(ends_of(column))

    def of(start: int, stop: int) -> int:
        found = row_bytes * (stop - start) + sum(one[stop] - one[start] for one in ends)
        for rows, keys, values in pairs:
            first, last = rows[start], rows[stop]
            found += keys[last] - keys[first] + values[last] - values[first]
            found += PAIR_BYTES * (last - first)
        return found

    return of


def ends_of(column: pa.Array) -> memoryview:
    """Return the offset of each value of a column, and the end of the last one."""
    return memoryview(column.buffers()[1]).cast("i")


def names_in(blocks: Sequence[EntryBlock]) -> list[str]:
    """Return the content columns of entries of one source, which are the same in all."""
    return list(blocks[0].content.schema.names if blocks else CONTENT.names)


def gather(blocks: Sequence[EntryBlock], names: Sequence[str]) -> dict[str, pa.Array]:
    """Return content columns by name, for all messages of some blocks in their order."""
    if not names:
        return {}
    spans, rows = _interleaved(blocks) or (runs_of(blocks), None)
    if any(span.remote is not None for span in spans):
        raise ValueError("the content is remote")
    pieces = list(map(_taken, groupby(spans, _content_id)))
    arrays = {
        name: pa.concat_arrays(list(chain.from_iterable(take(position) for take in pieces)))
        for name, position in zip(names, _positions(spans, names), strict=True)
    }
    return arrays if rows is None else {name: one.take(rows) for name, one in arrays.items()}


def _content_id(part: Part) -> int:
    return id(part.content)


def _taken(group: tuple[int, Iterator[Part]]) -> Callable[[int], list[pa.Array]]:
    """Return a function that returns the rows of some parts of one content, of a column of it.

    To take rows one by one costs less than many slices.
    """
    parts = list(group[1])
    columns = parts[0].content.columns
    if len(parts) < TAKEN_MIN:
        return lambda at: [columns[at].slice(part.start, part.rows) for part in parts]
    starts = numbers([part.start for part in parts], pa.int32())
    rows = Groups([part.rows for part in parts]).counted(starts)
    return lambda at: [columns[at].take(rows)]


def _interleaved(blocks: Sequence[EntryBlock]) -> tuple[list[Part], pa.Array] | None:
    """Return the deliveries of entries in many small runs, and the order of their rows.

    Entries of several consumers alternate in the order of positions. To slice a column for each of
    them costs more than to copy it once more. ``None``: slicing costs less.
    """
    if len(blocks) < INTERLEAVED_MIN:
        return None
    starts, sizes = list(map(_start, blocks)), list(map(len, map(_indices, blocks)))
    ends = list(map(add, starts, sizes))
    runs = 1 + sum(map(ne, starts[1:], ends))
    if sum(map(_payload, blocks)) + sum(map(_other, blocks)) > RUN_BYTES_MAX * runs:
        return None
    if runs < INTERLEAVED_MIN or any(map(_later, blocks)) or any(map(_remote, blocks)):
        return None
    contents = list(map(_content, blocks))
    keys = list(map(id, contents))
    found: dict[int, list[int]] = {}
    """First row, end and number of the rows of each delivery."""
    for key, start, end in zip(keys, starts, ends, strict=True):
        if key in found:
            span = found[key]
            # Calls of min and max take as long as all of the rest.
            if start < span[0]:  # noqa: PLR1730
                span[0] = start
            if end > span[1]:  # noqa: PLR1730
                span[1] = end
            span[2] += end - start
        else:
            found[key] = [start, end, end - start]
    if 2 * len(found) > runs:
        return None
    by_key = dict(zip(keys, contents, strict=True))
    # A worker answers with entries of many ranges at once. Only the wanted ones are copied.
    mixed: dict[int, tuple[list[int], list[int]]] = {
        key: ([], []) for key, (start, end, rows) in found.items() if end - start != rows
    }
    found |= {key: [0, 0, 0] for key in mixed}
    for at, key in enumerate(keys) if mixed else ():
        if key in mixed:
            firsts, counts = mixed[key]
            firsts.append(starts[at])
            counts.append(sizes[at])
            starts[at] = found[key][2]
            found[key][2] += sizes[at]
    for key, (firsts, counts) in mixed.items():
        by_key[key] = by_key[key].take(Groups(counts).counted(numbers(firsts, pa.int32())))
    spans = [Part(by_key[key], start, rows) for key, (start, _, rows) in found.items()]
    total = accumulate((rows for _, _, rows in found.values()), initial=0)
    # Row of the columns that is row 0 of a delivery.
    shift = {key: before - found[key][0] for key, before in zip(found, total, strict=False)}
    first = list(map(add, map(shift.__getitem__, keys), starts))
    return spans, Groups(sizes).counted(numbers(first, pa.int32()))


_content = attrgetter("content")
_start = attrgetter("start")
_indices = attrgetter("indices")
_payload = attrgetter("payload_bytes")
_other = attrgetter("other_bytes")
_remote = attrgetter("remote")
_later = attrgetter("later_parts")


def _positions(runs: Sequence[Part], names: Sequence[str]) -> Sequence[int]:
    # Metadata columns come last, and are the same in all content of a source.
    positions = list(map(CONTENT.get_field_index, names))
    if -1 in positions and runs:
        return list(map(runs[0].content.schema.get_field_index, names))
    return positions


def runs_of(blocks: Sequence[EntryBlock]) -> list[Part]:
    """Return the parts of some blocks; adjacent parts become one."""
    runs: list[Part] = []
    content: Any = None
    remote: Any = None
    start = end = -1

    def close() -> None:
        if start >= 0:
            runs.append(Part(content, start, end - start, remote))

    for block in blocks:
        if block.later_parts:
            close()
            start = end = -1
            runs += block.parts
            continue
        if block.content is not content or block.remote is not remote or block.start != end:
            close()
            content, remote, start = block.content, block.remote, block.start
            end = start
        end += len(block.indices)
    close()
    return runs


def _ordering_keys(keys: Sequence[str | None]) -> pa.Array:
    if keys.count(None) == len(keys):
        return pa.nulls(len(keys), pa.string())
    return pa.array(keys, pa.string())


def _event_times(event_ms: Sequence[int]) -> pa.Array:
    if not any(event_ms):
        return pa.nulls(len(event_ms), TIME)
    return _times([time or None for time in event_ms])


def _times(times_ms: Sequence[int | None]) -> pa.Array:
    return pa.array(times_ms, pa.timestamp("ms", tz="UTC")).cast(TIME)


def properties_of(offsets: pa.Array, keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return the column of properties; the shared empty one if no message has any.

    Args:
        offsets: Offset of the first property of each message, and the end.
        keys: Names of the properties.
        values: Values of the properties.
    """
    if not len(keys) and len(offsets) <= len(_NO_PROPERTIES):
        return _NO_PROPERTIES.slice(0, len(offsets) - 1)
    return pa.MapArray.from_arrays(offsets, keys, values)


def _properties(properties: Sequence[Mapping[str, str]]) -> pa.Array:
    if not any(properties) and len(properties) <= len(_NO_PROPERTIES):
        return _NO_PROPERTIES.slice(0, len(properties))
    offsets = [0] * (len(properties) + 1)
    keys: list[str] = []
    items: list[str] = []
    for row, own in enumerate(properties):
        keys.extend(own.keys())
        items.extend(own.values())
        offsets[row + 1] = len(keys)
    return properties_of(
        pa.array(offsets, pa.int32()), pa.array(keys, pa.string()), pa.array(items, pa.string())
    )


# From bytes, because Arrow imports pandas to check the type of a number or a list.
_NO_PROPERTIES = pa.MapArray.from_arrays(
    pa.Array.from_buffers(
        pa.int32(), PROPERTYLESS_MAX + 1, [None, pa.py_buffer(bytes(4 * (PROPERTYLESS_MAX + 1)))]
    ),
    pa.nulls(0, pa.string()),
    pa.nulls(0, pa.string()),
)


# -- Invalid metadata -----------------------------------------------------------------------------
# Any client may set any 64-bit number as a time, and invalid UTF-8 as a key or a property.
# Such a message is delivered like every other. An invalid time becomes null, and its number stays
# in the message as the property ``__eventTime`` or ``__publishTime``. Invalid bytes are replaced.

TIME_MS_MAX = 253_370_764_800_000
"""The year 9999, milliseconds since the epoch. From then on, a time zone might move a time beyond
the range of ``datetime``. Present times in micro- or nanoseconds are far larger."""
EVENT_TIME, PUBLISH_TIME = "__eventTime", "__publishTime"
"""Properties that keep the number of an invalid time."""
NOT_TEXT = "__notText"
"""Replaces all properties of a message if one is not valid text, because a client reports only the
first of them."""


def is_time(milliseconds: int) -> bool:
    """Whether a number is a valid time, in milliseconds; 0 means unset."""
    return 0 <= milliseconds < TIME_MS_MAX


def readable_times(
    event_ms: Sequence[int], publish_ms: Sequence[int], properties: Sequence[dict[str, str]]
) -> tuple[list[int], list[int], list[dict[str, str]], list[bool]]:
    """Replace invalid times by 0, and keep their numbers as properties.

    Args:
        event_ms: Event time of each message, milliseconds.
        publish_ms: Publish time of each message, milliseconds.
        properties: Properties of each message; an existing property of the same name stays.

    Returns:
        (event times, publish times, properties, whether each message had an invalid time).
    """
    events, published = list(event_ms), list(publish_ms)
    remote = list(properties)
    wrong = [False] * len(remote)
    for name, times in (EVENT_TIME, events), (PUBLISH_TIME, published):
        for row, time_ms in enumerate(times):
            if not is_time(time_ms):
                remote[row] = {name: str(time_ms)} | remote[row]
                times[row] = 0
                wrong[row] = True
    return events, published, remote, wrong
