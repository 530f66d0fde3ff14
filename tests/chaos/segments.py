"""Chaos for reads from bookies: a cluster whose bookies and brokers fail while history is read.

``python -m tests.proofs segments --messages 1000000`` starts two brokers and three bookies, and
publishes to three topic partitions in many ledgers; the last ones stay open. It reads them by the
broker. Then two processes read the same plan with ``segments`` ``auto``, while bytes change on the
disk of a bookie, and again and again while one is killed, another one frozen, and a broker killed.
Each split has to equal what the broker gave, row by row, and all splits together have to be every
message once. Wrong digests have to be noticed while bytes are wrong, and only then. At the end,
ledgers are deleted while they are read (``segment_losses``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import pyarrow as pa

from keyshard import KeyShardSource
from keyshard.config.connection import Connection
from keyshard.config.segments import Segments
from keyshard.core.position.split import Split, cut
from keyshard.reading.read_report import ReadReport, SpansByStart
from keyshard.reading.split_planner import plan_read
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.members import Bookie
from keyshard.testing.verify.workloads import Workload, produce
from tests.chaos.segment_losses import READ_BEFORE, Losses, wait_for
from tests.chaos.segment_tasks import AUTO, attempted, quiet, read
from tests.proofs.runner import Options, Outcome, Outcomes, Proof
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

TOPIC = "persistent://public/default/history"
PARTITIONS = 3
ENTRY_MESSAGES = 8
LEDGERS = 30
"""Approximate number of ledgers."""
SPLITS = 24
READERS = 2
AWAY_S = 6.0
"""How long a member fails: longer than a reader waits for a silent bookie."""
BETWEEN_S = 3.0
LIMIT_S = deadline(480)
"""Longest time of all reads under faults."""
LOG_HEAD, CHANGED_EVERY = 4_096, 20_000
"""Bytes of an entry log that stay right at its beginning, and the distance of changed ones."""


def run(messages: int) -> bool:
    """Read under faults; return whether every row is there once."""
    settings = {
        "managedLedgerMaxEntriesPerLedger": str(max(10, messages // ENTRY_MESSAGES // LEDGERS)),
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
    }
    cluster = DevCluster(2, 3, PULSAR, settings=settings)
    for bookie in cluster.bookies:
        # Entries come from the disk, not from a cache, and those of deleted ledgers go soon.
        bookie.settings |= {
            "flushInterval": "1000", "dbStorage_readAheadCacheMaxSizeMb": "2", "gcWaitTime": "500",
        }  # fmt: skip
    with cluster:
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        cluster.ask("POST", "/admin/v2/namespaces/public/default/retention", json=kept)
        path = TOPIC.replace("://", "/")
        cluster.ask("PUT", f"/admin/v2/{path}/partitions", json=PARTITIONS)
        load = Workload(messages, keys=1_000, entry_messages=ENTRY_MESSAGES)
        published = produce(load, cluster.service_url, TOPIC).per_key
        cluster.move(f"{TOPIC}-partition-0", cluster.brokers[1])
        source = KeyShardSource(TOPIC, service_url=cluster.service_url, admin_url=cluster.admin_url)
        splits = cut(plan_read(source, segments=AUTO), SPLITS)
        spans = [span.placement for split in splits for span in split.spans]
        closed = sum(not isinstance(one, str) for one in spans)
        print(f"{messages:,} messages, {len(splits)} splits, {len(spans)} spans, {closed} closed")
        began = time.monotonic()
        connection = source.how_to_connect()
        wanted = [read(connection, split, Segments())[0] for split in splits]
        took_s = time.monotonic() - began
        good, text = _judged(wanted, published)
        print(f"by the broker: {took_s:.1f} s; {text}", flush=True)
        spawn = get_context("spawn")
        with ProcessPoolExecutor(READERS, mp_context=spawn, initializer=quiet) as pool:
            disk = ChangedDisk(cluster.bookies[2])
            fine, digests = _round(
                pool, connection, splits, wanted, published, meanwhile=disk.change
            )
            disk.restore()
            good = good and fine and digests > 0
            with _faults(cluster) as going:
                rounds = 0
                while going.is_set() or not rounds:
                    good &= _round(pool, connection, splits, wanted, published)[0]
                    rounds += 1
            fine, digests = _round(pool, connection, splits, wanted, published)
            good = good and fine and not digests
            good &= Losses(cluster, pool, source, splits, wanted).run()
    print("ok" if good else "BAD", f"{rounds} reads while members failed, and one after them")
    return good


def _round(
    pool: ProcessPoolExecutor, connection: Connection, splits: Sequence[Split],
    wanted: Sequence[pa.Table], published: Mapping[str, int],
    *, meanwhile: Callable[[], None] | None = None,
) -> tuple[bool, int]:  # fmt: skip
    """Read all splits from bookies, and compare them.

    Args:
        pool: Processes that read.
        connection: The connection to the cluster.
        splits: The plan.
        wanted: The rows of each split.
        published: Messages by key.
        meanwhile: Called when some splits have been read.

    Returns:
        Whether they are right, and the number of wrong digests.
    """
    began = time.monotonic()
    futures = [pool.submit(attempted, connection, split) for split in splits]
    if meanwhile is not None:
        wait_for(futures, READ_BEFORE)
        meanwhile()
    tables, again, digests = [], 0, 0
    spans: SpansByStart = {}
    for one in futures:
        found = one.result(LIMIT_S)
        if found.table is None:
            raise AssertionError(f"no ledger was deleted: {found.loss}")
        tables.append(found.table)
        spans.update(found.report.by_start())
        again += found.attempts - 1
        digests += found.wrong_digests
    took_s, report = time.monotonic() - began, ReadReport.of(spans)
    good, text = _judged(tables, published)
    equal = sum(one.equals(other) for one, other in zip(tables, wanted, strict=True))
    print(
        f"from bookies: {took_s:.1f} s; {text}; {equal} of {len(splits)} splits are equal; "
        f"{again} attempts failed; {digests:,} wrong digests; entries: "
        f"{report.by_bookies:,} from bookies, {report.by_broker:,} by the broker {report.reasons}",
        flush=True,
    )
    return equal == len(splits) and good, digests


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


class ChangedDisk:
    """Bytes in the entry logs of a running bookie, which change and become right again."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._right: dict[tuple[int, int], bytes] = {}
        """Right bytes by open file and offset; a file may be removed meanwhile."""

    def change(self) -> None:
        """Change a bit in every 20,000 bytes."""
        print(f"bytes change on the disk of {self._bookie.name}", flush=True)
        for log in (self._bookie.folder / "data").glob("ledgers/current/*.log"):
            file = os.open(log, os.O_RDWR)
            for at in range(LOG_HEAD, os.fstat(file).st_size, CHANGED_EVERY):
                right = self._right[file, at] = os.pread(file, 1, at)
                os.pwrite(file, bytes([right[0] ^ 1]), at)

    def restore(self) -> None:
        """Write the right bytes again."""
        print(f"{len(self._right):,} bytes become right again", flush=True)
        for (file, at), right in self._right.items():
            os.pwrite(file, right, at)
        for file in {file for file, _ in self._right}:
            os.close(file)


@contextmanager
def _faults(cluster: DevCluster) -> Iterator[threading.Event]:
    """Kill or freeze two bookies and a broker in turn; bring each back before the next fault.

    The event is set until the last fault has ended.
    """
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


def _outcomes(given: Options, seeds: range) -> Outcomes:
    """Nothing is drawn: a seed is one more run."""
    quiet()
    for seed in seeds:
        good = run(given.messages)
        yield Outcome(seed, "" if good else "rows or digests are wrong, see the lines above")


PROOF = Proof(
    _outcomes, seed_start=0,
    options={"--messages": {"type": int, "default": 1_000_000, "help": "how many (1000000)"}},
)  # fmt: skip
