"""What does the transport cost? keyshard's embedded runtime over pulsar-client, and over the wire.

Each figure is measured in a process of its own against one broker, in turns; the first turn of each
shape is for the broker's compiler and does not count.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import psutil
from rich.console import Console

from bench.child import child
from bench.ingest import load
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

TRANSPORTS = ("client", "wire")
MESSAGES = 200_000
RUNS = 4
SHAPES = {"small": 4, "large": 1_000}
"""Messages of an entry."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Medians of rows per second, and of processor time per row, its own and the broker's."""
    figures: dict[str, float] = {}
    with DevBroker(optimised=True) as broker:
        for shape, entry_messages in SHAPES.items():
            workload = Workload(MESSAGES, keys=1_000, size_bytes=100)
            load(broker, shape, replace(workload, entry_messages=entry_messages))
            figures |= in_turns(broker, shape)
    return figures


def in_turns(broker: DevBroker, topic: str) -> dict[str, float]:
    """Both transports over one topic."""
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
    """A topic read in a process of its own, and the broker's processor time per row meanwhile."""
    process = psutil.Process(broker.pid)
    before = sum(process.cpu_times()[:2])
    arguments = {"service_url": broker.service_url, "topic": topic, "messages": messages}
    measured: dict[str, float] = child("bench.embedded", "ingest", json.dumps(arguments | settings))
    broker_s = sum(process.cpu_times()[:2]) - before
    return measured | {"broker_us_per_row": broker_s / messages * 1e6}
