"""Tasks that read a split from bookies, in processes of their own, as those of Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from keyshard.config.connection import Connection
from keyshard.config.segments import Segments
from keyshard.core.position.split import Split
from keyshard.errors import DataLossTrimmedError, KeyShardError
from keyshard.reading.read_report import ReadReport
from keyshard.reading.split_reader import read_splits

AUTO = Segments("auto")
ATTEMPTS = 4
"""Most attempts at a split, as Spark's default."""
COLUMNS = ("value", "__key", "__messageId", "__publishTime", "__partition")


class Outcome(NamedTuple):
    """The rows of a split, or why some of them are lost."""

    table: pa.Table | None
    loss: str
    """Error of deleted entries; empty if there is a table."""
    report: ReadReport
    attempts: int
    wrong_digests: int
    """Entries that a bookie returned with a wrong digest."""


def attempted(connection: Connection, split: Split, *, fail_on_data_loss: bool = True) -> Outcome:
    """Read a split as a task of Spark, which is run again after an error."""
    attempts = 1
    with _wrong_digests() as noticed:
        while True:
            try:
                table, report = read(connection, split, AUTO, fail_on_data_loss=fail_on_data_loss)
                return Outcome(table, "", report, attempts, noticed.count)
            except DataLossTrimmedError as exc:
                return Outcome(None, str(exc), ReadReport(), attempts, noticed.count)
            except KeyShardError as exc:
                if attempts == ATTEMPTS or not exc.retriable:
                    raise
            attempts += 1


def read(
    connection: Connection, split: Split, segments: Segments, *, fail_on_data_loss: bool = True
) -> tuple[pa.Table, ReadReport]:
    """Return the rows of a split, and what bookies and the broker returned."""
    found: list[ReadReport] = []
    batches = read_splits(
        connection, [split], COLUMNS, segments=segments, report=found.append,
        fail_on_data_loss=fail_on_data_loss,
    )  # fmt: skip
    if tables := list(batches):
        return pa.Table.from_batches(tables), found[0]
    return pa.table({one: [] for one in COLUMNS}), found[0]


def quiet() -> None:
    """Print no warnings of this process: there are thousands."""
    logging.getLogger("keyshard").addHandler(logging.NullHandler())


class _Noticed(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "wrong digest" in record.getMessage()


@contextmanager
def _wrong_digests() -> Iterator[_Noticed]:
    """Count the entries with a wrong digest that the log of this process names."""
    log, noticed = logging.getLogger("keyshard.bookkeeper"), _Noticed()
    log.addHandler(noticed)
    try:
        yield noticed
    finally:
        log.removeHandler(noticed)
