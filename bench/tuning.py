"""What do settings of the broker and of the source do to the broker's processor time per row?

A broker for each setting, all up at once, and the topic is read from them in turns, each time by a
process of its own. The first turn is for the compilers and does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from bench.ingest import load
from bench.transport import with_broker
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

RUNS = 3
SHAPES: Mapping[str, Workload] = {
    "small": Workload(200_000, keys=1_000, size_bytes=100, entry_messages=4),
    "100_kb": Workload(4_000, keys=1_000, size_bytes=100_000, entry_messages=1),
}
"""Topics: entries of 4 messages of 100 bytes, and of one of 100,000."""
BROKERS: Mapping[str, Mapping[str, str]] = {
    "defaults": {},
    "read_batch_1000": {"dispatcherMaxReadBatchSize": "1000"},
    "read_size_1m": {"dispatcherMaxReadSizeBytes": str(1 << 20)},
    "read_size_50m": {"dispatcherMaxReadSizeBytes": str(50 << 20)},
    "cache_0": {"managedLedgerCacheSizeMB": "0"},
    "look_ahead_200": {
        "keySharedLookAheadMsgInReplayThresholdPerConsumer": "200",
        "keySharedLookAheadMsgInReplayThresholdPerSubscription": "2000",
    },
}
"""Settings of brokers."""
SOURCES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "_50_ranges": {"ranges": 50},
    "_window_1g": {"window_bytes_max": 1 << 30, "window_rows_max": 200_000},
}
"""Settings of sources."""
MEASURED: Sequence[tuple[str, str, str]] = (
    *(
        (broker, source, "small")
        for broker in ("defaults", "read_batch_1000")
        for source in SOURCES
    ),
    *(
        (broker, source, "small")
        for broker in ("cache_0", "look_ahead_200")
        for source in ("", "_50_ranges")
    ),
    *(
        (broker, "", "100_kb")
        for broker in ("defaults", "read_size_1m", "read_size_50m", "cache_0")
    ),
)
"""Which broker, source and shape go together."""
FIGURES = ("broker_us_per_row", "cpu_us_per_row", "rows_per_s")

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Medians of the broker's processor time per row, the process's own, and rows per second."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        brokers = {
            name: stack.enter_context(DevBroker(settings=settings, optimised=True))
            for name, settings in BROKERS.items()
        }
        for name, shape in sorted({(broker, shape) for broker, _, shape in MEASURED}):
            load(brokers[name], shape, SHAPES[shape])
        for turn in range(RUNS + 1):
            for name, source, shape in MEASURED:
                measured = with_broker(
                    brokers[name], shape, SHAPES[shape].messages, **SOURCES[source]
                )
                for figure in FIGURES:
                    if turn:
                        of = found.setdefault(f"{name}{source}_{shape}_{figure}", [])
                        of.append(measured[figure])
            newest = ", ".join(f"{name} {values[-1]:,.1f}" for name, values in found.items())
            _console.print(f"turn {turn} of {RUNS}: {newest}")
    return {name: statistics.median(values) for name, values in found.items()}
