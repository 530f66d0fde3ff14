"""Batches of rows for sinks of a topic, and what they store."""

from __future__ import annotations

import pyarrow as pa

Rows = list[tuple[str | None, bytes]]


def batch_of(rows: Rows) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": pa.array([value for _, value in rows], pa.binary()),
            "__key": pa.array([key for key, _ in rows], pa.string()),
        }
    )


def rows_of(batch: int, count: int = 200, keys: int = 7) -> Rows:
    return [(f"k{number % keys}", b"%d:%d" % (batch, number)) for number in range(count)]


def expected(*batches: Rows) -> dict[str | None, list[bytes]]:
    found: dict[str | None, list[bytes]] = {}
    for rows in batches:
        for key, value in rows:
            found.setdefault(key, []).append(value)
    return found
