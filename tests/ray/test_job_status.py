"""A running Ray job as others see it: control socket, ``keyshard status``, history of rescales."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import ray_adapter
from keyshard import Message
from keyshard.broker.memory import Message as Stored
from keyshard.cli import main
from keyshard.control import running_sources
from keyshard.core.rescale_history import RescaleStatus, RunningRescaleStatus
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import DrainTimeoutError
from keyshard.observe.status_types import Status
from tests.helpers import key_in, present, wait_until
from tests.ray.ray_topic import RayTopic, Result, key_and_seq
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import deadline, joined

pytestmark = [pytest.mark.ray]

KEYS = [key_in(hash_range) for hash_range in split_ring(2)]


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    """No control socket of another test is in the folder."""
    with own_control_folder():
        yield


class Waits:
    """A handler that works on messages of one key until a file exists.

    Args:
        file: The file.
        key: The key; ``None`` for all.
    """

    def __init__(self, file: Path, key: str | None = None) -> None:
        self.file, self.key = file, key

    def __call__(self, message: Message) -> Result:
        until_s = time.monotonic() + 600
        while self.key in (None, message.key) and not self.file.exists():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return key_and_seq(message)


def publish(orders: RayTopic, key: str, count: int) -> None:
    messages = [Stored(f"{key}:{orders.sent[key] + n}:".encode(), key=key) for n in range(count)]
    orders.sent[key] += count
    orders.cluster.publish(orders.topic, *messages)


def shown() -> Status:
    """The status from the control socket."""
    (found,) = running_sources()
    assert (found.kind, found.pid) == ("ray", os.getpid())
    status: Status = found.ask("status")
    return status


def test_a_running_job_and_its_actors_are_found_from_outside(
    orders: RayTopic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    source = orders.source(parallelism=2, name="scores")
    with ray_adapter.run(source, partial(Waits, go, KEYS[1]), max_rows=1) as job:
        publish(orders, KEYS[1], 5)
        wait_until(lambda: shown()["handlerSlots"][1]["waiting"] == 4)
        status = shown()
        assert (status["kind"], status["name"], status["workers"]) == ("ray", "scores", 2)
        free, busy = status["handlerSlots"]
        assert [one["hashRange"] for one in (free, busy)] == list(map(str, split_ring(2)))
        assert (free["state"], free["used"], free["runningSeconds"]) == ("free", 0, None)
        assert (busy["state"], busy["inFlight"], busy["handled"]) == ("busy", 1, 0)
        wait_until(lambda: (shown()["handlerSlots"][1]["runningSeconds"] or 0) > 0.5)
        pids = {free["pid"], busy["pid"], os.getpid(), None}
        assert len(pids) == 4, "two actors, and this process"
        assert free["host"] == busy["host"] == socket.gethostname()
        range_ = status["ranges"][1]
        assert (range_["waiting"], range_["inFlight"], range_["handled"]) == (4, 1, 0)
        assert (range_["state"], status["ranges"][0]["state"]) == ("running", "idle")
        own = job.status()
        assert (own["version"], own["state"], own["sink"]) == (1, "running", None)
        assert [one["pid"] for one in own["actors"]] == [free["pid"], busy["pid"]]
        with pytest.raises(SystemExit):
            main(["status", "scores"])
        lines = capsys.readouterr().out.splitlines()
        assert any(f"{busy['pid']} on" in one and " busy " in one for one in lines)
        go.touch()
        orders.take(job, job)
    orders.check_taken()
    assert running_sources() == []


def test_an_actor_that_died_is_seen_from_outside(orders: RayTopic, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with ray_adapter.run(orders.source(parallelism=1), partial(Waits, go)) as job:
        publish(orders, KEYS[0], 1)
        wait_until(lambda: shown()["handlerSlots"][0]["inFlight"] == 1)
        killed = present(shown()["handlerSlots"][0]["pid"])
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: shown()["handlerSlots"][0]["restarts"] == 1)
        wait_until(lambda: shown()["handlerSlots"][0]["pid"] not in (None, killed))
        wait_until(lambda: shown()["handlerSlots"][0]["state"] == "busy")
        go.touch()
        orders.take(job, job)
    orders.check_taken()


def test_rescales_of_actors_are_in_the_history(orders: RayTopic, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with ray_adapter.run(
        orders.source(parallelism=2, name="scores"), partial(Waits, go),
        parallelism=2, drain_timeout_s=deadline(30),
    ) as job:  # fmt: skip
        publish(orders, KEYS[0], 3)
        wait_until(lambda: shown()["handlerSlots"][0]["used"] == 1)
        rescale = threading.Thread(target=job.rescale, args=(3,))
        rescale.start()
        wait_until(lambda: (now := running()) is not None and now["phases"][-1]["phase"] == "drain")
        now = present(running())
        assert (now["asked"], now["before"], now["after"]) == ({"actors": 3}, 2, 3)
        assert [one["phase"] for one in now["phases"]] == ["start", "drain"]
        assert now["waitsFor"] is None
        go.touch()
        joined(rescale, deadline(60))
        moved = last()
        assert (moved["asked"], moved["end"], moved["error"]) == ({"actors": 3}, "moved", "")
        assert [one["phase"] for one in moved["phases"]] == ["start", "drain", "adopt"]
        # The parts from 0 to 1/3 and from 1/2 to 2/3 stay.
        assert moved["movedFraction"] == pytest.approx(0.5, abs=1e-3)
        assert 0 < present(moved["pauseMillis"]) <= moved["durationMillis"]
        assert (running(), len(shown()["handlerSlots"])) == (None, 3)
        assert {one["waiting"] for one in shown()["ranges"]} == {None}, "two ranges, three actors"
        job.rescale(3)
        assert (last()["end"], last()["movedFraction"]) == ("unchanged", 0)
        orders.take(job, job)
    orders.check_taken()


def test_a_rescale_that_failed_has_its_reason_in_the_history(
    orders: RayTopic, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with ray_adapter.run(
        orders.source(parallelism=1), partial(Waits, go),
        num_cpus=1, start_timeout_s=deadline(60), drain_timeout_s=0.1,
    ) as job:  # fmt: skip
        publish(orders, KEYS[0], 1)
        wait_until(lambda: shown()["handlerSlots"][0]["used"] == 1)
        with pytest.raises(DrainTimeoutError) as late:
            job.rescale(2)
        kept = last()
        assert (kept["end"], kept["error"]) == ("kept", late.value.message)
        assert [one["phase"] for one in kept["phases"]] == ["start", "drain"]
        assert (kept["pauseMillis"], kept["movedFraction"]) == (None, 0)
        go.touch()
        orders.take(job, job)
    orders.check_taken()


def running() -> RunningRescaleStatus | None:
    return present(shown()["history"])["rescaling"]


def last() -> RescaleStatus:
    return present(shown()["history"])["rescales"][-1]
