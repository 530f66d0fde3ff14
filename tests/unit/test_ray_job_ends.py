"""The end of a Ray job whose actors are in this process: taken results are committed before it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from keyshard import KeyShardSink, Produce
from keyshard.broker.memory import Message
from keyshard.columns.outgoing import Outgoing
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.handlers.entry_run import RowsByTopic
from ray_adapter import job as job_module
from ray_adapter import results
from ray_adapter.actor import CallResult, messages
from ray_adapter.job import END_S, Job
from ray_adapter.job_state import LOOK_S, ActorSlot, Done, JobState
from ray_adapter.options import JobOptions, Takes
from tests.support.memory_topic import MemoryTopic

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
SENT = 4


class LocalActors:
    """Stands for the actors of a job; their handler returns the values."""

    handler_name = "app.value"
    session = SimpleNamespace(named=lambda error: error)

    def __init__(self, _handler: object, options: JobOptions, *_: object, **__: object) -> None:
        self._takes = options.takes

    def start(self, count: int) -> list[Any]:
        return [SimpleNamespace(process=None) for _ in range(count)]

    def call(self, _actor: object, rows: Any, _start: int) -> CallResult:
        if self._takes == "arrow":
            return CallResult(rows.num_rows, [rows["value"].to_pylist()], LatencyHistogram())
        values = [message.value for entry in messages(rows) for message in entry]
        return CallResult(len(values), values, LatencyHistogram())

    def end(self, actors: Sequence[Any]) -> None:
        pass


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> MemoryTopic:
    monkeypatch.setattr(job_module, "ActorPool", LocalActors)
    topic = MemoryTopic(partitions=1)
    topic.cluster.publish(topic.topic, *(Message(b"%d" % one, key="k") for one in range(SENT)))
    return topic


def job_of(topic: MemoryTopic, takes: Takes = "messages", **options: Any) -> Job:
    """A job with one actor, which gets all messages in one call."""
    of_one_call = JobOptions(parallelism=1, takes=takes, max_rows=SENT, max_wait_s=60.0)
    return Job(topic.source(parallelism=1, **options), bytes, of_one_call)


def test_results_taken_before_a_stop_are_committed(topic: MemoryTopic) -> None:
    """The thread that commits had ended, so their messages came again."""
    job = job_of(topic)
    results = iter(job)
    assert [next(results), next(results)] == [b"0", b"1"]
    job.stop()
    job._others[1].join(2 * LOOK_S)
    assert list(results) == []
    assert topic.backlog() == SENT - 2


def test_an_arrow_result_taken_before_a_stop_is_committed(topic: MemoryTopic) -> None:
    job = job_of(topic, "arrow")
    results = iter(job)
    assert len(next(results)) == SENT
    job.stop()
    assert list(results) == []
    assert topic.backlog() == 0


@pytest.mark.parametrize(("takes", "left"), [("messages", SENT - 2), ("arrow", SENT)])
def test_results_taken_are_committed_if_the_iteration_does_not_go_on(
    topic: MemoryTopic, takes: Takes, left: int
) -> None:
    """Results of a call were committed only when the caller went on or left the loop."""
    with job_of(topic, takes) as job:
        results = iter(job)
        for _ in range(3 if takes == "messages" else 1):
            next(results)
    assert topic.backlog() == left
    assert list(results) == []
    assert topic.backlog() == left


def test_the_source_ends_after_the_last_commit(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this operation timeout, the source ended before it."""
    job = job_of(topic, operation_timeout_ms=int(1000 * END_S))
    commit, early = job._run.commit, []

    def slow(*entries: Any, **others: Any) -> None:
        early.append(job._committed.wait(2 * LOOK_S))
        commit(*entries, **others)

    monkeypatch.setattr(job._run, "commit", slow)
    for number, _ in enumerate(job):
        if number == SENT - 1:
            job.drain()
    assert early == [False]
    assert topic.backlog() == 0


class Unreachable:
    """A run whose topic cannot be opened at first."""

    def __init__(self, error: KeyShardError) -> None:
        self.errors = [error]
        self.committed: list[str] = []

    def checked(self, _topic: str, _rows: Outgoing) -> None:
        if self.errors:
            raise self.errors.pop()

    def commit(self, _entries: object, rows: RowsByTopic, _handled: object) -> None:
        self.committed += rows


@pytest.mark.parametrize("stopping", [False, True])
def test_a_topic_that_cannot_be_opened_for_a_while_does_not_end_the_job(
    stopping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable broker ended the job if it was the first result for a topic."""
    monkeypatch.setattr(results, "AGAIN_S", 0.0)
    (actor,) = slots = [ActorSlot(0, None)]
    exchange = JobState(slots, 1, 0.0, 1_000_000)
    published = results.Results(exchange, KeyShardSink("out", service_url="memory://out"))
    published.add(Done(actor, (), [[Produce(b"1")]]))
    run: Any = Unreachable(BrokerUnavailableError("The broker is away."))
    exchange.stopping = stopping
    published._commit(run, list(published._waiting))
    assert run.errors == []
    assert run.committed == ([] if stopping else [KeyShardSink("out").topic])
