"""Chaos on a real broker, shortly; ``make chaos MINUTES=20`` runs long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import Kind
from tests.chaos.runner import FORGOTTEN
from tests.chaos.stream_process import ROOT

SEED = 1
LIMIT_S = 240
"""Longest time of a run; on two idle cores it takes about 65 s."""


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_every_promise_holds_under_every_fault(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos", "--minutes", "0", "--seed", str(SEED)),
            *("--json", str(figures)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(figures.read_text())
    assert result["holds"]
    assert result["violations"] == 0
    assert result["faults"].keys() == {*(kind.value for kind in Kind), FORGOTTEN}
    assert all(result["faults"].values())
    assert result["rows"] == result["messages"] > 1_000
    assert result["of_bytes"] > 100
    assert result["misrouted"] == 0
    assert result["redeliveries_dropped"] > 0
    assert result["batches_run_again"] > 0
