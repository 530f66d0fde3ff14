"""The end of Spark's stream process: no consumer may outlive the query.

The process ends itself in three cases:

- SIGTERM: Spark sends it at the end of a query, and does not call ``stop()``.
- The JVM dies. The process gets no signal, so it watches its parent process.
- The program calls ``spark.stop()`` without ``query.stop()``. The process gets no signal, and the
  JVM lives as long as the program. But ``spark.stop()`` deletes the directory of
  ``SparkContext.addFile``, which each context has, so the process watches this directory.

If the process ends for another reason, its parent process reports that to Spark, with the last
lines of standard error: see :mod:`spark_adapter.watched_process`. So the process writes a line to
standard error when it leaves. If a signal such as SIGSEGV ends it, it writes Python's stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from keyshard.threads import begin

WATCH_INTERVAL_S = 1.0
"""Time between two checks of the parent process and of the context's directory, seconds."""
KEEP_CHECKS = 600
"""Checks after which the directory gets a new time, so that nothing deletes it for its age."""
GONE_CHECKS = 2
"""Checks in a row that do not find the directory, after which it counts as deleted."""
STOP_TIMEOUT_S = 4.0
"""Longest time for the stop of the source, seconds."""


def end_with_host(stop: Callable[[], None], context_files: str = "") -> None:
    """Run ``stop`` and exit on SIGTERM, or when the parent process or its context is gone.

    Call it once, from the main thread of the process. Every other thread must be a daemon.

    Args:
        stop: Stops the source.
        context_files: Directory that exists as long as the SparkContext; nothing is watched if it
            does not exist now.
    """
    parent = os.getppid()
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__.fileno() if sys.__stderr__ else 2)

    def leave(number: int = 0, _frame: object = None, why: str = "") -> None:
        why = signal.Signals(number).name if number else why
        _say(f"keyshard: stream process {os.getpid()} ends and gives its ranges back: {why}\n")

        def stop_quietly() -> None:
            with contextlib.suppress(Exception):
                stop()

        # In a separate thread: the client may wait for a broker that does not answer.
        with contextlib.suppress(Exception):
            begin("keyshard-leave", stop_quietly).join(STOP_TIMEOUT_S)
        os._exit(0)

    def watch() -> None:
        never, watched = threading.Event(), bool(context_files) and Path(context_files).is_dir()
        gone = 0
        for check in itertools.count():
            if os.getppid() != parent:
                leave(why=f"its parent process {parent} has ended")
            if watched and _is_gone(context_files, keep=check % KEEP_CHECKS == 0):
                gone += 1
            else:
                gone = 0
            if gone >= GONE_CHECKS:
                leave(why=f"its SparkContext was stopped: {context_files} was deleted")
            never.wait(WATCH_INTERVAL_S)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
    begin("keyshard-parent-watch", watch)


def _is_gone(directory: str, *, keep: bool) -> bool:
    """Whether a directory was deleted; ``False`` if another error hides whether it exists."""
    try:
        Path(directory).stat()
        if keep:
            os.utime(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _say(line: str) -> None:
    """Write to standard error. Safe also if a signal has interrupted a write."""
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
