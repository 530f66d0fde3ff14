"""How the end of a process, or a failed start, is explained: problem, remedy, end of the log."""

from __future__ import annotations

import signal

LINES_MAX = 8
"""Most lines of a log that are shown."""
LINE_CHARS_MAX = 120
"""Most characters of such a line that are shown."""
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that a process gets for a fault of native code."""
_FATAL = "Fatal Python error"
_CURRENT = "Current thread"


def ending(status: int | None) -> str:
    """Return how a process ended, as the rest of a sentence after its name.

    Args:
        status: Its exit status; negative: the number of the signal that ended it. ``None``: it is
            not known.
    """
    if status is None:
        return "ended, with an unknown exit status"
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {_signal_name(-status)}"


def remedy(status: int | None) -> str:
    """Return the probable cause of such an end, and what to do; one or more sentences."""
    if status == -signal.SIGKILL:
        return (
            "If nobody killed it, the system did so because memory ran out: raise the memory limit "
            "of its container or machine, or let it use less."
        )
    if status is not None and -status in CRASHES:
        return (
            "Native code crashed, in keyshard, in a library or in your code: report the stack in "
            "its log, and try another version of the library that it names."
        )
    if status is None or status < 0:
        return "Look for the program or the person that ended it."
    return "Look for its error in its log, or for code that ends the process."


def no_start(kind: str, exc: OSError) -> tuple[str, str]:
    """Return the problem and the remedy of a process that the system did not start.

    Args:
        kind: Kind of the process, such as ``worker``.
        exc: The error of the system.
    """
    check = "the memory of this machine, and its limits of processes and open files"
    if exc.filename is not None:
        check = f"that {exc.filename} exists and may be executed"
    return f"The system started no {kind} process: {exc.strerror or exc}.", f"Check {check}."


def last_lines(log: str) -> str:
    """Return the end of a log for an error: whole lines, of limited number and length.

    Python writes the stacks of all threads when it crashes. Of those, the cause and the top of the
    stack that crashed remain.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    fatal = max((at for at, line in enumerate(lines) if line.startswith(_FATAL)), default=None)
    if fatal is not None:
        cause, stacks = lines[fatal], lines[fatal + 1 :]
        current = next((at for at, line in enumerate(stacks) if line.startswith(_CURRENT)), 0)
        lines = [cause, *stacks[current : current + LINES_MAX - 1]]
    return "\n".join(line[:LINE_CHARS_MAX] for line in lines[-LINES_MAX:])


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
