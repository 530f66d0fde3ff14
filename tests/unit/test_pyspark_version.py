"""Which PySpark the adapter takes, said before PySpark fails in words of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_adapter.pyspark_version import check, installed


@pytest.mark.parametrize("version", ["4.2.0", "4.2.0.dev3", "4.10.1", "5.0.0"])
def test_a_version_that_is_new_enough(version: str) -> None:
    check(version)


@pytest.mark.parametrize(("version", "has"), [("4.1.1", "has 4.1.1"), (None, "has none")])
def test_one_that_is_too_old_or_missing_is_named(version: str | None, has: str) -> None:
    with pytest.raises(ImportError, match=has) as caught:
        check(version)
    assert "pyspark>=4.2" in str(caught.value)


def test_the_one_that_is_here_will_do() -> None:
    check(installed())


def test_the_oldest_that_is_admitted_is_the_one_that_make_oldest_runs() -> None:
    root = Path(__file__).parents[2]
    assert 'spark = ["pyspark>=4.2,<5",' in (root / "pyproject.toml").read_text()
    assert "OLDEST_PYSPARK := 4.2.0\n" in (root / "Makefile").read_text()
    check("4.2.0")
