"""What worker processes bring: rows per second and processor time, in turn with none."""

from __future__ import annotations

import json
import statistics

from rich.console import Console

from bench.child import child
from bench.ingest import load
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 300_000
KINDS = ("embedded", "processes:1", "processes:2")
ENTRIES = (4, 1_000)
"""Messages of one entry, about."""
RUNS = 3

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Medians, for small and for large entries."""
    figures: dict[str, float] = {}
    with DevBroker() as broker:
        for size in ENTRIES:
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
            figures |= {
                f"entries_{size}_{kind}_{name}": statistics.median(one[name] for one in turns)
                for kind, turns in found.items()
                for name in turns[0]
            }
    return figures
