"""A failure that the machine explains is run again; every other failure is final."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from concurrent import futures
from datetime import date, timedelta
from pathlib import Path

import pytest

from keyshard.errors import AvailableNowTimeoutError, DevBrokerError
from tests.support import machine, second_runs
from tests.support.deadlines import FACTOR, DeadlineError, deadline, in_time
from tests.support.machine import MachineError, Since, trouble
from tests.support.second_runs import FLAKY_DAYS, FLAKY_MAX, INCONCLUSIVE, Flaky, flaky

ROOT = Path(__file__).parents[2]
CONFTEST = """
pytest_plugins = ["tests.support.second_runs"]


def pytest_configure(config):
    from tests.support import second_runs

    second_runs.VARIABLE = ""  # second runs keep the factor: to measure takes time
    config.addinivalue_line("markers", "broker: needs a broker")
"""
TESTS = """
import os
import signal
from pathlib import Path

import pytest

from tests.support.machine import MachineError


def first_time(name):
    file = Path(__file__).with_name(name)
    is_first = not file.exists()
    file.touch()
    return is_first


@pytest.fixture
def broker():
    if first_time("broker"):
        raise MachineError("not up in time")


@pytest.mark.broker
def test_starts_late(broker):
    pass


@pytest.mark.broker
def test_never_starts():
    raise MachineError("not up in time")


@pytest.mark.broker
def test_loses():
    assert 9 == 10, "lost"


@pytest.mark.broker
def test_loses_at_the_second_run():
    if first_time("loses"):
        raise MachineError("not up in time")
    assert 9 == 10, "lost"


@pytest.mark.broker
def test_dies_at_the_second_run():
    if first_time("dies"):
        raise MachineError("not up in time")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.broker
def test_loses_and_cannot_clean_up():
    try:
        assert 9 == 10, "lost"
    finally:
        raise MachineError("not up in time")


@pytest.fixture
def late_end():
    yield
    raise MachineError("not ended in time")


@pytest.mark.broker
def test_loses_before_its_fixture_ends(late_end):
    assert first_time("late end"), "run twice"
    assert 9 == 10, "lost"


def test_of_the_gate():
    raise MachineError("not up in time")
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest in a folder of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_example.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        timeout=deadline(60), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return result.returncode, result.stdout


def test_only_what_the_machine_explains_runs_again(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-n", "2")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    last = output.splitlines()[-1]
    for count in ("6 failed", "1 inconclusive", "1 passed at the second run"):
        assert count in last, output
    assert sorted(line for line in output.splitlines() if line.startswith("second run of ")) == [
        "second run of test_example.py::test_dies_at_the_second_run: failed",
        "second run of test_example.py::test_loses_at_the_second_run: failed",
        "second run of test_example.py::test_never_starts: inconclusive",
        "second run of test_example.py::test_starts_late: passed",
    ]
    assert "\ninconclusive: MachineError (CPU pressure " in output


def test_a_test_that_passes_at_the_second_run_does_not_fail_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, "test_example.py::test_starts_late")
    assert status == 0, output
    assert "1 passed at the second run" in output.splitlines()[-1]


def test_an_inconclusive_test_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    for arguments in ((), ("--no-second-runs",)):
        status, output = run(tmp_path, "test_example.py::test_never_starts", *arguments)
        assert status == INCONCLUSIVE, output
        assert output.splitlines()[-1].strip("= ").startswith("1 inconclusive in "), output
        assert ("second run of " in output) == (not arguments)


def test_a_run_that_stops_at_its_first_failure_stays_red(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-x", "-k", "starts_late or of_the_gate")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "1 passed at the second run" in output.splitlines()[-1]


def failing(error: BaseException) -> BaseException:
    """The same error, raised while an assertion failed."""
    try:
        try:
            raise AssertionError("lost")
        finally:
            raise error
    except type(error) as exc:
        return exc


@pytest.mark.parametrize(
    "error",
    [
        MachineError("no port"),
        DevBrokerError("The broker is not ready."),
        RuntimeError("org.apache.spark.SparkException: Python worker failed to connect back."),
    ],
    ids=str,
)
def test_what_did_not_start_is_inconclusive(error: BaseException) -> None:
    assert "CPU pressure" in (trouble(error, Since()) or "")
    assert trouble(failing(error), Since()) is None


def timed_out() -> BaseException:
    """The error of pytest-timeout."""
    with pytest.raises(pytest.fail.Exception) as caught:
        pytest.fail("Timeout (>60.0s) from pytest-timeout.")
    return caught.value


LATE = [
    DeadlineError("10 messages"), subprocess.TimeoutExpired("java", 10), TimeoutError(),
    futures.TimeoutError(), queue.Empty(), timed_out(),
]  # fmt: skip


@pytest.mark.parametrize("error", LATE, ids=lambda error: type(error).__name__)
def test_a_late_failure_is_inconclusive_if_the_machine_got_slower(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measured_now", lambda: 2.0 * FACTOR)
    assert f"machine factor {2.0 * FACTOR:.1f}" in (trouble(error, Since()) or "")
    assert trouble(failing(error), Since()) is None
    monkeypatch.setattr(machine, "measured_now", lambda: 1.9 * FACTOR)
    assert trouble(error, Since()) is None


@pytest.mark.parametrize(
    "error",
    [AssertionError("lost"), AvailableNowTimeoutError("rows are left"), ValueError(), KeyError()],
    ids=lambda error: type(error).__name__,
)
def test_other_failures_count_however_slow_the_machine_is(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measured_now", lambda: 100.0)
    assert trouble(error, Since()) is None


def test_a_kill_for_want_of_memory_explains_errors_but_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since = Since()
    monkeypatch.setattr(machine, "_killed_for_memory", lambda: since.killed_for_memory + 1)
    assert "for want of memory" in (trouble(ConnectionError(), since) or "")
    assert trouble(AssertionError("lost"), since) is None


def test_a_wait_fails_at_its_deadline() -> None:
    in_time(float("inf"), "never")
    with pytest.raises(DeadlineError, match="10 messages"):
        in_time(0.0, "10 messages")


def test_a_flaky_test_is_excused_for_one_failure_and_some_days() -> None:
    since = date(2026, 11, 1)
    one = Flaky("tests/a.py::test_a", "ConnectionError", since, "a lost wake-up")
    error = "ConnectionError: reset"
    assert one.covers("tests/a.py::test_a", error, since + timedelta(days=FLAKY_DAYS))
    assert not one.covers("tests/a.py::test_a", error, since + timedelta(days=FLAKY_DAYS + 1))
    assert not one.covers("tests/a.py::test_b", error, since)
    assert not one.covers("tests/a.py::test_a", "AssertionError: lost", since)


def test_the_list_of_flaky_tests_is_short() -> None:
    assert len(flaky()) <= FLAKY_MAX
    for one in flaky():
        assert (ROOT / one.test.partition("::")[0]).exists(), one
        assert one.signature, one
        assert one.suspected, one


def test_a_listed_failure_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Flaky("tests/a.py::test_a", "ConnectionError", date.today(), "a lost wake-up")  # noqa: DTZ011
    monkeypatch.setattr(second_runs, "flaky", lambda: (listed,))
    error = "ConnectionError: reset"
    assert "a lost wake-up" in (second_runs._listed("tests/a.py::test_a", error) or "")
    assert second_runs._listed("tests/b.py::test_b", error) is None
