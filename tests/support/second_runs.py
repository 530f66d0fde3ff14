"""If the machine explains the failure of a test, it runs again, alone and in a new process.

This concerns tests with a real broker, Spark or Ray. Such a failure is "inconclusive". If the
second run passes, the test counts as "passed at the second run". If it is inconclusive again, it
stays so, and the run ends with :data:`INCONCLUSIVE`. A failure that ``tests/flaky.toml`` lists gets
a second run as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import VARIABLE, deadline
from tests.support.kinds import KINDS, kind_of
from tests.support.machine import Since, trouble

INCONCLUSIVE = 75
"""Exit status if no test failed, but one is inconclusive: ``EX_TEMPFAIL`` of sysexits.h."""
PASSED = "passed at the second run"
SECOND_RUNS_MAX = 10
"""The tests beyond it stay inconclusive."""
SECOND_RUN_S = deadline(1200)
"""Longest time of a second run, seconds."""
LIST = Path(__file__).parents[1] / "flaky.toml"
FLAKY_MAX, FLAKY_DAYS = 10, 14
_SINCE = pytest.StashKey[Since]()


@dataclass(frozen=True)
class Flaky:
    """A test that fails now and then; it may fail with this text up to a date."""

    test: str
    """Its node id."""
    signature: str
    """Part of the error: its class or text."""
    since: date
    suspected: str
    """The defect that may be the cause."""

    def covers(self, test: str, error: str, today: date) -> bool:
        """Whether a failure is this one, and may still occur."""
        lasts = today - self.since <= timedelta(days=FLAKY_DAYS)
        return lasts and test == self.test and self.signature in error


@cache
def flaky() -> tuple[Flaky, ...]:
    """The tests of ``tests/flaky.toml``."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tuple(Flaky(**one) for one in toml.loads(LIST.read_text()).get("flaky", ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Second runs can be switched off."""
    parser.addoption(
        "--no-second-runs", action="store_true",
        help="a failure that the machine explains stays inconclusive",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Watch the machine from here on, if a second run is possible."""
    markers = {marker.name for marker in item.iter_markers()}
    if kind_of(item.nodeid, markers) in KINDS.keys() - {"gate", "clock"}:
        item.stash[_SINCE] = Since()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note why a failure is inconclusive."""
    report = yield
    since = item.stash.get(_SINCE, None)
    if report.failed and call.excinfo is not None and since is not None:
        found = trouble(call.excinfo.value, since) or _listed(item.nodeid, call.excinfo.exconly())
        report.sections.append(("the machine", found or str(since)))
        report.inconclusive = found  # type: ignore[attr-defined]
    return report


def _listed(test: str, error: str) -> str | None:
    today = date.today()  # noqa: DTZ011 - the list has dates only
    found = (one for one in flaky() if one.covers(test, error, today))
    return next(
        (f"listed in {LIST.name} since {one.since}: {one.suspected}" for one in found), None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Count inconclusive failures apart."""
    if getattr(report, "inconclusive", None):
        return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})
    return None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Run tests again whose failures were all inconclusive, and decide the exit status."""
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    stats: dict[str, list[Any]] = reporter.stats
    final = {one.nodeid for kind in ("failed", "error") for one in stats.get(kind, ())}
    inconclusive = {one.nodeid: one for one in stats.pop("inconclusive", ())}
    for place, (test, report) in enumerate(inconclusive.items()):
        result = "inconclusive"
        if test in final:
            result = "error"  # of a fixture, after the failure that counts
        elif place < SECOND_RUNS_MAX and not session.config.getoption("no_second_runs"):
            status, output = _second_run(test, session.config.rootpath)
            result = {0: PASSED, INCONCLUSIVE: "inconclusive"}.get(status, "failed")
            report.sections.append(("second run", output))
            reporter.write_line(f"\nsecond run of {test}: {result.partition(' ')[0]}")
        if result in ("error", "failed"):
            report.inconclusive = None
        stats.setdefault(result, []).append(report)
    reporter._set_main_color()  # the last line forgets new results after -x
    stopped = session.shouldfail or session.shouldstop  # as by -x: tests are left
    none_failed = not (stats.get("failed") or stats.get("error"))
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and none_failed and not stopped:
        session.exitstatus = INCONCLUSIVE if stats.get("inconclusive") else pytest.ExitCode.OK


def _second_run(test: str, root: Path) -> tuple[int, str]:
    """Exit status and output of one test in a process of its own, which measures the machine."""
    command = [sys.executable, "-m", "pytest", "--no-second-runs", "-p", "no:cacheprovider", test]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    try:
        run = subprocess.run(
            command, check=False, cwd=root, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECOND_RUN_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as exc:
        output = (exc.output or b"").decode(errors="replace")
        return 1, f"{output}\nended after {SECOND_RUN_S:.0f} s"
    return run.returncode, run.stdout.decode(errors="replace")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the inconclusive tests, and those that passed at the second run, with their reasons."""
    for kind in ("inconclusive", PASSED):
        for report in terminalreporter.stats.get(kind, ()):
            terminalreporter.section(f"{kind}: {report.nodeid}")
            terminalreporter.write_line(report.longreprtext)
            if kind == "inconclusive":
                for name, text in report.sections:
                    terminalreporter.section(name, "-")
                    terminalreporter.write_line(text)
            terminalreporter.write_line(f"{kind}: {report.inconclusive}")
