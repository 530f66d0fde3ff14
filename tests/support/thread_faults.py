"""Notes the calls that threads of keyshard make, and raises at one of them, given by name."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class InjectedError(RuntimeError):
    """An unexpected error."""


class Step(NamedTuple):
    """A call that a function of a thread makes."""

    thread: str
    """Its name, without numbers."""
    function: str
    """The function: module and qualified name."""


class Calls:
    """Notes the calls of keyshard's threads, down to a depth, and raises at one of them.

    Args:
        depth: 1: calls of the function of a thread itself.
        raises_at: The step that raises, once.
    """

    def __init__(self, depth: int, raises_at: Step | None = None) -> None:
        self.steps: set[Step] = set()
        self.raised = threading.Event()
        self._depth = depth
        self._raises_at = raises_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, threads that begin are watched."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("keyshard.", "ray_adapter.")) or module == "keyshard.threads":
            return
        if not 1 <= self._depth_of(frame) <= self._depth:
            return
        name = re.sub(r"[-_:.\d]*\d+$", "", threading.current_thread().name)
        code = frame.f_code
        function = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
        step = Step(name, f"{module}.{function}")
        self.steps.add(step)
        if step == self._raises_at and not self.raised.is_set():
            self.raised.set()
            raise InjectedError(step.function)

    def _depth_of(self, frame: FrameType) -> int:
        """Frames between a call and the function of its thread; 0: that itself."""
        depth, back = -1, frame.f_back
        while back is not None and depth <= self._depth:
            if back.f_globals.get("__name__", "") == "keyshard.threads":
                return depth + 1
            depth, back = depth + 1, back.f_back
        return sys.maxsize
