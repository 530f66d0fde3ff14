"""Measures shapes, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from tests.memory.backlog_broker import BacklogBroker
from tests.memory.shape import Shape
from tests.support.deadlines import deadline

TIMEOUT_S = deadline(120)


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory and time that reading a shape took."""

    shape: Shape
    peak: int
    """The highest peak of a process, bytes."""
    rows: int
    problem: str
    """The failure; empty if there is none."""


def measure(shape: Shape) -> Measured:
    """Read a shape in a process of its own."""
    broker = BacklogBroker(shape)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.memory.subject", broker.url, json.dumps(shape.to_json())],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        return Measured(shape, 0, 0, f"it did not end within {TIMEOUT_S:.0f} s")
    finally:
        broker.close()
    if done.returncode:
        return Measured(shape, 0, 0, done.stderr.strip()[-300:] or f"status {done.returncode}")
    output = json.loads(done.stdout.splitlines()[-1])
    peak = max(output["peak"], output["workers"])
    over = f"{peak / 1e6:.0f} MB are above {shape.limit / 1e6:.0f}" if peak > shape.limit else ""
    return Measured(shape, peak, output["rows"], over or ("" if output["rows"] else "nothing came"))
