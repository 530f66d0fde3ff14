"""The end of Spark's stream process: no consumer may outlive the query.

Spark ends the process with SIGTERM, without a call of ``stop()``. If the JVM dies, the process gets
no signal.

If the process ends for another reason, Spark only says that the connection was reset. So the
process writes a line to its standard error, which is the JVM's, when it leaves. If a signal such as
SIGSEGV ends it, it writes Python's stacks. If there is neither, it was killed (SIGKILL): check the
memory limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable

from keyshard.threads import begin

WATCH_INTERVAL_S = 1.0
"""Time between two checks of the parent process, seconds."""
STOP_TIMEOUT_S = 4.0
"""Longest time for the stop of the source, seconds."""


def end_with_host(stop: Callable[[], None]) -> None:
    """Run ``stop`` and exit on SIGTERM, or when the parent process is gone.

    Call it once, from the main thread of the process. Every other thread must be a daemon.
    """
    parent = os.getppid()
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__.fileno() if sys.__stderr__ else 2)

    def leave(number: int = 0, _frame: object = None) -> None:
        why = signal.Signals(number).name if number else f"its parent process {parent} has ended"
        _say(f"keyshard: stream process {os.getpid()} ends and gives its ranges back: {why}\n")

        def stop_quietly() -> None:
            with contextlib.suppress(Exception):
                stop()

        # In a separate thread: the client may wait for a broker that does not answer.
        with contextlib.suppress(Exception):
            begin("keyshard-leave", stop_quietly).join(STOP_TIMEOUT_S)
        os._exit(0)

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(WATCH_INTERVAL_S)
        leave()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
    begin("keyshard-parent-watch", watch)


def _say(line: str) -> None:
    """Write to standard error. Safe also if a signal has interrupted a write."""
    with contextlib.suppress(OSError):
        os.write(2, line.encode())
