"""The slot of each actor of a Ray job, ranges that have an actor of the same slots, rescales."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pyarrow as pa
import pytest
from rich.console import Console

from keyshard import Message
from keyshard.cli.status_text import status_view
from keyshard.config.source import SourceConfig
from keyshard.core.lanes.lane_status import LatencyHistogram
from keyshard.core.message import CONTEXT
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import (
    CALLS_MIN,
    STALL_S,
    RangeFacts,
    RangeWatchdog,
    load_of,
    state_of,
)
from keyshard.core.recent_history import History
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import NotRunningError, ThreadStartError
from keyshard.handlers.range_owners import RangeOwners
from keyshard.observe.handler_view import Ownership
from keyshard.reading.message_decoder import MessageDecoder
from ray_adapter.actor import HandlerActor, arrow_rows, message_rows
from ray_adapter.cluster import JobCancelled
from ray_adapter.job import Job
from ray_adapter.job_state import UNTAKEN_MAX, ActorSlot, Done, JobResults, JobState, JobStatus
from ray_adapter.row_slices import RowSlice
from tests.helpers import block, key_in, present
from tests.support.statuses import metrics_of, status

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

WHERE = TopicPartition("persistent://public/default/t")
RANGES = split_ring(2)
KEYS = [key_in(hash_range) for hash_range in RANGES]


def job_of_two() -> JobState:
    """A job whose second actor works on one of three messages, since second 100."""
    actors = [ActorSlot(index, SimpleNamespace(process=(7 + index, "node"))) for index in range(2)]
    job = JobState(actors, 1, 0.0, 1_000_000)
    job.push([(WHERE, block(1, number, KEYS[1])) for number in range(3)])
    job.next_rows(actors[1])
    actors[1].since_s = 100.0
    return job


def test_an_actor_shows_its_work_and_what_waits_for_it() -> None:
    job = job_of_two()
    free, busy = job.slots(107.04)
    assert busy == {
        "index": 1, "pid": 8, "host": "node", "hashRange": str(RANGES[1]), "state": "busy",
        "total": 1, "used": 1, "waiting": 2, "inFlight": 1, "runningSeconds": 7.0, "handled": 0,
        "restarts": 0, "untakenCalls": 1, "stalled": None,
    }  # fmt: skip
    assert (free["pid"], free["hashRange"], free["state"]) == (7, str(RANGES[0]), "free")
    assert (free["used"], free["waiting"], free["inFlight"]) == (0, 0, 0)
    assert free["runningSeconds"] is None
    assert (busy["untakenCalls"] or 0) < UNTAKEN_MAX


def test_an_actor_that_died_has_no_process_and_starts() -> None:
    job = job_of_two()
    job.actor_slots[1].lost, job.actor_slots[1].deaths = True, 1
    _, dead = job.slots(107.0)
    assert (dead["pid"], dead["host"], dead["state"], dead["used"]) == (None, None, "starting", 0)
    assert (dead["restarts"], dead["inFlight"]) == (1, 1), "it handles its messages again"


def ranges_of(count: int, job: JobState) -> list[RangeFacts]:
    owners = RangeOwners(actors=job)
    owners.begin(assign(count))
    owned = Ownership({n: [part] for n, part in enumerate(split_ring(count))}, {}, set(), {})
    return owners.ranges(107.0, owned)


def test_a_range_has_the_messages_of_the_actor_with_its_slots() -> None:
    idle, running = ranges_of(2, job_of_two())
    assert (running.counted, running.waiting, running.in_flight, running.handled) == (True, 2, 1, 0)
    assert [state_of(one, stalled=False).value for one in (idle, running)] == ["idle", "running"]
    assert [load_of(one).name for one in (idle, running)] == ["WAITING", "BUSY"]


def test_the_messages_of_ranges_are_unknown_if_actors_divide_the_ring_otherwise() -> None:
    assert [(one.counted, one.waiting) for one in ranges_of(3, job_of_two())] == [(False, 0)] * 3


def test_a_job_counts_messages_and_attempts_of_its_actors() -> None:
    """The metrics of handlers were missing for a Ray job."""
    job, timings = job_of_two(), LatencyHistogram()
    owners = RangeOwners(actors=job)
    timings.add(0.02)
    job.called(0, 0.02, timings)
    job.failed(job.actor_slots[1], 1, "message 1:0:0 of key 'k'", "ValueError: no")
    counters, seconds, circuit, newest = owners.totals(0.0)
    assert (counters["completed"], counters["failedAttempts"]) == (0, 1)
    assert set(counters.values()) == {0, 1, None}, "it has no dead letters, observers and outputs"
    assert (present(seconds)["count"], circuit) == (1, None)
    assert present(newest).text == "ValueError: no"
    busy = job.actor_slots[1]
    job.deliver(busy, Done(busy, busy.pieces, [None]), ())
    busy.retired = True
    assert owners.totals(0.0).counters["completed"] == 1
    shown = status(
        kind="ray", counters=owners.totals(0.0).counters, handlerSeconds=seconds, circuit=None,
        handlerSlots=job.slots(107.0),
    )  # fmt: skip
    metrics = metrics_of(shown)
    for line in (
        'keyshard_messages_completed_total{subscription="s"} 1.0',
        'keyshard_attempts_failed_total{subscription="s"} 1.0',
        'keyshard_handler_seconds_count{subscription="s"} 1.0',
        'keyshard_handler_messages_total{process="1",subscription="s"} 1.0',
    ):
        assert line in metrics
    assert "keyshard_messages_dead_lettered_total{" not in metrics


def test_the_text_of_a_job_has_its_counts_and_no_dead_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = status(kind="ray", counters=job_of_two().totals().counters, circuit=None)
    Console(width=200).print(status_view(shown, None, all_ranges=None))
    text = capsys.readouterr().out
    assert "completed 0, failed attempts 0, redeliveries dropped 0" in text
    assert "parked" not in text


def doubled(message: Message) -> bytes:
    if message.value == b"bad":
        raise ValueError("bad")
    return 2 * present(message.value)


def counted_rows(rows: pa.RecordBatch) -> int:
    return rows.num_rows


def loaded(handler: object) -> HandlerActor:
    decoder = MessageDecoder.of(SourceConfig("t", subscription="s"))
    actor = HandlerActor(pickle.dumps(handler), decoder)
    assert actor.load().broken is None
    return actor


@pytest.fixture
def own_context() -> Iterator[None]:
    """Undo what the code of an actor sets for the whole of its process."""
    token = CONTEXT.set(CONTEXT.get())
    yield
    CONTEXT.reset(token)


@pytest.mark.usefixtures("own_context")
def test_an_actor_times_each_call_of_its_handler() -> None:
    values = [b"1", b"2", b"bad", b"4"]
    pieces = [RowSlice(WHERE, block(1, 0, *"aaaa", values=values), None)]
    outcome = loaded(doubled).handle_messages(message_rows(pieces), 1)
    assert (outcome.done, outcome.results) == (2, [b"22"])
    assert outcome.timings.count == 2, "one that returned, and one that raised"
    outcome = loaded(counted_rows).handle_arrow(arrow_rows(pieces), 0)
    assert (outcome.done, outcome.timings.count) == (4, 1)


def test_an_actor_may_work_for_hours_without_a_stall() -> None:
    """Nobody knows how long a call with many rows usually takes, such as to a model."""
    watchdog, job = RangeWatchdog(), job_of_two()
    usual_s, _ = RangeOwners().pace()
    facts = ranges_of(2, job)
    assert watchdog.look(0.0, facts, usual_s=usual_s) == []
    assert watchdog.look(10_000.0, facts, usual_s=usual_s) == []


def test_an_actor_has_no_stall_while_the_usual_time_is_unknown() -> None:
    job, timings = job_of_two(), LatencyHistogram()
    _, busy = job.actor_slots
    busy.called_at_s = 100.0
    for _ in range(CALLS_MIN - 1):
        job.called(1_000, 1.0, timings)
    assert job.slots(100_000.0)[1]["stalled"] is None
    job.called(1_000, 1.0, timings)
    assert job.slots(100.0 + STALL_S - 0.1)[1]["stalled"] is None
    assert [one["stalled"] for one in job.slots(100.0 + STALL_S)] == [None, {
        "forSeconds": STALL_S, "kind": "actor",
        "reason": f"a call with 1 messages has not returned for {STALL_S:.1f} s",
    }]  # fmt: skip
    busy.lost = True
    assert job.slots(100_000.0)[1]["stalled"] is None, "it starts"


def test_calls_that_handle_nothing_show_no_usual_time() -> None:
    job = job_of_two()
    job.actor_slots[1].called_at_s = 100.0
    for _ in range(CALLS_MIN):
        job.called(0, 0.0, LatencyHistogram())
    assert job.slots(100_000.0)[1]["stalled"] is None


def test_a_message_that_fails_again_and_again_stalls_its_actor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr("ray_adapter.job_state.time.monotonic", lambda: now_s)
    job = job_of_two()
    _, busy = job.actor_slots
    name = "message 1:0:0 of key 'k'"
    job.failed(busy, 1, name, "ValueError: no")
    now_s += STALL_S
    job.failed(busy, 2, name, "ValueError: still no")
    stalled = present(job.slots(now_s)[1]["stalled"])
    assert stalled["forSeconds"] == STALL_S
    assert stalled["reason"] == f"{name} failed 2 times: ValueError: still no"
    shown = status(kind="ray", handlerSlots=job.slots(now_s), circuit=None)
    Console(width=200).print(status_view(shown, None, all_ranges=None))
    text = " ".join(capsys.readouterr().out.split())
    assert f"actor 1 is stalled for 6 s: {name} failed 2 times: ValueError: still no" in text
    assert "runbook for actor: docs/runbook.md#keyshardstalledactor" in text
    job.failed(busy, 1, "message 1:1:0 of key 'k'", "ValueError: no")
    assert job.slots(now_s)[1]["stalled"] is None, "another message fails: the actor has continued"
    now_s += STALL_S
    job.deliver(busy, Done(busy, busy.pieces, [None]), ())
    assert job.slots(now_s)[1]["stalled"] is None


def test_each_field_of_the_status_of_a_job_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    table = page.partition("| field of a job | meaning |")[2].partition("\nFields")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in row[1].replace("`", "").split(",")]
    assert [name.strip() for name in documented] == list(get_type_hints(JobStatus))
    for name in get_type_hints(JobResults):
        assert f"`{name}`" in rows[-1][2]


@pytest.mark.parametrize(
    ("error", "raised", "end"),
    [
        (None, None, "moved"),
        (KeyboardInterrupt(), KeyboardInterrupt, "moved"),
        (KeyboardInterrupt(), KeyboardInterrupt, "kept"),
        (ThreadStartError("no thread"), ThreadStartError, "lost"),
        (JobCancelled(), NotRunningError, "kept"),
    ],
)
def test_the_actors_that_have_the_ring_decide_how_a_rescale_ended(
    error: BaseException | None, raised: type[BaseException] | None, end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Issue: an interrupt left a rescale that ran for ever in the status of the job."""
    shared = SimpleNamespace(lock=threading.Condition(), history=History())
    job: Any = object.__new__(Job)
    job._exchange, job._options = job_of_two(), SimpleNamespace(drain_timeout_s=5.0)
    coordinator = SimpleNamespace(epoch=0, consumers=SimpleNamespace(shared=shared))
    job._run = SimpleNamespace(coordinator=coordinator)

    def move(*_: object) -> float:
        if end != "kept":
            job._exchange.actor_slots = job._exchange.actor_slots * 2
        if end == "lost":
            job._exchange.error = error
        if error is not None:
            raise error
        return 7.0

    monkeypatch.setattr(job, "_move", move)
    with nullcontext() if raised is None else pytest.raises(raised):
        job._rescale(4)
    history = shared.history.status(time.monotonic())
    assert history["rescaling"] is None
    (one,) = history["rescales"]
    assert (one["end"], one["pauseMillis"]) == (end, 7.0 if raised is None else None)
    assert (one["movedFraction"] > 0) == (end == "moved")


def test_messages_of_an_entry_that_actors_share_are_committed_as_they_are_taken() -> None:
    """Otherwise a restart would repeat them after newer messages of their key."""
    job = JobState([ActorSlot(index, SimpleNamespace()) for index in range(2)], 1, 0.0, 1_000_000)
    job.push([(WHERE, block(1, 0, KEYS[0], KEYS[1], KEYS[0]))])
    pieces = [job.next_rows(actor) for actor in job.actor_slots]
    assert pieces[0] is not None
    assert pieces[1] is not None
    of_each = [Done(job.actor_slots[index], one, []) for index, one in enumerate(pieces)]
    job.push([(WHERE, block(1, 1, KEYS[1]))])
    job.taken(of_each[1], pieces[1])
    (whole,) = job.next_rows(job.actor_slots[1])
    job.taken(Done(job.actor_slots[1], [whole], []), [whole])
    assert job.next_to_commit() == ({WHERE: [(1, 1)]}, [(WHERE, (1, 0), 1)])
    job.taken(of_each[0], pieces[0])
    assert job.next_to_commit() == ({WHERE: [(1, 0)]}, [(WHERE, (1, 0), 0), (WHERE, (1, 0), 2)])
    job.stop()
    assert job.next_to_commit() == ({}, [])
