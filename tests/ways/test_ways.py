"""A few topics in a few ways; ``python -m tests.proofs ways --seeds 300`` draws more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import deadline

ROOT = Path(__file__).parents[2]
LIMIT_S = 400
SEED = 106
"""Its draws have both producers, and encrypted, malformed, chunked and delayed messages."""


@pytest.mark.broker
@pytest.mark.spark
@pytest.mark.ray
@pytest.mark.timeout(LIMIT_S + 10)
def test_each_value_round_trips_or_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.proofs", "ways", "--seeds", "6", "--seed-start", str(SEED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=deadline(LIMIT_S),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3_000:]
