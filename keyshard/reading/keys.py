"""Messages of some keys only, chosen before columns are made of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from typing import Any

import pyarrow as pa
from pyarrow import compute

from keyshard.arrow.content import only
from keyshard.core.position.entry import EntryBlock

KEY = "__key"


class OnlyKeys:
    """Chooses by partition key; the keys of one delivery are looked at all together.

    Not by the slot, because an ordering key routes where there is one.

    Args:
        keys: As column ``__key`` has them.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = pa.array(sorted(keys), pa.string())
        self._content: Any = None
        self._rows: list[int] = []
        """Those of the content that have one of the keys, ascending."""

    def of(self, block: EntryBlock) -> EntryBlock | None:
        """The messages of a block that have one of the keys; ``None`` where none has."""
        kept: list[int] = []
        before = 0
        for part in block.parts:
            rows = self._rows_of(part.content)
            first, end = (bisect_left(rows, part.start + row) for row in (0, part.rows))
            kept.extend(block.indices[before + row - part.start] for row in rows[first:end])
            before += part.rows
        if len(kept) == block.rows:
            return block
        return only(block, frozenset(kept)) if kept else None

    def _rows_of(self, content: pa.RecordBatch) -> list[int]:
        if content is not self._content:
            found = compute.is_in(content.column(KEY), value_set=self._keys)
            self._content, self._rows = content, compute.indices_nonzero(found).to_pylist()
        return self._rows
