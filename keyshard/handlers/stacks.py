"""The Python stacks of running handlers: of a thread, or of a coroutine and those it awaits."""

from __future__ import annotations

import gc
import linecache
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

FRAMES_MAX = 100
"""Maximum number of frames of a stack. The outermost ones are left out."""
CHARACTERS_MAX = 300
"""Maximum number of characters of a line of a stack."""

_AWAITS = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""Attributes of coroutines, generators and asynchronous generators."""


class Call(NamedTuple):
    """A frame and the line that it executes."""

    frame: FrameType
    line: int


def of_thread(ident: int | None, until: str) -> list[Call]:
    """Return the calls of a thread, the outermost first; none if it does not exist.

    Args:
        ident: The thread.
        until: File of the function that called the handler. Only calls inside it are returned.
    """
    frame = None if ident is None else _frames().get(ident)
    return [] if frame is None else _later((Call(*one) for one in walk_stack(frame)), until)


def of_coroutine(coroutine: object, until: str) -> list[Call]:
    """Return the calls of a coroutine that waits: its own and those that it awaits.

    Args:
        coroutine: The coroutine of a task.
        until: As for :func:`of_thread`.
    """
    return _later(reversed(deque(_awaited(coroutine), maxlen=FRAMES_MAX)), until)


def lines_of(calls: Sequence[Call]) -> list[str]:
    """Return a stack as text: file, line, function and code of each call."""
    lines: list[str] = ["..."] if len(calls) == FRAMES_MAX else []
    for frame, number in calls:
        code = frame.f_code
        lines.append(f'File "{code.co_filename}", line {number}, in {code.co_name}')
        source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
        if source:
            lines.append(f"  {source}")
    return [one if len(one) <= CHARACTERS_MAX else f"{one[:CHARACTERS_MAX]}..." for one in lines]


def _frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by its ident.

    The interpreter holds its list of threads meanwhile. A garbage collection in this call, which
    makes frames, would wait for ever for that list if another thread starts or ends.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _awaited(coroutine: Any) -> Iterator[Call]:
    """Yield the calls of a coroutine, the outermost first."""
    while coroutine is not None:
        for frame_name, await_name in _AWAITS:
            frame = getattr(coroutine, frame_name, None)
            if frame is not None:
                yield Call(frame, frame.f_lineno)
                coroutine = getattr(coroutine, await_name)
                break
        else:
            return


def _later(inwards: Iterator[Call], until: str) -> list[Call]:
    """Return the calls inside the innermost one from file ``until``, the outermost first."""
    found: list[Call] = []
    for call in islice(inwards, FRAMES_MAX):
        if call.frame.f_code.co_filename == until:
            break
        found.append(call)
    return found[::-1]
