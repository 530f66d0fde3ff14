"""If the machine explains the failure of a test, it runs again, alone and in a new process.

This concerns tests with a real broker, Spark or Ray. Such a failure is "inconclusive". If the
second run passes, the test counts as "passed at the second run". If it is inconclusive again, it
stays so, and the run ends with :data:`INCONCLUSIVE`. A failure that ``tests/flaky.toml`` lists gets
a second run as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import VARIABLE, deadline
from tests.support.kinds import KINDS, kind_of_item, read_toml
from tests.support.machine import Since, is_verdict, trouble

INCONCLUSIVE = 75
"""Exit status if no test failed, but one is inconclusive: ``EX_TEMPFAIL`` of sysexits.h."""
PASSED = "passed at the second run"
SECOND_RUNS_MAX = 10
"""The tests beyond it stay inconclusive."""
SECOND_RUN_S, SECOND_RUNS_S = deadline(900), deadline(2400)
"""Longest time of a second run, and time after which none begins, seconds."""
PHASES = {"setup", "call", "teardown"}
LIST = Path(__file__).parents[1] / "flaky.toml"
FLAKY_MAX, FLAKY_DAYS = 10, 14
_SINCE = pytest.StashKey[Since]()
_OUTCOMES = pytest.StashKey[list[tuple[str, str, str]]]()
"""Test, phase and outcome of each report of this process."""


@dataclass(frozen=True)
class Flaky:
    """A test that fails now and then; it may fail with this text up to a date."""

    test: str
    """Its node id."""
    signature: str
    """Beginning of the error: its class with the module, and of its text as much as is constant."""
    since: date
    suspected: str
    """The defect that may be the cause."""

    def covers(self, test: str, error: str, today: date) -> bool:
        """Whether a failure is this one, and may still occur."""
        lasts = today - self.since <= timedelta(days=FLAKY_DAYS)
        return lasts and test == self.test and error.startswith(self.signature)


@cache
def flaky() -> tuple[Flaky, ...]:
    """The tests of ``tests/flaky.toml``."""
    return tuple(Flaky(**one) for one in read_toml(LIST).get("flaky", ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """A second run writes its outcomes, and has no second runs itself."""
    parser.addoption("--second-run", metavar="FILE", help="write the outcomes of this second run")


class EarlyEnds:
    """Notes what ends a run, or a process of it, before its last test."""

    was_ended = False
    """Whether somebody, or ``pytest.exit``, ended the run."""
    lost_process = False
    """Whether a process of the run ended by itself."""

    def pytest_keyboard_interrupt(self) -> None:
        """Called by pytest, also for ``pytest.exit``."""
        self.was_ended = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error: object | None) -> None:
        """Called by xdist at the end of each process."""
        self.lost_process = self.lost_process or error is not None


_EARLY_ENDS = pytest.StashKey[EarlyEnds]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing noted."""
    config.stash[_OUTCOMES] = []
    config.stash[_EARLY_ENDS] = EarlyEnds()
    config.pluginmanager.register(config.stash[_EARLY_ENDS])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Watch the machine from here on, if a second run is possible."""
    if kind_of_item(item) in KINDS.keys() - {"gate", "clock"}:
        item.stash[_SINCE] = Since()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note why a failure is inconclusive."""
    report = yield
    since = item.stash.get(_SINCE, None)
    item.config.stash[_OUTCOMES].append((report.nodeid, report.when, _outcome(report)))
    if report.failed and call.excinfo is not None and since is not None:
        found = trouble(call.excinfo.value, since) or _listed(item.nodeid, call.excinfo)
        report.sections.append(("the machine", found or str(since)))
        report.inconclusive = found  # type: ignore[attr-defined]
    return report


def _outcome(report: pytest.TestReport) -> str:
    return "excused" if hasattr(report, "wasxfail") else report.outcome


def _listed(test: str, found: pytest.ExceptionInfo[BaseException]) -> str | None:
    if is_verdict(found.value):
        return None
    today = date.today()  # noqa: DTZ011 - the list has dates only
    covering = (one for one in flaky() if one.covers(test, found.exconly(), today))
    return next(
        (f"listed in {LIST.name} since {one.since}: {one.suspected}" for one in covering), None
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
    config = session.config
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    if file := config.getoption("second_run"):
        Path(file).write_text(json.dumps(config.stash[_OUTCOMES]))
    early = config.stash[_EARLY_ENDS]
    if early.lost_process and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    ended = early.was_ended or early.lost_process or session.shouldfail or session.shouldstop
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or ended:
        return
    stats: dict[str, list[Any]] = reporter.stats
    inconclusive: dict[str, list[Any]] = {}
    for report in stats.pop("inconclusive", ()):
        inconclusive.setdefault(report.nodeid, []).append(report)
    counted = sum(map(len, inconclusive.values()))
    if not counted:
        return
    _run_again(config, reporter, inconclusive)
    reporter._set_main_color()  # without it, the summary line omits new results
    # If any other test failed, the run stays failed.
    if session.testsfailed == counted and not (stats.get("failed") or stats.get("error")):
        session.exitstatus = INCONCLUSIVE if stats.get("inconclusive") else pytest.ExitCode.OK


def _run_again(config: pytest.Config, reporter: Any, inconclusive: dict[str, list[Any]]) -> None:
    """Run tests again, and put their reports where they belong now."""
    stats: dict[str, list[Any]] = reporter.stats
    final = {one.nodeid for kind in ("failed", "error") for one in stats.get(kind, ())}
    end_s = time.monotonic() + SECOND_RUNS_S
    for place, (test, reports) in enumerate(inconclusive.items()):
        result = "inconclusive"
        if test in final:
            result = "error"  # of a fixture, after the failure that counts
        elif (
            place < SECOND_RUNS_MAX
            and time.monotonic() < end_s
            and not config.getoption("second_run")
        ):
            result, output = _second_run(test, config)
            reports[0].sections.append(("second run", output))
            reporter.write_line(f"\nsecond run of {test}: {result.partition(' ')[0]}")
        for report in reports:
            if result in ("error", "failed"):
                report.inconclusive = None
        # A test has several reports if its call and its fixtures failed; it counts once.
        stats.setdefault(result, []).append(reports[0])


def _second_run(test: str, config: pytest.Config) -> tuple[str, str]:
    """Result and output of one test in a process of its own, which measures the machine."""
    unset = (VARIABLE, "PYTEST_ADDOPTS")
    with tempfile.TemporaryDirectory() as folder:
        outcomes, output = Path(folder) / "outcomes.json", Path(folder) / "output.txt"
        command = [sys.executable, "-m", "pytest", "--second-run", str(outcomes)]
        command += ["-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
        command += ["-c", str(config.inipath)] if config.inipath else []
        with output.open("wb") as writing:
            run = subprocess.Popen(
                [*command, test], cwd=config.rootpath, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in unset},
                stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                status = run.wait(SECOND_RUN_S)
            except subprocess.TimeoutExpired:
                status = -1
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
        found = json.loads(outcomes.read_text()) if outcomes.exists() else []
        text = output.read_text(errors="replace")
    return _result(test, status, found), text or f"ended after {SECOND_RUN_S:.0f} s"


def _result(test: str, status: int, outcomes: list[list[str]]) -> str:
    """The result of a second run. It passed only if each phase of this test did."""
    phases = {phase for name, phase, _ in outcomes if name == test}
    met = {outcome for _, _, outcome in outcomes}
    if status == INCONCLUSIVE and met <= {"passed", "failed"} and phases:
        return "inconclusive"
    return PASSED if status == 0 and met == {"passed"} and phases == PHASES else "failed"


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
