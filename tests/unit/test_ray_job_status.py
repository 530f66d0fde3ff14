"""The slot of each actor of a Ray job, and the ranges that have an actor of the same slots."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import RangeFacts, RangeWatchdog, load_of, state_of
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import split_ring
from keyshard.handlers.range_owners import RangeOwners
from keyshard.observe.handler_view import Ownership
from ray_adapter.job_state import UNTAKEN_MAX, ActorSlot, JobResults, JobState, JobStatus
from tests.helpers import block, key_in

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
        "restarts": 0, "untakenCalls": 1,
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
    owners = RangeOwners(slots=job.slots)
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


def test_an_actor_may_work_for_hours_without_a_stall() -> None:
    """Nobody knows how long a call with many rows usually takes, such as to a model."""
    watchdog, job = RangeWatchdog(), job_of_two()
    usual_s, _ = RangeOwners().pace()
    facts = ranges_of(2, job)
    assert watchdog.look(0.0, facts, usual_s=usual_s) == []
    assert watchdog.look(10_000.0, facts, usual_s=usual_s) == []


def test_each_field_of_the_status_of_a_job_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    table = page.partition("| field of a job | meaning |")[2].partition("\nFields")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in row[1].replace("`", "").split(",")]
    assert [name.strip() for name in documented] == list(get_type_hints(JobStatus))
    for name in get_type_hints(JobResults):
        assert f"`{name}`" in rows[-1][2]
