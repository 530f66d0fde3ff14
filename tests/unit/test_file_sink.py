"""The files of a sink are counted, and judged by the checkers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.file_sink import SinkCheck

SENT = {"a": 3, "b": 1}
BATCHES = [{0: [("a", 0), ("a", 1)], 1: [("b", 0)]}, {0: [("a", 2)]}]
"""Rows of each Spark partition of each batch: key and sequence number."""


def judged(folder: Path, batches: list[dict[int, list[tuple[str, int]]]]) -> SinkCheck:
    check = SinkCheck()
    for number, parts in enumerate(batches):
        files = []
        for part, rows in parts.items():
            keys = [key for key, _ in rows]
            columns = {
                "value": [b"%s:%d:" % (key.encode(), seq) for key, seq in rows],
                "__key": keys,
                "__topic": ["persistent://public/default/t"] * len(rows),
                "__partition": [0] * len(rows),
                "__messageId": [f"1:{10 * seq + ord(key)}:0" for key, seq in rows],
                "__slot": [key_slot(key) for key in keys],
            }
            files.append(folder / f"part-{part:05}-{number}.parquet")
            pq.write_table(pa.table(columns), files[-1])
        check.add(files, 10)
    return check


def test_a_right_sink_passes_and_is_counted(tmp_path: Path) -> None:
    check = judged(tmp_path, BATCHES)
    verdicts = check.verdicts("t", SENT)
    assert all(verdict.holds for verdict in verdicts.values())
    assert verdicts["no loss"].checked == check.rows == 4
    keys = Counter(SENT).elements()
    assert check.rows_of_range == Counter(range_index(key_slot(key), 10) for key in keys)


@pytest.mark.parametrize(
    ("batches", "promise"),
    [
        (BATCHES[:1], "no loss"),
        ([BATCHES[0], BATCHES[1], BATCHES[1]], "exactly once into the checkpoint"),
        (BATCHES[::-1], "order per key"),
        ([{0: [("a", 0)], 1: [("a", 1), ("b", 0)]}, BATCHES[1]], "order per key"),
    ],
)
def test_a_wrong_sink_is_found_out(
    tmp_path: Path, batches: list[dict[int, list[tuple[str, int]]]], promise: str
) -> None:
    assert not judged(tmp_path, batches).verdicts("t", SENT)[promise].holds
