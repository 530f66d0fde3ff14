"""What does ``keyshard check`` cost for a million events? Needs no broker.

A program with handlers over 5,000 keys: each message is sent, delivered, started, completed and
acknowledged. The check runs in a process of its own.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keyshard.testing.verify.history import Event, HistoryWriter

MESSAGES = 200_000
"""A fifth of the events."""
KEYS, PARTITIONS, RUNS = 5_000, 5, 3


def run() -> dict[str, float]:
    """Return processor seconds and peak memory of the check, medians of :data:`RUNS`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        with HistoryWriter(path) as history:
            history.write_all(_events())
        spent = statistics.median(_checked(path) for _ in range(RUNS))
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"cpu_s": round(spent, 2), "memory_mb": round(peak_kib / 1024)}


def _checked(path: Path) -> float:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run(
        [sys.executable, "-m", "keyshard", "check", str(path)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return spent() - before


def _events() -> Iterator[Event]:
    yield Event(0.0, "range_gained", range="0-65535", worker="w", epoch=1)
    handled: dict[str, Any] = {"worker": "w", "range": "0-65535", "epoch": 1}
    for number in range(MESSAGES):
        at: dict[str, Any] = {
            "topic": "orders", "partition": number % PARTITIONS,
            "ledger": 7, "entry": number // PARTITIONS,
        }  # fmt: skip
        of: dict[str, Any] = {**at, "index": 0, "key": f"key-{number % KEYS}", "seq": number}
        seconds = number / 1_000
        yield Event(seconds, "sent", **of)
        yield Event(seconds + 0.1, "delivered", **of, **handled)
        yield Event(seconds + 0.2, "started", **of, **handled)
        yield Event(seconds + 0.3, "completed", **of, worker="w")
        yield Event(seconds + 0.4, "acked", **at, worker="w")
