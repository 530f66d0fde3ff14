"""The stream process is watched by its parent, which tells Spark how it ended.

If the process at the other end of Spark's socket dies, Spark only says ``EOFException``. So the
process that Spark starts forks before anything else begins. The child is the stream process. The
parent, the *watching process*, keeps Spark's socket open and writes nothing to it::

    Spark (JVM)  --SIGTERM-->  watching process  --SIGTERM-->  stream process
                 <------------------- socket ------------------>
                 <--stderr---                    <--stderr---

If the stream process ends and Spark did not ask for it, the watching process answers the pending or
next call of Spark with a :class:`~keyshard.errors.StreamProcessError`. It gives the same error to
tasks that lost their connection to the stream process, and ends when Spark closes the socket.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from keyshard.core.process_end import ending, last_lines, remedy
from keyshard.errors import KeyShardError, StreamProcessError
from keyshard.redaction import redacted
from spark_adapter.error_text import as_spark_error

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
"""Module that Spark starts as the stream process."""
LOOK_S = 1.0
"""Time between two checks of the parent process, seconds."""
LEAVE_TIMEOUT_S = 6.0
"""Longest time from SIGTERM to the end of the stream process, seconds."""
ASK_TIMEOUT_S = 3.0
"""Longest wait of a task for each step of an answer, and of the watching process, seconds."""
TELL_S = 60.0
"""Longest time that tasks can ask after the end, seconds. Spark keeps the connection open if the
stream process ends before its first answer."""
LOG_BYTES_MAX = 65_536
"""Size of the remembered end of the log, bytes."""
EXCEPTION = -2
"""Begins an answer to Spark that is an exception; ``SpecialLengths`` of PySpark."""
_EXPLAINED = 255
"""Exit status of the runner after it has reported an exception to Spark itself."""


@dataclass(frozen=True)
class EndAddress:
    """Address at which tasks ask how the stream process ended. Small and picklable."""

    host: str
    port: int
    token: str = field(repr=False)
    """Secret of this run."""

    def ask(self) -> StreamProcessError | None:
        """Return the error of the ended process; ``None`` if it runs or its parent is gone."""
        said = b""
        try:
            with socket.create_connection((self.host, self.port), ASK_TIMEOUT_S) as stream:
                stream.sendall(self.token.encode() + b"\n")
                with stream.makefile("rb") as answer:
                    said = answer.read(LOG_BYTES_MAX)
        except OSError:
            return None
        return StreamProcessError(*said.decode(errors="replace").split("\0", 1)) if said else None


_spark_pid: list[int] = []
"""The process that started the watching process, in a watched process."""


def spark_pid() -> int:
    """Return the process id of the JVM that started this stream process."""
    return _spark_pid[0] if _spark_pid else os.getppid()


def watch_this_process(host: str) -> EndAddress | None:
    """Fork a child that continues as the stream process, while the parent watches it.

    After the fork, only the child returns. When the child ends, the parent explains its end. Call
    this function from the main thread before other Python threads begin.

    Args:
        host: Address to listen on, to which tasks connect.

    Returns:
        The address at which tasks ask how the child ended; ``None`` if this process is no stream
        process of Spark or cannot be watched.
    """
    spark = _spark_connection()
    if spark is None or threading.current_thread() is not threading.main_thread():
        return None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
    except OSError:  # The batch server listens on the same host later. Its error names the option.
        return None
    address = EndAddress(host, listener.getsockname()[1], secrets.token_hex(16))
    log_from, log_to = os.pipe()
    alive_from, alive_to = os.pipe()
    parent, stderr = os.getppid(), 2
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(log_to)
        os.close(alive_to)
        _Watch(child, (log_from, alive_from), spark, listener, address.token).run()
    # alive_to stays open until this process ends: the parent waits for that.
    os.dup2(log_to, stderr)
    for end in (log_from, log_to, alive_from):
        os.close(end)
    spark.close()
    listener.close()
    _spark_pid[:] = [parent]
    return address


def _spark_connection() -> socket.socket | None:
    """Return a copy of the socket to Spark; ``None`` if this is no stream process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(spec, "name", "") != RUNNER:
        return None
    path, port = (os.environ.get(f"PYTHON_WORKER_FACTORY_{name}") for name in ("SOCK_PATH", "PORT"))
    for entry in Path("/dev/fd").iterdir():
        with suppress(OSError):
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(number))
            with suppress(OSError):
                peer = copy.getpeername()
                if peer == path or (isinstance(peer, tuple) and str(peer[1]) == port):
                    return copy
            copy.close()
    return None


