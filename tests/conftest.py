"""Fixtures for all tests, and the order in which several processes run them.

The real broker is started once per process, when a test needs it.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Generator, Iterator

import pytest

from control_folder import own_control_folder
from keyshard.testing.devbroker import DevBroker

FOLDERS = ("unit", "property", "spark", "mutants", "simulation", "chaos", "integration")
"""What tells most in the least time comes first, then what lasts or waits longest; the rest fills
the processes up to the end."""
SHARED_BY_ALL = {"dev_broker"}
"""Fixtures of the session that every process may have one of."""


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests; those that share an expensive fixture share a process, too."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(item.config.rootpath).parts[1]
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)

    items.sort(key=rank)
    for item in items:
        if group := _shared_fixture(item):
            item.add_marker(pytest.mark.xdist_group(group))


def _shared_fixture(item: pytest.Item) -> str | None:
    """The fixture of the session, or else the file, that a test shares with others."""
    definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    scopes = {
        name: found[-1].scope
        for name, found in definitions.items()
        if found[-1].baseid and not name.startswith("_") and name not in SHARED_BY_ALL
    }
    for name, scope in scopes.items():
        if scope == "session":
            return name
    return item.path.stem if "module" in scopes.values() else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logs may hold lone surrogates, which no process can send to another."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def dev_broker() -> Iterator[DevBroker]:
    """A real Pulsar broker of this session; tests that kill brokers start their own."""
    with DevBroker() as broker:
        yield broker


@pytest.fixture
def topic_name() -> str:
    """A short topic name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session", autouse=True)
def _control_folder() -> Iterator[None]:
    """Sources of tests are not found among those that somebody runs here."""
    with own_control_folder():
        yield


@pytest.fixture(scope="session", autouse=True)
def _spark_workers_interpreter() -> None:
    """Spark's Python workers run in this interpreter, on keyshard's Java."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
