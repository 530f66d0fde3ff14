"""A short run of bounded reads under faults; ``python -m tests.proofs bounded`` runs longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.stream_process import ROOT
from tests.support.deadlines import deadline

SEED, SEEDS = 0, 3
LIMIT_S = 540
"""Longest time of a run; on two busy cores it takes about 60 s."""


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_bounded_read_gives_the_stored_messages_or_fails_by_name() -> None:
    command = [sys.executable, "-m", "tests.proofs", "bounded", "--seed-start", str(SEED)]
    run = subprocess.run(
        [*command, "--seeds", str(SEEDS), "--minutes", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline(LIMIT_S),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{SEEDS} of {SEEDS} seeds hold" in run.stdout