def explanation(pid: int, status: int | None, log: str) -> KeyShardError:
    """Return the error of a query whose stream process has ended.

    Args:
        pid: Its process id.
        status: Its exit status; negative: the number of a signal.
        log: The end of its log.
    """
    # Redact before last_lines() cuts lines: redacted() does not recognize a part of a secret.
    lines = last_lines(redacted(log))
    shown = f" Its last lines:\n{lines}" if lines else ""
    limit = " Option window_bytes_max limits it." if status == -signal.SIGKILL else ""
    return as_spark_error().translate(
        StreamProcessError(
            f"Stream process {pid} on the driver, which reads the stream of this query, "
            f"{ending(status)}. Its log is part of the standard error of the driver.{shown}",
            f"{remedy(status)}{limit} Then start the query again from its checkpoint: it reads "
            "again the rows that Spark has not committed.",
        )
    )


class _Watch:
    """The work of the watching process, which never returns to the code that forked it."""

    def __init__(
        self, child: int, pipes: tuple[int, int], spark: socket.socket, listener: socket.socket,
        token: str,
    ) -> None:  # fmt: skip
        self._child = child
        self._log, self._alive = pipes
        self._spark = spark
        self._listener = listener
        self._token = token
        self._parent = os.getppid()
        self._tail = b""
        self._leave_s = float("inf")
        """When the stream process must have ended, because Spark asked for its end."""

    def run(self) -> NoReturn:
        """Watch the child until it has ended and Spark knows; then exit."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, lambda *_: self._leave())
            os.set_blocking(self._log, False)
            status = self._status()
            self._copy_log()
            if not self._asked_to_leave() and status != _EXPLAINED:
                self._explain(status)
        finally:
            os._exit(0)

    def _leave(self) -> None:
        """Let the stream process end, as Spark asked."""
        if not self._asked_to_leave():
            self._leave_s = time.monotonic() + LEAVE_TIMEOUT_S
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGTERM)

    def _asked_to_leave(self) -> bool:
        return self._leave_s != float("inf")

    def _status(self) -> int | None:
        """Wait for the end of the child, and return its exit status."""
        open_ends = [self._log, self._alive]
        while True:
            ready = select.select(open_ends, [], [], LOOK_S)[0]
            if self._log in ready and not self._copy_log():
                open_ends.remove(self._log)
            if self._alive in ready:
                return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if os.getppid() != self._parent:
                self._leave()
            if time.monotonic() > self._leave_s:
                os.kill(self._child, signal.SIGKILL)

    def _copy_log(self) -> bool:
        """Copy new log of the child to standard error; return whether more may come."""
        while True:
            try:
                data = os.read(self._log, 65_536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tail = (self._tail + data)[-LOG_BYTES_MAX:]
            with suppress(OSError):
                os.write(2, data)

    def _explain(self, status: int | None) -> None:
        """Tell Spark and tasks how the child ended, until Spark closes the connection.

        Do so for at most :data:`TELL_S`.
        """
        error = explanation(self._child, status, self._tail.decode(errors="replace"))
        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}".encode()
        answer = struct.pack("!ii", EXCEPTION, len(text)) + text
        # Only after the child has ended: it shares the socket, so a time limit affects it, too.
        for stream in (self._spark, self._listener):
            stream.settimeout(ASK_TIMEOUT_S)
        with suppress(OSError):
            self._spark.sendall(answer)
        with suppress(OSError):
            # If the child sent a part of an answer, Spark reads this error as the rest of it, and
            # waits for more bytes unless the stream ends.
            self._spark.shutdown(socket.SHUT_WR)
        end_s = time.monotonic() + TELL_S
        while time.monotonic() < end_s and not self._is_over():
            ready = select.select([self._listener, self._spark], [], [], LOOK_S)[0]
            if self._listener in ready:
                with suppress(OSError):
                    self._answer(f"{error.problem}\0{error.remedy}")
            try:
                if self._spark in ready and not self._spark.recv(65_536):
                    return
            except OSError:
                return

    def _is_over(self) -> bool:
        return self._asked_to_leave() or os.getppid() != self._parent

    def _answer(self, message: str) -> None:
        stream, _ = self._listener.accept()
        with stream:
            stream.settimeout(ASK_TIMEOUT_S)
            with stream.makefile("rb") as request:
                asked = request.readline(len(self._token) + 1).strip()
            if hmac.compare_digest(asked, self._token.encode()):
                stream.sendall(message.encode())
