"""The adapters refuse an engine that is too old or missing, before its imports fail."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import ray_adapter
from keyshard.errors import ConfigError
from keyshard.version import check_version
from spark_adapter.preflight import (
    FILTERS,
    REPORTS,
    STREAM_WRITES,
    STREAMS,
    Feature,
    check_has,
    check_pyspark,
    lacking,
    warning_of_lacking,
)


@pytest.mark.parametrize("version", ["4.2.0", "4.2.0.dev3", "4.10.1", "5.0.0"])
def test_a_new_enough_version_is_accepted(version: str) -> None:
    check_version("PySpark", version, (4, 2), "pyspark>=4.2,<5")


@pytest.mark.parametrize(("version", "has"), [("4.1.1", "has 4.1.1"), (None, "has none")])
def test_an_old_or_missing_version_is_refused(version: str | None, has: str) -> None:
    with pytest.raises(ImportError, match=has) as caught:
        check_version("PySpark", version, (4, 2), "pyspark>=4.2,<5")
    assert "PySpark 4.2 or newer" in str(caught.value)
    assert "pip install 'pyspark>=4.2,<5'" in str(caught.value)


def test_spark_checks_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    check_pyspark()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ImportError, match=r"PySpark 4\.0 or newer, and this environment has none"):
        check_pyspark()


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("4.0.1", [STREAMS, STREAM_WRITES, FILTERS, REPORTS]),
        ("4.1.4", [STREAMS]),
        ("4.2.0", []),
    ],
)
def test_features_that_an_older_pyspark_cannot_have_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, lacks: list[Feature]
) -> None:
    monkeypatch.setattr("pyspark.__version__", version)
    check_pyspark()
    assert lacking() == lacks
    for feature in (STREAMS, STREAM_WRITES, FILTERS, REPORTS):
        if feature not in lacks:
            check_has(feature)
            continue
        with pytest.raises(
            ConfigError, match=re.escape(f"PySpark {version} cannot have {feature.name}")
        ):
            check_has(feature)
        assert feature.name in warning_of_lacking()
    assert bool(lacks) == bool(warning_of_lacking())


def test_ray_checks_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(ImportError, match=r"Ray 2\.50 or newer, and this environment has none"):
        importlib.reload(ray_adapter)


def test_make_oldest_runs_the_oldest_pyspark_of_each_minor_version() -> None:
    root = Path(__file__).parents[2]
    assert 'spark = ["pyspark>=4.0,<5",' in (root / "pyproject.toml").read_text()
    assert "OLDEST_PYSPARK := 4.0.0 4.1.0 4.2.0\n" in (root / "Makefile").read_text()
