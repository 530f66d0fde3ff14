"""What does the transport cost? The embedded runtime over pulsar-client, and over the wire.

The figures are measured in turn, each in a separate process, on one broker. The first turn of each
shape only warms up the broker's JIT compiler.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import psutil
from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

TRANSPORTS = ("client", "wire")
MESSAGES = 200_000
RUNS = 4
SHAPES = {"small": 4, "large": 1_000}
"""Messages per entry."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians of rows per second, and of CPU time per row, own and of the broker."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR, optimised=True) as broker:
        for shape, entry_messages in SHAPES.items():
            workload = Workload(MESSAGES, keys=1_000, size_bytes=100)
            load(broker, shape, replace(workload, entry_messages=entry_messages))
            figures |= in_turns(broker, shape)
    return figures


def in_turns(broker: DevBroker, topic: str) -> dict[str, float]:
    """Measure both transports over one topic."""
    found: dict[str, list[float]] = {}
    for turn in range(RUNS + 1):
        for transport in TRANSPORTS:
            measured = with_broker(broker, topic, MESSAGES, transport=transport)
            if turn:
                for name in ("rows_per_s", "cpu_us_per_row", "broker_us_per_row"):
                    found.setdefault(f"{transport}_{name}_{topic}", []).append(measured[name])
        newest = ", ".join(f"{name} {values[-1]:,.1f}" for name, values in found.items())
        _console.print(f"{topic} run {turn} of {RUNS}: {newest}")
    return {name: statistics.median(values) for name, values in found.items()}


def with_broker(
    broker: DevBroker, topic: str, messages: int, **settings: object
) -> dict[str, float]:
    """Read a topic in a separate process, and measure the broker's CPU time per row meanwhile."""
    process = psutil.Process(broker.pid)
    before = sum(process.cpu_times()[:2])
    arguments = {"service_url": broker.service_url, "topic": topic, "messages": messages}
    measured: dict[str, float] = child("bench.embedded", "ingest", json.dumps(arguments | settings))
    broker_s = sum(process.cpu_times()[:2]) - before
    return measured | {"broker_us_per_row": broker_s / messages * 1e6}
