"""Measures shapes, each in a process of its own.

``python -m tests.proofs memory`` prints a table of drawn shapes, their peaks and their limits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from tests.memory.backlog_broker import BacklogBroker
from tests.memory.shape import WAYS, Shape, drawn
from tests.proofs.runner import Options, Outcome, Outcomes, Proof, failed
from tests.support.deadlines import DeadlineError, deadline
from tests.support.machine import Since

TIMEOUT_S = deadline(120)
COLUMNS = (
    ("seed", 10), ("way", 12), ("window", 7), ("ranges", 6), ("parts", 5), ("value", 8),
    ("key", 6), ("props", 11), ("msgs", 6), ("zip", 4), ("small", 5), ("rows", 9), ("peak", 6),
    ("limit", 6),
)  # fmt: skip


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
    """Read a shape in a process of its own.

    Raises:
        DeadlineError: It did not end in time.
    """
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
    except subprocess.TimeoutExpired as exc:
        raise DeadlineError(f"{shape} did not end within {TIMEOUT_S:.0f} s") from exc
    finally:
        broker.close()
    if done.returncode:
        return Measured(shape, 0, 0, done.stderr.strip()[-300:] or f"status {done.returncode}")
    output = json.loads(done.stdout.splitlines()[-1])
    peak = max(output["peak"], output["workers"])
    over = f"{peak / 1e6:.0f} MB are above {shape.limit / 1e6:.0f}" if peak > shape.limit else ""
    return Measured(shape, peak, output["rows"], over or ("" if output["rows"] else "nothing came"))


def line(seed: int, found: Measured) -> str:
    """Return a line of the table; sizes of windows, peaks and limits in MB."""
    one = found.shape
    cells = (
        seed, one.named, one.window_bytes // 10**6, one.ranges, one.partitions, one.value_bytes,
        one.key_bytes, f"{one.properties}x{one.property_bytes}", one.entry_messages,
        f"{one.compression}{'r' if one.random_bytes else '0'}", one.small_first, found.rows,
        found.peak // 10**6, one.limit // 10**6,
    )  # fmt: skip
    text = " ".join(str(cell).rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return f"{text}  {found.problem}".rstrip()


def _outcomes(given: Options, seeds: range) -> Outcomes:
    print(" ".join(name.rjust(width) for name, width in COLUMNS))
    for seed in seeds:
        since = Since()
        try:
            found = measure(drawn(seed, (given.way,) if given.way else WAYS))
        except DeadlineError as exc:
            yield failed(seed, exc, since)
            continue
        print(line(seed, found), flush=True)
        yield Outcome(seed, found.problem, counts=Counter({"rows": found.rows}))


PROOF = Proof(
    _outcomes, seeds=200, keep_going=True,
    options={"--way": {"choices": WAYS, "help": "the only way to read (default: all)"}},
)  # fmt: skip
