"""An unexpected error in a thread of a Ray job ends the job, whose error names it."""

from __future__ import annotations

import pytest

import ray_adapter
from keyshard.errors import KeyShardError, UnexpectedError
from tests.helpers import keyshard_threads, wait_until
from tests.ray.ray_topic import RayTopic, key_and_seq
from tests.support.thread_faults import Calls, Step

pytestmark = [pytest.mark.ray]
DEPTH = 3
"""Calls of the guard, and of the function that it calls."""
STEPS = [
    Step("keyshard-ray", "ray_adapter.feeding.ActorFeeder._fed"),
    Step("keyshard-ray", "ray_adapter.feeding.ActorFeeder._handled"),
    Step("keyshard-ray", "ray_adapter.feeding.ActorFeeder.run"),
    Step("keyshard-ray", "ray_adapter.job_state.JobState.deliver"),
    Step("keyshard-ray", "ray_adapter.job_state.JobState.next_rows"),
    Step("keyshard-ray-commit", "keyshard.handlers.entry_run.EntryRun.commit"),
    Step("keyshard-ray-commit", "keyshard.handlers.entry_run.EntryRun._commit"),
    Step("keyshard-ray-commit", "ray_adapter.job_state.JobState.next_to_commit"),
    Step("keyshard-ray-end", "ray_adapter.actor_pool.ActorPool.end"),
    Step("keyshard-ray-receive", "keyshard.handlers.entry_run.EntryRun.started"),
    Step("keyshard-ray-receive", "keyshard.handlers.entry_run.EntryRun.stopping"),
    Step("keyshard-ray-receive", "keyshard.handlers.entry_run.EntryRun.take"),
    Step("keyshard-ray-receive", "keyshard.source.KeyShardSource.running_as"),
    Step("keyshard-ray-receive", "ray_adapter.job_state.JobState.ending"),
    Step("keyshard-ray-receive", "ray_adapter.job_state.JobState.push"),
]
"""A thread of a job, and calls that it makes."""


@pytest.mark.parametrize("step", STEPS, ids=":".join)
def test_an_unexpected_error_in_a_thread_ends_the_job_and_is_named_in_its_error(
    orders: RayTopic, step: Step
) -> None:
    before, calls = keyshard_threads(), Calls(DEPTH, step)
    error = _error_of(orders, calls)
    assert calls.raised.is_set(), "the thread does not come by there"
    assert isinstance(error, UnexpectedError)
    assert f"InjectedError('{step.function}')" in error.message
    left = sum(orders.sent.values()) - len(orders.taken)
    assert orders.backlog() in {-1, *range(left, left + len(orders.taken) + 1)}, "-1: no consumer"
    wait_until(lambda: not keyshard_threads() - before)


def test_every_thread_of_a_job_is_in_the_list_of_steps(orders: RayTopic) -> None:
    calls = Calls(DEPTH)
    assert _error_of(orders, calls) is None
    found = {step.thread for step in calls.steps if step.thread.startswith("keyshard-ray")}
    assert found == {step.thread for step in STEPS}


def _error_of(orders: RayTopic, calls: Calls) -> KeyShardError | None:
    """Take all messages of a job; return the error that ended it."""
    orders.publish(keys=4, per_key=3)
    try:
        with (
            calls.watched(),
            ray_adapter.run(orders.source(), key_and_seq, parallelism=2) as job,
        ):
            orders.take(iter(job), job)
    except KeyShardError as exc:
        return exc
    return None
