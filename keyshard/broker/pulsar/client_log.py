"""What the C++ client of Pulsar logs, as warnings of the logger ``keyshard.client``.

The client has one logger for a whole process, that of the first client in it. A logger in Python
would be called while the client holds its own locks, and waits for the interpreter, which a thread
may hold that waits for such a lock. A pipe blocks who writes while nobody reads. So the client
writes to a file without a name, and a thread reads and empties it.
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
"""Time in which a kind of line is logged once, seconds."""
KINDS_MAX = 200
"""Kinds of lines that are remembered; the oldest is forgotten."""
LOOK_S = 0.25
"""Time between two looks into the file, seconds."""
FILE_BYTES_MAX = 1024 * 1024
"""Size at which the file is emptied, once it is read; what comes in that moment is lost."""
READ_BYTES = 64 * 1024
"""What is read at once."""
LINE_BYTES_MAX = 8 * 1024
"""What is longer without an end is taken for a line."""
LEAVE_S = 1.0
"""Longest wait for what the last client logged to be told, seconds."""

_LINE = re.compile(r"\S+ \S+ \w+ +\[\w+\] ([\w.]+:\d+) \| (.*)")
"""Time, level and thread, the place in the client's source, and what it says."""

_log = logging.getLogger("keyshard.client")


class Repeats:
    """Which lines to tell: the first of each kind, and how many more came in :data:`EVERY_S`."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, int, str]] = {}
        """When each kind was told, how many more came since, and the newest."""

    def take(self, now_s: float, line: str) -> list[str]:
        """The texts to log now that a line came: none or one."""
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
        """The texts to log because time passed: the newest of each kind that came again."""
        texts: list[str] = []
        for kind, (told_s, more, text) in list(self._kinds.items()):
            if now_s - told_s < EVERY_S:
                continue
            del self._kinds[kind]
            if more:
                self._kinds[kind] = now_s, 0, text
                texts.append(f"{kind}: {text} ({more} like it since the one before)")
        return texts


class _ClientLog:
    """The file of this process, and the thread that reads it while there are clients."""

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
        """There is a client more; the logger that it is to have."""
        with self._lock:
            if self._file is None:
                self._file = _unnamed_file()
            self._clients += 1
            if self._thread is None:
                self._ending.clear()
                self._thread = begin("keyshard-client-log", self._run)
            return pulsar.FileLogger(pulsar.LoggerLevel.Warn, f"/dev/fd/{self._file}")

    def leave(self) -> None:
        """There is a client less; what the last one logged is told before this returns."""
        with self._lock:
            self._clients -= 1
            if self._clients or self._thread is None:
                return
            self._ending.set()
            self._thread.join(timeout=LEAVE_S)
            self._thread = None

    def forked(self) -> None:
        """In a process that was forked: its clients write to a file that it reads itself."""
        shared = self._file
        self.__init__()  # type: ignore[misc]  # the locks, counts and thread are the parent's
        if shared is None:
            return
        self._file = shared
        inode, own = os.fstat(shared), _unnamed_file()
        appending = os.open(f"/dev/fd/{own}", os.O_RDWR | os.O_APPEND)
        for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with suppress(OSError):  # that of the listing is closed
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
        """The next lines that were written; none at the end of the file."""
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
    """A client whose own log goes to ``keyshard.client``; :func:`close_client` closes it."""
    logger = _OURS.join()
    try:
        return pulsar.Client(service_url, logger=logger, **options)
    except BaseException:
        _OURS.leave()
        raise


def close_client(client: pulsar.Client) -> None:
    """Close a client; once for each."""
    try:
        client.close()
    finally:
        _OURS.leave()


def _unnamed_file() -> int:
    """A file that is gone with its last user; in memory where the system has that."""
    in_memory: Callable[[str], int] | None = getattr(os, "memfd_create", None)
    if in_memory is not None:
        return in_memory("keyshard-client-log")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
