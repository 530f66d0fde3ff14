"""How long does a process take to its first batch, with each transport?"""

from __future__ import annotations

import statistics

from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from bench.transport import TRANSPORTS
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

RUNS = 6
PARTS = ("import_s", "open_s", "first_batch_s", "cpu_s")
"""Times from the start of the process; the last one is its processor time."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians by transport. The first turn only warms up the broker's JIT compiler."""
    found: dict[str, list[float]] = {}
    with DevBroker(PULSAR) as broker:
        load(broker, "cold", Workload(20_000, keys=1_000, size_bytes=100, entry_messages=4))
        for turn in range(RUNS + 1):
            for transport in TRANSPORTS:
                times = child("bench.cold_start", broker.service_url, "cold", transport)
                _console.print(f"run {turn} of {RUNS}, {transport}: {times}")
                for part, time_s in zip(PARTS, times if turn else (), strict=bool(turn)):
                    found.setdefault(f"{transport}_{part}", []).append(time_s)
    return {name: statistics.median(times) for name, times in found.items()}
