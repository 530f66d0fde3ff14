"""The end of Spark's stream process: nothing of keyshard may outlive the query.

Spark ends the process with SIGTERM and without ``stop()``. When the JVM dies, nobody tells it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

WATCH_INTERVAL_S = 1.0
"""How often the parent is looked at, seconds."""
STOP_TIMEOUT_S = 4.0
"""Longest time that giving back the ranges may take, seconds."""


def end_with_host(stop: Callable[[], None]) -> None:
    """Run ``stop`` and leave the process on SIGTERM, and when the parent process is gone.

    Call it once, from the main thread of the process. Every other thread must be a daemon.
    """
    parent = os.getppid()

    def leave(_signal: int = 0, _frame: object = None) -> None:
        def stop_quietly() -> None:
            with contextlib.suppress(Exception):
                stop()

        # In a thread of its own: the client may wait for a broker that does not answer.
        stopper = threading.Thread(target=stop_quietly, daemon=True)
        stopper.start()
        stopper.join(STOP_TIMEOUT_S)
        os._exit(0)

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent:
            never.wait(WATCH_INTERVAL_S)
        leave()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, name="keyshard-parent-watch", daemon=True).start()
