"""Ledgers in file systems such as HDFS: a folder with a map file of Hadoop for each.

Source: ``FileSystemManagedLedgerOffloader`` of Apache Pulsar's ``tiered-storage/file-system``, and
``SequenceFile`` and ``MapFile`` of Apache Hadoop 3, version 6 of the format.

File ``data`` has a header, and a record for each entry. The key of a record is the number of the
entry; number -1 is the metadata of the ledger. Values are compressed each by itself, many in a
block (as the configuration that Pulsar ships says), or not at all. A mark of 16 bytes stands before
each block, and now and then between two records. File ``index`` has the key of every 128th record
and the offset of it, or of its block, in blocks of compressed records.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote_plus

from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.replicas import OffloadedLedger
from keyshard.offloads.layout import ENTRY_BYTES_MAX, PARSED_BYTES_MAX, LayoutError, Parsed
from keyshard.offloads.metadata import check_metadata
from keyshard.redaction import shown

Fetch = Callable[[int, int], bytes]

_VERSION = b"SEQ\x06"
_NUMBER, _BYTES = b"org.apache.hadoop.io.LongWritable", b"org.apache.hadoop.io.BytesWritable"
_CODEC = b"org.apache.hadoop.io.compress.DefaultCodec"
_INT, _LONG, _RECORD = struct.Struct(">i"), struct.Struct(">q"), struct.Struct(">iiq")
_MARK_BYTES = 16
_ESCAPE = b"\xff\xff\xff\xff"
"""Stands before a mark, where a record has its length."""
METADATA = -1
"""Number of the record with the metadata of the ledger."""
HEAD_BYTES = 64 * 1024
"""Bytes of a data file that usually have its header and the metadata of the ledger."""
BLOCK_RECORDS_MAX = 1_000_000
"""Most records of a block."""


def folder_of(root: str, topic_partition: TopicPartition, uuid: str, ledger: int) -> str:
    """Return the folder of a ledger.

    Source of the name: ``TopicName.getPersistenceNamingEncoding`` and ``Codec.encode`` of Pulsar,
    which uses ``java.net.URLEncoder``.
    """
    domain, _, path = topic_partition.name.partition("://")
    tenant, namespace, local = path.split("/", 2)
    encoded = quote_plus(local, safe="*").replace("~", "%7E")
    return f"{root}/{tenant}/{namespace}/{domain}/{encoded}/{ledger}-{uuid}"


class MapFile:
    """The map file of a ledger.

    Args:
        path: The data file.
        size: Size of the data file, bytes.
        fetch: Returns the content of the data file between two offsets, the second exclusive.
        index: The whole index file.
        ledger: The ledger, as the broker lists it.

    Raises:
        LayoutError: It has another format, or is that of another ledger.
    """

    def __init__(
        self, path: str, size: int, fetch: Fetch, index: bytes, ledger: OffloadedLedger
    ) -> None:
        self.path, self.size = path, size
        head = fetch(0, min(HEAD_BYTES, size))
        self._header = _header(head, _BYTES)
        start = self._header.end
        first = self.parsed(head[start:], start, with_metadata=True)
        while not first.entries and len(head) < min(start + first.wanted, size):
            # A block with the metadata also has the first entries, so it may exceed the head.
            more = fetch(len(head), min(max(start + first.wanted, 2 * len(head)), size))
            if not more:
                raise LayoutError(f"its data ends after {len(head)} of {size} bytes")
            head += more
            first = self.parsed(head[start:], start, with_metadata=True)
        if not first.entries or first.entries[0][0] != METADATA:
            raise LayoutError("it does not begin with the metadata of the ledger")
        check_metadata(first.entries[0][1], ledger)
        self._keys, self._offsets = [METADATA], [start]
        for key, offset in _index(index):
            if (key, offset) == (METADATA, start):
                continue
            if not (self._keys[-1] < key <= ledger.last and self._offsets[-1] < offset < size):
                raise LayoutError("the offsets in its index are not ascending inside its data")
            self._keys.append(key)
            self._offsets.append(offset)

    def place_of(self, entry: int) -> tuple[int, int | None]:
        """See :meth:`keyshard.offloads.layout.Layout.place_of`."""
        at = bisect_right(self._keys, entry) - 1
        first = max(0, self._keys[at])  # the metadata is left out
        return self._offsets[at], None if self._header.in_blocks else first

    def parsed(self, data: bytes, offset: int, *, with_metadata: bool = False) -> Parsed:
        """See :meth:`keyshard.offloads.layout.Layout.parsed`.

        Args:
            data: Bytes of the file.
            offset: Their offset in the file.
            with_metadata: Whether the metadata of the ledger is returned like an entry.
        """
        parse = _blocks if self._header.in_blocks else _records
        found = parse(data, self._header)
        entries = found.entries
        if not with_metadata and entries and entries[0][0] == METADATA:
            entries = entries[1:]
        return Parsed(entries, offset + found.offset, found.wanted)


class _Header(NamedTuple):
    compressed: bool
    """Whether values are compressed."""
    in_blocks: bool
    """Whether records are compressed in blocks."""
    mark: bytes
    """Stands after an escape, between records or before a block."""
    end: int
    """Offset of the first record or block."""


def _header(data: bytes, value: bytes) -> _Header:
    """Parse the header of a file with numbers as keys, and values of the Java class ``value``."""
    at = len(_VERSION)
    if data[:at] != _VERSION:
        raise LayoutError(f"it begins with {data[:at]!r}, so it is of another format")
    try:
        key_class, at = _text(data, at)
        value_class, at = _text(data, at)
        compressed, in_blocks = data[at] == 1, data[at + 1] == 1
        at += 2
        codec, at = _text(data, at) if compressed else (_CODEC, at)
        (pairs,) = _INT.unpack_from(data, at)
        mark = data[at + 4 : at + 4 + _MARK_BYTES]
    except (IndexError, struct.error):
        raise LayoutError("its header ends too early") from None
    if (key_class, value_class, codec) != (_NUMBER, value, _CODEC) or pairs:
        raise LayoutError(
            f"it has records of {shown(key_class)} and {shown(value_class)}, with codec "
            f"{shown(codec)}"
        )
    return _Header(compressed, in_blocks, mark, at + 4 + _MARK_BYTES)


def _records(data: bytes, header: _Header) -> Parsed:
    """Parse whole records. The returned offset counts from the start of ``data``."""
    found: list[tuple[int, bytes]] = []
    at, end, wanted, size = 0, len(data), 4 + _MARK_BYTES, 0
    while at + wanted <= end:
        if data[at : at + 4] == _ESCAPE:
            at = _past_mark(data, at, header)
            continue
        length, key_length, entry = _RECORD.unpack_from(data, at)
        if key_length != _LONG.size or not key_length < length <= ENTRY_BYTES_MAX:
            raise LayoutError(f"a record has {length} bytes and a key of {key_length} bytes")
        stop = at + 8 + length
        if stop > end:
            wanted = stop - at
            break
        stored = data[at + _RECORD.size : stop]
        content = _content(_inflated(stored) if header.compressed else stored)
        found.append((entry, content))
        at, size = stop, size + len(content)
        if size > PARSED_BYTES_MAX:
            return Parsed(found, at, 0)
    return Parsed(found, at, wanted)


def _blocks(data: bytes, header: _Header) -> Parsed:
    """Parse whole blocks of records. The returned offset counts from the start of ``data``."""
    found: list[tuple[int, bytes]] = []
    at, end, wanted, size = 0, len(data), 4 + _MARK_BYTES, 0
    while at < end:
        try:
            (sizes, values), numbers, stop = _block(data, at, header, ENTRY_BYTES_MAX)
        except _IncompleteError as exc:
            wanted = exc.wanted - at
            break
        position = 0
        for number, length in zip(numbers, sizes, strict=True):
            found.append((number, _content(values[position : position + length])))
            position += length
        if position != len(values):
            raise LayoutError("a block has values of another length")
        at, size = stop, size + position
        if size > PARSED_BYTES_MAX:
            return Parsed(found, at, 0)
    return Parsed(found, at, wanted)


def _index(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield key and offset of each record of an index file."""
    header = _header(data, _NUMBER)
    if not header.in_blocks:
        raise LayoutError("its index is not compressed in blocks")
    at = header.end
    while at < len(data):
        try:
            (sizes, values), numbers, at = _block(data, at, header)
        except _IncompleteError:
            raise LayoutError("its index ends too early") from None
        if len(values) != _LONG.size * len(sizes):
            raise LayoutError("a block of its index has values of another length")
        yield from zip(numbers, (one for (one,) in _LONG.iter_unpack(values)), strict=True)


