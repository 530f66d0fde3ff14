"""How do settings of broker and source change the broker's processor time per row?

There is one broker for each setting. All run at once, and the topic is read from them in turn, each
time by a separate process. The first turn only warms up the JIT compilers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from bench.ingest import load
from bench.release import PULSAR
from bench.transport import with_broker
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 200_000
ENTRY_MESSAGES = 4
RUNS = 3
BROKERS: Mapping[str, Mapping[str, str]] = {
    "defaults": {},
    "read_batch_100": {"dispatcherMaxReadBatchSize": "100"},
    "read_batch_500": {"dispatcherMaxReadBatchSize": "500"},
    "read_batch_1000": {"dispatcherMaxReadBatchSize": "1000"},
}
"""Settings of brokers."""
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "_1_range": {"ranges": 1},
    "_50_ranges": {"ranges": 50},
    "_window_1g": {"window_bytes_max": 1 << 30, "window_rows_max": 200_000},
}
"""Settings of sources; each is measured with each broker."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return medians of rows per second, and of processor time per row of reader and broker."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        brokers = {
            name: stack.enter_context(DevBroker(PULSAR, settings=settings, optimised=True))
            for name, settings in BROKERS.items()
        }
        workload = Workload(MESSAGES, keys=1_000, size_bytes=100, entry_messages=ENTRY_MESSAGES)
        for broker in brokers.values():
            load(broker, "tuning", workload)
        for turn in range(RUNS + 1):
            for source, settings in SOURCES.items():
                for name, broker in brokers.items():
                    measured = with_broker(broker, "tuning", MESSAGES, **settings)
                    for figure in ("broker_us_per_row", "cpu_us_per_row", "rows_per_s"):
                        if turn:
                            found.setdefault(f"{name}{source}_{figure}", []).append(
                                measured[figure]
                            )
            newest = ", ".join(f"{name} {values[-1]:,.1f}" for name, values in found.items())
            _console.print(f"turn {turn} of {RUNS}: {newest}")
    return {name: statistics.median(values) for name, values in found.items()}
