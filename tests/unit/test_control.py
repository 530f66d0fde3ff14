"""The control socket: found by name, private, bounded, and clear when something is wrong."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from keyshard import control, control_folder
from keyshard.control import (
    CONNECTIONS_MAX,
    REQUEST_BYTES_MAX,
    ControlServer,
    running_source,
    running_sources,
)
from keyshard.errors import ConfigError, ControlError, KeyShardError, ThreadStartError
from keyshard.threads import owned_by
from tests.helpers import wait_until
from tests.support.control_folder import own_control_folder
from tests.support.deadlines import deadline

CANDIDATES = control_folder.candidates
URL = "pulsar://127.0.0.1:6650"


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with own_control_folder() as made:
        yield made


def echo(request: Mapping[str, Any]) -> Any:
    return {"told": request["text"]}


def refuse(_request: Mapping[str, Any]) -> Any:
    raise ConfigError("parallelism is 0; it must be an integer from 1 to 65536.")


def serve(subscription: str = "orders", url: str = URL, topics: str = "t") -> ControlServer:
    return ControlServer(subscription, url, topics, {"echo": echo, "refuse": refuse})


def raw(path: Path, sent: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(sent)
        return json.loads(connection.makefile().readline())  # type: ignore[no-any-return]


def test_a_source_is_found_by_its_subscription_and_answers() -> None:
    server = serve()
    other = serve("bills")
    try:
        found = running_source("orders")
        assert (found.subscription, found.service_url, found.topics) == ("orders", URL, "t")
        assert found.pid == os.getpid()
        assert found.ask("echo", text="hä") == {"told": "hä"}
        assert {one.subscription for one in running_sources()} == {"orders", "bills"}
    finally:
        server.close()
        other.close()
    with pytest.raises(ControlError, match="No running source of 'orders'"):
        running_source("orders")


def test_a_forked_child_leaves_the_socket_to_its_parent() -> None:
    """Issue: a child that left its ``with`` block removed the socket of its parent."""
    server = serve()
    child = os.fork()
    if not child:
        try:
            server.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    try:
        assert running_source("orders").ask("echo", text="here") == {"told": "here"}
    finally:
        server.close()


def test_a_source_is_found_without_a_runtime_folder(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(control_folder, "candidates", CANDIDATES)
    monkeypatch.setattr(tempfile, "tempdir", str(folder.parent))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    server = serve()
    try:
        assert server.path.parent == folder.parent / f"keyshard-{os.getuid()}"
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
        assert running_source("orders").path == server.path
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/folder")
        assert running_source("orders").path == server.path
    finally:
        server.close()


def test_socket_and_folder_are_for_this_user_alone(folder: Path) -> None:
    server = serve()
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
        folder.chmod(0o755)
        assert running_sources() == [], "somebody else may have put it there"
        with pytest.raises(ControlError, match="private folder of this user"):
            serve()
    finally:
        server.close()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can")
def test_another_user_is_refused_also_where_folder_and_socket_are_open(folder: Path) -> None:
    server = serve()
    try:
        for path in (server.path, *server.path.parents[:-2]):
            path.chmod(0o777)
        program = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
            "made = socket.socket(socket.AF_UNIX); made.settimeout(20);"
            'made.connect(sys.argv[1]); made.sendall(b\'{"do": "who"}\\n\');'
            "print(made.recv(100))"
        )
        asked = [sys.executable, "-c", program, str(server.path)]
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=deadline(60), check=False
        )
        assert "connect" not in done.stderr.rpartition("\n")[2]
        assert "b''" in done.stdout or "Broken" in done.stderr or "reset" in done.stderr
        assert raw(server.path, b'{"do": "who"}\n')["ok"]
    finally:
        server.close()


def test_two_sources_of_one_name_are_distinguished_by_cluster_or_pid() -> None:
    servers = [serve(topics="a"), serve(url="pulsar://other:6650", topics="b")]
    try:
        with pytest.raises(ControlError, match=r"(?s)2 sources match.*on a.*--pid") as caught:
            running_source("orders")
        assert "'orders' on b at pulsar://other:6650" in str(caught.value)
        assert running_source("orders", service_url=URL).topics == "a"
        with pytest.raises(ControlError, match="No running source"):
            running_source("orders", URL, pid=1)
    finally:
        for server in servers:
            server.close()


def test_an_error_of_the_source_keeps_its_class_and_text() -> None:
    server = serve()
    try:
        with pytest.raises(ConfigError, match="must be an integer from 1 to 65536") as caught:
            running_source("orders").ask("refuse")
        assert str(caught.value).count("[KEYSHARD") == 1
        with pytest.raises(ControlError, match="commands are: echo, refuse, who"):
            running_source("orders").ask("nonsense")
        with pytest.raises(ControlError, match="KeyError"):
            running_source("orders").ask("echo")
    finally:
        server.close()


@pytest.mark.parametrize("sent", [b"no json\n", b"[1]\n", b"\xff\xfe\n", b"{}\n", b"null\n"])
def test_an_invalid_request_is_refused_and_the_next_is_served(sent: bytes) -> None:
    server = serve()
    try:
        assert raw(server.path, sent)["ok"] is False
        assert running_source("orders").ask("echo", text="x") == {"told": "x"}
    finally:
        server.close()


def test_a_request_has_a_longest_size() -> None:
    server = serve()
    try:
        output = raw(server.path, b"x" * (REQUEST_BYTES_MAX + 1))
        assert "exceeds" in output["error"]
    finally:
        server.close()


def test_a_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_S", 0.2)
    server = serve()
    try:
        output = raw(server.path, b'{"do": "echo", ')
        assert output["code"] == "KEYSHARD_CONTROL"
    finally:
        server.close()


def test_connections_are_bounded_and_slow_ones_do_not_block_others() -> None:
    held = threading.Event()
    asked = threading.Semaphore(0)

    def hang(_request: Mapping[str, Any]) -> Any:
        asked.release()
        held.wait(deadline(30))
        return "late"

    server = ControlServer("orders", URL, "t", {"hang": hang, "echo": echo})
    source = running_source("orders")
    answers: list[str] = []
    askers = [
        threading.Thread(target=lambda: answers.append(source.ask("hang")))
        for _ in range(CONNECTIONS_MAX)
    ]
    try:
        askers[0].start()
        assert asked.acquire(timeout=deadline(20))
        assert source.ask("echo", text="x") == {"told": "x"}
        for asker in askers[1:]:
            asker.start()
        for _ in askers[1:]:
            assert asked.acquire(timeout=deadline(20))
        with pytest.raises(ControlError, match="too many concurrent requests"):
            source.ask("echo", text="x")
    finally:
        held.set()
        for asker in askers:
            asker.join(deadline(20))
        server.close()
    assert answers == ["late"] * CONNECTIONS_MAX


def test_an_answer_has_a_deadline() -> None:
    held = threading.Event()
    server = ControlServer("orders", URL, "t", {"hang": lambda _request: held.wait(30)})
    try:
        with pytest.raises(ControlError, match="does not answer"):
            running_source("orders").ask("hang", timeout_s=0.1)
    finally:
        held.set()
        server.close()


def test_sources_sinks_and_workers_are_asked_at_the_same_time() -> None:
    together = threading.Barrier(3)
    servers = [
        ControlServer("orders", URL, "t", {}, kind=kind)
        for kind in ("handlers", control.SINK, control.WORKER)
    ]

    def waits(server: ControlServer) -> control.Handler:
        def answer(_request: Mapping[str, Any]) -> Any:
            together.wait(deadline(20))
            return server._who

        return answer

    try:
        for one in servers:
            one._handlers = {"who": waits(one)}
        found, errors = control.answering_sources(deadline(20), control.ANY)
        assert errors == []
        assert {one.kind_word for one in found} == {"source", "sink", "worker"}
    finally:
        for one in servers:
            one.close()


OTHER = """
import sys, time
from keyshard.control import ControlServer
server = ControlServer("orders", "pulsar://127.0.0.1:6650", "t", {})
print(server.path, flush=True)
time.sleep(120)
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait(deadline(20))
    assert process.stdout is not None
    process.stdout.close()


