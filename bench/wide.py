"""What do many ranges cost: 1,000 ranges over 5 topic partitions, against 10, in turn?"""

from __future__ import annotations

import json
import statistics

from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 200_000
RANGES = (10, 1_000)
RUNS = 3

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians of rows per second, processor seconds and the time to subscribe."""
    found: dict[int, list[dict[str, float]]] = {ranges: [] for ranges in RANGES}
    with DevBroker(PULSAR) as broker:
        load(broker, "wide", Workload(MESSAGES, keys=10_000, size_bytes=100))
        for _ in range(RUNS):
            for ranges in RANGES:
                arguments = {
                    "service_url": broker.service_url, "topic": "wide",
                    "messages": MESSAGES, "ranges": ranges,
                }  # fmt: skip
                one = child("bench.embedded", "ingest", json.dumps(arguments))
                _console.print(f"{ranges} ranges: {one}")
                found[ranges].append(one)
    figures = {
        f"wide_{name}_{ranges}": statistics.median(one[name] for one in turns)
        for ranges, turns in found.items()
        for name in turns[0]
    }
    few, many = RANGES
    ratio = figures[f"wide_rows_per_s_{many}"] / figures[f"wide_rows_per_s_{few}"]
    return {"wide_over_few": ratio} | figures
