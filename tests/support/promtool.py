"""Checks rules with promtool, which ``.ci/tools promtool`` fetches."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from keyshard.observe.alerts import ALERTS
from tests.support.deadlines import deadline

RULES = Path(__file__).parents[2] / "docs" / "operations" / "alerts.yml"
TARGET = {"instance": "here:9464", "job": "keyshard"}
"""Labels that Prometheus adds."""


def promtool(*arguments: object) -> str:
    """Run it and return its output; skips the test where it is missing."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip(
            "promtool is not on the path; on Debian and Ubuntu: export PATH=$PATH:"
            "$(.ci/tools promtool)"
        )
    made = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=deadline(60),
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def check_expressions(folder: Path, expressions: Iterable[str]) -> None:
    """Parse expressions of PromQL."""
    rules = [
        {"record": f"test:expression:{number}", "expr": one}
        for number, one in enumerate(expressions)
    ]
    path = folder / "expressions.yml"
    path.write_text(json.dumps({"groups": [{"name": "test", "rules": rules}]}))
    promtool("check", "rules", path)


def series(answer: str) -> list[tuple[str, str]]:
    """Return the series and values of an answer of ``/metrics``, as Prometheus stores them."""
    found = []
    for family in text_string_to_metric_families(answer):
        for sample in family.samples:
            labels = {**sample.labels, **TARGET}
            text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            found.append((f"{sample.name}{{{text}}}", str(sample.value)))
    return found


def fires(
    folder: Path,
    answers: Sequence[str],
    alert: str,
    labels: Mapping[str, str],
    summary: str,
    *,
    at: str = "8m",
) -> None:
    """Check that one alert of a name fires, with some labels and a summary.

    Args:
        folder: For files.
        answers: What Prometheus gets of ``/metrics``, 15 s apart; the last one for 10 minutes.
        alert: Name of the alert.
        labels: All of its labels but the name, the severity and those of the target.
        summary: Its text.
        at: When it fires.
    """
    rule = next(each for each in ALERTS if each.name == alert)
    values: dict[str, list[str]] = {}
    for number, answer in enumerate(answers):
        for name, value in series(answer):
            values.setdefault(name, ["_"] * number).append(value)
    for each in values.values():
        each[-1] += "x40"
    expected = {
        "exp_labels": {**labels, **TARGET, "severity": rule.severity},
        "exp_annotations": {"summary": summary, "runbook": rule.runbook},
    }
    test = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": " ".join(seen)} for name, seen in values.items()
        ],
        "alert_rule_test": [{"eval_time": at, "alertname": alert, "exp_alerts": [expected]}],
    }
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    promtool("test", "rules", path)
