"""Requests to many control sockets: a process that hangs delays no other one, and is asked once."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from keyshard import control_requests
from keyshard.control_requests import Requests
from keyshard.errors import ControlError, RuntimeStoppedError
from tests.helpers import wait_until
from tests.support.deadlines import deadline


class Process:
    """A control socket whose answers the test sends.

    Args:
        path: The socket.
        room: Connections that may wait at it.
    """

    def __init__(self, path: Path, room: int = 8) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(room)
        self._socket.settimeout(deadline(20))

    def accept(self) -> socket.socket:
        return self._socket.accept()[0]

    def asked(self) -> bool:
        """Whether a request waits that was not accepted."""
        self._socket.settimeout(0)
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            return False
        finally:
            self._socket.settimeout(deadline(20))
        return True

    def close(self) -> None:
        self._socket.close()


def told(result: Any) -> bytes:
    return json.dumps({"ok": True, "result": result}).encode() + b"\n"


@pytest.fixture
def requests() -> Iterator[Requests]:
    with closing(Requests()) as made:
        yield made


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    with closing(Process(tmp_path / "a")) as made:
        yield made


def result(requests: Requests, process: Process, wait_s: float = 0.05) -> Any:
    key = process.path, "status"
    return requests.ask([key], wait_s)[key].result()


def test_a_request_that_waits_is_not_sent_again_and_delays_one_call(
    requests: Requests, process: Process
) -> None:
    with pytest.raises(TimeoutError, match="its request has waited for 0 s"):
        result(requests, process)
    began_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            result(requests, process, deadline(30))
    assert time.monotonic() - began_s < deadline(30)
    with process.accept() as connection:
        assert connection.recv(100) == b'{"do": "status"}\n'
        assert not process.asked()
        connection.sendall(told(7))
        assert result(requests, process) == 7
    assert not process.asked()


def test_an_answer_that_came_while_nobody_asked_is_asked_for_again(
    requests: Requests, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TimeoutError):
        result(requests, process)
    monkeypatch.setattr(control_requests, "STALE_S", 0.0)
    with process.accept() as connection:
        connection.sendall(told("old"))

    def answer() -> None:
        with process.accept() as connection:
            connection.sendall(told("new"))

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        assert result(requests, process, deadline(20)) == "new"
    finally:
        answering.join(deadline(20))


def test_an_answer_that_has_begun_is_waited_for(requests: Requests, process: Process) -> None:
    with pytest.raises(TimeoutError):
        result(requests, process)
    large = told("x" * 3_000_000)

    def answer() -> None:
        with process.accept() as connection:
            connection.sendall(large[:10])
            begun.set()
            connection.sendall(large[10:])

    begun = threading.Event()
    answering = threading.Thread(target=answer)
    answering.start()
    try:
        assert begun.wait(deadline(20))
        assert len(result(requests, process, deadline(20))) == 3_000_000
    finally:
        answering.join(deadline(20))


def test_a_socket_without_room_is_tried_until_it_has_some(
    requests: Requests, tmp_path: Path
) -> None:
    with closing(Process(tmp_path / "full", room=0)) as process:
        others = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        others[0].connect(str(process.path))
        others[1].settimeout(0)
        with pytest.raises(BlockingIOError):
            others[1].connect(str(process.path))
        with pytest.raises(TimeoutError):
            result(requests, process)

        def answer() -> None:
            process.accept().close()
            with process.accept() as connection:
                connection.sendall(told(7))

        answering = threading.Thread(target=answer)
        answering.start()
        wait_until(lambda: _answered(requests, process) == 7)
        answering.join(deadline(20))
        for one in others:
            one.close()


def _answered(requests: Requests, process: Process) -> Any:
    try:
        return result(requests, process)
    except TimeoutError:
        return None


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", ConnectionResetError), (b'{"ok": tr', ConnectionResetError), (b"\n", ControlError),
        (b"x" * 100_000, ControlError),
        (b'{"ok": false, "code": "KEYSHARD_CONTROL", "error": "no"}\n', ControlError),
    ],
    ids=["nothing", "half", "empty", "endless", "refusal"],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_and_the_next_request_is_sent(
    requests: Requests, process: Process, monkeypatch: pytest.MonkeyPatch, sent: bytes,
    error: type[Exception],
) -> None:  # fmt: skip
    monkeypatch.setattr(control_requests, "ANSWER_BYTES_MAX", 50_000)
    with pytest.raises(TimeoutError):
        result(requests, process)
    with process.accept() as connection:
        connection.recv(100)
        connection.sendall(sent)
    with pytest.raises(error):
        result(requests, process, deadline(20))
    with pytest.raises(TimeoutError):
        result(requests, process)
    assert process.asked()


def test_a_process_without_a_socket_or_a_file_to_open_is_an_error_at_once(
    requests: Requests, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = process.path.with_name("missing"), "status"
    with pytest.raises(FileNotFoundError):
        requests.ask([missing], deadline(20))[missing].result()

    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as full:
        full.setattr(socket, "socket", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            result(requests, process, deadline(20))


def test_the_end_ends_a_call_of_another_thread(process: Process) -> None:
    requests = Requests()
    ends = threading.Timer(0.05, requests.close)
    ends.start()
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        result(requests, process, deadline(60))
    assert time.monotonic() - began_s < deadline(30)
    ends.join(deadline(20))
    with pytest.raises(RuntimeStoppedError):
        result(requests, process)
    requests.close()
