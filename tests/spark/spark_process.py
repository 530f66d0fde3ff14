"""Starts, watches and kills a Spark query with everything it started."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.deadlines import DeadlineError, deadline, in_time
from tests.support.machine import ended_early

ROOT = Path(__file__).parents[2]
STEP_S = deadline(180)
"""Longest time from one step of a query to the next, seconds."""
GONE_S = deadline(10)
"""Longest time until the processes of a killed query have ended, seconds."""


def eventually(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until a condition holds; fails after the deadline."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        in_time(end_s, f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.005)


def query_arguments() -> tuple[argparse.Namespace, dict[str, str]]:
    """The arguments that :class:`SparkProcess` gives to its program, and the options among them."""
    parser = argparse.ArgumentParser()
    for name in ("sink", "checkpoint", "progress"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--option", action="append", default=[])
    arguments = parser.parse_args()
    return arguments, dict(option.split("=", 1) for option in arguments.option)


class SparkProcess:
    """One run of a query: the driver's Python process, its JVM, and all Python processes of it."""

    def __init__(
        self,
        options: dict[str, str],
        directory: Path,
        number: int = 0,
        module: str = "examples.parquet_query",
    ) -> None:
        self.checkpoint = directory / "checkpoint"
        self.sink = directory / "sink"
        self.progress = directory / f"run-{number}.jsonl"
        self.log = directory / f"run-{number}.log"
        command = [sys.executable, "-m", module]
        command += ["--sink", str(self.sink), "--checkpoint", str(self.checkpoint)]
        command += ["--progress", str(self.progress)]
        for name, value in options.items():
            command += ["--option", f"{name}={value}"]
        with self.log.open("wb") as log:
            self._driver = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[psutil.Process]:
        """All living processes of the run, the driver first."""
        try:
            driver = psutil.Process(self._driver.pid)
            return [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def jvm(self) -> psutil.Process:
        """The JVM of the run."""
        return next(process for process in self.processes() if process.name() == "java")

    def alive(self) -> bool:
        """Whether the driver runs."""
        return self._driver.poll() is None

    def must_run(self) -> None:
        """Fail if the run has ended."""
        if not self.alive():
            raise ended_early(self.log.read_text(errors="replace"))

    def batches(self, log: str) -> list[int]:
        """Batches in a log of the checkpoint: ``offsets`` or ``commits``."""
        directory = self.checkpoint / log
        if not directory.is_dir():
            return []
        return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())

    def committed(self) -> int:
        """Number of committed batches."""
        return len(self.batches("commits"))

    def wait_committed(self, count: int, timeout_s: float = STEP_S) -> None:
        """Wait for the number of committed batches, over all runs on the checkpoint."""

        def reached() -> bool:
            self.must_run()
            return self.committed() >= count

        eventually(reached, timeout_s, f"{count} batches committed\n{self.tail()}")

    def wait_inside_batch(self, files_min: int, timeout_s: float = STEP_S) -> int:
        """Wait until a batch is partly written and not committed; return its number."""
        found = -1

        def inside() -> bool:
            nonlocal found
            self.must_run()
            planned, committed = self.batches("offsets"), self.batches("commits")
            if not planned or planned[-1] in committed:
                return False
            found = planned[-1]
            since = (self.checkpoint / "offsets" / str(found)).stat().st_mtime_ns
            return sum(1 for path in self.files() if path.stat().st_mtime_ns > since) >= files_min

        eventually(inside, timeout_s, f"a batch with {files_min} files\n{self.tail()}")
        return found

    def files(self) -> set[Path]:
        """All files in the sink that Spark tasks wrote, committed or not."""
        return set(self.sink.glob("part-*.parquet"))

    def kill(self, victim: psutil.Process, gone_within_s: float = GONE_S) -> float:
        """SIGKILL one process, and wait until all processes of the run have ended by themselves.

        Returns:
            The time that this took, seconds.
        """
        everything = self.processes()
        began = time.monotonic()
        victim.send_signal(signal.SIGKILL)

        def gone() -> bool:
            self._driver.poll()
            return not any(_lives(process) for process in everything)

        end_s = began + gone_within_s
        while not gone() and time.monotonic() < end_s:
            time.sleep(0.05)
        left = [process for process in everything if _lives(process)]
        names = [" ".join(process.cmdline())[:200] for process in left]
        for process in left:
            process.kill()
        if left:
            raise DeadlineError(f"still there {gone_within_s:.0f} s after SIGKILL: {names}")
        return time.monotonic() - began

    def stop(self) -> None:
        """End the run, whatever state it is in."""
        everything = self.processes()
        for process in everything:
            if _lives(process):
                process.kill()
        self._driver.wait(deadline(10))
        psutil.wait_procs(everything, timeout=deadline(10))

    def reported(self) -> list[dict[str, Any]]:
        """The reports of the source with each progress of this run."""
        if not self.progress.exists():
            return []
        lines = self.progress.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def tail(self) -> str:
        """The end of the run's output, for failures."""
        return self.log.read_text(errors="replace")[-4000:]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
