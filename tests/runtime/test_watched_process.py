"""A stream process that dies is explained to Spark and to its tasks."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_adapter.watched_process import EndAddress
from tests.helpers import DEADLINE_S, wait_until
from tests.support.deadlines import deadline

STARTED_S = deadline(30)

PROGRAM = """
import json, os, socket, sys
from spark_adapter import watched_process as watched
watched.RUNNER = ""  # the name of a program that has none
spark = socket.create_connection(("127.0.0.1", int(os.environ["PYTHON_WORKER_FACTORY_PORT"])))
BEGIN
facts = [os.getpid(), os.getppid(), watched.spark_pid(), at.host, at.port, at.token]
spark.sendall(json.dumps(facts).encode() + b"\\n")
while True:
    exec(spark.recv(4096).decode())
"""
BEGIN = 'at = watched.watch_this_process("127.0.0.1")'
"""Starts the watch in :data:`PROGRAM`."""
STREAM_READER = """
from pyspark.sql.types import BinaryType, StructType
from spark_adapter import KeyShardDataSource, PulsarDataSource
options = {"topic": "t", "subscription": "s", "workerHost": "127.0.0.1"}
at = KIND(options).streamReader(StructType().add("COLUMN", BinaryType()))._ended_at
"""


class Spark:
    """Stands for Spark's JVM: starts a stream process, and reads its answers."""

    def __init__(self, folder: Path, begin: str = BEGIN) -> None:
        self._log = folder / "log"
        with socket.create_server(("127.0.0.1", 0)) as server, self._log.open("wb") as log:
            server.settimeout(STARTED_S)
            port = str(server.getsockname()[1])
            self.watching = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.replace("BEGIN", begin)],
                env=os.environ | {"PYTHON_WORKER_FACTORY_PORT": port},
                stderr=log,
            )
            self._stream, _ = server.accept()
        self._stream.settimeout(STARTED_S)
        self._answers = self._stream.makefile("rb")
        self.pid, self.parent, self.spark_pid, *address = json.loads(self._answers.readline())
        self.ended_at = EndAddress(*address)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def call(self, code: str) -> None:
        """Let the stream process execute code."""
        self._stream.sendall(code.encode())

    def error(self) -> str:
        """Read the next answer as Spark does; an empty text if the connection ends instead."""
        head = self._answers.read(8)
        if not head:
            return ""
        kind, size = struct.unpack("!ii", head)
        assert kind == -2
        return self._answers.read(size).decode()

    def close(self) -> None:
        """End the connection, as Spark does after an error."""
        self._answers.close()
        self._stream.close()

    def end(self) -> None:
        self.close()
        if _lives(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        self.watching.kill()
        self.watching.wait(DEADLINE_S)


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def spark(tmp_path: Path) -> Iterator[Spark]:
    made = Spark(tmp_path)
    yield made
    made.end()


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("os.kill(os.getpid(), 9)", ["was killed by SIGKILL (9)", "memory limit"]),
        ("os._exit(3)", ["ended with exit status 3"]),
        ("os._exit(0)", ["ended with exit status 0"]),
        (
            "import faulthandler; faulthandler.enable(2); faulthandler._sigsegv()",
            ["was killed by SIGSEGV (11)", "Fatal Python error: Segmentation fault", "<module>"],
        ),
        ("raise ZeroDivisionError('x')", ["exit status 1", "ZeroDivisionError: x"]),
    ],
)  # fmt: skip
def test_the_pending_call_of_spark_gets_the_end_as_its_error(
    spark: Spark, code: str, parts: list[str]
) -> None:
    """Spark said ``java.io.EOFException``."""
    spark.call(code)
    error = spark.error()
    prefix = "keyshard.errors.StreamProcessError: [KEYSHARD_STREAM_PROCESS] Stream process "
    assert error.startswith(f"{prefix}{spark.pid} on the driver")
    for part in parts:
        assert part in error
    assert spark.error() == "", "no call waits for the rest of an answer"


@pytest.mark.parametrize(
    ("kind", "column"), [("KeyShardDataSource", "__keyBytes"), ("PulsarDataSource", "__key")]
)
def test_the_stream_reader_of_each_format_is_watched(
    tmp_path: Path, kind: str, column: str
) -> None:
    """Issue: a query of ``format("pulsar")`` ended with ``java.io.EOFException``."""
    spark = Spark(tmp_path, STREAM_READER.replace("KIND", kind).replace("COLUMN", column))
    try:
        os.kill(spark.pid, signal.SIGKILL)
        assert "was killed by SIGKILL (9)" in spark.error()
        assert spark.ended_at.ask() is not None, "tasks learn it, too"
    finally:
        spark.end()


