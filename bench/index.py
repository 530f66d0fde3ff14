"""What does an index of closed ledgers save a read of one day in thirty, and of one key?

A topic partition has 30 closed ledgers, one for each "day", whose keys occur on that day only.
Publish times are those of the run, so a day is the time in which its messages were published. Each
turn reads everything, one day and one key, without an index and with one, and everything while the
index is made. All times include planning. The broker's processor time is measured, too.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import closing

import pulsar
from rich.console import Console

from bench.release import PULSAR
from bench.segments import cpu_of
from keyshard import KeyShardSource
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position.zones import Wanted
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevCluster

DAYS = 30
ROWS = 20_000
"""Messages of a day."""
KEYS = 100
"""Keys of a day."""
DAY = 17
TURNS = 4
"""The first one only warms up the compilers of the broker and the bookie."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians by read: seconds, and processor time of reader and broker."""
    with DevCluster(1, 1, PULSAR) as cluster:
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        cluster.ask("POST", "/admin/v2/namespaces/public/default/retention", json=kept)
        day = _fill(cluster)
        found: dict[str, list[float]] = {}
        for turn in range(TURNS):
            for name, value in _turn(cluster, day).items():
                if turn:
                    found.setdefault(name, []).append(value)
    figures = {name: statistics.median(values) for name, values in found.items()}
    for name in ("day", "key"):
        figures[f"{name}_faster"] = figures[f"{name}_s"] / figures[f"{name}_index_s"]
    making, without = (figures[f"all{way}_reader_us_per_row"] for way in ("_making", ""))
    return figures | {"making_over_all_reader": making / without}


def _fill(cluster: DevCluster) -> tuple[int, int]:
    """Publish; return the first and the last publish time of a day, end exclusive."""
    path = "/admin/v2/persistent/public/default/history"
    cluster.ask("PUT", f"{path}/partitions", json=1)
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    times = []
    with closing(pulsar.Client(cluster.service_url, logger=quiet)) as client:
        for day in range(DAYS):
            producer = client.create_producer(
                "history", batching_enabled=True, batching_max_publish_delay_ms=5,
                batching_max_messages=50, block_if_queue_full=True,
            )  # fmt: skip
            began = int(time.time() * 1000)
            for number in range(ROWS):
                key = f"day-{day}-{number % KEYS}"
                producer.send_async(b"x" * 100, lambda *_: None, partition_key=key)
            producer.flush()
            producer.close()
            times.append((began, int(time.time() * 1000) + 1))
            cluster.ask("PUT", f"{path}-partition-0/unload")
            time.sleep(0.05)
    return times[DAY]


def _turn(cluster: DevCluster, day: tuple[int, int]) -> dict[str, float]:
    folder = tempfile.mkdtemp(prefix="keyshard-index-")
    key = {f"day-{DAY}-5"}
    figures: dict[str, float] = {}

    def take(name: str, rows: int, index: str | None, keys: Collection[str] | None = None) -> None:
        start, end = ("earliest", "latest") if "day" not in name else day
        source = KeyShardSource(
            "history", service_url=cluster.service_url, admin_url=cluster.admin_url
        )
        figures.update(
            _measured(cluster, name, rows, lambda: _read(source, start, end, index, keys))
        )

    try:
        take("all", DAYS * ROWS, None)
        take("day", ROWS, None)
        take("key", ROWS // KEYS, None, key)
        take("all_making", DAYS * ROWS, folder)
        take("all_index", DAYS * ROWS, folder)
        take("day_index", ROWS, folder)
        take("key_index", ROWS // KEYS, folder, key)
    finally:
        shutil.rmtree(folder)
    _console.print({name: round(value, 3) for name, value in figures.items() if "_s" in name})
    return figures


def _measured(
    cluster: DevCluster, name: str, rows: int, read: Callable[[], int]
) -> dict[str, float]:
    broker = cluster.brokers[0].pid
    assert broker is not None, "it runs"
    before, busy, began = cpu_of([broker]), time.process_time(), time.perf_counter()
    found = read()
    took_s, used_s = time.perf_counter() - began, time.process_time() - busy
    (broker_s,) = cpu_of([broker])
    assert found == rows, f"{name}: {found} of {rows} rows"
    return {
        f"{name}_s": took_s,
        f"{name}_reader_s": used_s,
        f"{name}_broker_s": broker_s - before[0],
        f"{name}_reader_us_per_row": used_s / rows * 1e6,
    }


def _read(
    source: KeyShardSource, start: object, end: object, index: str | None,
    keys: Collection[str] | None,
) -> int:  # fmt: skip
    splits = plan_read(source, start, end, ledger_index=index, wanted=Wanted(keys=keys))
    batches = read_splits(
        source.how_to_connect(), splits, SCHEMA.names, keys=keys, ledger_index=index
    )
    return sum(one.num_rows for one in batches)
