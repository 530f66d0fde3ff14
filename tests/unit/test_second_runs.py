"""A failure that the machine explains is run again; every other failure is final."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from datetime import date, timedelta
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from pyspark.errors import PySparkException

from keyshard.errors import AvailableNowTimeoutError, DevBrokerError
from tests.support import machine, second_runs
from tests.support.deadlines import FACTOR, DeadlineError, deadline, in_time, joined
from tests.support.machine import MachineError, Since, ended_early, is_verdict, trouble
from tests.support.second_runs import (
    FLAKY_DAYS,
    FLAKY_MAX,
    INCONCLUSIVE,
    PASSED,
    Flaky,
    _result,
    flaky,
)

ROOT = Path(__file__).parents[2]
PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
}  # fmt: skip
"""Loading the others takes most of the time of a run, and of its second runs."""
CONFTEST = """
pytest_plugins = ["tests.support.second_runs"]


def pytest_configure(config):
    from tests.support import second_runs

    second_runs.VARIABLE = ""  # second runs keep the factor: to measure takes time
    config.addinivalue_line("markers", "broker: needs a broker")
"""
TESTS = """
import os
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
def test_ends_its_process_at_the_second_run():
    if first_time("ends"):
        raise MachineError("not up in time")
    os._exit(0)


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


@pytest.mark.broker
def test_ends_the_run():
    pytest.exit("no broker", returncode=1)


def test_passes():
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest in a folder of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_example.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)} | PLUGINS, check=False,
        timeout=deadline(60), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return result.returncode, result.stdout


def test_only_failures_that_the_machine_explains_run_again(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-n", "2", "-k", "not ends_the_run")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    last = output.splitlines()[-1]
    for count in ("6 failed", "1 inconclusive", "1 passed at the second run"):
        assert count in last, output
    assert sorted(line for line in output.splitlines() if line.startswith("second run of ")) == [
        "second run of test_example.py::test_ends_its_process_at_the_second_run: failed",
        "second run of test_example.py::test_loses_at_the_second_run: failed",
        "second run of test_example.py::test_never_starts: inconclusive",
        "second run of test_example.py::test_starts_late: passed",
    ]
    assert "\ninconclusive: MachineError (CPU pressure " in output


def test_a_second_run_passes_only_if_each_phase_does() -> None:
    phases = [["t", phase, "passed"] for phase in ("setup", "call", "teardown")]
    assert _result("t", 0, phases) == PASSED
    skipped = [["t", "setup", "passed"], ["t", "call", "skipped"], ["t", "teardown", "passed"]]
    failed = [["t", "setup", "failed"], ["t", "teardown", "passed"]]
    for status, outcomes in (
        (0, []), (0, phases[:2]), (0, skipped), (0, [["other", *rest] for _, *rest in phases]),
        (1, phases), (-9, phases), (5, []), (INCONCLUSIVE, []), (1, failed),
    ):  # fmt: skip
        assert _result("t", status, outcomes) == "failed"
    assert _result("t", INCONCLUSIVE, failed) == "inconclusive"


def test_a_test_that_passes_at_the_second_run_does_not_fail_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, "test_example.py::test_starts_late")
    assert status == 0, output
    assert "1 passed at the second run" in output.splitlines()[-1]


def test_an_inconclusive_test_has_an_exit_status_of_its_own(tmp_path: Path) -> None:
    status, output = run(tmp_path, "test_example.py::test_never_starts")
    assert status == INCONCLUSIVE, output
    assert output.splitlines()[-1].strip("= ").startswith("1 inconclusive in "), output


@pytest.mark.parametrize(
    "ends", [("-x", "-k", "starts_late or passes"), ("-k", "starts_late or ends_the_run")]
)
def test_a_run_that_ends_early_stays_red(tmp_path: Path, ends: tuple[str, ...]) -> None:
    status, output = run(tmp_path, *ends)
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "1 inconclusive in " in output, output
    assert "second run of " not in output


def caught(raises: Callable[[], object]) -> BaseException:
    """Return the error that a function raises."""
    try:
        raises()
    except BaseException as exc:  # noqa: BLE001 - also the errors of pytest
        return exc
    raise NotImplementedError


def behind(
    first: BaseException, error: BaseException, *, cause: BaseException | None = None
) -> BaseException:
    """Return an error that the cleanup after another error raises."""

    def raises() -> None:
        try:
            raise first
        finally:
            if cause is None:
                raise error
            raise error from cause

    return caught(raises)


VERDICTS = [
    AssertionError("lost"), caught(lambda: pytest.fail("lost")), KeyError("lost"),
    AvailableNowTimeoutError("rows are left"),
]  # fmt: skip


def test_a_verdict_stays_one_after_later_failures() -> None:
    for verdict in VERDICTS:
        assert is_verdict(behind(verdict, MachineError("no port")))
        assert is_verdict(behind(verdict, DevBrokerError("late", outcome="LATE")))
    for verdict in VERDICTS[:2]:
        assert is_verdict(verdict)
        assert is_verdict(behind(verdict, MachineError("no port"), cause=OSError("port")))
        assert is_verdict(behind(behind(verdict, OSError()), MachineError("no port")))
    circle = MachineError("no port")
    circle.__cause__ = OSError()
    circle.__cause__.__cause__ = circle
    assert not is_verdict(circle)


def test_the_cause_of_a_translated_error_is_no_verdict() -> None:
    def translates() -> None:
        try:
            int("port")
        except ValueError as exc:
            raise MachineError("no port") from exc

    assert not is_verdict(caught(translates))


class GroupError(Exception):
    """Several errors, such as an exception group of Python 3.11."""

    exceptions = (OSError(), AssertionError("lost"))


