"""The number of tasks of a batch follows what rows cost, and never exceeds the ranges."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.core.window.layout import ROWS_PER_PARTITION_MIN
from keyshard.core.window.task_costs import (
    BATCH_COST_S,
    TASK_COST_S,
    TaskCosts,
    tasks_at_once,
    tasks_worth,
)

RANGES = 10
SOME = (1_764_000_000_123, 1_764_000_000_777)
"""Times of a batch that does not end at a trigger, milliseconds since the epoch."""


class Host:
    """A host that runs batches with some tasks at once, all of the same duration.

    With a trigger interval, a batch begins at a multiple of it and shows its end at the next one.
    """

    def __init__(self, at_once: int, row_s: float, interval_s: int = 0, seed: int = 0) -> None:
        self.costs = TaskCosts()
        self.at_once = at_once
        self.row_s = row_s
        self.interval_s = interval_s
        self.random = Random(seed)
        self.now_s = 1_764_000_000 + self.random.random() * 60

    def run(self, rows: int) -> int:
        """Run a batch; return the number of its tasks."""
        tasks = self.costs.tasks(rows, 100 * rows, RANGES)
        task_s = TASK_COST_S + rows * self.row_s / tasks
        began = [i // self.at_once * task_s for i in range(tasks)]
        cut_s, planning_s = self.now_s, self.random.uniform(0.01, 0.2)
        self.now_s += planning_s + max(began) + task_s + BATCH_COST_S
        if self.interval_s and self.now_s < (
            tick := ceil(cut_s / self.interval_s + 0.01) * self.interval_s
        ):
            self.now_s = tick + self.random.uniform(0.001, 0.04)
        took_s = self.now_s - cut_s - planning_s
        self.costs.learn(rows, began, took_s, (int(cut_s * 1000), int(self.now_s * 1000)))
        return tasks


def test_the_first_batch_has_a_task_for_a_number_of_rows_or_bytes() -> None:
    costs = TaskCosts()
    assert costs.tasks(100, 10_000, RANGES) == 1
    assert costs.tasks(3 * ROWS_PER_PARTITION_MIN, 10_000, RANGES) == 3
    assert costs.tasks(100, 2**40, RANGES) == RANGES


def test_cheap_rows_keep_the_cores_busy_with_few_tasks() -> None:
    host = Host(at_once=2, row_s=4e-6)
    assert [host.run(500_000) for _ in range(5)][1:] == [2, 2, 2, 2]


def test_rows_of_a_millisecond_get_all_tasks() -> None:
    for at_once in (2, 4, 64):
        host = Host(at_once, row_s=1e-3)
        host.run(20_000)
        assert [host.run(20_000) for _ in range(5)] == [RANGES] * 5


def test_a_small_batch_of_cheap_rows_has_one_task() -> None:
    host = Host(at_once=2, row_s=4e-6)
    host.run(500_000)
    assert [host.run(50) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("interval_s", [2, 10, 60])
@pytest.mark.parametrize("seed", range(5))
def test_the_wait_for_a_trigger_is_no_work(interval_s: int, seed: int) -> None:
    host = Host(at_once=2, row_s=4e-6, interval_s=interval_s, seed=seed)
    few = -(-20_000 // ROWS_PER_PARTITION_MIN)
    assert [host.run(20_000) for _ in range(8)][2:] == [few] * 6


@pytest.mark.parametrize("seed", range(5))
def test_slow_rows_that_overrun_a_trigger_get_all_tasks_and_keep_them(seed: int) -> None:
    host = Host(at_once=10, row_s=1e-3, interval_s=5, seed=seed)
    assert [host.run(20_000) for _ in range(12)][5:] == [RANGES] * 7


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_became_cheap_get_fewer_tasks_within_a_trigger_interval(seed: int) -> None:
    host = Host(at_once=2, row_s=1e-3, interval_s=2, seed=seed)
    for _ in range(3):
        host.run(20_000)
    host.row_s = 1e-6
    assert [host.run(200_000) for _ in range(10)][-1] < RANGES


def test_one_slow_small_batch_does_not_make_rows_expensive() -> None:
    host = Host(at_once=2, row_s=4e-6)
    host.run(500_000)
    host.costs.learn(5, [0.0], 2.0, SOME)
    assert host.run(10_000) <= 2


def test_more_cores_are_noticed_when_the_work_needs_them() -> None:
    host = Host(at_once=2, row_s=1e-4)
    for _ in range(3):
        host.run(20_000)
    host.at_once = 8
    assert max(host.run(100_000) for _ in range(5)) == RANGES


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 7, 10, 16])
@pytest.mark.parametrize("tasks", [1, 2, 5, 10, 16])
def test_the_number_of_concurrent_tasks_follows_from_their_start_times(
    at_once: int, tasks: int
) -> None:
    began = [i // at_once for i in range(tasks)]
    assert tasks_at_once(began, max(began) + 1) == min(at_once, tasks)


def test_a_batch_without_rows_or_reads_teaches_nothing() -> None:
    costs = TaskCosts()
    costs.learn(0, [0.0], 100.0, SOME)
    costs.learn(100, [], 100.0, SOME)
    assert costs.tasks(100, 0, RANGES) == 1


@given(st.integers(1, 100), st.integers(1, 10**6))
def test_a_fixed_number_stays_below_the_ranges(fixed: int, rows: int) -> None:
    costs = TaskCosts(fixed)
    costs.learn(rows, [0.0], 1000.0, SOME)
    assert costs.tasks(rows, rows, RANGES) == min(fixed, RANGES)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=20), st.floats(0, 100),
    st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, 100),
)  # fmt: skip
def test_the_number_is_always_possible(
    began: list[float], longer_s: float, before: int, rows: int, ranges: int
) -> None:
    costs = TaskCosts()
    first = min(began)
    costs.learn(before, [one - first for one in began], max(began) - first + longer_s, SOME)
    assert 1 <= costs.tasks(rows, rows, ranges) <= ranges


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.integers(1, 1_000))
def test_more_work_is_never_worth_fewer_tasks(
    one: float, other: float, at_once: int | None
) -> None:
    less, more = sorted((one, other))
    assert tasks_worth(less, at_once) <= tasks_worth(more, at_once)
