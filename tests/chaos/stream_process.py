"""The program's process, from outside: starting, killing, freezing, and starting again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path

import psutil

from keyshard.testing.verify.history import Event, HistoryWriter
from tests.chaos.stream import TRY_AGAIN, WORKER, Settings, Status
from tests.support.deadlines import deadline
from tests.support.observed import is_live_worker

ROOT = Path(__file__).parents[2]
_LOG_LINES = 25
_STOP_S = deadline(40)


class StreamFailedError(Exception):
    """The program ended as no fault explains."""


class StreamProcess:
    """One process after the other, on the same files.

    Args:
        module: The program.
        settings: Of the first start.
    """

    def __init__(self, module: str, settings: Settings) -> None:
        self._module = module
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[Status] = []
        self.all_workers: set[psutil.Process] = set()
        """Worker processes that were seen."""
        self.gave_up = 0
        """Times that it ended because the broker was away or still knew the one before."""

    @property
    def starts(self) -> int:
        """Times that it was started."""
        return len(self._ended) + 1

    def start(self, ranges: int | None = None) -> None:
        """Start it.

        Args:
            ranges: Its number of ranges from now on; ``None``: as before.
        """
        self._settings = replace(
            self._settings,
            ranges=ranges or self._settings.ranges,
            number=len(self._ended),
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, json.dumps(asdict(self._settings))],
                cwd=ROOT,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )

    def status(self) -> Status:
        """The counts of the current process."""
        path = self._settings.status
        return Status(**json.loads(path.read_text())) if path.exists() else Status()

    def total(self) -> Status:
        """The counts of all processes; a killed one may have done a little more."""
        every = [*self._ended, self.status()]
        return Status(
            running=every[-1].running,
            batches=sum(one.batches for one in every),
            acknowledged=sum(one.acknowledged for one in every),
            duplicates_dropped=sum(one.duplicates_dropped for one in every),
            misrouted=sum(one.misrouted for one in every),
            parked=every[-1].parked,
            unparked=sum(one.unparked for one in every),
            rescales=sum(one.rescales for one in every),
            segments_waiting=max(one.segments_waiting for one in every),
        )

    def tend(self) -> None:
        """Start it again if another fault ended it.

        Raises:
            StreamFailedError: It ended for another reason.
        """
        code = self._child.poll()
        if code is None:
            return
        if code != TRY_AGAIN:
            raise self._failed(code)
        self.gave_up += 1
        self._buried()
        self.start()

    def kill_at(self, step: Enum | None, timeout_s: float) -> bool:
        """Kill it (SIGKILL) at a step of a batch, else after a while; whether it was at the step.

        Raises:
            StreamFailedError: It ended meanwhile as no fault explains.
        """
        reached = False
        if step is not None:
            self.order(step.name)
            with suppress(subprocess.TimeoutExpired):
                code = self._child.wait(timeout_s)
                reached = code == -signal.SIGKILL
                if not reached and code != TRY_AGAIN:
                    raise self._failed(code)
        self._child.kill()
        self._child.wait()
        self._buried()
        return reached

    def order(self, text: str) -> None:
        """Give it a line of its input."""
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # It may have ended by itself.
            self._child.stdin.write(f"{text}\n".encode())

    def freeze(self) -> None:
        """Stop it (SIGSTOP)."""
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue it (SIGCONT)."""
        self._child.send_signal(signal.SIGCONT)

    def workers(self) -> list[psutil.Process]:
        """Its worker processes that live."""
        try:
            children = psutil.Process(self._child.pid).children()
        except psutil.NoSuchProcess:
            return []
        alive = [one for one in children if is_live_worker(one)]
        self.all_workers.update(alive)
        return alive

    def restart(self, ranges: int) -> None:
        """Ask it to end, wait, and start it again.

        Raises:
            StreamFailedError: It ended as no fault explains.
        """
        code = self._end()
        if code not in {0, TRY_AGAIN}:
            raise self._failed(code)
        write(self._settings.history, "disconnected", WORKER)
        self._ended.append(self.status())
        self.start(ranges)

    def stop(self) -> None:
        """Ask it to end, and wait.

        Raises:
            StreamFailedError: It did not end well.
        """
        code = self._end()
        if code != 0:
            raise self._failed(code)

    def _end(self) -> int:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            return self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            raise StreamFailedError(f"the program did not end. {self.log_tail()}") from None

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def log_tail(self) -> str:
        """The end of what it printed."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(["Its log ends:", *(f"  {line}" for line in lines)])

    @property
    def _child(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def _log(self) -> Path:
        return Path(self._settings.directory) / f"program-{self._settings.number}.log"

    def _failed(self, code: int) -> StreamFailedError:
        return StreamFailedError(f"the program ended with status {code}. {self.log_tail()}")

    def _buried(self) -> None:
        """Record in the history that the process has died.

        Opening the history also cuts a torn last line before the next process writes.
        """
        assert self._child.stdin is not None
        self._child.stdin.close()
        write(self._settings.history, "crashed", WORKER)
        self._ended.append(self.status())


def write(history: Path, kind: str, worker: str | None = None) -> None:
    """Append an event that is about no message."""
    with HistoryWriter(history) as writer:
        writer.write(Event(time.time(), kind, worker=worker))


def _environment() -> Mapping[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
