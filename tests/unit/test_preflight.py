"""Checks of the workers' interpreter and of settings: each error is named, with its remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyshard.errors import ConfigError, WorkerEnvironmentError
from spark_adapter import preflight
from spark_adapter.end_positions import PUSHDOWN, positions
from spark_adapter.preflight import check_interpreter, check_workers
from spark_adapter.session_catalog import SessionCatalog
from spark_adapter.workers.executors import start_workers


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_this_interpreter_has_all_modules_of_workers() -> None:
    check_interpreter(sys.executable)


def test_missing_modules_are_named_with_an_interpreter_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "NEEDED", ("json", "no_such_module_a", "no_such_module_b"))
    with pytest.raises(WorkerEnvironmentError) as caught:
        check_interpreter(sys.executable)
    assert "which lacks no_such_module_a,no_such_module_b. Install" in caught.value.message
    assert repr(sys.executable) in caught.value.message
    assert caught.value.facts == {
        "python": sys.executable,
        "missing": "no_such_module_a,no_such_module_b",
    }


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        WorkerEnvironmentError, match="'/no/such/python', which does not run"
    ) as caught:
        check_interpreter("/no/such/python")
    assert caught.value.facts == {"python": "/no/such/python"}


def test_an_interpreter_that_fails_is_named(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "exit 3")
    with pytest.raises(WorkerEnvironmentError, match=r"does not run: .*exit status 3"):
        check_interpreter(python)


def test_an_interpreter_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TIMEOUT_S", 0.1)
    python = script(tmp_path / "python", "exec sleep 60")
    with pytest.raises(WorkerEnvironmentError, match="timed out"):
        check_interpreter(python)


def test_the_interpreter_of_the_session_is_the_one_checked() -> None:
    spark = SimpleNamespace(_sc=SimpleNamespace(pythonExec="/no/such/python"))
    with pytest.raises(WorkerEnvironmentError, match="/no/such/python"):
        check_workers(spark)  # type: ignore[arg-type]


def test_a_session_without_a_context_checks_no_interpreter() -> None:
    check_workers(SimpleNamespace())  # type: ignore[arg-type]


# -- Settings of Spark, which Spark reads in any case ----------------------------------------------


def _read(setting: str, ending: str) -> Any:
    """Return a DataFrame of a batch read, as far as ``positions()`` looks at it."""
    leaf = SimpleNamespace(
        getClass=lambda: SimpleNamespace(getSimpleName=lambda: "DataSourceV2Relation"),
        table=lambda: SimpleNamespace(name=lambda: "keyshard"),
        options=lambda: {"endingOffsets": ending},
    )
    leaves = SimpleNamespace(size=lambda: 1, apply=lambda _: leaf)
    plan = SimpleNamespace(analyzed=lambda: SimpleNamespace(collectLeaves=lambda: leaves))
    return SimpleNamespace(
        _jdf=SimpleNamespace(queryExecution=lambda: plan),
        isStreaming=False,
        sparkSession=SimpleNamespace(conf={PUSHDOWN: setting}),
    )


@pytest.mark.parametrize(
    ("setting", "ending"), [("true", "latest"), ("TRUE", "latest"), ("true", "LATEST")]
)
def test_positions_of_a_read_that_spark_plans_again_are_refused(setting: str, ending: str) -> None:
    """Issue: the setting TRUE and the option LATEST passed, and the positions were of no query."""
    with pytest.raises(ConfigError, match="Spark plans each query with a filter again"):
        positions(_read(setting, ending))


def test_workers_refuse_dynamic_allocation_in_any_case() -> None:
    """Issue: with the setting True, workers were started that Spark cannot run."""
    context = SimpleNamespace(
        master="spark://a:7077",
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isLocal=lambda: False)),
        getConf=lambda: {"spark.dynamicAllocation.enabled": "True"},
    )
    session: Any = SimpleNamespace(_sc=context)
    with pytest.raises(ConfigError, match=r"spark\.dynamicAllocation\.enabled is true"):
        start_workers(session, 2)


@pytest.mark.parametrize(("setting", "sensitive"), [("TRUE", True), ("false", False)])
def test_a_catalog_knows_whether_spark_ignores_case(setting: str, *, sensitive: bool) -> None:
    """Issue: with the setting TRUE, topics with capitals got tables in lower case or none."""
    session: Any = SimpleNamespace(
        conf={"spark.sql.caseSensitive": setting},
        _jvm=None,
        _jsparkSession=SimpleNamespace(
            sharedState=lambda: SimpleNamespace(externalCatalog=lambda: None)
        ),
    )
    assert SessionCatalog(session, "pulsar://a:6650").case_sensitive is sensitive
