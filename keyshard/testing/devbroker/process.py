"""The broker's process: starting it in a group of its own, and ending the whole group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keyshard.errors import DevBrokerError

STOP_S = 20.0
"""Longest time that a process has for an orderly end, seconds."""
_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
_LOG_LINES = 15

# A pipe tells the death of the parent, whatever killed it. (PR_SET_PDEATHSIG would also fire when
# only the *thread* that started the broker ends, and needs code between fork and exec.) A line says
# that the broker was ended in order; end of file without a line that the parent is gone.
_WATCHDOG = """\
read -r line && exit 0
kill -s KILL -- "-$1"
[ -n "$2" ] || exit 0
for _ in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$2" && exit 0
    sleep 0.2
done
"""


class BrokerProcess:
    """A running process in a group of its own, with its output in a file."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        remove_if_orphaned: Path | None = None,
    ) -> None:
        """Start the process; it is killed when this one ends, unless it was let go.

        Args:
            command: Program and arguments.
            env: Its whole environment.
            log_path: File that its output is appended to.
            remove_if_orphaned: Directory to remove when it is killed because this process ended.
        """
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watchdog: subprocess.Popen[bytes] | None = _start_watchdog(
            self.pid, remove_if_orphaned
        )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Exit status, or ``None`` while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float) -> None:
        """Ask the process to end (SIGTERM) and kill its group when it does not in time.

        Args:
            timeout_s: Seconds before it is killed.
        """
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the whole group (SIGKILL) and return when it is gone.

        Raises:
            DevBrokerError: It is still there at the deadline.
        """
        kill_group(self.pid, reap=self._process.poll)
        self.let_go()

    def let_go(self) -> None:
        """Let it live on when this process ends. Idempotent."""
        if self._watchdog is not None:
            _dismiss(self._watchdog)
            self._watchdog = None


class ProcessOwner:
    """Base of everything that has one process at a time."""

    _process: BrokerProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else ``None``."""
        return self._process.pid if self._process is not None and self.is_running() else None

    def is_running(self) -> bool:
        """Whether its process is alive; a frozen one is."""
        return self._process is not None and self._process.returncode() is None

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it in order (SIGTERM): a broker hands its topics over. Kills it after the time-out.

        Args:
            timeout_s: Seconds before it is killed.
        """
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None

    def kill(self) -> None:
        """End it at once (SIGKILL to its process group); returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def kill_group(pid: int, reap: Callable[[], object] | None = None) -> None:
    """Kill the process group of ``pid`` (SIGKILL) and return when it is gone.

    Args:
        pid: Process id of the group's leader.
        reap: Function to call while waiting, which collects a dead child.

    Raises:
        DevBrokerError: It is still there at the deadline.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        except PermissionError:  # macOS says so for a group of zombies.
            break
        if reap is not None:
            reap()
        elif start_ticks(pid) is None:
            break
        if time.monotonic() >= deadline:
            raise DevBrokerError(f"The broker (process {pid}) does not end after SIGKILL.")
        time.sleep(_POLL_S)
    if reap is not None:
        reap()


def start_ticks(pid: int) -> str | None:
    """When a live process was started, as the system says it; ``None`` when there is none.

    Together with the process id this names one process: ids are used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_by_ps(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def log_tail(path: Path, start: int = 0) -> str:
    """The last lines of a log, indented, for an error.

    Args:
        path: The log.
        start: Bytes of it that belong to an earlier process.
    """
    try:
        with path.open("rb") as log:
            log.seek(start)
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])


def _start_by_ps(pid: int) -> str | None:
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    state, _, started = done.stdout.strip().partition(" ")
    return started.strip() if started and not state.startswith("Z") else None


def _start_watchdog(pid: int, remove: Path | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "sh", str(pid), str(remove or "")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _dismiss(watchdog: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        watchdog.communicate(b"done\n", timeout=_KILL_TIMEOUT_S)
