"""What share of 30 workers' time does a skewed load get: with lanes, and with AUTO_SPLIT?

10 keys have 1,000 messages, 100 have 100 and 5,890 have 9, evenly mixed on one topic. A handler
takes 10 ms. The best possible time is the sum of handler times over 30. Both run in turn, each in a
separate process.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from bench.child import child
from bench.loads import efficiency, publish, skewed_keys
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker

CLIENTS, CONSUMERS = 3, 10
LANES = CLIENTS * CONSUMERS
HANDLER_MS = 10.0

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return all figures."""
    keys = skewed_keys()
    mean_s = HANDLER_MS / 1e3
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        publish(broker.service_url, "skew", keys)
        ideal_s = len(keys) * mean_s / LANES
        _console.print(f"{len(keys):,} messages, at best {ideal_s:.1f} s")
        common = {
            "service_url": broker.service_url, "topic": "skew", "messages": len(keys),
            "low_ms": HANDLER_MS, "high_ms": HANDLER_MS,
        }  # fmt: skip
        ways: dict[str, tuple[str, dict[str, Any]]] = {
            "skew": ("bench.handled", {"parallelism": 1, "lanes": LANES, "handler": "threads"}),
            "skew_3_ranges": (
                "bench.handled",
                {"parallelism": CLIENTS, "lanes": CONSUMERS, "handler": "threads"},
            ),
            "skew_autosplit": ("bench.auto_split", {"clients": CLIENTS, "consumers": CONSUMERS}),
        }
        for name, (module, settings) in ways.items():
            found = child(module, json.dumps(common | settings))
            figures[f"{name}_efficiency"] = efficiency(len(keys), found["seconds"], LANES, mean_s)
            figures[f"{name}_seconds"] = found["seconds"]
            _console.print(
                f"{name}: {found['seconds']:.1f} s, efficiency {figures[f'{name}_efficiency']:.3f}"
            )
    return figures