def test_a_call_after_the_end_gets_the_end_as_its_error(spark: Spark) -> None:
    os.kill(spark.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{spark.pid}").exists(), DEADLINE_S)
    spark.call("the next call")
    assert "was killed by SIGKILL (9)" in spark.error()


def test_a_part_of_an_answer_ends_also_if_spark_does_not_read(spark: Spark) -> None:
    """Spark waited a minute for the rest of the answer."""
    spark.call("spark.sendall(b'x' * 50_000_000)")
    assert spark._answers.read(1) == b"x"
    os.kill(spark.pid, signal.SIGKILL)
    wait_until(lambda: spark.ended_at.ask() is not None, deadline(15))
    spark._stream.settimeout(deadline(10))
    assert len(spark._answers.read()) < 50_000_000


def test_a_task_learns_how_the_process_ended_and_nobody_else_does(spark: Spark) -> None:
    os.kill(spark.pid, signal.SIGKILL)
    error = spark.ended_at.ask()
    assert error is not None
    assert f"{error.problem}\nRemedy: {error.remedy}\n" in spark.error()
    at = spark.ended_at
    assert EndAddress(at.host, at.port, "another token").ask() is None
    spark.close()
    spark.watching.wait(DEADLINE_S)
    assert at.ask() is None


def test_a_task_keeps_its_error_if_the_process_runs(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_adapter.watched_process.ASK_TIMEOUT_S", 0.1)
    assert spark.ended_at.ask() is None


def test_the_log_is_forwarded_to_the_driver_and_its_end_is_in_the_error(spark: Spark) -> None:
    spark.call("os.write(2, b'one\\ntwo\\n')")
    wait_until(lambda: spark.log == "one\ntwo\n", DEADLINE_S)
    os.kill(spark.pid, signal.SIGKILL)
    assert "Its last lines:\none\ntwo\nRemedy: " in spark.error()


def test_the_process_knows_the_host_that_started_its_parent(spark: Spark) -> None:
    assert spark.parent == spark.watching.pid
    assert spark.spark_pid == os.getpid()


LEAVES = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: (os.write(2, b'left'), os._exit(0)))"
    "; spark.sendall(b'set\\n')"
)


def test_an_end_that_spark_asked_for_is_no_error(spark: Spark) -> None:
    spark.call(LEAVES)
    assert spark._answers.readline() == b"set\n"
    spark.watching.terminate()
    spark.watching.wait(DEADLINE_S)
    assert spark.error() == ""
    assert spark.log == "left"


def test_an_error_that_spark_has_is_not_repeated(spark: Spark) -> None:
    """Spark's program reports exceptions itself, and ends with this status."""
    spark.call("sys.exit(-1)")
    assert spark.error() == ""
    spark.watching.wait(DEADLINE_S)


def test_a_process_that_ignores_the_request_to_end_is_killed(spark: Spark) -> None:
    spark.call("import signal; signal.signal(15, signal.SIG_IGN); spark.sendall(b'set\\n')")
    assert spark._answers.readline() == b"set\n"
    spark.watching.terminate()
    spark.watching.wait(deadline(30))
    assert not _lives(spark.pid)


def test_both_processes_end_with_spark(tmp_path: Path) -> None:
    """The process that stands for Spark is killed; the two below it must end."""
    host = (
        "import sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.runtime.test_watched_process import Spark\n"
        "made = Spark(Path(sys.argv[1]))\n"
        "print(made.pid, made.parent, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", host, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        pids = [int(one) for one in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        wait_until(lambda: not any(map(_lives, pids)), deadline(15))


def test_both_processes_keep_no_copies_of_the_standard_streams(spark: Spark) -> None:
    for pid in (spark.pid, spark.parent):
        files = {int(one.name): one.readlink() for one in Path(f"/proc/{pid}/fd").iterdir()}
        standard = [files.pop(number) for number in (0, 1, 2)]
        copies = [one for one in files.values() if one in standard]
        assert not copies


def test_a_program_that_is_no_stream_process_is_not_forked() -> None:
    from spark_adapter.watched_process import spark_pid, watch_this_process  # noqa: PLC0415

    assert watch_this_process("127.0.0.1") is None
    assert spark_pid() == os.getppid()
