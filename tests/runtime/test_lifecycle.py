"""The stream process ends with its host, and gives the ranges back first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_adapter import lifecycle
from tests.helpers import DEADLINE_S, wait_until
from tests.support.deadlines import deadline

LEFT_S = deadline(10)
"""Longest time until the stream process has ended, seconds."""

CHILD = """
import pathlib, sys, threading
from spark_adapter import lifecycle
lifecycle.STOP_TIMEOUT_S = float(sys.argv[3])
folder, how = pathlib.Path(sys.argv[1]), sys.argv[2]

def stop():
    with (folder / "stopped").open("a") as file:
        file.write("stopped\\n")
    if how == "hangs":
        threading.Event().wait()
    if how == "raises":
        raise RuntimeError("the broker is away")

lifecycle.end_with_host(stop, str(folder / "userFiles"))
import os
(folder / "pid.new").write_text(str(os.getpid()))
(folder / "pid.new").rename(folder / "pid")
threading.Event().wait()
"""

PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]]).wait()
"""


class Host:
    """A process that stands for Spark's JVM, with the stream process as its child."""

    def __init__(self, folder: Path, how: str = "stops", stop_timeout_s: float = 4.0) -> None:
        self.folder = folder
        (folder / "userFiles").mkdir()
        arguments = [CHILD, str(folder), how, str(stop_timeout_s)]
        with (folder / "stderr").open("w") as stderr:
            self.parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, *arguments], stderr=stderr
            )
        wait_until((folder / "pid").exists, deadline(30))
        self.child = int((folder / "pid").read_text())

    def alive(self) -> bool:
        """Whether the child runs; one that ended and is not waited for does not."""
        try:
            status = Path(f"/proc/{self.child}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in "ZX"

    @property
    def output(self) -> str:
        """Standard error of the processes."""
        return (self.folder / "stderr").read_text()

    @property
    def stops(self) -> int:
        file = self.folder / "stopped"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def end(self) -> None:
        if self.alive():
            os.kill(self.child, signal.SIGKILL)
        self.parent.kill()
        self.parent.wait(DEADLINE_S)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(*args: object) -> Host:
        made.append(Host(tmp_path, *args))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.end()


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def test_the_stream_process_stops_and_exits_when_its_host_is_killed(
    host: Callable[..., Host],
) -> None:
    process = host()
    process.parent.kill()
    process.parent.wait(DEADLINE_S)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert process.stops == 1


def test_the_stream_process_stops_and_exits_on_sigterm(host: Callable[..., Host]) -> None:
    process = host()
    os.kill(process.child, signal.SIGTERM)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert process.stops == 1


def test_the_stream_process_exits_though_stopping_raises(host: Callable[..., Host]) -> None:
    process = host("raises")
    os.kill(process.child, signal.SIGTERM)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert process.stops == 1


def test_the_stream_process_exits_in_time_though_stopping_hangs(host: Callable[..., Host]) -> None:
    process = host("hangs", 0.3)
    began = time.monotonic()
    os.kill(process.child, signal.SIGTERM)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert time.monotonic() - began >= 0.3
    assert process.stops == 1


@pytest.mark.parametrize(
    ("number", "evidence"),
    [
        (signal.SIGTERM, "ends and gives its ranges back: SIGTERM"),
        (signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        (signal.SIGABRT, "Fatal Python error: Aborted"),
    ],
)
def test_it_leaves_evidence_of_its_end(
    host: Callable[..., Host], number: signal.Signals, evidence: str
) -> None:
    process = host()
    os.kill(process.child, number)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert evidence in process.output


def test_it_logs_that_its_parent_is_gone(host: Callable[..., Host]) -> None:
    process = host()
    process.parent.kill()
    process.parent.wait(DEADLINE_S)
    wait_until(lambda: not process.alive(), LEFT_S)
    assert f"its parent process {process.parent.pid} has ended" in process.output


def test_the_stream_process_exits_when_the_context_of_a_living_host_is_stopped(
    host: Callable[..., Host],
) -> None:
    """The JVM lives as long as its Python program; its stopped context has no directory."""
    process = host()
    (process.folder / "userFiles").rmdir()
    wait_until(lambda: not process.alive(), LEFT_S)
    assert process.stops == 1
    assert "its SparkContext was stopped" in process.output


def test_it_keeps_the_directory_of_its_context_young(tmp_path: Path) -> None:
    """A service that deletes old temporary files must not end a healthy query."""
    os.utime(tmp_path, (0, 0))
    assert not lifecycle._is_gone(str(tmp_path), keep=False)
    assert tmp_path.stat().st_mtime == 0
    assert not lifecycle._is_gone(str(tmp_path), keep=True)
    assert tmp_path.stat().st_mtime > 0
    assert lifecycle._is_gone(str(tmp_path / "away"), keep=True)
    (tmp_path / "file").touch()
    assert not lifecycle._is_gone(str(tmp_path / "file" / "within"), keep=True)
