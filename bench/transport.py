"""What does the transport cost? keyshard's embedded runtime over pulsar-client, and over the wire.

Each figure is measured in a process of its own against one broker, in turns.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

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
    """Medians of rows per second, and of the process's own processor time per row."""
    figures: dict[str, float] = {}
    with DevBroker() as broker:
        for shape, entry_messages in SHAPES.items():
            workload = Workload(MESSAGES, keys=1_000, size_bytes=100)
            load(broker, shape, replace(workload, entry_messages=entry_messages))
            figures |= in_turns(broker.service_url, shape)
    return figures


def in_turns(service_url: str, topic: str) -> dict[str, float]:
    """Both transports over one topic."""
    found: dict[str, list[float]] = {}
    for turn in range(RUNS):
        for transport in TRANSPORTS:
            arguments = {
                "service_url": service_url, "topic": topic, "messages": MESSAGES,
                "transport": transport,
            }  # fmt: skip
            measured = child("bench.embedded", "ingest", json.dumps(arguments))
            for name in ("rows_per_s", "cpu_us_per_row"):
                found.setdefault(f"{transport}_{name}_{topic}", []).append(measured[name])
        newest = ", ".join(f"{name} {values[-1]:,.1f}" for name, values in found.items())
        _console.print(f"{topic} run {turn + 1} of {RUNS}: {newest}")
    return {name: statistics.median(values) for name, values in found.items()}
