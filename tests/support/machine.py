"""Trouble of the machine: failures of a test that say nothing about the product."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import tempfile
import time
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keyshard.errors import DevBrokerError
from tests.support.deadlines import FACTOR, DeadlineError, measured_now

SLOWER = 2.0
"""A deadline says nothing once the machine is this many times slower than when the run began."""
TEXTS = ("Python worker failed to connect back", "[JAVA_GATEWAY_EXITED]")
"""What errors of Spark say if a process of it did not start in time."""
_WAITED = (DeadlineError, subprocess.TimeoutExpired)
_WAITED_EXACTLY = (TimeoutError, futures.TimeoutError, queue.Empty)
"""Errors of the product derive from these."""


class MachineError(Exception):
    """Something that a test needs did not start in time, or was taken."""


def ended_early(output: str) -> Exception:
    """The error for a program that should run on; ``output`` is all that it wrote."""
    kind = MachineError if any(text in output for text in TEXTS) else AssertionError
    return kind(f"the program ended early:\n{output[-4000:]}")


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
    """What the machine is short of from now on."""

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


def _asserted(error: BaseException) -> bool:
    """Whether an assertion failed before this error: a verdict, which is final."""
    met: BaseException | None = error
    while met is not None:
        if isinstance(met, AssertionError) and not isinstance(met, DeadlineError):
            return True
        met = met.__cause__ or met.__context__
    return False


def _passed_a_deadline(error: BaseException) -> bool:
    """Whether a test, or one of its waits, took too long."""
    return (
        isinstance(error, _WAITED)
        or type(error) in _WAITED_EXACTLY
        or (isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout (>"))
    )


def trouble(error: BaseException, since: Since) -> str | None:
    """Why a failure says nothing about the product.

    Args:
        error: What ended the test, or one of its fixtures.
        since: Taken when the test began.

    Returns:
        ``None`` if the failure counts. That of an assertion does, whatever the machine does.
    """
    if _asserted(error):
        return None
    if isinstance(error, (MachineError, DevBrokerError)) or any(
        text in str(error) for text in TEXTS
    ):
        return f"{type(error).__name__} ({since})"
    if since.killed():
        return f"a process was killed for want of memory ({since})"
    if _passed_a_deadline(error) and (now := measured_now()) >= SLOWER * FACTOR:
        return f"machine factor {now:.1f}, but {FACTOR:.1f} when the run began ({since})"
    return None
