"""The check of the workers' interpreter: each error is named, with its remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from keyshard.errors import WorkerEnvironmentError
from spark_adapter import preflight
from spark_adapter.preflight import check_interpreter, check_workers


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