def test_leftovers_of_a_killed_process_are_removed(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    path = Path(other.stdout.readline().strip())
    assert running_source("orders").pid == other.pid
    other.kill()
    other.wait(deadline(20))
    assert path.exists()
    wait_until(lambda: running_sources("orders") == [])
    assert not path.exists()


def test_a_stopped_process_is_named(
    other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.stdout is not None
    other.stdout.readline()
    monkeypatch.setattr(control, "ANSWER_S", 0.3)
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(ControlError, match=f"Process {other.pid} has a control socket"):
        running_source("orders")
    other.send_signal(signal.SIGCONT)
    monkeypatch.setattr(control, "ANSWER_S", deadline(20))
    assert running_source("orders").pid == other.pid


def test_two_processes_with_one_subscription_are_distinguished(
    other: subprocess.Popen[str],
) -> None:
    assert other.stdout is not None
    other.stdout.readline()
    server = serve()
    try:
        with pytest.raises(ControlError, match=f"(?s)pid {other.pid}.*--pid"):
            running_source("orders")
        assert running_source("orders", pid=os.getpid()).path == server.path
    finally:
        server.close()


def test_closing_twice_is_fine_and_removes_the_socket(folder: Path) -> None:
    server = serve()
    server.close()
    server.close()
    assert list(folder.iterdir()) == []


def test_requests_for_which_no_thread_starts_do_not_end_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[KeyShardError] = []
    refused: list[str] = []

    def full(name: str, *_: object) -> None:
        refused.append(name)
        raise ThreadStartError("can't start new thread")

    with owned_by(errors.append):
        server = serve()
    try:
        with monkeypatch.context() as exhausted:
            exhausted.setattr(control, "begin", full)
            for _ in range(2 * CONNECTIONS_MAX):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(20)
                    connection.connect(str(server.path))
                    assert connection.recv(1) == b""
        assert raw(server.path, b'{"do": "echo", "text": "x"}\n')["ok"]
    finally:
        server.close()
    assert (len(refused), errors) == (2 * CONNECTIONS_MAX, [])


def test_a_server_whose_thread_cannot_be_started_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def full(name: str, *_: object) -> None:
        raise ThreadStartError(f"{name} cannot be started")

    monkeypatch.setattr(control, "begin", full)
    with pytest.raises(ThreadStartError):
        serve()
    gc.collect()  # an open socket would be a warning, and so an error
    assert list(folder.iterdir()) == []


def test_an_unexpected_error_closes_the_connection_and_ends_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: socket.socket) -> bool:
        raise MemoryError

    errors: list[KeyShardError] = []
    monkeypatch.setattr(control, "_of_another_user", broken)
    with owned_by(errors.append):
        server = serve()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(str(server.path))
            assert connection.recv(1) == b""
        wait_until(lambda: errors)
    finally:
        server.close()
