"""A running source pauses and resumes: it receives nothing, loses nothing, and stays connected."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from keyshard import Message
from keyshard.broker.memory import Message as Stored
from keyshard.cli import main
from keyshard.control import running_source
from keyshard.core import range_watchdog
from keyshard.errors import ConfigError, NotRunningError
from keyshard.observe import monitor
from tests.helpers import present, started, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic
from tests.support.recorded_handler import RecordedHandler

pytestmark = pytest.mark.usefixtures("control_folder")

WAITING = 50
"""Messages that a running source would not leave at the broker."""
MakeRecorded = Callable[..., RecordedHandler]


def handle(message: Message) -> None:
    """Succeed."""


def paused(recorded: RecordedHandler) -> int:
    """Wait until messages only wait at the broker; return how many were handled."""
    wait_until(lambda: recorded.backlog() >= 200)
    wait_until(lambda: present(recorded.source.status()["window"])["windowRows"] == 0)
    handled = recorded.count
    for _ in range(20):
        threading.Event().wait(0.01)
        assert recorded.count == handled
    return handled


@pytest.mark.simulated
def test_a_paused_source_receives_nothing_and_loses_nothing(make_recorded: MakeRecorded) -> None:
    recorded = make_recorded(handle)
    source = recorded.source
    recorded.keep_publishing()
    recorded.more()
    source.pause()
    source.pause()
    paused(recorded)
    status = source.status()
    assert status["state"] == "paused"
    assert {(each["state"], each["reason"]) for each in status["ranges"]} == {
        ("paused", "the source is paused until keyshard resume")
    }
    assert all(each["covered"] for each in status["partitions"]), "consumers stay connected"
    source.resume()
    source.resume()
    recorded.more(1_000)
    assert source.status()["state"] == "running"
    recorded.check()


@pytest.mark.simulated
def test_a_rescale_of_a_paused_source_leaves_it_paused(make_recorded: MakeRecorded) -> None:
    recorded = make_recorded(handle)
    recorded.keep_publishing()
    recorded.more()
    recorded.source.pause()
    handled = paused(recorded)
    recorded.rescale(7)
    assert recorded.source.status()["state"] == "paused"
    assert paused(recorded) == handled
    recorded.source.resume()
    recorded.more(1_000)
    recorded.check()


def test_a_paused_source_stops_and_a_restart_is_not_paused(make_recorded: MakeRecorded) -> None:
    recorded = make_recorded(handle)
    recorded.keep_publishing()
    recorded.more()
    recorded.source.pause()
    handled = paused(recorded)
    recorded.source.stop()
    recorded.thread.join(deadline(20))
    assert not recorded.thread.is_alive()
    assert recorded.count == handled
    with pytest.raises(NotRunningError):
        recorded.source.resume()


class Paused:
    """A source in a thread whose handler waits on the value ``hang``."""

    def __init__(self) -> None:
        self.topic = MemoryTopic()
        self.source = self.topic.source(
            subscription="jobs", parallelism=2, admin_url=self.topic.url
        )
        self.release, self.begun = threading.Event(), threading.Event()
        self.handled: list[bytes | None] = []

    def handle(self, message: Message) -> None:
        self.begun.set()
        if message.value == b"hang":
            assert self.release.wait(deadline(60))
        self.handled.append(message.value)

    def publish(self, value: bytes) -> None:
        self.topic.cluster.publish(self.topic.topic, Stored(value, key="a"))

    def backlog(self) -> int:
        return self.topic.backlog("jobs")

    def publish_until_many_wait(
        self, value: bytes, take: Callable[[], object] = lambda: None
    ) -> int:
        """Publish until the paused source leaves many; a receive that has begun may take some.

        Args:
            value: The value of each message.
            take: Takes received rows and acknowledges them.

        Returns:
            The number of messages that were published.
        """
        published = 0

        def many_wait() -> bool:
            nonlocal published
            published += 1
            self.publish(value)
            take()
            return self.backlog() >= WAITING

        wait_until(many_wait)
        return published


@pytest.fixture
def job() -> Paused:
    return Paused()


def test_a_message_in_flight_is_finished_and_acknowledged_without_an_alert(
    job: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "LOOK_S", 0.02)
    monkeypatch.setattr(range_watchdog, "STALL_S", 0.2)
    with job.source.running(job.handle, metrics_port=0):
        port = present(job.source.__dict__["_running"]._monitor).metrics_port

        def probe(path: str) -> httpx.Response:
            return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)

        job.publish(b"hang")
        assert job.begun.wait(deadline(20))
        job.source.pause()
        job.release.set()
        wait_until(lambda: job.backlog() == 0)
        assert job.handled == [b"hang"]
        published = job.publish_until_many_wait(b"later")
        looks = 0

        def looked(ranges: list[Any]) -> bool:
            nonlocal looks
            assert [each["stalled"] for each in ranges] == [None, None]
            looks += 1
            return looks >= 50

        wait_until(lambda: looked([dict(each) for each in job.source.status()["ranges"]]))
        assert probe("/livez").status_code == 200
        assert probe("/readyz").status_code == 200
        assert 'keyshard_paused{subscription="jobs"} 1' in probe("/metrics").text
        assert job.backlog() >= WAITING
        job.source.resume()
        wait_until(lambda: job.handled == [b"hang"] + [b"later"] * published)
        assert 'keyshard_paused{subscription="jobs"} 0' in probe("/metrics").text


def test_commands_pause_and_resume_a_source(
    job: Paused, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    with job.source.running(job.handle):
        assert "'jobs'" in command("pause", "--subscription", "jobs")
        assert command("status", "jobs").startswith("paused: 'jobs'")
        assert command("pause", "--json") == '{"paused": true}\n'
        assert "receives again" in command("resume")
        assert job.source.status()["state"] == "running"


def test_batches_pause_too(job: Paused) -> None:
    batches = job.source.batches(max_rows=1, max_wait_s=0.01)
    job.publish(b"1")
    next(batches).ack()
    job.source.pause()
    taken = 0

    def take() -> None:
        nonlocal taken
        for batch in batches:
            batch.ack()
            taken += 1

    thread = threading.Thread(target=take)
    thread.start()
    try:
        published = job.publish_until_many_wait(b"2")
        assert job.source.status()["state"] == "paused"
        job.source.resume()
        wait_until(lambda: taken == published)
    finally:
        job.source.stop()
        thread.join(deadline(20))


def test_a_bounded_run_and_a_source_that_starts_are_refused(job: Paused) -> None:
    coordinator = job.source.coordinator()
    with pytest.raises(NotRunningError, match="starting"):
        coordinator.pause()
    job.publish(b"1")
    with started(coordinator, available_now=True):
        with pytest.raises(ConfigError, match="bounded run"):
            coordinator.pause()
        coordinator.resume()


def test_a_stream_pauses_by_its_methods_and_by_commands(job: Paused) -> None:
    values: list[bytes] = []

    def take(timeout_s: float = 0) -> int:
        batch = stream.next_batch(timeout_s)
        if batch is not None:
            values.extend(value for rows in batch for value in rows["value"].to_pylist())
            stream.commit(batch)
        return len(values)

    with job.source.open() as stream:
        control = running_source("jobs")
        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (stream.pause, stream.resume),
            (lambda: control.ask("pause"), lambda: control.ask("resume")),
        ]
        published = 0
        for pause, resume in pairs:
            job.publish(b"before")
            published += 1
            assert take(deadline(60)) == published
            pause()
            pause()
            assert control.ask("status")["state"] == "paused"
            published += job.publish_until_many_wait(b"after", take)
            assert take(0.2) == published - WAITING
            wait_until(lambda: control.ask("status")["lag"]["entries"] == WAITING)
            resume()
            resume()
            assert control.ask("status")["state"] == "running"
            wait_until(lambda: take(0.1) and job.backlog() == 0)
            assert len(values) == published
    for call in (stream.pause, stream.resume):
        with pytest.raises(NotRunningError, match="The stream is closed"):
            call()
