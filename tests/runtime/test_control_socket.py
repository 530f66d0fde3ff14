"""Commands and programs that reach a running source by its control socket."""

from __future__ import annotations

import json

import pytest
import tenacity

from keyshard import KeyShardSource, RetryPolicy
from keyshard.cli import main
from keyshard.control import running_source, running_sources
from keyshard.errors import ConfigError, ControlError, NotRunningError, TopicNotFoundError
from keyshard.observe.status_types import Status
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.watched_job import KEYS, RANGES, Job

pytestmark = pytest.mark.usefixtures("control_folder")


def test_a_stream_of_open_is_found_by_its_name_until_it_is_closed(job: Job) -> None:
    job.source = KeyShardSource(
        job.topic, subscription="jobs", name="invoices", parallelism=2, service_url=job.url,
        admin_url=job.url, starting_position="earliest",
    )  # fmt: skip
    job.publish(*((key, b"1") for key in KEYS))
    with job.source.open() as stream:
        found = running_source("invoices")
        assert (found.kind, found.subscription) == ("stream", "jobs")
        wait_until(lambda: found.ask("status")["window"]["windowRows"] == len(KEYS))
        status: Status = found.ask("status")
        assert (status["state"], status["kind"], status["executor"]) == (
            "running", "stream", "batches",
        )  # fmt: skip
        assert [each["hashRanges"] for each in status["ranges"]] == [["0-32767"], ["32768-65535"]]
        wait_until(lambda: (found.ask("status")["lag"]["seconds"] or 0) > 0)
        assert found.ask("explain", key=KEYS[0])["range"] == 0
        with pytest.raises(ConfigError, match="fixed while it runs"):
            found.ask("rescale", ranges=4)
        batch = present(stream.next_batch(timeout_s=deadline(20)))
        stream.commit(batch)
        wait_until(lambda: found.ask("status")["lag"]["rows"] == 0)
        wait_until(lambda: found.ask("status")["rates"]["received"] is not None)
        rates = found.ask("status")["rates"]
        assert (rates["completed"], rates["failedAttempts"]) == (None, None), "no handlers"
    assert running_sources() == []


def test_a_rescale_is_planned_without_a_move(job: Job) -> None:
    job.start()
    source = running_source("jobs")
    assert source.ask("rescale", ranges=8, dry_run=True) == {
        "before": 4, "after": 8, "movedFraction": 0.5, "moves": 4,
    }  # fmt: skip
    assert job.status()["epoch"] == 0
    for wrong in ({}, {"balance": True}, {"ranges": "8"}):
        with pytest.raises(ConfigError, match="dry_run needs"):
            source.ask("rescale", dry_run=True, **wrong)
    with pytest.raises(ConfigError, match="70000"):
        source.ask("rescale", dry_run=True, ranges=70_000)


def test_a_stream_that_does_not_start_leaves_no_control_socket(job: Job) -> None:
    source = KeyShardSource("no-such-topic", subscription="jobs", service_url=job.url)
    with pytest.raises(TopicNotFoundError):
        source.open()
    assert running_sources() == []


def test_the_commands_reach_a_running_source_until_it_ends(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start()
    job.publish((KEYS[0], b"hang"))
    wait_until(lambda: job.hung)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        assert caught.value.code in (None, 0)
        return capsys.readouterr().out

    assert json.loads(run("status", "jobs", "--json"))["subscription"] == "jobs"
    assert "'jobs' on" in run("status")
    assert f"lane    running, message {job.hung[0].message_id}" in run("explain", KEYS[0])
    assert "4 ranges to 8: 50.0% of the ring moves" in run("rescale", "8", "--dry-run")
    job.stop()
    with pytest.raises(ControlError):
        running_source("jobs")
    assert running_sources() == []
    with pytest.raises(NotRunningError):
        job.source.status()


ONCE = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))


def test_a_parked_key_is_shown_and_unparked_by_command(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start(retry=ONCE)
    job.publish((KEYS[1], b"fail"), (KEYS[1], b"behind"))
    parked = {"key": KEYS[1], "deadLetters": 2}
    wait_until(lambda: job.status()["parked"] == [parked])
    assert job.status()["parkedKeys"] == 1
    counters = {
        "completed": 0,
        "failedAttempts": 1,
        "parked": 2,
        "deadLettered": 2,
        "rejected": 0,
        "observerErrors": 0,
        "outputsPublished": None,
        "outputsConfirmed": None,
        "outputsFailed": None,
    }
    wait_until(lambda: job.status()["counters"] == counters)
    assert running_source("jobs").ask("explain", key=KEYS[1])["parked"]
    job.release.set()
    for says in ("Unparking 1 key: 2 dead letters in order", "No parked key matches"):
        with pytest.raises(SystemExit):
            main(["dead-letters", "replay", "--key", KEYS[1]])
        assert says in capsys.readouterr().out
        wait_until(lambda: not job.status()["parked"])
    assert [message.value for message in job.handled] == [b"fail", b"behind"]
    wait_until(lambda: job.status()["counters"] == counters | {"completed": 2})


def test_a_rescale_by_command_is_shown(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.start()
    job.publish((KEYS[0], b"hang"), *((key, b"fine") for key in KEYS))
    wait_until(lambda: len(job.handled) == RANGES - 1 and job.hung)
    job.release.set()
    with pytest.raises(SystemExit) as caught:
        main(["rescale", "5"])
    assert caught.value.code in (None, 0)
    assert "4 ranges to 5: 20.0% of the ring moved, at least 20.0% were necessary" in (
        capsys.readouterr().out
    )
    status = job.status()
    assert (status["epoch"], len(status["ranges"])) == (1, 5)
    assert (status["workers"], status["workersMax"]) == (5 * status["lanes"], 256)
    assert len(status["ranges"][4]["hashRanges"]) == 4
    assert all(each["covered"] for each in status["partitions"])
    job.publish(*((key, b"later") for key in KEYS))
    wait_until(lambda: len(job.handled) == 2 * RANGES + 1)
    with pytest.raises(ConfigError):
        running_source("jobs").ask("rescale", ranges=0)
    with pytest.raises(ConfigError):
        running_source("jobs").ask("rescale")
