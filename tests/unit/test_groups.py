"""Processes get groups of tests in order, and what has ended costs the later tests nothing."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.groups import Together, lasts

LONG = [f"tests/simulation/test_a.py::test_{number}" for number in range(6)]
UNIT = [f"tests/unit/test_{file}.py::test_{test}" for file in "ab" for test in range(10)]
ALONE = [f"tests/runtime/test_a.py::test_{number}" for number in range(40)]
RAY = [f"tests/ray/test_{file}.py::test_a" for file in "ab"]
REMEMBERED_MAX = 4
"""Groups of a process: the running one, and some that wait."""
TESTS = [*UNIT, *RAY, *LONG, *ALONE]


class Process:
    """A process of xdist that keeps the tests that it is given."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.given: list[list[str]] = []
        self.ran: list[str] = []
        self.gateway = SimpleNamespace(id="process")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given.append([TESTS[index] for index in indices])

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def config(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> pytest.Config:
    monkeypatch.setattr(pytestconfig.option, "loadscopereorder", False, raising=False)
    monkeypatch.setattr(pytestconfig.option, "tx", ["popen", "popen"], raising=False)
    return pytestconfig


def started(config: pytest.Config) -> tuple[Together, list[Process]]:
    """Return a schedule of ``TESTS`` for two processes that have their first tests."""
    tests, processes = Together(config, None), [Process(), Process()]
    for process in processes:
        tests.add_node(process)
        tests.add_node_collection(process, TESTS)
    tests.schedule()
    return tests, processes


def run(tests: Together, processes: list[Any], limit: int = len(TESTS)) -> list[list[str]]:
    """Let the processes run tests in turns; return all that each has run."""
    ran: list[list[str]] = [process.ran for process in processes]
    for _ in range(limit):
        for process, done in zip(processes, ran, strict=True):
            waiting = [test for group in process.given for test in group][len(done) :]
            if waiting:
                done.append(waiting[0])
                tests.mark_test_complete(process, TESTS.index(waiting[0]))
                assert len(tests.assigned_work[process]) <= REMEMBERED_MAX
    return ran


def test_each_test_runs_once_and_a_group_stays_in_one_process(config: pytest.Config) -> None:
    tests, processes = started(config)
    ran = run(tests, processes)
    assert sorted(ran[0] + ran[1]) == sorted(TESTS)
    for group in (UNIT[:10], UNIT[10:], RAY):
        assert any(set(group) <= set(done) for done in ran)


def test_half_of_the_processes_begin_with_long_tests_and_none_waits_behind_another(
    config: pytest.Config,
) -> None:
    tests, processes = started(config)
    run(tests, processes)
    long = [[lasts(group) for group in process.given] for process in processes]
    assert [kinds[0] for kinds in long] == [True, False]
    assert (True, True) not in itertools.pairwise(long[0])


def test_tests_of_a_process_that_died_run_in_another(config: pytest.Config) -> None:
    tests, (first, second) = started(config)
    before = run(tests, [first, second], limit=5)
    crashed = tests.remove_node(first)
    assert crashed not in before[0]
    after = run(tests, [second])
    assert sorted(before[0] + after[0]) == sorted(TESTS)
