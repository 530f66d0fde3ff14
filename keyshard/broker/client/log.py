"""Forwards the log of the C++ client as warnings of the logger ``keyshard.client``.

All clients of a process share one logger: that of the first client. The client would call a Python
logger while it holds its own locks, and wait for the interpreter lock. The thread with that lock
may wait for such a client lock: a deadlock. A full pipe would block the client. The client
therefore writes to an unnamed file, and a thread reads and empties it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar

from keyshard.redaction import sentence
from keyshard.threads import begin

EVERY_S = 60.0
"""Interval in which each kind of line is logged once, seconds."""
KINDS_MAX = 200
"""Maximum number of remembered kinds of lines; the oldest is dropped."""
LOOK_S = 0.25
"""Time between two reads of the file, seconds."""
FILE_BYTES_MAX = 1024 * 1024
"""Size at which a fully read file is emptied, bytes. Lines written at that moment are lost."""
READ_BYTES = 64 * 1024
"""Bytes of one read."""
LINE_BYTES_MAX = 8 * 1024
"""Length from which an unfinished line counts as complete, bytes."""
LEAVE_S = 1.0
"""Longest wait until the log of the last client is forwarded, seconds."""

_LINE = re.compile(r"\S+ \S+ \w+ +\[\w+\] ([\w.]+:\d+) \| (.*)")
"""Time, level and thread, the location in the client's source, and the text."""

_log = logging.getLogger("keyshard.client")


class Repeats:
    """Limits repeats: logs the first line of each kind, then a summary per :data:`EVERY_S`."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, int, str]] = {}
        """Per kind: when it was logged, the number of lines since, and the newest line."""

    def take(self, now_s: float, line: str) -> list[str]:
        """Accept a line, and return the texts to log now: none or one."""
        found = _LINE.match(line)
        kind, text = found.groups() if found else ("client", line)
        told_s, more, _ = self._kinds.get(kind, (now_s, -1, ""))
        self._kinds[kind] = told_s, more + 1, text
        if more >= 0:
            return []
        if len(self._kinds) > KINDS_MAX:
            del self._kinds[next(iter(self._kinds))]
        return [f"{kind}: {text}"]

    def due(self, now_s: float) -> list[str]:
        """Return the summaries that are due: the newest line of each kind that was repeated."""
        texts: list[str] = []
        for kind, (told_s, more, text) in list(self._kinds.items()):
            if now_s - told_s < EVERY_S:
                continue
            del self._kinds[kind]
            if more:
                self._kinds[kind] = now_s, 0, text
                texts.append(f"{kind}: {text} ({more} similar since the previous line)")
        return texts


class _ClientLog:
    """The log file of this process, and the thread that reads it while there are clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = None
        self._position = 0
        self._rest = b""
        self._clients = 0
        self._repeats = Repeats()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self) -> pulsar.FileLogger:
        """Count a new client, and return its logger."""
        with self._lock:
            if self._file is None:
                self._file = _unnamed_file()
            self._clients += 1
            if self._thread is None:
                self._ending.clear()
                self._thread = begin("keyshard-client-log", self._run)
            return pulsar.FileLogger(pulsar.LoggerLevel.Warn, f"/dev/fd/{self._file}")

    def leave(self) -> None:
        """Count a closed client. If it was the last, forward the rest of the log, then return."""
        with self._lock:
            self._clients -= 1
            if self._clients or self._thread is None:
                return
            self._ending.set()
            self._thread.join(timeout=LEAVE_S)
            self._thread = None

    def forked(self) -> None:
        """After a fork, let the child's clients write to a file of its own."""
        shared = self._file
        self.__init__()  # type: ignore[misc]  # the locks, counts and thread are the parent's
        if shared is None:
            return
        self._file = shared
        inode, own = os.fstat(shared), _unnamed_file()
        appending = os.open(f"/dev/fd/{own}", os.O_RDWR | os.O_APPEND)
        for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with suppress(OSError):  # The descriptor of the listing is closed by now.
                if os.path.samestat(os.fstat(number), inode):
                    os.dup2(appending, number, inheritable=False)
        os.close(appending)
        os.close(own)

    def _run(self) -> None:
        ending = False
        while not ending:
            ending = self._ending.wait(LOOK_S)
            texts: list[str] = []
            while lines := self._lines():
                for line in lines:
                    texts += self._repeats.take(time.monotonic(), line.decode(errors="replace"))
            texts += self._repeats.due(math.inf if ending else time.monotonic())
            if ending:
                self._repeats = Repeats()
            for text in texts:
                _log.warning("%s", sentence(text))

    def _lines(self) -> list[bytes]:
        """Return the next lines; none at the end of the file."""
        assert self._file is not None
        lines: list[bytes] = []
        while not lines:
            data = os.pread(self._file, READ_BYTES, self._position)
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LINE_BYTES_MAX:
                lines.append(self._rest)
                self._rest = b""
            if not data:
                if self._position > FILE_BYTES_MAX:
                    os.ftruncate(self._file, 0)
                    self._position = 0
                break
        return lines


_OURS = _ClientLog()
os.register_at_fork(after_in_child=_OURS.forked)


def open_client(service_url: str, **options: Any) -> pulsar.Client:
    """Create a client that logs to ``keyshard.client``. Close it with :func:`close_client`."""
    logger = _OURS.join()
    try:
        return pulsar.Client(service_url, logger=logger, **options)
    except BaseException:
        _OURS.leave()
        raise


def close_client(client: pulsar.Client) -> None:
    """Close a client. Call it once per client."""
    try:
        client.close()
    finally:
        _OURS.leave()


def _unnamed_file() -> int:
    """Open a file that disappears with its last user; in memory if the system supports that."""
    in_memory: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    if in_memory is not None:
        return in_memory("keyshard-client-log")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
