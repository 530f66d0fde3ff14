"""Chaos for reads from bookies: a cluster whose bookies and brokers fail while history is read.

``python -m tests.chaos.segments --messages 1000000`` starts two brokers and three bookies, and
publishes to three topic partitions in many ledgers; the last ones stay open. It reads them by the
broker. Then two processes read the same plan with ``segments`` ``auto``, again and again, while a
bookie is killed, another one frozen, and a broker killed. Each split has to equal what the broker
gave, row by row, and all splits together have to be every message once.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import pyarrow as pa

from keyshard import KeyShardSource
from keyshard.config.connection import Connection
from keyshard.config.segments import Segments
from keyshard.core.position.split import Split, cut
from keyshard.errors import KeyShardError
from keyshard.reading.read_report import ReadReport, SpansByStart
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.verify.workloads import Workload, produce
from tests.support.tested_pulsar import PULSAR

TOPIC = "persistent://public/default/history"
PARTITIONS = 3
ENTRY_MESSAGES = 8
LEDGERS = 30
"""Approximate number of ledgers."""
SPLITS = 24
READERS = 2
ATTEMPTS = 4
"""Most attempts at a split, as Spark's default."""
COLUMNS = ("value", "__key", "__messageId", "__publishTime", "__partition")
AWAY_S = 6.0
"""How long a member fails: longer than a reader waits for a silent bookie."""
BETWEEN_S = 3.0
LIMIT_S = 480.0
"""Longest time of all reads under faults."""


def run(messages: int) -> int:
    """Read under faults; return 0 if every row is there once."""
    settings = {
        "managedLedgerMaxEntriesPerLedger": str(max(10, messages // ENTRY_MESSAGES // LEDGERS)),
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    }
    with DevCluster(2, 3, PULSAR, settings=settings) as cluster:
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        cluster.ask("POST", "/admin/v2/namespaces/public/default/retention", json=kept)
        path = TOPIC.replace("://", "/")
        cluster.ask("PUT", f"/admin/v2/{path}/partitions", json=PARTITIONS)
        load = Workload(messages, keys=1_000, entry_messages=ENTRY_MESSAGES)
        published = produce(load, cluster.service_url, TOPIC).per_key
        cluster.move(f"{TOPIC}-partition-0", cluster.brokers[1])
        source = KeyShardSource(TOPIC, service_url=cluster.service_url, admin_url=cluster.admin_url)
        splits = cut(plan_read(source, segments=Segments("auto")), SPLITS)
        spans = [span.placement for split in splits for span in split.spans]
        closed = sum(not isinstance(one, str) for one in spans)
        print(f"{messages:,} messages, {len(splits)} splits, {len(spans)} spans, {closed} closed")
        began = time.monotonic()
        connection = source.how_to_connect()
        wanted = [_read(connection, split, Segments())[0] for split in splits]
        took_s = time.monotonic() - began
        good, text = _judged(wanted, published)
        print(f"by the broker: {took_s:.1f} s; {text}", flush=True)
        with ProcessPoolExecutor(READERS, mp_context=get_context("spawn")) as pool:
            with _faults(cluster) as going:
                rounds = 0
                while going.is_set() or not rounds:
                    good &= _round(pool, connection, splits, wanted, published)
                    rounds += 1
            good &= _round(pool, connection, splits, wanted, published)
    print("ok" if good else "BAD", f"{rounds} rounds under faults, and one after them")
    return 0 if good else 1


def _round(
    pool: ProcessPoolExecutor, connection: Connection, splits: Sequence[Split],
    wanted: Sequence[pa.Table], published: Mapping[str, int],
) -> bool:  # fmt: skip
    """Read all splits from bookies, and compare them; return whether they are right."""
    began = time.monotonic()
    auto = Segments("auto")
    read = [pool.submit(_attempted, connection, split, auto) for split in splits]
    tables, again = [], 0
    spans: SpansByStart = {}
    for one in read:
        table, reported, attempts = one.result(LIMIT_S)
        tables.append(table)
        spans.update(reported.by_start())
        again += attempts - 1
    took_s, report = time.monotonic() - began, ReadReport.of(spans)
    good, text = _judged(tables, published)
    equal = sum(one.equals(other) for one, other in zip(tables, wanted, strict=True))
    print(
        f"from bookies: {took_s:.1f} s; {text}; "
        f"{equal} of {len(splits)} splits are equal; {again} attempts failed; entries: "
        f"{report.by_bookies:,} from bookies, {report.by_broker:,} by the broker {report.reasons}",
        flush=True,
    )
    return equal == len(splits) and good


def _attempted(
    connection: Connection, split: Split, segments: Segments
) -> tuple[pa.Table, ReadReport, int]:
    """Read a split as a task of Spark, which is run again after an error."""
    attempts = 1
    while True:
        try:
            return *_read(connection, split, segments), attempts
        except KeyShardError as exc:
            if attempts == ATTEMPTS or not exc.retriable:
                raise
        attempts += 1


def _read(connection: Connection, split: Split, segments: Segments) -> tuple[pa.Table, ReadReport]:
    found: list[ReadReport] = []
    batches = list(
        read_splits(connection, [split], COLUMNS, segments=segments, report=found.append)
    )
    return pa.Table.from_batches(batches), found[0]


def _judged(tables: Sequence[pa.Table], published: Mapping[str, int]) -> tuple[bool, str]:
    """Return whether every message is there once, and how many are not, in words."""
    wanted = {
        (key.encode(), b"%d" % number)
        for key, count in published.items()
        for number in range(count)
    }
    # A value begins with the key and the number of its message.
    values = [value for one in tables for value in one["value"].to_pylist()]
    found = {tuple(value.split(b":", 2)[:2]) for value in values}
    missing, others = len(wanted - found), len(found - wanted)
    twice = len(values) - len(found)
    text = f"{len(values):,} rows, {missing} missing, {twice} twice, {others} never published"
    return not (missing or twice or others), text


@contextmanager
def _faults(cluster: DevCluster) -> Iterator[threading.Event]:
    """Let members fail one after the other; the event is set as long as that goes on."""
    going, failed = threading.Event(), []
    going.set()

    def inject() -> None:
        try:
            for name, member, begin, end in (
                ("killed", cluster.bookies[0], "kill", "start"),
                ("frozen", cluster.bookies[1], "freeze", "resume"),
                ("killed", cluster.brokers[1], "kill", "start"),
            ):
                time.sleep(BETWEEN_S)
                getattr(member, begin)()
                print(f"{member.name} is {name}", flush=True)
                time.sleep(AWAY_S)
                getattr(member, end)()
                print(f"{member.name} is back", flush=True)
        except Exception as exc:  # noqa: BLE001 - the main thread raises it
            failed.append(exc)
        finally:
            going.clear()

    thread = threading.Thread(target=inject, daemon=True)
    thread.start()
    try:
        yield going
    finally:
        thread.join(LIMIT_S)
    if failed:
        raise failed[0]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.segments", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    return run(parser.parse_args().messages)


if __name__ == "__main__":
    sys.exit(main())
