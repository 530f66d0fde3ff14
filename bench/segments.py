"""What does a read of history cost, by the broker and from bookies, and how does it disturb?

One broker and one bookie, each a process, so that both are measured apart. A turn reads a closed
topic by the broker, from the bookie, and both ways with three tasks, each in a process of its own.
The CPU time of the broker and the bookie is that between the first and the last row: nothing else
uses them, and planning is done. While three tasks read, a producer and a consumer of another topic
measure their latency.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Literal

import psutil
import pulsar
from rich.console import Console

from bench.child import child
from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.connection import Connection
from keyshard.config.segments import Segments
from keyshard.core.position.split import Split, cut
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.verify.workloads import Workload, produce

MESSAGES = {4: 80_000, 1_000: 200_000}
"""Messages of a topic, by approximate messages per entry."""
TURNS = 3
"""The first one only warms up the compilers of the broker and the bookie."""
WAYS: tuple[Literal["broker", "auto"], ...] = ("broker", "auto")
TASKS = 3
SILENCE_S = 0.01
"""Pause between two messages of the live topic, seconds."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians by shape and way: rows per second, CPU of each process, latency."""
    figures: dict[str, float] = {}
    with DevCluster(1, 1, PULSAR) as cluster:
        for size, messages in MESSAGES.items():
            topic = f"history-{size}"
            path = f"/admin/v2/persistent/public/default/{topic}"
            kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
            cluster.ask("POST", "/admin/v2/namespaces/public/default/retention", json=kept)
            cluster.ask("PUT", f"{path}/partitions", json=1)
            load = Workload(messages, keys=100, size_bytes=100, entry_messages=size)
            produce(load, cluster.service_url, topic)
            cluster.ask("PUT", f"{path}-partition-0/unload")
            figures |= _turns(cluster, topic, messages, size)
    return figures


def _turns(cluster: DevCluster, topic: str, messages: int, size: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for turn in range(TURNS):
        for way in WAYS:
            for tasks in (1, TASKS) if turn else (1,):
                name = f"{way}_{size}" if tasks == 1 else f"{way}_{size}_{tasks}_tasks"
                measured = _measured(cluster, topic, messages, way, tasks)
                if turn:
                    for key, value in measured.items():
                        found.setdefault(f"{name}_{key}", []).append(value)
        rates = ", ".join(f"{k} {v[-1]:,.0f}" for k, v in found.items() if "rows_per_s" in k)
        _console.print(f"{size} messages an entry, turn {turn}: {rates or 'warm'}")
    figures = {name: statistics.median(values) for name, values in found.items()}
    for end in ("", f"_{TASKS}_tasks"):
        rates_of = [figures[f"{way}_{size}{end}_rows_per_s"] for way in WAYS]
        figures[f"auto_over_broker_{size}{end}"] = rates_of[1] / rates_of[0]
    return figures


def _measured(
    cluster: DevCluster, topic: str, messages: int, way: str, tasks: int
) -> dict[str, float]:
    arguments = {
        "way": way, "topic": topic, "messages": messages, "tasks": tasks,
        "service_url": cluster.service_url, "admin_url": cluster.admin_url,
        "pids": [cluster.brokers[0].pid, cluster.bookies[0].pid] if tasks == 1 else [],
    }  # fmt: skip
    measured: dict[str, float]
    if tasks == 1:
        measured = child("bench.segments", json.dumps(arguments), timeout_s=90)
        return measured
    with _latency(cluster.service_url) as waits:
        measured = child("bench.segments", json.dumps(arguments), timeout_s=90)
    ordered = sorted(waits)
    return measured | {"live_p95_ms": ordered[len(ordered) * 95 // 100] * 1e3}


def cpu_of(pids: Sequence[int]) -> list[float]:
    """Return the CPU time of processes with their children, seconds."""
    found = []
    for pid in pids:
        process = psutil.Process(pid)
        all_of = [process, *process.children(recursive=True)]
        found.append(sum(sum(one.cpu_times()[:2]) for one in all_of))
    return found


@contextmanager
def _latency(service_url: str) -> Iterator[list[float]]:
    """Collect the times from a send to its receipt, seconds, until the end of the block."""
    waits: list[float] = []
    ended = threading.Event()
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    consumer = client.subscribe("live", "live")
    producer = client.create_producer("live")

    def measure() -> None:
        while not ended.wait(SILENCE_S):
            began = time.perf_counter()
            producer.send(b"x")
            consumer.acknowledge(consumer.receive(10_000))
            waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join(20.0)
        client.close()


def measure(
    *, way: Literal["broker", "auto"], topic: str, messages: int, tasks: int, service_url: str,
    admin_url: str, pids: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Read a topic in this process, or in several; return the rate, and CPU time per row.

    Args:
        pids: The broker and the bookie, or nothing. Their CPU time is measured, too, and that of
            the broker in an equally long time afterwards, when nobody reads.
    """
    source = KeyShardSource(topic, service_url=service_url, admin_url=admin_url)
    segments = Segments(way)
    splits = cut(plan_read(source, segments=segments), tasks)
    connection = source.how_to_connect()
    # Each process reads a little first, so that it has imported all it needs.
    (few, *_) = cut(splits, 200)
    if tasks == 1:
        _read(connection, few, segments)
        time.sleep(1.0)  # the broker closes what planning opened
        before = cpu_of(pids)
        began = time.perf_counter()
        read = [_read(connection, splits[0], segments)]
        took_s = time.perf_counter() - began
        after = cpu_of(pids)
        time.sleep(took_s)
        idle = cpu_of(pids)
    else:
        with ProcessPoolExecutor(tasks, mp_context=get_context("spawn")) as pool:
            same = [connection] * tasks, [segments] * tasks
            list(pool.map(_warm, same[0], [few] * tasks, same[1]))
            began = time.perf_counter()
            read = list(pool.map(_read, same[0], splits, same[1]))
            took_s = time.perf_counter() - began
    rows = sum(rows for rows, _ in read)
    assert rows == messages, f"{rows} of {messages} rows"
    cpu_s = sum(cpu_s for _, cpu_s in read)
    used = {}
    if pids:
        names = ("broker_us_per_row", "bookie_us_per_row")
        of_read = [end - start for start, end in zip(before, after, strict=True)]
        used = {name: one / rows * 1e6 for name, one in zip(names, of_read, strict=True)}
        used["idle_broker_us_per_row"] = (idle[0] - after[0]) / rows * 1e6
    return used | {"rows_per_s": rows / took_s, "cpu_us_per_row": cpu_s / rows * 1e6}


def _warm(connection: Connection, split: Split, segments: Segments) -> None:
    """Read a split, and wait until each process of the pool has one."""
    _read(connection, split, segments)
    time.sleep(0.5)


def _read(connection: Connection, split: Split, segments: Segments) -> tuple[int, float]:
    """Return the rows of a split, and the CPU time of this process meanwhile, seconds."""
    busy = time.process_time()
    batches = read_splits(connection, [split], SCHEMA.names, segments=segments)
    return sum(one.num_rows for one in batches), time.process_time() - busy


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
