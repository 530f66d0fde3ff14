"""Stops a run in an orderly way on SIGTERM, on Ctrl-C, and at the end of the program."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from keyshard.threads import begin

LOOK_S = 0.2
"""Interval at which the end of a run in another thread is checked, seconds."""


@contextmanager
def stopping_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and Ctrl-C; a second signal interrupts. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        stop()

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def stopping_with_program(stop: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Call ``stop`` at the end of the program and wait for the run; for a run in another thread.

    A program whose main thread has ended lives as long as its other threads. Only the main thread
    gets Ctrl-C, which is meant for the whole program.

    Args:
        stop: Starts the stop.
        timeout_s: Longest wait until the block has ended, seconds.
    """
    main = threading.main_thread()
    if threading.current_thread() is main:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while main.is_alive() and not ended.is_set():
            main.join(LOOK_S)
        if getattr(sys, "last_type", None) is KeyboardInterrupt and not ended.is_set():
            stop()

    def at_exit() -> None:
        stop()
        ended.wait(timeout_s)

    atexit.register(at_exit)
    begin("keyshard-main-watch", watch)
    try:
        yield
    finally:
        ended.set()
        atexit.unregister(at_exit)
