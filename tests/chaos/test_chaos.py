"""A short run of chaos on a real broker; ``make chaos MINUTES=20`` runs longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.plan import Subject
from tests.chaos.runner import FORGOTTEN
from tests.support.proof_run import hold

SEED = 1
EMBEDDED = "embedded"
"""Workers are killed and stopped in tests of their own; ``--workers processes:2`` does it here."""
LIMIT_S = 420
"""Longest time of a run; on two idle cores it takes about 65 s."""


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_every_promise_holds_under_every_fault(tmp_path: Path) -> None:
    result = chaos(tmp_path, Subject.STREAM)
    assert result["rows"] == result["messages"]
    assert result["batches_run_again"] > 0


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_handlers_keep_every_promise_under_every_fault(tmp_path: Path) -> None:
    result = chaos(tmp_path, Subject.HANDLERS)
    assert result["rows"] >= result["messages"]
    assert result["dead_letters"] > 50
    assert result["unparked"] > 0


@pytest.mark.broker
@pytest.mark.timeout(LIMIT_S + 10)
def test_every_promise_holds_when_one_of_two_brokers_fails_or_hands_over(tmp_path: Path) -> None:
    result = chaos(tmp_path, Subject.STREAM, brokers=2)
    assert result["rows"] == result["messages"]


def chaos(folder: Path, subject: Subject, brokers: int = 1) -> dict[str, Any]:
    """A run of one round; its figures."""
    figures = folder / "figures.json"
    hold(
        "chaos", "--fault-minutes", "0", "--seed-start", str(SEED), "--subject", subject.value,
        "--workers", EMBEDDED, "--json", str(figures), "--brokers", str(brokers),
        limit_s=LIMIT_S,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(figures.read_text())
    assert result["holds"]
    assert result["violations"] == 0
    kinds = subject.kinds(EMBEDDED, brokers)
    assert result["faults"].keys() == {*(kind.value for kind in kinds), FORGOTTEN}
    assert all(result["faults"].values())
    assert result["messages"] > 1_000
    assert result["of_bytes"] > 100
    assert result["misrouted"] == 0
    assert result["redeliveries_dropped"] > 0
    return result
