"""The broker's process: its ports, its process group, whether it serves, and its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TypeVar

from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.preflight import missing_topics
from keyshard.config.connection import Connection
from keyshard.errors import AuthenticationError, AuthorizationError, BrokerError, DevBrokerError

STOP_S = 20.0
"""Longest time for a graceful end of a process, seconds."""
_POLL_S = 0.02
_KILL_TIMEOUT_S = 10.0
_LOG_LINES = 15
_Started = TypeVar("_Started", bound="StartedByBlock")

# A pipe detects the death of the parent from any cause. (PR_SET_PDEATHSIG would also fire when only
# the *thread* that started the broker ends, and needs code between fork and exec.) A line means
# that the parent has dismissed the watchdog. End of file without a line means a dead parent.
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
    """A running process in its own process group, with its output in a file."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        *,
        remove_if_orphaned: Path | None = None,
    ) -> None:
        """Start the process; it is killed when this process ends, unless :meth:`let_go` was called.

        Args:
            command: Program and arguments.
            log_path: File to which its output is appended; its folder is the working directory.
            remove_if_orphaned: Directory to remove if it is killed because this process ended.
        """
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=log_path.parent,
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
        """Return the exit status, or ``None`` while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float) -> None:
        """Ask the process to end (SIGTERM), and kill its group if it does not end in time.

        Args:
            timeout_s: Time before it is killed, seconds.
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
            DevBrokerError: It still exists at the deadline.
        """
        kill_group(self.pid, reap=self._process.poll)
        self.let_go()

    def let_go(self) -> None:
        """Let the process outlive this one. Idempotent."""
        if self._watchdog is not None:
            _dismiss(self._watchdog)
            self._watchdog = None


class ProcessOwner:
    """Base of classes that own one process at a time."""

    _process: BrokerProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs, otherwise ``None``."""
        return self._process.pid if self._process is not None and self.is_running() else None

    def is_running(self) -> bool:
        """Whether its process is alive; a frozen process is."""
        return self._process is not None and self._process.returncode() is None

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Stop the process gracefully (SIGTERM), so that a broker hands over its topics.

        If the process does not end in time, kill it.

        Args:
            timeout_s: Time before it is killed, seconds.
        """
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None

    def kill(self) -> None:
        """Kill the process group (SIGKILL) and return when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process = None


class StartedByBlock(ABC):
    """Base of context managers that start on entry, and close on exit or if the start fails."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: _Started) -> _Started:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kill_group(pid: int, reap: Callable[[], object] | None = None) -> None:
    """Kill the process group of ``pid`` (SIGKILL) and return when it is gone.

    Args:
        pid: Process id of the group's leader.
        reap: Called while waiting, to collect a dead child.

    Raises:
        DevBrokerError: It still exists at the deadline.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while True:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        except PermissionError:  # macOS raises this error for a group of zombies.
            break
        if reap is not None:
            reap()
        elif start_ticks(pid) is None:
            break
        if time.monotonic() >= deadline:
            raise DevBrokerError(
                f"The broker (process {pid}) did not end after SIGKILL.",
                "Check the state of the process.",
            )
        time.sleep(_POLL_S)
    if reap is not None:
        reap()


def start_ticks(pid: int) -> str | None:
    """Return the start time of a live process, as the system writes it; ``None`` if it is dead.

    Process ids are reused: the start time and the id together identify a process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_by_ps(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def log_tail(path: Path, start: int = 0) -> str:
    """Return the last lines of a log, indented, for an error.

    Args:
        path: The log.
        start: Leading bytes that belong to an earlier process.
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


# -- Whether a started program serves --------------------------------------------------------------

_READY_POLL_S = 0.1
_REFUSED_S = 5.0
"""Time after which a broker that starts accepts its own clients, seconds."""
_NAMESPACE = "public/default"
_PROBE = f"/lookup/v2/topic/persistent/{_NAMESPACE}/keyshard-probe"
_STUCK = re.compile(
    rb"Lock on resource (?:/ledgers/available/\S+ was invalidated\. state Valid"
    # From Pulsar 5.0 on, the path and the state follow the text, in braces.
    rb"|was invalidated \{.*/ledgers/available/.*\bValid)"
)
_STUCK_LINES = 3
_IN_USE = re.compile(rb"Address already in use")


class StartResult(Enum):
    """Outcome of a start, in words for a user."""

    READY = "it is ready"
    DIED = "its process ended"
    TAKEN = "another process listens on one of its ports"
    LATE = "it was not ready in time"
    STUCK = "its storage keeps losing its registration"
    REFUSED = (
        "it refuses the credentials of DevBroker. Use DevBroker(tokens=True), or give "
        "brokerClientAuthenticationPlugin and brokerClientAuthenticationParameters of a superuser "
        "in settings"
    )


def start_error(
    name: str, outcome: StartResult, timeout_s: float, log_path: Path, log_from: int
) -> DevBrokerError:
    """Return the error of a start; its text has the end of the log from ``log_from`` on."""
    return DevBrokerError(
        f"{name} did not start: {outcome.value} (limit {timeout_s:g} s). Its log is "
        f"{log_path} and ends:\n{log_tail(log_path, log_from)}",
        log_path=str(log_path),
        outcome=outcome.name,
    )


