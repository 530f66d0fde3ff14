"""Facts about a process: its memory, and the moment when a source receives nothing more."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ENOUGH_S = 2.5
"""Longest time in which something is received, seconds."""
STILL_S = 0.4
"""Time without anything received after which the window counts as full, seconds."""


def memory(name: str, pid: str) -> int:
    """Resident memory of a process, bytes: ``VmRSS`` now, ``VmHWM`` its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def wait(status: Callable[[], Mapping[str, Any]]) -> None:
    """Wait until nothing more is received."""
    end_s = time.monotonic() + ENOUGH_S
    rows, since_s = -1, time.monotonic()
    while time.monotonic() < end_s and time.monotonic() - since_s < STILL_S:
        found = status()["rowsReceived"]
        if found != rows:
            rows, since_s = found, time.monotonic()
        time.sleep(0.02)