class _IncompleteError(Exception):
    """Some bytes end inside a block."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        """Least offset in the bytes at which the block can end."""


def _block(
    data: bytes, at: int, header: _Header, values_max: int = 0
) -> tuple[tuple[Sequence[int], bytes], Sequence[int], int]:
    """Parse a block of records.

    Args:
        data: Bytes of the file.
        at: Offset of the block in them.
        header: The header of the file.
        values_max: Most bytes of the values; 0: eight for each.

    Returns:
        The lengths of the values and the values, the keys, and the offset of the next block.

    Raises:
        _IncompleteError: The bytes end before the block does.
        LayoutError: It is no block.
    """
    if len(data) < at + 4 + _MARK_BYTES + 1:
        raise _IncompleteError(at + 4 + _MARK_BYTES + 1)
    at = _past_mark(data, at, header)
    columns = []
    try:
        count, at = _varint(data, at)
        if not 0 < count <= BLOCK_RECORDS_MAX:
            raise LayoutError(f"a block has {count} records")
        # Lengths of keys, keys, lengths of values, values.
        for limit in (5 * count, 8 * count, 5 * count, values_max or 8 * count):
            length, at = _varint(data, at)
            if length > ENTRY_BYTES_MAX:
                raise LayoutError(f"a block has a part of {length} bytes")
            if at + length > len(data):
                raise _IncompleteError(at + length)
            columns.append(_inflated(data[at : at + length], limit))
            at += length
    except IndexError:
        raise _IncompleteError(len(data) + 1) from None
    _, keys, sizes, values = columns
    if len(keys) != _LONG.size * count:
        raise LayoutError(f"a block of {count} records has {len(keys)} bytes of keys")
    lengths, position = [], 0
    try:
        for _ in range(count):
            length, position = _varint(sizes, position)
            lengths.append(length)
    except IndexError:
        raise LayoutError("a block has too few lengths") from None
    return (lengths, values), [one for (one,) in _LONG.iter_unpack(keys)], at


def _past_mark(data: bytes, at: int, header: _Header) -> int:
    """Return the offset after a mark."""
    end = at + 4 + _MARK_BYTES
    if data[at:end] != _ESCAPE + header.mark:
        raise LayoutError("a mark between its records is wrong")
    return end


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    length, at = _varint(data, at)
    return data[at : at + length], at + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number in the format of ``WritableUtils.readVInt``, and the offset after it.

    Raises:
        IndexError: The bytes end too early.
        LayoutError: The number is negative, or has more than four bytes.
    """
    first = data[at]
    if first < 0x80:
        return first, at + 1
    size = 0x90 - first
    if not 1 <= size <= 4:
        raise LayoutError("a length is negative")
    if at + 1 + size > len(data):
        raise IndexError("a length ends too early")
    return int.from_bytes(data[at + 1 : at + 1 + size], "big"), at + 1 + size


def _content(value: bytes) -> bytes:
    """Return the bytes of a ``BytesWritable``."""
    if len(value) < _INT.size or _INT.unpack_from(value)[0] != len(value) - _INT.size:
        raise LayoutError("the length of a value is wrong")
    return value[_INT.size :]


def _inflated(stored: bytes, limit: int = ENTRY_BYTES_MAX) -> bytes:
    """Return the content of one zlib stream."""
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(stored, limit + 1)
    except zlib.error as exc:
        raise LayoutError(f"a record cannot be decompressed: {exc}") from None
    if not stream.eof or stream.unused_data or len(content) > limit:
        raise LayoutError("a compressed record ends too early or too late, or is too long")
    return content
