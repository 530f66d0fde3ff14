"""Ledgers in object stores: one object of blocks, and one object that is its index.

Source: ``OffloadIndexBlockImpl``, ``DataBlockHeaderImpl`` and ``BlockAwareSegmentInputStreamImpl``
of Apache Pulsar's ``tiered-storage/jcloud``, format version 1. The drivers ``aws-s3``, ``S3``,
``google-cloud-storage``, ``azureblob`` and ``aliyun-oss`` write it. All numbers are big-endian.

The index is ``magic 4, length 4, data length 8, block header length 8, count 4, metadata length
4``, the metadata of the ledger, and for each block ``first entry 8, part 4, offset 8``. A block is
a header, entries of ``length 4, number 8`` and their bytes, and padding ``fe dc de ad``. The
header begins with a negative number, too: ``fb db ab cb``.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from itertools import pairwise

from keyshard.offloads.layout import ENTRY_BYTES_MAX, LayoutError, Parsed
from keyshard.offloads.metadata import check_metadata

_INDEX_MAGIC = 0xDE47DE47
_INDEX_HEAD = struct.Struct(">IIqqii")
_BLOCK = struct.Struct(">qiq")
_ENTRY = struct.Struct(">iq")


def data_path(root: str, uuid: str, ledger: int) -> str:
    """Return the path of the object with the blocks of a ledger; its index ends in ``-index``."""
    return f"{root}/{uuid}-ledger-{ledger}"


class Blocks:
    """The blocks of a ledger.

    Args:
        path: The object.
        index: The whole index object.
        last: Last entry of the ledger, as the broker lists it.

    Raises:
        LayoutError: The index has another format, or is that of another ledger.
    """

    def __init__(self, path: str, index: bytes, last: int) -> None:
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
        check_metadata(index[_INDEX_HEAD.size : start], last)
        blocks = sorted(_BLOCK.iter_unpack(index[start:]))
        self._firsts: list[int] = [first for first, _, _ in blocks]
        """First entry of each block, ascending."""
        self._offsets: list[int] = [offset + header for _, _, offset in blocks]
        """Offset of the first entry of each block."""
        ascending = all(one < other for one, other in pairwise(self._offsets))
        if not blocks or not ascending or self._offsets[0] < 0 or self._offsets[-1] > self.size:
            raise LayoutError("the offsets in its index are not ascending inside its data")

    def offset_of(self, entry: int) -> int:
        """See :meth:`keyshard.offloads.layout.Layout.offset_of`."""
        at = bisect_right(self._firsts, entry) - 1
        if at < 0:
            raise LayoutError(f"its index begins after entry {entry}")
        return self._offsets[at]

    def parsed(self, data: bytes, offset: int) -> Parsed:
        """See :meth:`keyshard.offloads.layout.Layout.parsed`."""
        found: list[tuple[int, bytes]] = []
        at, end, wanted = 0, len(data), _ENTRY.size
        while at + _ENTRY.size <= end:
            length, entry = _ENTRY.unpack_from(data, at)
            if length < 0:  # the padding of a block
                next_block = bisect_right(self._offsets, offset + at)
                if next_block == len(self._offsets):
                    raise LayoutError(f"its last block has no entry at offset {offset + at}")
                at, wanted = self._offsets[next_block] - offset, _ENTRY.size
                continue
            stop = at + _ENTRY.size + length
            if length > ENTRY_BYTES_MAX or offset + stop > self.size:
                raise LayoutError(f"entry {entry} has {length} bytes at offset {offset + at}")
            if stop > end:
                wanted = stop - at
                break
            found.append((entry, data[at + _ENTRY.size : stop]))
            at = stop
        return Parsed(found, offset + at, wanted)
