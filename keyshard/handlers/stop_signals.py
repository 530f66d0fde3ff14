"""SIGTERM, Ctrl-C and the end of the program end a run in order."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from keyshard.threads import begin


@contextmanager
def stopping_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call ``stop``, a second one interrupts; in the main thread."""
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
    """Inside, the end of the program calls ``stop`` and waits; for a run in another thread.

    A program whose main thread is at its end goes on while its other threads do. Ctrl-C, of which
    only the main thread is told, is meant for all of it.

    Args:
        stop: Begins the end.
        timeout_s: Longest wait until the block has ended, seconds.
    """
    main = threading.main_thread()
    if threading.current_thread() is main:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        main.join()
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
