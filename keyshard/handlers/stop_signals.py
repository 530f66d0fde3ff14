"""SIGTERM and Ctrl-C end a run in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