def test_a_verdict_in_a_group_stays_one() -> None:
    assert is_verdict(GroupError())
    assert is_verdict(behind(GroupError(), MachineError("no port")))


@pytest.mark.parametrize(
    "error",
    [
        MachineError("no port"),
        DevBrokerError("The broker did not start.", outcome="LATE"),
        DevBrokerError("Port 6650 is in use.", port=6650),
        PySparkException("SparkException: Python worker failed to connect back."),
    ],
    ids=str,
)
def test_a_test_that_did_not_start_is_inconclusive(error: BaseException) -> None:
    assert "CPU pressure" in (trouble(error, Since()) or "")
    assert trouble(behind(AssertionError("lost"), error), Since()) is None


@pytest.mark.parametrize(
    "error",
    [
        DevBrokerError("The broker did not start.", outcome="DIED"),
        DevBrokerError("The broker is running."),
        RuntimeError("Python worker failed to connect back."),
        PySparkException("AssertionError: lost; Python worker failed to connect back."),
    ],
    ids=str,
)
def test_a_failure_that_the_product_may_have_caused_counts(error: BaseException) -> None:
    assert trouble(error, Since()) is None


def test_the_end_of_the_output_tells_if_an_early_end_is_a_machine_error() -> None:
    late = "SparkException: Python worker failed to connect back.\n"
    assert isinstance(ended_early(late), MachineError)
    for output in (
        f"{late}AssertionError: lost",
        f"{late}[KEYSHARD_BROKER]",
        late + "x" * 9_000,
        "",
    ):
        assert is_verdict(ended_early(output))


LATE = [
    DeadlineError("10 messages"), subprocess.TimeoutExpired("java", 10), TimeoutError(),
    futures.TimeoutError(), queue.Empty(),
    caught(lambda: pytest.fail("Timeout (>60.0s) from pytest-timeout.")),
]  # fmt: skip


@pytest.mark.parametrize("error", LATE, ids=lambda error: type(error).__name__)
def test_a_late_failure_is_inconclusive_if_the_machine_got_slower(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(len(os.sched_getaffinity(0))))
    monkeypatch.setattr(machine, "measured_now", lambda: 4.0 * FACTOR)
    assert "2.0 times as slow" in (trouble(error, Since()) or "")
    assert trouble(behind(AssertionError("lost"), error), Since()) is None
    monkeypatch.setattr(machine, "measured_now", lambda: 3.9 * FACTOR)
    assert trouble(error, Since()) is None


@pytest.mark.parametrize("error", VERDICTS, ids=lambda error: type(error).__name__)
def test_other_failures_count_however_slow_the_machine_is(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measured_now", lambda: 100.0)
    assert trouble(error, Since()) is None


def test_a_measurement_that_fails_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measured_now", lambda: pytest.fail("Timeout (>3.0s)"))
    assert trouble(DeadlineError("10 messages"), Since()) is None


def test_a_kill_for_want_of_memory_explains_the_failures_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since = Since()
    monkeypatch.setattr(machine, "measured_now", lambda: FACTOR)
    for error in (ConnectionError(), CalledProcessError(-9, "java"), DeadlineError("10 messages")):
        assert trouble(error, since) is None
    monkeypatch.setattr(machine, "_killed_for_memory", lambda: since.killed_for_memory + 1)
    for error in (ConnectionError(), CalledProcessError(-9, "java"), DeadlineError("10 messages")):
        assert "for want of memory" in (trouble(error, since) or "")
    for other in (*VERDICTS, CalledProcessError(-11, "python")):
        assert trouble(other, since) is None


def test_a_wait_fails_at_its_deadline() -> None:
    in_time(float("inf"), "never")
    with pytest.raises(DeadlineError, match="10 messages"):
        in_time(0.0, "10 messages")


def test_the_end_of_a_thread_has_a_deadline() -> None:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="writes")
    thread.start()
    try:
        with pytest.raises(DeadlineError, match="writes"):
            joined(thread, 0.0)
    finally:
        may_end.set()
    joined(thread, deadline(20))


def test_a_flaky_test_is_excused_for_one_failure_and_some_days() -> None:
    since = date(2026, 11, 1)
    one = Flaky("tests/a.py::test_a", "ConnectionError: reset", since, "a lost wake-up")
    error = "ConnectionError: reset by peer"
    assert one.covers("tests/a.py::test_a", error, since + timedelta(days=FLAKY_DAYS))
    assert not one.covers("tests/a.py::test_a", error, since + timedelta(days=FLAKY_DAYS + 1))
    assert not one.covers("tests/a.py::test_b", error, since)
    assert not one.covers("tests/a.py::test_a", f"KeyError: {error}", since)


def test_the_list_of_flaky_tests_is_short() -> None:
    assert len(flaky()) <= FLAKY_MAX
    for one in flaky():
        assert (ROOT / one.test.partition("::")[0]).exists(), one
        assert one.signature, one
        assert one.suspected, one


def test_a_listed_failure_runs_again_unless_it_is_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    test = "tests/a.py::test_a"
    today = date.today()  # noqa: DTZ011
    listed = tuple(
        Flaky(test, signature, today, "a lost wake-up")
        for signature in ("ConnectionError", "AssertionError")
    )
    monkeypatch.setattr(second_runs, "flaky", lambda: listed)

    def reason(name: str, first: BaseException, error: BaseException) -> str | None:
        found = pytest.ExceptionInfo.from_exception(behind(first, error))
        return second_runs._listed(name, found)

    assert "a lost wake-up" in (reason(test, OSError(), ConnectionError("reset")) or "")
    assert reason("tests/b.py::test_b", OSError(), ConnectionError("reset")) is None
    assert reason(test, AssertionError("lost"), ConnectionError("reset")) is None
    assert reason(test, OSError(), AssertionError("lost")) is None
