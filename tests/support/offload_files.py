"""Writes ledgers as Pulsar's offloaders do; their own bytes are in :mod:`offloaded_samples`."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.replicas import OffloadedLedger
from keyshard.core.protobuf import message
from keyshard.offloads.blocks import data_path
from keyshard.offloads.map_file import folder_of

Way = Literal["objects", "BLOCK", "RECORD", "NONE"]
WAYS: tuple[Way, ...] = ("objects", "BLOCK", "RECORD", "NONE")
MARK = bytes(range(100, 116))
_NUMBERS = b"org.apache.hadoop.io.LongWritable"
_BYTES = b"org.apache.hadoop.io.BytesWritable"
_CODEC = b"org.apache.hadoop.io.compress.DefaultCodec"
_HEADER_BYTES = 128


def offloaded(uuid: str, ledger: int, entries: Sequence[bytes]) -> OffloadedLedger:
    """Return a ledger as a plan has it."""
    return OffloadedLedger(ledger, len(entries) - 1, sum(map(len, entries)), uuid)


def metadata_of(entries: Sequence[bytes]) -> bytes:
    """Return the metadata of a closed ledger with some entries."""
    length = sum(map(len, entries))
    return message({1: 1, 2: 1, 3: length, 4: len(entries) - 1, 5: 3, 7: 3})


def write_offload(  # noqa: PLR0917 - as they stand in the names of the files
    way: Way, root: Path, topic_partition: TopicPartition, uuid: str, ledger: int,
    entries: Sequence[bytes], *, block_bytes: int = 2_000, interval: int = 4,
) -> tuple[Path, Path]:  # fmt: skip
    """Write a ledger.

    Args:
        way: Format of the files.
        root: The store.
        topic_partition: Its topic partition.
        uuid: Id of the offload.
        ledger: Its number.
        entries: Its entries.
        block_bytes: About the size of a block.
        interval: Records of a map file for each that its index has.

    Returns:
        The file with the entries, and its index.
    """
    metadata = metadata_of(entries)
    if way == "objects":
        data = Path(data_path(str(root), uuid, ledger))
        index = data.with_name(f"{data.name}-index")
        contents = objects(entries, metadata, block_bytes)
    else:
        folder = Path(folder_of(str(root), topic_partition, uuid, ledger))
        data, index = folder / "data", folder / "index"
        contents = map_file(way, [(-1, metadata), *enumerate(entries)], block_bytes, interval)
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(contents[0])
    index.write_bytes(contents[1])
    return data, index


def objects(entries: Sequence[bytes], metadata: bytes, block_bytes: int) -> tuple[bytes, bytes]:
    """Return an object of blocks, and its index. A block has at least one entry."""
    data, blocks, at = b"", b"", 0
    while at < len(entries):
        first, block = at, b""
        while at < len(entries):
            entry = struct.pack(">iq", len(entries[at]), at) + entries[at]
            if block and _HEADER_BYTES + len(block) + len(entry) > block_bytes:
                break
            block, at = block + entry, at + 1
        size = _HEADER_BYTES + len(block)
        if at < len(entries):
            size = max(size, block_bytes)
        blocks += struct.pack(">qiq", first, len(blocks) // 20 + 1, len(data))
        header = struct.pack(">Iqqq", 0xFBDBABCB, _HEADER_BYTES, size, first)
        padding = b"\xfe\xdc\xde\xad" * (size // 4 + 1)
        content = header.ljust(_HEADER_BYTES, b"\0") + block
        data += content + padding[: size - len(content)]
    length = 32 + len(metadata) + len(blocks)
    head = struct.pack(
        ">IIqqii", 0xDE47DE47, length, len(data), _HEADER_BYTES, len(blocks) // 20, len(metadata)
    )
    return data, head + metadata + blocks


def map_file(
    way: Way, records: Sequence[tuple[int, bytes]], block_bytes: int, interval: int
) -> tuple[bytes, bytes]:
    """Return the data and the index of a map file."""
    data = _header(_BYTES, compressed=way != "NONE", in_blocks=way == "BLOCK")
    offsets: list[tuple[int, bytes]] = []
    waiting: list[tuple[int, bytes]] = []
    marked = len(data)
    for number, (key, content) in enumerate(records):
        if number % interval == 0 and (not offsets or offset_in(offsets[-1]) < len(data)):
            offsets.append((key, struct.pack(">q", len(data))))
        value = struct.pack(">i", len(content)) + content
        if way == "BLOCK":
            waiting.append((key, value))
            if sum(8 + len(one) for _, one in waiting) >= block_bytes:
                data, waiting = data + _block(waiting), []
            continue
        if len(data) >= marked + 2_000:
            marked = len(data)
            data += b"\xff\xff\xff\xff" + MARK
        stored = zlib.compress(value) if way == "RECORD" else value
        data += struct.pack(">iiq", 8 + len(stored), 8, key) + stored
    if waiting:
        data += _block(waiting)
    index = _header(_NUMBERS, compressed=True, in_blocks=True)
    for at in range(0, len(offsets), 100):
        index += _block(offsets[at : at + 100])
    return data, index


def offset_in(record: tuple[int, bytes]) -> int:
    """Return the offset that a record of an index has."""
    return int.from_bytes(record[1], "big")


def _header(value: bytes, *, compressed: bool, in_blocks: bool) -> bytes:
    names = [_text(_NUMBERS), _text(value), bytes([compressed, in_blocks])]
    return b"SEQ\x06" + b"".join([*names, _text(_CODEC) if compressed else b"", bytes(4), MARK])


def _block(records: Sequence[tuple[int, bytes]]) -> bytes:
    keys = b"".join(struct.pack(">q", key) for key, _ in records)
    columns: Iterable[bytes] = (
        b"\x08" * len(records), keys,
        b"".join(_varint(len(value)) for _, value in records),
        b"".join(value for _, value in records),
    )  # fmt: skip
    parts = b"".join(map(_text, map(zlib.compress, columns)))
    return b"\xff\xff\xff\xff" + MARK + _varint(len(records)) + parts


def _text(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Encode a positive number as ``WritableUtils.writeVInt`` does."""
    if value < 0x80:
        return bytes([value])
    size = (value.bit_length() + 7) // 8
    return bytes([0x90 - size]) + value.to_bytes(size, "big")
