"""Trouble of the machine: failures of a test that say nothing about the product."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keyshard.errors import BrokerUnavailableError, DevBrokerError
from tests.support.deadlines import FACTOR, DeadlineError, measured_now

SLOWER = 2.0
"""A deadline says nothing once the machine is this many times slower than the tests make it."""
TEXTS = ("Python worker failed to connect back", "[JAVA_GATEWAY_EXITED]")
"""Texts in errors of Spark if one of its processes did not start in time."""
VERDICTS = ("AssertionError", "KEYSHARD_")
"""An output with one of these shows why a program ended, whatever else stands there."""
_SPARK = ("py4j.", "pyspark.")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_OF_THE_WORLD = (DevBrokerError, OSError, subprocess.SubprocessError, queue.Empty)


class MachineError(Exception):
    """Something that a test needs did not start in time, or was taken."""


def ended_early(output: str) -> Exception:
    """The error for a program that should run on; ``output`` is all that it wrote."""
    end = output[-4000:]
    late = any(text in end for text in TEXTS) and not any(text in end for text in VERDICTS)
    return (MachineError if late else AssertionError)(f"the program ended early:\n{end}")


def _cpu_waits_s() -> float:
    """How long, since boot, a thread that could run waited for a core; 0 if nothing counts it."""
    try:
        line = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    except OSError:
        return 0.0
    return int(line.rpartition("=")[2]) / 1e6


def _killed_for_memory() -> int:
    """Number of processes that the kernel has killed for want of memory since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@dataclass(frozen=True)
class Since:
    """A moment, and the shortages of the machine since then."""

    began_s: float = field(default_factory=time.monotonic)
    cpu_waits_s: float = field(default_factory=_cpu_waits_s)
    killed_for_memory: int = field(default_factory=_killed_for_memory)

    def killed(self) -> int:
        """Number of processes that the kernel has killed for want of memory."""
        return _killed_for_memory() - self.killed_for_memory

    def __str__(self) -> str:
        took_s = max(time.monotonic() - self.began_s, 0.001)
        pressure = min((_cpu_waits_s() - self.cpu_waits_s) / took_s, 1.0)
        memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        disk = shutil.disk_usage(tempfile.gettempdir()).free
        return (
            f"CPU pressure {pressure:.0%}, load {os.getloadavg()[0]:.0f}, memory free "
            f"{memory / 1e9:.1f} GB, disk free {disk / 1e9:.1f} GB, killed for want of memory "
            f"{self.killed()}"
        )


# -- Verdicts --------------------------------------------------------------------------------------


def is_verdict(error: BaseException) -> bool:
    """Whether a failure is final: an assertion failed, or another error before this one.

    An error that an ``except`` block translates is its ``__cause__``. One that is only the
    ``__context__`` happened first, and this one while a test or a fixture cleaned up.
    """
    for met, is_first in _chain(error):
        if isinstance(met, pytest.fail.Exception):
            if not _is_timeout(met):
                return True
        elif isinstance(met, AssertionError):
            if not isinstance(met, DeadlineError):
                return True
        elif is_first and not isinstance(met, (MachineError, *_OF_THE_WORLD)):
            return True
    return False


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield an error with all its causes and contexts, and whether each is only a context."""
    found: list[tuple[BaseException | None, bool]] = [(error, False)]
    seen: set[int] = set()
    while found:
        met, is_first = found.pop()
        if met is None or id(met) in seen:
            continue
        seen.add(id(met))
        yield met, is_first
        found.append((met.__context__, not met.__suppress_context__))
        found.append((met.__cause__, False))
        found += [(one, is_first) for one in getattr(met, "exceptions", ())]


# -- Trouble ---------------------------------------------------------------------------------------


def trouble(error: BaseException, since: Since) -> str | None:
    """Why a failure says nothing about the product.

    Args:
        error: The error that ended the test, or one of its fixtures.
        since: Taken when the test began.

    Returns:
        ``None`` if the failure counts. A verdict does, whatever the machine does.
    """
    if is_verdict(error):
        return None
    if _did_not_start(error):
        return f"{type(error).__name__} ({since})"
    if since.killed() and _may_follow_a_kill(error):
        return f"a process was killed for want of memory ({since})"
    if _passed_a_deadline(error) and (now := _slowness()) >= SLOWER:
        return f"the machine is {now:.1f} times as slow as at the start ({since})"
    return None


def _did_not_start(error: BaseException) -> bool:
    if isinstance(error, MachineError):
        return True
    if isinstance(error, DevBrokerError):
        # A failed start has imported it; a process whose tests start no broker does not need it.
        from keyshard.testing.devbroker.process import StartResult  # noqa: PLC0415

        not_started = {StartResult.LATE.name, StartResult.STUCK.name, StartResult.TAKEN.name}
        return error.facts.get("outcome") in not_started or "port" in error.facts
    text = str(error)
    return (
        type(error).__module__.startswith(_SPARK)
        and any(one in text for one in TEXTS)
        and not any(one in text for one in VERDICTS)
    )


def _may_follow_a_kill(error: BaseException) -> bool:
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode in _KILLED
    return _passed_a_deadline(error) or isinstance(
        error, (ConnectionError, EOFError, BrokerUnavailableError)
    )


def _passed_a_deadline(error: BaseException) -> bool:
    """Whether a test, or one of its waits, took too long. Errors of the product derive from some of
    these."""
    return (
        isinstance(error, (DeadlineError, subprocess.TimeoutExpired))
        or type(error) in (TimeoutError, futures.TimeoutError, queue.Empty)
        or _is_timeout(error)
    )


def _is_timeout(error: BaseException) -> bool:
    """Whether it is the error of pytest-timeout."""
    return isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout (>")


def _slowness() -> float:
    """How many times slower the machine is than when the run began, beside the processes of it."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    beside = 1 + processes / len(os.sched_getaffinity(0))
    try:
        return measured_now() / (FACTOR * beside)
    except (OSError, subprocess.SubprocessError, pytest.fail.Exception):
        return 0.0  # the limit of the test may end the measurement
