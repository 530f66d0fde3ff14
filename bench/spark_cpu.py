"""What does a row cost in Spark, by process? A noop sink, with both transports in turn."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from bench.transport import SHAPES, TRANSPORTS
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 1_000_000
RUNS = 3

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians of rows per second, and of processor time per row, by process."""
    found: dict[str, list[float]] = {}
    with DevBroker(PULSAR, optimised=True) as broker:
        for shape, entry_messages in SHAPES.items():
            workload = Workload(MESSAGES, keys=1_000, size_bytes=100)
            load(broker, shape, replace(workload, entry_messages=entry_messages))
            for turn in range(RUNS):
                for transport in TRANSPORTS:
                    arguments = {
                        "service_url": broker.service_url, "topic": shape, "messages": MESSAGES,
                        "transport": transport,
                    }  # fmt: skip
                    measured = child("bench.spark_run", "cpu", json.dumps(arguments))
                    shown = ", ".join(f"{name} {value:,.1f}" for name, value in measured.items())
                    _console.print(f"{shape} {transport} run {turn + 1} of {RUNS}: {shown}")
                    for name, value in measured.items():
                        found.setdefault(f"{transport}_{name}_{shape}", []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}
