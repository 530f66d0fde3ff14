"""Reads the committed files of a Spark file sink, batch by batch, for the checkers.

Spark's file sink names the files of a batch in ``_spark_metadata/<batch>`` (JSON lines); every
tenth log, ``<batch>.compact``, also repeats all earlier ones. Files that no log names are leftovers
of killed runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow.parquet as pq

from keyshard.core.position.entry import full_topic_name
from keyshard.core.ring.hash_range import range_index
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.checkers import check
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import ROW_COLUMNS, row_events, sent_events
from keyshard.testing.verify.verdict import Verdict

METADATA = "_spark_metadata"
_TASK = re.compile(r"part-(\d+)-")


def committed_files(sink: Path) -> dict[int, list[Path]]:
    """Return the files of each committed batch by batch id, in the order of Spark partitions.

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
    """Return the Spark partition that wrote a file of the sink."""
    match = _TASK.search(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not a file of a Spark task")
    return int(match[1])


@dataclass
class SinkCheck:
    """Counts and checks the rows of a sink; add every batch once, in order."""

    rows: int = 0
    rows_of_range: Counter[int] = field(default_factory=Counter)
    """Rows per hash range, by the number of ranges given to :meth:`add`."""
    _batches: int = 0
    _events: list[Event] = field(default_factory=list)

    def add(self, files: Iterable[Path], ranges: int) -> None:
        """Add the files of the next batch, in the order of its Spark partitions."""
        batch = str(self._batches)
        self._batches += 1
        self._events.append(Event(0.0, "started", batch=batch))
        for path in files:
            for row in rows_of(path, batch, 0.0):
                self.rows += 1
                slot = 0 if row.key is None else key_slot(row.key)
                self.rows_of_range[range_index(slot, ranges)] += 1
                self._events.append(row)
        self._events.append(Event(0.0, "checkpointed", batch=batch))

    def verdicts(self, topic: str, sent: Mapping[str, int]) -> dict[str, Verdict]:
        """Return the verdicts on the sink, by promise.

        Args:
            topic: Topic name, short or full.
            sent: Number of published messages per key.
        """
        published = sent_events(full_topic_name(topic), sent, 0.0)
        return {verdict.name: verdict for verdict in check([*published, *self._events])}


def rows_of(path: Path, batch: str, t: float) -> Iterator[Event]:
    """Yield the rows of a file, as those of a run of a batch.

    Args:
        path: A file of the sink.
        batch: Name of the batch.
        t: Time of the rows, seconds.
    """
    where = {"batch": batch, "part": task_of(path)}
    for records in pq.read_table(path, columns=list(ROW_COLUMNS)).to_batches():
        yield from row_events(t, records, where)


def message_ids(path: Path) -> list[tuple[int, str]]:
    """Return (topic partition, message id) of every row of a file, in order."""
    table = pq.read_table(path, columns=["__partition", "__messageId"])
    partitions, ids = (column.to_pylist() for column in table.columns)
    return list(zip(partitions, ids, strict=True))
