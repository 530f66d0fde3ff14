"""A pytest plugin for the runs on mutants: it records failed tests and the imported modules.

It writes one JSON object into the file that ``KEYSHARD_KILL_RECORD`` names. If a killer has several
tests, those behind the first failed one are skipped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

FAILED: list[str] = []


def pytest_configure() -> None:
    """The same examples in every run; the smallest that fails is of no interest."""
    settings.register_profile(
        "mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
    )
    settings.load_profile("mutants")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for killer in item.config.args:
        if item.nodeid.startswith(killer) and any(test.startswith(killer) for test in FAILED):
            pytest.skip("its killer has failed")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.when == "call":
        FAILED.append(report.nodeid)


def pytest_sessionfinish() -> None:
    packages = ("keyshard", "spark_adapter")
    modules = {
        name: module.__file__
        for name, module in sys.modules.items()
        if name.split(".")[0] in packages and getattr(module, "__file__", None)
    }
    record = {"failed": FAILED, "modules": modules}
    Path(os.environ["KEYSHARD_KILL_RECORD"]).write_text(json.dumps(record))
