"""What do workers gain: rows per second and processor time, in turn with no workers?

It also measures handlers that compute: which option gives them more than one core.
"""

from __future__ import annotations

import json
import statistics
from operator import truediv

from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

MESSAGES = 300_000
KINDS = ("embedded", "processes:1", "processes:2", "ray:2")
ENTRIES = (4, 1_000)
"""Approximate messages per entry."""
RUNS = 3
SINGLE = 200
"""Number of batches of one message."""
COMPUTING = 1_500
COMPUTERS = (
    ("threads", "computing_threads", "embedded"),
    ("threads, workers processes:2", "computing_threads", "processes:2"),
    ("executor processes", "computing_processes", "embedded"),
    ("executor processes, workers processes:2", "computing_processes", "processes:2"),
    ("ray_adapter.run", "computing_ray", "embedded"),
)
"""Name, its name in :mod:`bench.ray_jobs`, and the workers of the source."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians for small and large entries, batches of one row, and computing handlers."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        for size in ENTRIES:
            figures |= _ingest(broker, size)
        figures |= _single(broker)
        figures |= _computing(broker)
    return figures


def _ingest(broker: DevBroker, size: int) -> dict[str, float]:
    topic = f"entries-{size}"
    keys = 100 if size > 4 else 10_000
    load(broker, topic, Workload(MESSAGES, keys=keys, size_bytes=100, entry_messages=size))
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(RUNS):
        for kind in KINDS:
            arguments = {
                "service_url": broker.service_url, "topic": topic,
                "messages": MESSAGES, "workers": kind,
            }  # fmt: skip
            one = child("bench.embedded", "ingest", json.dumps(arguments))
            _console.print(f"{size} messages an entry, {kind}: {one}")
            found[kind].append(one)
    return {
        f"entries_{size}_{kind}_{name}": statistics.median(one[name] for one in turns)
        for kind, turns in found.items()
        for name in turns[0]
    }


def _single(broker: DevBroker) -> dict[str, float]:
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(RUNS):
        for number, kind in enumerate(KINDS):
            arguments = {
                "service_url": broker.service_url, "topic": f"single-{turn}-{number}",
                "messages": SINGLE, "workers": kind,
            }  # fmt: skip
            found[kind].append(
                child("bench.embedded", "single", json.dumps(arguments))["single_ms"]
            )
            _console.print(f"batches of one row, {kind}: {found[kind][-1]:.2f} ms")
    return {f"single_{kind}_ms": statistics.median(turns) for kind, turns in found.items()}


def _computing(broker: DevBroker) -> dict[str, float]:
    create_partitioned_topic(broker.admin_url, "computing", 5)
    load = Workload(COMPUTING, keys=1_000, entry_messages=2)
    produce(load, broker.service_url, "computing")
    found: dict[str, list[float]] = {name: [] for name, *_ in COMPUTERS}
    for _ in range(RUNS):
        for name, method, workers in COMPUTERS:
            arguments = [method, broker.service_url, "computing", COMPUTING, workers]
            seconds = child("bench.ray_jobs", json.dumps(arguments))["seconds"]
            found[name].append(COMPUTING / seconds)
            _console.print(f"5 ms of computing, {name}: {COMPUTING / seconds:.0f} per second")
    threads = found["threads"]
    return {
        f"computing, {name}: {figure}": value
        for name, turns in found.items()
        for figure, value in (
            ("per_s", statistics.median(turns)),
            # In turn, so that other load of the machine is the same for both.
            ("over_threads", statistics.median(map(truediv, turns, threads))),
        )
    }
