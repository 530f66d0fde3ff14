"""Arrow arrays made of their buffers.

``pa.array`` and ``pa.scalar`` import pandas, where it is installed, to look whether a value is one
of its own: half a second of a process that would else never need it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa


def numbers(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    """Integers, or times as integers, of 32 or 64 bits; ``None`` is null."""
    nulls = values.count(None)
    validity: pa.Buffer | None = None
    if nulls:
        bits = "".join("0" if value is None else "1" for value in reversed(values))
        validity = pa.py_buffer(int(bits, 2).to_bytes((len(values) + 7) // 8, "little"))
    data = array("i" if kind.bit_width == 32 else "q", [value or 0 for value in values])
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data)], nulls)


def texts(values: Sequence[str]) -> pa.Array:
    """Strings."""
    data = [value.encode() for value in values]
    offsets = array("i", accumulate(map(len, data), initial=0))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers, 0)
