"""Arrow arrays made from buffers.

``pa.array``, ``pa.scalar`` and the length of a run-end encoded array import pandas where it is
installed, which costs half a second in a process that does not need it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
from pyarrow import compute

_COUNTED = 10_000
"""Rows whose numbers are kept. Most record batches have fewer."""


def numbers(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    """Make an array of integers, or of times as integers, with 32 or 64 bits; ``None`` is null."""
    code = "i" if kind.bit_width == 32 else "q"
    nulls = values.count(None)
    if not nulls:
        return _array(kind, array(code, values))  # type: ignore[arg-type]
    if nulls == len(values):
        return pa.nulls(nulls, kind)
    bits = "".join("0" if value is None else "1" for value in reversed(values))
    validity = pa.py_buffer(int(bits, 2).to_bytes((len(values) + 7) // 8, "little"))
    data = pa.py_buffer(array(code, [value or 0 for value in values]))
    return pa.Array.from_buffers(kind, len(values), [validity, data], nulls)


def texts(values: Sequence[str]) -> pa.Array:
    """Make an array of strings."""
    data = [value.encode() for value in values]
    offsets = array("i", accumulate(map(len, data), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers, 0)


def _array(kind: pa.DataType, values: array[int]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)], 0)


_NUMBERS = _array(pa.int32(), array("i", range(_COUNTED)))


def up_to(end: int) -> pa.Array:
    """Return the 32-bit numbers from 0 to ``end``, without ``end``."""
    if end <= _COUNTED:
        return _NUMBERS.slice(0, end)
    return _array(pa.int32(), array("i", range(end)))


class Groups:
    """Rows in groups, one after the other.

    Args:
        rows: Rows of each group, at least one each.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        ends = array("i", accumulate(rows, initial=0))
        self.rows = ends[-1]
        """Rows of all groups."""
        self._first = _array(pa.int32(), ends[:-1])
        self._ends = _array(pa.int32(), ends[1:])
        self._single = len(rows) == self.rows

    def each(self, values: pa.Array) -> pa.Array:
        """Repeat the value of each group for all of its rows."""
        if self._single:
            return values
        encoded = pa.RunEndEncodedArray.from_buffers(
            pa.run_end_encoded(pa.int32(), values.type), self.rows, [None],
            children=[self._ends, values],
        )  # fmt: skip
        return compute.run_end_decode(encoded)

    def counted(self, first: pa.Array) -> pa.Array:
        """Return a number for each row: ascending by one from the first row of each group.

        Args:
            first: Number of the first row of each group, 32 bits.
        """
        shift = compute.subtract(first, self._first)
        return compute.add(self.each(shift), up_to(self.rows))
