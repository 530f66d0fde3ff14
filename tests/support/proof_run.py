"""Runs seeds of a proof in a process of their own, for the tests that are a short run of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.proofs.runner import INCONCLUSIVE
from tests.support.deadlines import deadline
from tests.support.machine import MachineError

ROOT = Path(__file__).parents[2]


def hold(name: str, *options: str, limit_s: float) -> str:
    """Run ``python -m tests.proofs NAME`` with options; return its output.

    Args:
        name: Name of the proof.
        options: Its options.
        limit_s: Longest time of the run on a quiet machine, seconds.

    Raises:
        AssertionError: A promise broke; the output has the command that repeats the seed.
        MachineError: No promise broke, and the machine had trouble with a seed.
        subprocess.TimeoutExpired: The run took longer.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.proofs", name, *options],
        cwd=ROOT, capture_output=True, text=True, timeout=deadline(limit_s), check=False,
    )  # fmt: skip
    if run.returncode == INCONCLUSIVE:
        raise MachineError(run.stdout[-4_000:])
    assert run.returncode == 0, run.stdout + run.stderr[-4_000:]
    return run.stdout
