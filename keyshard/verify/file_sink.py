"""Reads what a Spark file sink committed, batch by batch, and checks keys and completeness.

Spark's file sink names the files of a batch in ``_spark_metadata/<batch>`` (JSON lines); every
tenth log, ``<batch>.compact``, also repeats all earlier ones. Files that it does not name are
leftovers of killed runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from keyshard.core.hash_range import range_index
from keyshard.verify.workloads import parse_value

METADATA = "_spark_metadata"
_TASK = re.compile(r"part-(\d+)-")


def committed_files(sink: Path) -> dict[int, list[Path]]:
    """Files of each committed batch, by Spark partition.

    Args:
        sink: Directory of the file sink.
    """
    logs: dict[int, Path] = {}
    metadata = sink / METADATA
    for path in metadata.iterdir() if metadata.is_dir() else ():
        number = path.name.removesuffix(".compact")
        if number.isdigit():
            logs[int(number)] = path
    seen: set[Path] = set()
    result: dict[int, list[Path]] = {}
    for batch in sorted(logs):
        files = [path for path in _named(logs[batch]) if path not in seen]
        seen.update(files)
        result[batch] = sorted(files, key=task_of)
    return result


def _named(log: Path) -> Iterator[Path]:
    for line in log.read_text().splitlines()[1:]:
        action = json.loads(line)
        if action["action"] == "add":
            yield Path(unquote(urlparse(action["path"]).path))


def task_of(path: Path) -> int:
    """Spark partition that wrote a file of the sink."""
    match = _TASK.search(path.name)
    if match is None:
        raise ValueError(f"{path.name} is no file of a Spark task")
    return int(match[1])


@dataclass
class SinkCheck:
    """Verdict over a sink; feed it every batch once, in order."""

    rows: int = 0
    twice: int = 0
    """Rows whose message was in the sink already."""
    inversions: int = 0
    """Rows that came after a later message of their key."""
    split_keys: int = 0
    """Keys of one topic partition found in more than one Spark partition of a batch."""
    rows_of_range: Counter[int] = field(default_factory=Counter)
    """Rows per hash range, by the number of ranges given to :meth:`add`."""
    sequences: Counter[str] = field(default_factory=Counter)
    """Distinct messages per key."""
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _last: dict[tuple[int, str], int] = field(default_factory=dict)

    def add(self, files: Iterable[Path], ranges: int) -> None:
        """Check the files of the next batch, in the order of its Spark partitions."""
        task_of_key: dict[tuple[int, str], int] = {}
        for path in files:
            table = pq.read_table(path, columns=["value", "__partition", "__slot"])
            self._add_table(table, task_of(path), task_of_key, ranges)

    def _add_table(
        self, table: pa.Table, task: int, task_of_key: dict[tuple[int, str], int], ranges: int
    ) -> None:
        values, partitions, slots = (column.to_pylist() for column in table.columns)
        for value, partition, slot in zip(values, partitions, slots, strict=True):
            key, sequence = parse_value(value)
            self.rows += 1
            self.rows_of_range[range_index(slot or 0, ranges)] += 1
            if (key, sequence) in self._seen:
                self.twice += 1
            else:
                self._seen.add((key, sequence))
                self.sequences[key] += 1
            lane = (partition, key)
            self.inversions += sequence < self._last.get(lane, -1)
            self._last[lane] = max(sequence, self._last.get(lane, -1))
            self.split_keys += task_of_key.setdefault(lane, task) != task

    def missing(self, sent: Mapping[str, int]) -> int:
        """Messages that were sent and are not in the sink.

        Args:
            sent: Number of messages per key, with sequence numbers from 0.
        """
        return sum(
            (key, sequence) not in self._seen
            for key, count in sent.items()
            for sequence in range(count)
        )


def message_ids(path: Path) -> list[tuple[int, str]]:
    """(topic partition, message id) of every row of a file, in order."""
    table = pq.read_table(path, columns=["__partition", "__messageId"])
    partitions, ids = (column.to_pylist() for column in table.columns)
    return list(zip(partitions, ids, strict=True))
