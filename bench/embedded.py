"""The embedded runtime of keyshard without Spark, in a separate process."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pulsar

from keyshard import KeyShardSource
from keyshard.source_stream import SourceStream

RANGES = 10
STALL_S = 60.0
CUT_ROWS = 20_000


def source(service_url: str, topic: str, ranges: int = RANGES, **settings: Any) -> KeyShardSource:
    """Return a source from the start of a topic, with a new subscription."""
    return KeyShardSource(
        topic,
        service_url=service_url,
        subscription=f"embedded-{uuid.uuid4().hex[:8]}",
        parallelism=ranges,
        starting_position="earliest",
        **settings,
    )


def busy_s(stream: SourceStream) -> float:
    """Return the processor time of the workers so far, seconds."""
    pids = [one["pid"] for one in stream.status()["sourceWorkers"]]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def ingest(
    service_url: str, topic: str, messages: int, ranges: int = RANGES, **settings: Any
) -> dict[str, float]:
    """Read all rows as Arrow batches with all columns, and release each batch.

    Returns:
        Rows per second, processor time per row of this process and of workers in us, and the time
        to open the source in seconds.
    """
    opening = time.perf_counter()
    with source(service_url, topic, ranges, **settings).open() as stream:
        began = time.perf_counter()
        busy, workers_busy_s = time.process_time(), busy_s(stream)
        rows = 0
        while rows < messages:
            batch = stream.next_batch(60)
            if batch is None:
                sys.exit(f"received only {rows} of {messages} rows")
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
        return {
            "rows_per_s": rows / (time.perf_counter() - began),
            "cpu_us_per_row": (time.process_time() - busy) / rows * 1e6,
            "workers_us_per_row": (busy_s(stream) - workers_busy_s) / rows * 1e6,
            "open_s": began - opening,
        }


def single(service_url: str, topic: str, messages: int, workers: str) -> dict[str, float]:
    """Measure batches of one message: median time from publish to read, milliseconds."""
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    producer = client.create_producer(topic, batching_enabled=False)  # creates the topic
    taken_ms: list[float] = []
    with source(service_url, topic, workers=workers).open() as stream:
        for number in range(messages):
            began = time.perf_counter()
            producer.send(b"content", partition_key=str(number))
            batch = stream.next_batch(60)
            if batch is None or sum(part.num_rows for part in batch) != 1:
                sys.exit(f"message {number} did not arrive alone")
            taken_ms.append((time.perf_counter() - began) * 1e3)
            stream.commit(batch)
    client.close()
    return {"single_ms": statistics.median(taken_ms)}


def checkpoint(service_url: str, topic: str, messages: int) -> dict[str, float]:
    """Return checkpoint bytes per message, with cuts of 20,000 rows during receipt."""
    size = rows = 0
    with source(service_url, topic, batch_rows_max=CUT_ROWS).open() as stream:
        while rows + CUT_ROWS <= messages:
            wait_rows(stream, min(2 * CUT_ROWS, messages - rows))
            batch = stream.next_batch(60)
            if batch is None:
                sys.exit(f"received only {rows} of {messages} rows")
            rows += sum(part.num_rows for part in batch)
            size += len(batch.checkpoint)
            stream.commit(batch)
    return {"bytes_per_message": size / rows}


def wait_rows(stream: SourceStream, rows: int) -> None:
    """Wait until the window holds at least ``rows`` rows."""
    deadline = time.monotonic() + 60
    while stream.status()["windowRows"] < rows:
        if time.monotonic() > deadline:
            sys.exit(f"the window has {stream.status()['windowRows']} rows after 60 s")
        time.sleep(0.01)


def stalled(service_url: str, topic: str, messages: int, **settings: Any) -> dict[str, float]:
    """Return peak memory while the first batch is not committed and the window fills up."""
    with source(service_url, topic, **settings).open() as stream:
        batch = stream.next_batch(60)
        if batch is None:
            sys.exit("received nothing")
        deadline, last, since = time.monotonic() + STALL_S, -1, time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < 5:
            for partition in batch.partitions:
                for _ in batch.read(partition):
                    pass
            received = stream.status()["rowsReceived"]
            if received != last:
                last, since = received, time.monotonic()
            time.sleep(0.2)
        peak_kb = peak_rss_kb()
        status = stream.status()
    return {"peak_mb": peak_kb / 1024, "window_rows": status["windowRows"], "messages": messages}


def peak_rss_kb() -> int:
    """Return the peak memory of this process; ``ru_maxrss`` would start at the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    # By default, Ray's processes have a lower priority than all others, including the broker.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    tasks: dict[str, Callable[..., Any]] = {
        "ingest": ingest, "single": single, "checkpoint": checkpoint, "stalled": stalled,
    }  # fmt: skip
    print(json.dumps(tasks[sys.argv[1]](**json.loads(sys.argv[2]))))
