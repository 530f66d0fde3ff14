"""Ledgers that are deleted while they are read from bookies.

First a topic partition is truncated. Then retention removes older ledgers of another one. Each time
two processes read all splits, of which every second one accepts the loss. Beside them, this process
reads the whole topic partition and pauses: it goes on when bookies have dropped the ledgers.

If losses are errors, a read returns all of its rows or the named error. If not, it returns the rows
of every ledger that is still listed, once and in order. It may return rows of a ledger that was
deleted meanwhile, but none of a ledger that was deleted before it began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa
from pyarrow import compute

from keyshard import KeyShardSource
from keyshard.broker.connect import connect_admin
from keyshard.config.segments import Segments
from keyshard.core.position.split import Split
from keyshard.errors import DataLossTrimmedError
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevCluster
from tests.chaos.segment_tasks import AUTO, COLUMNS, Outcome, attempted
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.dropped_ledgers import is_dropped

READ_BEFORE = 2
"""Splits that are read before ledgers are deleted."""
LIMIT_S = deadline(480)
GONE_S = deadline(120)
"""Longest time until ledgers are deleted, and dropped by bookies."""
RETENTION = "/admin/v2/namespaces/public/default/retention"
ALL_KEPT = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
MODES = [(segments, strict) for segments in (AUTO, Segments("bookies")) for strict in (True, False)]

Listed = Mapping[str, frozenset[int]]
"""Ledgers by topic partition."""


class Held(NamedTuple):
    """A read of a topic partition that has begun."""

    segments: Segments
    strict: bool
    """Whether losses are errors."""
    first: pa.RecordBatch
    rest: Iterator[pa.RecordBatch]


class Losses:
    """Deletes ledgers while they are read, and judges what is read.

    Args:
        cluster: The cluster.
        pool: Processes that read splits.
        source: The topic.
        splits: The plan, made while all ledgers were there.
        wanted: The rows of each split.
    """

    def __init__(
        self, cluster: DevCluster, pool: ProcessPoolExecutor, source: KeyShardSource,
        splits: Sequence[Split], wanted: Sequence[pa.Table],
    ) -> None:  # fmt: skip
        self._cluster, self._pool = cluster, pool
        self._connection = source.how_to_connect()
        self._splits, self._wanted = splits, wanted
        self._whole = {one.topic_partition.name: one for one in plan_read(source, segments=AUTO)}
        self._deleted: set[str] = set()
        """Topic partitions with deleted ledgers."""

    def run(self) -> bool:
        """Delete ledgers in two ways; return whether all reads are right."""
        truncated, trimmed, _ = sorted(self._whole)
        good = self._deletion("truncated", truncated, lambda: self._truncate(truncated))
        good &= self._deletion("trimmed", trimmed, lambda: self._trim(trimmed))
        listed = self._listed()
        return self._judged("after the deletions", self._submit(), listed, listed) and good

    def _deletion(self, text: str, where: str, delete: Callable[[], None]) -> bool:
        """Delete ledgers of a topic partition while all are read."""
        before, whole = self._listed(), self._whole[where]
        held = [self._begin(whole, segments, strict=strict) for segments, strict in MODES]
        reads = self._submit()
        of_partition = [
            read
            for read, split in zip(reads, self._splits, strict=True)
            if split.topic_partition.name == where
        ]
        wait_for(of_partition, READ_BEFORE)
        delete()
        self._deleted.add(where)
        gone = before[where] - self._listed()[where]
        print(f"{where}: {text}, {len(gone)} of {len(before[where])} ledgers deleted", flush=True)
        good = bool(gone)
        wait(reads, LIMIT_S)
        after = self._listed()
        good &= self._judged(text, reads, before, after)
        placed = [one.placement for one in whole.spans if one.ledger in gone]
        wait_until(lambda: all(map(is_dropped, placed)), GONE_S)
        rows = self._rows_of(where)
        for one in held:
            good &= self._finish(one, text, rows, before[where], after[where])
        return good

    def _begin(self, split: Split, segments: Segments, *, strict: bool) -> Held:
        batches = read_splits(
            self._connection, [split], COLUMNS, segments=segments, fail_on_data_loss=strict
        )
        return Held(segments, strict, next(batches), batches)

    def _finish(
        self, held: Held, text: str, wanted: pa.Table, before: frozenset[int], after: frozenset[int]
    ) -> bool:
        """Read the rest, and judge it; a strict read has to fail, because entries are gone."""
        named = f"{text}, paused, {held.segments.source}, {'strict' if held.strict else 'lenient'}"
        try:
            found = pa.Table.from_batches([held.first, *held.rest])
        except DataLossTrimmedError as exc:
            print(f"{named}: {exc.code}", flush=True)
            return held.strict
        wrong = wrong_rows(found, wanted, before, after, strict=held.strict)
        if held.strict:
            wrong = wrong or "the read noticed nothing"
        missing = wanted.num_rows - found.num_rows
        print(f"{named}: {found.num_rows:,} rows, {missing:,} lost {wrong}", flush=True)
        return not wrong

    def _submit(self) -> list[Future[Outcome]]:
        return [
            self._pool.submit(attempted, self._connection, split, fail_on_data_loss=not number % 2)
            for number, split in enumerate(self._splits)
        ]

    def _judged(
        self, text: str, reads: Sequence[Future[Outcome]], before: Listed, after: Listed
    ) -> bool:
        """Judge reads of all splits; return whether they are right."""
        refused = partly = equal = 0
        wrong: list[str] = []
        for number, (split, wanted) in enumerate(zip(self._splits, self._wanted, strict=True)):
            found, where = reads[number].result(LIMIT_S), split.topic_partition.name
            strict = not number % 2
            ledgers = {span.ledger for span in split.spans}
            if found.table is None:
                refused += 1
                if not strict or ledgers <= after[where]:
                    wrong.append(f"split {number}: {found.loss}")
                continue
            partly += found.table.num_rows < wanted.num_rows
            equal += found.table.equals(wanted)
            said = wrong_rows(found.table, wanted, before[where], after[where], strict=strict)
            wrong += [f"split {number}: {said}"] if said else []
        print(
            f"{text}: {equal} of {len(self._splits)} splits are equal, {refused} have the named "
            f"error, {partly} lack rows of deleted ledgers; wrong: {wrong or 'none'}",
            flush=True,
        )
        return not wrong and refused > 0 and partly > 0

    def _rows_of(self, where: str) -> pa.Table:
        """Return the rows of a topic partition in its order."""
        found = [
            (split.first, table)
            for split, table in zip(self._splits, self._wanted, strict=True)
            if split.topic_partition.name == where
        ]
        return pa.concat_tables(table for _, table in sorted(found, key=lambda one: one[0]))

    def _listed(self) -> Listed:
        """Return the ledgers that the broker lists."""
        with closing(connect_admin(self._connection)) as admin:
            return {
                name: frozenset(one.id for one in admin.ledgers(split.topic_partition) or ())
                for name, split in self._whole.items()
            }

    def _truncate(self, where: str) -> None:
        self._cluster.ask("DELETE", f"/admin/v2/{where.replace('://', '/')}/truncate")
        before = {span.ledger for span in self._whole[where].spans[:-1]}
        wait_until(lambda: not before & self._listed()[where], GONE_S)

    def _trim(self, where: str) -> None:
        """Let retention keep half of the bytes in whole MiB; below 1 MiB, it keeps nothing."""
        half_mb = self._whole[where].size_bytes // 2 >> 20
        kept = {"retentionTimeInMinutes": -1 if half_mb else 0, "retentionSizeInMB": half_mb}
        before = self._listed()[where]
        self._cluster.ask("POST", RETENTION, json=kept)

        def is_trimmed() -> bool:
            # A broker learns late of the retention.
            self._cluster.ask("POST", f"/admin/v2/{where.replace('://', '/')}/trim")
            return self._listed()[where] < before

        try:
            wait_until(is_trimmed, GONE_S)
        finally:
            self._cluster.ask("POST", RETENTION, json=ALL_KEPT)


def wrong_rows(
    found: pa.Table,
    wanted: pa.Table,
    before: frozenset[int],
    after: frozenset[int],
    *,
    strict: bool,
) -> str:
    """Return what is wrong with the rows of a read; empty if nothing is.

    Args:
        found: The rows that it returned.
        wanted: The rows before any ledger was deleted.
        before: Ledgers that were listed before the read began.
        after: Ledgers that were listed after it.
        strict: Whether it had to fail if a row was lost.
    """
    found = found.cast(wanted.schema)  # without rows, its columns have no types
    if found.equals(wanted):
        gone = ledgers_of(wanted) - before
        return f"rows of ledgers that were deleted before: {sorted(gone)}" if gone else ""
    if strict:
        return "rows are missing, and there is no error"
    is_found = compute.is_in(wanted["__messageId"], value_set=found["__messageId"].combine_chunks())
    if not wanted.filter(is_found).equals(found):
        return "rows that are changed, doubled or out of order"
    if lost := ledgers_of(wanted.filter(compute.invert(is_found))) & after:
        return f"rows of ledgers that are still listed are missing: {sorted(lost)}"
    if dead := ledgers_of(found) - before:
        return f"rows of ledgers that were deleted before: {sorted(dead)}"
    return ""


def ledgers_of(table: pa.Table) -> set[int]:
    """Return the ledgers of some rows."""
    return {int(one.partition(":")[0]) for one in table["__messageId"].to_pylist()}


def wait_for(reads: Sequence[Future[Outcome]], count: int) -> None:
    """Wait until some reads have ended."""
    wait_until(lambda: sum(one.done() for one in reads) >= count, LIMIT_S)