class LogWatch:
    """Finds in a broker's log a start that can never succeed.

    A killed bookie leaves its registration behind. The next start deletes it and registers anew.
    The notice of that deletion often comes so late that it counts as a loss of the new
    registration. That one is then deleted and made again, several hundred times a second without
    end: the compared values have no ``equals`` (apache/pulsar#17759). Meanwhile reads time out. The
    loop shows within two seconds, before the broker serves clients, and another start ends it.
    """

    def __init__(self, path: Path, start: int) -> None:
        """Watch the log at ``path`` after its first ``start`` bytes."""
        self._path = path
        self._start = start
        self._next = start
        self._rest = b""
        self._found = 0

    def has(self, text: re.Pattern[bytes]) -> bool:
        """Whether a text was written."""
        with self._path.open("rb") as log:
            log.seek(self._start)
            return text.search(log.read()) is not None

    def stuck(self) -> bool:
        """Whether a bookie is deleting and renewing its registration without end."""
        with self._path.open("rb") as log:
            log.seek(self._next)
            new = log.read()
        self._next += len(new)
        lines, newline, rest = (self._rest + new).rpartition(b"\n")
        self._rest = rest
        self._found += len(_STUCK.findall(lines)) if newline else 0
        return self._found >= _STUCK_LINES


def wait_until_ready(
    connection: Connection,
    *,
    returncode: Callable[[], int | None],
    log: LogWatch,
    deadline: float,
) -> StartResult:
    """Wait until the broker has its namespace, answers lookups, and accepts connections.

    A lookup names the owner of a topic. If the settings of the broker forbid the topic, the lookup
    is refused, which is an answer, too.

    Args:
        connection: Connection to the broker.
        returncode: Returns the exit status of its process, ``None`` while it runs.
        log: Its log.
        deadline: End of the wait, monotonic seconds.
    """
    refused_s: float | None = None
    with closing(AdminHttp(connection)) as admin:
        while True:
            if returncode() is not None:
                return StartResult.TAKEN if log.has(_IN_USE) else StartResult.DIED
            if log.stuck():
                return StartResult.STUCK
            found, now = _probe(connection, admin), time.monotonic()
            if found is StartResult.READY:
                return found
            refused = found is StartResult.REFUSED
            refused_s = (now if refused_s is None else refused_s) if refused else None
            if now >= deadline or (refused_s is not None and now - refused_s >= _REFUSED_S):
                return found
            time.sleep(_READY_POLL_S)


def _probe(connection: Connection, admin: AdminHttp) -> StartResult:
    """Ask the broker once whether it serves; ``LATE`` means not yet."""
    try:
        namespaces = admin.request("GET", "/admin/v2/namespaces/public")
        if namespaces.status_code != 200 or _NAMESPACE not in namespaces.json():
            return StartResult.LATE
        if not is_answer(admin.request("GET", _PROBE).status_code):
            return StartResult.LATE
        missing_topics(connection, Credentials(connection), ())
    except (AuthenticationError, AuthorizationError):
        return StartResult.REFUSED
    except (BrokerError, ValueError):
        return StartResult.LATE
    return StartResult.READY


def is_answer(status: int) -> bool:
    """Whether a broker that has its namespace decided a lookup.

    Without automatic creation of topics, the answer is 404. Without persistent topics, it is 405.
    A broker that is not ready yet answers with a status of 500 or higher.

    Args:
        status: HTTP status of the answer.
    """
    return status == 200 or 400 <= status < 500


# -- Free ports of the loopback interface ----------------------------------------------------------

LOOPBACK = "127.0.0.1"
"""The only address on which a development broker listens."""

_FIRST, _LAST = 20_000, 32_000
_TRIES_MAX = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_held: dict[int, socket.socket] = {}


def port_is_free(port: int) -> bool:
    """Whether a server can listen on a loopback port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(taken: Collection[int] = ()) -> int:
    """Return a free loopback port outside the kernel's range for outgoing connections.

    A client that reconnects to a dead broker could otherwise get the broker's own port for its
    end. It would connect to itself, and keep the broker from starting again.

    On Linux the port is reserved until :func:`give_back`, or the end of this process. Many brokers
    start side by side, seconds pass between the choice and the listening, and a dead broker comes
    back to its port.

    Args:
        taken: Ports not to choose.

    Raises:
        DevBrokerError: None was found.
    """
    last = min(_LAST, _ephemeral_start() - 1)
    first = _FIRST if last - _FIRST > _TRIES_MAX else 1_100
    chooser = random.SystemRandom()
    for _ in range(_TRIES_MAX):
        port = chooser.randint(first, last)
        if port not in taken and _hold(port):
            return port
    raise DevBrokerError(f"No free port was found between {first} and {last}.", "Name a port.")


def give_back(port: int) -> None:
    """Release a reserved port; does nothing if it is not reserved."""
    if port in _held:
        _held.pop(port).close()


@atexit.register
def _give_all_back() -> None:
    """Close all reserved sockets, because Python gives a ``ResourceWarning`` for open ones."""
    for port in list(_held):
        give_back(port)


def _hold(port: int) -> bool:
    """Reserve a free port by binding it without listening; ``False`` if it is not free.

    Linux lets a server listen beside a socket that is only bound, if both may share the address
    (``SO_REUSEADDR``, as servers usually do). A bind without sharing is refused, so holders notice
    one another.
    """
    if sys.platform != "linux":
        return port_is_free(port)
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind((LOOPBACK, port))
    except OSError:
        holder.close()
        return False
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held[port] = holder
    return True


def loopback_interface() -> str:
    """Return the network interface with the loopback address, such as ``lo``."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def _ephemeral_start() -> int:
    try:
        start = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LAST + 1
    return start if start > _FIRST else _LAST + 1
