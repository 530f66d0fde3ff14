"""Metrics and probes that a source serves from its start to its end."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import Broker
from keyshard.cli import main
from keyshard.control import running_source, running_sources
from keyshard.coordinator.coordinator import Coordinator
from keyshard.errors import NotRunningError
from keyshard.observe import status as status_module
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.watched_job import KEYS, RANGES, Job

pytestmark = pytest.mark.usefixtures("control_folder")


def test_metrics_are_served_while_it_runs(job: Job) -> None:
    job.start(metrics_port=0)
    port = job.source.__dict__["_running"]._monitor.metrics_port
    url = f"http://127.0.0.1:{port}/metrics"
    job.publish(*((key, b"fine") for key in KEYS))
    wait_until(
        lambda: (
            'keyshard_messages_completed_total{subscription="jobs"} 4.0'
            in httpx.get(url, trust_env=False).text
        )
    )
    count = 'keyshard_handler_seconds_count{subscription="jobs"} 4.0'
    assert count in httpx.get(url, trust_env=False).text
    job.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


class HeldUp(KeyShardSource):
    """A source whose broker takes its time to connect."""

    def coordinator(self) -> Coordinator:
        return Coordinator(self, self.__dict__["_connect"])


def test_a_starting_source_reports_its_start_and_takes_nothing(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect() -> Broker:
        assert job.release.wait(deadline(60))
        return MemoryBroker(job.cluster)

    job.source = HeldUp(job.topic, subscription="jobs", parallelism=RANGES, service_url=job.url)
    object.__setattr__(job.source, "_connect", connect)
    thread = threading.Thread(target=job.source.run, args=[job.handle], kwargs={"metrics_port": 0})
    thread.start()
    wait_until(lambda: running_sources("jobs"))
    status = job.source.status()
    assert (status["state"], status["ranges"], status["partitions"]) == ("starting", [], [])
    assert (status["parkedKeys"], status["malformedDeadLetters"]) == (None, None)
    with pytest.raises(SystemExit):
        main(["status", "jobs"])
    assert "starting: 'jobs' on" in capsys.readouterr().out
    requests: list[tuple[str, dict[str, Any]]] = [
        ("rescale", {"ranges": 2}), ("pause", {}), ("resume", {}),
        *((do, {"key": "k"}) for do in ASKS),
    ]  # fmt: skip
    for do, fields in requests:
        with pytest.raises(NotRunningError, match="starting"):
            running_source("jobs").ask(do, **fields)
    assert probe(job, "/livez") == (200, "ok")
    assert probe(job, "/readyz") == (503, "The source is starting.")
    job.release.set()
    wait_until(lambda: job.source.status()["state"] == "running")
    assert probe(job, "/readyz") == (200, "ok")
    job.source.stop()
    thread.join(deadline(30))
    assert not thread.is_alive()


ASKS = ("explain", "unpark")


def probe(job: Job, path: str) -> tuple[int, str]:
    port = job.source.__dict__["_running"]._monitor.metrics_port
    answer = httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False)
    return answer.status_code, answer.text.strip()


def test_probes_show_the_state_of_the_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start(metrics_port=0, drain_timeout_s=60)
    assert probe(job, "/readyz") == (200, "ok")
    partitions = job.cluster.partitions(job.topic)
    (client,) = job.cluster._clients
    consumers = client.drop(partitions)
    wait_until(lambda: probe(job, "/readyz")[0] == 503)
    assert probe(job, "/readyz")[1] == (
        f"Some consumers are not connected to {partitions[0]} and 1 more."
    )
    assert probe(job, "/livez") == (200, "ok"), "a restart would not bring the broker back"
    client.reconnect(consumers)
    wait_until(lambda: probe(job, "/readyz") == (200, "ok"))
    monkeypatch.setattr(status_module, "LIVE_S", 0.0)
    assert probe(job, "/livez")[0] == 503
    monkeypatch.undo()
    job.publish((KEYS[0], b"hang"))
    wait_until(lambda: job.hung)
    job.source.stop()
    assert probe(job, "/readyz") == (503, "The source is stopping.")
    assert probe(job, "/livez") == (200, "ok")


def test_a_metrics_port_that_is_taken_ends_the_run_with_an_error(job: Job) -> None:
    job.start(metrics_port=0)
    port = job.source.__dict__["_running"]._monitor.metrics_port
    other = Job()
    with pytest.raises(AssertionError, match="metrics_port"):
        other.start(metrics_port=port)
    assert other.run is not None
    other.run.thread.join(deadline(30))
    assert not other.run.thread.is_alive()
