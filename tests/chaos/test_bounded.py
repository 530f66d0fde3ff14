"""A short run of bounded reads under faults; ``python -m tests.chaos.bounded`` runs longer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.stream_process import ROOT
from tests.support.deadlines import deadline

SEED, ROUNDS = 2, 3
LIMIT_S = 540
"""Longest time of a run; on two busy cores it takes about 60 s."""


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_a_bounded_read_gives_the_stored_messages_or_fails_by_name() -> None:
    command = [sys.executable, "-m", "tests.chaos.bounded", "--seed", str(SEED)]
    run = subprocess.run(
        [*command, "--rounds", str(ROUNDS), "--minutes", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline(LIMIT_S),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"round {ROUNDS - 1} ended" in run.stdout
