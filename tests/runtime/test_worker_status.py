"""A worker process: found by ``keyshard status``, what it holds, and the end of its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyshard import cli
from keyshard.cli import connecting
from keyshard.config.connection import Connection
from keyshard.control import WORKER, ControlServer, RunningSource, answering_sources
from keyshard.workers.encoding import DeliveredTotals
from keyshard.workers.server import WorkerSetup
from keyshard.workers.worker import Worker
from tests.helpers import present, wait_until
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import deadline

URL = "memory://workers"
PROGRAM = """
import json, os, sys
from keyshard.broker.memory import MemoryCluster, Message
from keyshard.workers.server import start_server
cluster = MemoryCluster.named("workers")
topic = cluster.create_topic("orders")
cluster.publish(topic, *(Message(b"%d" % i, key="k") for i in range(5)))
server, hello = start_server(*json.loads(sys.stdin.readline()))
print(hello, flush=True)
server.serve_to_the_end()
os._exit(0)
"""


class Process(Worker):
    """A worker process with an in-memory cluster of its own."""

    def __init__(self) -> None:
        setup = WorkerSetup(Connection(URL), lease_s=600.0, level=30, keeps=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        to = present(self.process.stdin)
        to.write(json.dumps(setup.packed()) + "\n")
        to.flush()
        super().__init__(present(self.process.stdout).readline(), setup.token, "worker process")

    def subscribe(self, number: int, start: int, end: int) -> None:
        self.request(
            "subscribe", 60.0, number=number, topic="persistent://public/default/orders",
            partition=-1, subscription="billing", start=start, end=end, position="earliest",
            consumer_name="c", receiver_queue_size=100,
        )  # fmt: skip

    def finish(self) -> None:
        self.process.kill()
        self.process.wait(deadline(60))
        for pipe in (self.process.stdin, self.process.stdout):
            present(pipe).close()
        self.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with own_control_folder() as made:
        yield made


@pytest.fixture
def worker(folder: Path) -> Iterator[Process]:
    del folder
    made = Process()
    made.subscribe(1, 0, 32_767)
    made.subscribe(2, 32_768, 65_535)
    yield made
    made.finish()


def found() -> list[RunningSource]:
    workers, errors = answering_sources(60.0, WORKER)
    assert errors == []
    return workers


def the_worker() -> RunningSource:
    wait_until(found)
    (one,) = found()
    return one


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_a_worker_is_listed_with_its_consumers(
    worker: Process, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = the_worker()
    assert (one.kind, one.name, one.pid) == ("worker", "billing", worker.process.pid)
    wait_until(lambda: one.ask("status")["waiting"]["messages"] == 5)
    code, out, _ = run(capsys, "status", "--pid", str(worker.process.pid), "--json")
    assert code == 0
    status = json.loads(out)
    assert (status["version"], status["kind"], status["state"]) == (1, "worker", "running")
    assert (status["serviceUrl"], status["newestError"]) == (URL, None)
    assert status["source"] == {"pid": os.getpid(), "host": socket.gethostname()}
    assert status["waiting"]["entries"] == 5
    assert status["waiting"]["bytes"] > 0
    assert status["kept"] == {"messages": 0, "bytes": 0}
    consumers = status["consumers"]
    assert [each["hashRange"] for each in consumers] == ["0-32767", "32768-65535"]
    assert all(each["connected"] and not each["problem"] for each in consumers)
    assert sorted(each["messages"] for each in consumers) == [0, 5]

    taken = worker.take({})
    while not any(delivery.blocks for delivery in taken):
        taken = worker.take({})
    status = one.ask("status")
    assert status["waiting"]["messages"] == 0
    assert status["kept"]["messages"] == 5
    (number,) = {delivery.consumer for delivery in taken if delivery.blocks}
    held = {1: 0, 2: 1}[number]
    assert status["consumers"][held]["messages"] == 5, "not in the window yet"
    worker.take({number: DeliveredTotals(5, 2**40)})
    assert one.ask("status")["consumers"][held]["messages"] == 0

    for named in ([], ["billing"]):
        code, out, _ = run(capsys, "status", *named)
        assert code == 0
        assert f"worker of 'billing' at {URL}, pid {worker.process.pid}" in out
        assert f"of the source with pid {os.getpid()}" in out
        assert "32768-65535" in out
    code, out, _ = run(capsys, "ps", "--json")
    assert [(one["kind"], one["pid"]) for one in json.loads(out)] == [("worker", worker.pid)]
    assert run(capsys, "pause")[0] == 1, "a worker is no source"
    assert len(list(folder.iterdir())) == 1
    worker.leave()
    assert worker.process.wait(deadline(60)) == 0
    assert list(folder.iterdir()) == []


def test_workers_are_listed_below_their_source(
    worker: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(found)
    server = ControlServer("billing", URL, "t", {"status": lambda _request: {}}, kind=WORKER)
    try:
        code, out, err = run(capsys, "status")
        assert code == 0
        assert "Several workers match. Name one: keyshard status --pid PID." in err
        lines = [line for line in out.splitlines() if str(worker.process.pid) in line]
        assert any("running" in line and "2" in line for line in lines)
        assert "cannot be understood" in out, "a worker of another release"
        code, _, err = run(capsys, "status", "--json")
        assert code == 1
        assert "2 workers match" in err
    finally:
        server.close()


def test_a_suspended_worker_is_named_and_the_socket_of_a_killed_one_is_removed(
    worker: Process, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = the_worker()
    monkeypatch.setattr(connecting, "OTHER_S", 0.3)
    worker.process.send_signal(signal.SIGSTOP)
    code, _, err = run(capsys, "ps")
    assert code == 0
    assert f"Process {worker.process.pid} has a control socket, but does not answer" in err
    worker.process.kill()
    worker.process.wait(deadline(60))
    assert one.path.exists()
    wait_until(lambda: found() == [])
    assert not one.path.exists()


def test_hostile_and_slow_clients_hold_no_worker_up(worker: Process) -> None:
    one = the_worker()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.connect(str(one.path))
        slow.sendall(b'{"do"')
        for sent in (b"\x00\n", b"7\n", b'{"do": "leave"}\n', b"x" * 70_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hostile:
                hostile.settimeout(60)
                hostile.connect(str(one.path))
                hostile.sendall(sent)
                assert json.loads(hostile.makefile().readline())["ok"] is False
        assert worker.request("last_entry", 60.0, number=1) is not None
        assert one.ask("status")["state"] == "running"
