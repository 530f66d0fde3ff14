"""Ledgers in object stores: one object of blocks, and one object that is its index.

Source: ``OffloadIndexBlockImpl``, ``DataBlockHeaderImpl`` and ``BlockAwareSegmentInputStreamImpl``
of Apache Pulsar's ``tiered-storage/jcloud``, format version 1. The drivers ``aws-s3``, ``S3``,
``google-cloud-storage``, ``azureblob`` and ``aliyun-oss`` write it. All numbers are big-endian.

The index is ``magic 4, length 4, data length 8, block header length 8, count 4, metadata length
4``, the metadata of the ledger, and for each block ``first entry 8, part 4, offset 8``. A block is
a header, entries of ``length 4, number 8`` and their bytes, and padding ``fe dc de ad``.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import pairwise

from keyshard.core.position.replicas import OffloadedLedger
from keyshard.offloads.layout import ENTRY_BYTES_MAX, LayoutError, Parsed
from keyshard.offloads.metadata import check_metadata

_INDEX_MAGIC = 0xDE47DE47
_INDEX_HEAD = struct.Struct(">IIqqii")
_BLOCK = struct.Struct(">qiq")
_ENTRY = struct.Struct(">iq")
_PADDING = b"\xfe\xdc\xde\xad"


def data_path(root: str, uuid: str, ledger: int) -> str:
    """Return the path of the object with the blocks of a ledger; its index ends in ``-index``."""
    return f"{root}/{uuid}-ledger-{ledger}"


class Blocks:
    """The blocks of a ledger.

    Args:
        path: The object.
        index: The whole index object.
        ledger: The ledger, as the broker lists it.

    Raises:
        LayoutError: The index has another format, or is that of another ledger.
    """

    def __init__(self, path: str, index: bytes, ledger: OffloadedLedger) -> None:
        self.path = path
        try:
            magic, length, self.size, header, count, metadata = _INDEX_HEAD.unpack_from(index)
        except struct.error:
            raise LayoutError(f"its index has only {len(index)} bytes") from None
        if magic != _INDEX_MAGIC:
            raise LayoutError(f"its index begins with {magic:08x}, so it is of another format")
        start = _INDEX_HEAD.size + metadata
        if length != len(index) or metadata < 0 or length != start + count * _BLOCK.size:
            raise LayoutError(f"its index says that it has {length} bytes, but has {len(index)}")
        check_metadata(index[_INDEX_HEAD.size : start], ledger)
        blocks = sorted(_BLOCK.iter_unpack(index[start:]))
        self._firsts: list[int] = [first for first, _, _ in blocks]
        """First entry of each block, ascending."""
        self._offsets: list[int] = [offset + header for _, _, offset in blocks]
        """Offset of the first entry of each block."""
        self._ends: list[int] = [*(offset for _, _, offset in blocks[1:]), self.size]
        """End of each block, exclusive."""
        inside = [one for pair in zip(self._offsets, self._ends, strict=True) for one in pair]
        if not blocks or self._offsets[0] < 0 or any(a > b for a, b in pairwise(inside)):
            raise LayoutError("the offsets in its index are not ascending inside its data")

    def place_of(self, entry: int) -> tuple[int, int | None]:
        """See :meth:`keyshard.offloads.layout.Layout.place_of`."""
        at = bisect_right(self._firsts, entry) - 1
        if at < 0:
            raise LayoutError(f"its index begins after entry {entry}")
        return self._offsets[at], self._firsts[at]

    def parsed(self, data: bytes, offset: int) -> Parsed:
        """See :meth:`keyshard.offloads.layout.Layout.parsed`."""
        found: list[tuple[int, bytes]] = []
        block = bisect_right(self._offsets, offset) - 1
        at, end, wanted = 0, len(data), _ENTRY.size
        while True:
            block_end = self._ends[block] - offset
            if at + _ENTRY.size > block_end or data[at : at + 4] == _PADDING:
                block += 1
                if block == len(self._offsets):
                    return Parsed(found, self.size, wanted)
                at = self._offsets[block] - offset
                continue
            if at + _ENTRY.size > end:
                break
            length, entry = _ENTRY.unpack_from(data, at)
            stop = at + _ENTRY.size + length
            if not 0 <= length <= ENTRY_BYTES_MAX or stop > block_end:
                raise LayoutError(f"entry {entry} has {length} bytes at offset {offset + at}")
            if stop > end:
                wanted = stop - at
                break
            found.append((entry, data[at + _ENTRY.size : stop]))
            at = stop
        return Parsed(found, offset + at, wanted)
