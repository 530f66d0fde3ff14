"""The processes of a development cluster, each with its own ports and data."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from keyshard.config.connection import Connection
from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker.process import (
    LOOPBACK,
    BrokerProcess,
    LogWatch,
    ProcessOwner,
    StartResult,
    start_error,
    wait_until_ready,
)

START_S = 180.0
"""Longest time until a process serves, seconds; a whole cluster takes 10 to 45 on two cores."""
_FROZEN_S = 3.0
"""Time from which a frozen broker may lose its session, seconds: half of the session's time-out."""
_ENDS_S = 5.0
"""Longest wait for the end of a broker that was frozen for longer, seconds."""
_POLL_S = 0.1
_BOOKIE_ENDS = re.compile(rb"Shutting down Bookie(-| \{)")
_BOOKIE_STARTED = re.compile(rb"Started component (\{component=)?bookie-server")


@dataclass(eq=False)
class ClusterMember(ProcessOwner):
    """One process of a cluster. Its ports and its data stay the same over restarts."""

    name: str
    """Its name, such as ``broker-0``."""
    port: int
    """Port of its own protocol, on loopback."""
    folder: Path
    """Folder of its data, its configuration and its log."""
    settings: dict[str, str]
    """Lines of its configuration; a change takes effect at its next start."""
    run: Callable[[ClusterMember], BrokerProcess]
    """Starts its process."""
    _log_from: int = field(default=0, init=False)

    def __repr__(self) -> str:
        state = f"running, pid {self.pid}" if self.is_running() else "not running"
        return f"<{self.name} on {self.port}: {state}>"

    @property
    def log_path(self) -> Path:
        """File with its output."""
        return self.folder / "process.log"

    def launch(self) -> None:
        """Start the process without waiting for it; does nothing if it runs."""
        if not self.is_running():
            self.kill()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._log_from = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._process = self.run(self)

    def wait(self, timeout_s: float = START_S) -> None:
        """Wait until it serves.

        Raises:
            DevBrokerError: It died or did not serve in time; the message ends with its log.
        """
        outcome = self._serves(time.monotonic() + timeout_s)
        if outcome is not StartResult.READY:
            raise start_error(self.name, outcome, timeout_s, self.log_path, self._log_from)

    def start(self, timeout_s: float = START_S) -> None:
        """Start the process and wait until it serves.

        Raises:
            DevBrokerError: As for :meth:`wait`.
        """
        self.launch()
        self.wait(timeout_s)

    def freeze(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open and silent."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a frozen process (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def _serves(self, deadline: float) -> StartResult:
        """Wait until it accepts connections."""
        while self.is_running():
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((LOOPBACK, self.port)) == 0:
                    return StartResult.READY
            if time.monotonic() >= deadline:
                return StartResult.LATE
            time.sleep(_POLL_S)
        return StartResult.DIED

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise DevBrokerError(f"{self.name} does not run.", "Start it first.")
        os.killpg(self._process.pid, number)


class Bookie(ClusterMember):
    """A bookie of a cluster, which serves once it is registered.

    If it finds the registration of its former process, it shuts down, but its process stays
    (apache/pulsar#17759). Then it is started again.
    """

    @property
    def has_shut_down(self) -> bool:
        """Whether it has stopped serving, though its process may run."""
        return not self.is_running() or LogWatch(self.log_path, self._log_from).has(_BOOKIE_ENDS)

    def _serves(self, deadline: float) -> StartResult:
        while self.is_running():
            if self.has_shut_down:
                self.kill()
                self.launch()
            elif LogWatch(self.log_path, self._log_from).has(_BOOKIE_STARTED):
                return StartResult.READY
            if time.monotonic() >= deadline:
                return StartResult.LATE
            time.sleep(_POLL_S)
        return StartResult.DIED


class ClusterBroker(ClusterMember):
    """A broker of a cluster."""

    admin_port: int = 0
    _frozen_s: float = 0.0

    def freeze(self) -> None:
        self._frozen_s = time.monotonic()
        super().freeze()

    def resume(self) -> None:
        """Resume a frozen broker (SIGCONT).

        If its session with ZooKeeper has expired meanwhile, the broker process ends, and this
        method launches a new one.
        """
        frozen_s = time.monotonic() - self._frozen_s
        super().resume()
        end = time.monotonic() + (_ENDS_S if frozen_s > _FROZEN_S else 0.0)
        while self.is_running() and time.monotonic() < end:
            time.sleep(_POLL_S)
        if not self.is_running():
            self.kill()
            self.launch()

    @property
    def service_url(self) -> str:
        """URL of this broker alone, for Pulsar clients."""
        return f"pulsar://{LOOPBACK}:{self.port}"

    @property
    def admin_url(self) -> str:
        """URL of its admin REST interface."""
        return f"http://{LOOPBACK}:{self.admin_port}"

    @property
    def connection(self) -> Connection:
        """Connection to this broker alone."""
        return Connection(self.service_url, self.admin_url)

    def _serves(self, deadline: float) -> StartResult:
        """Wait until it finds topics and accepts connections."""
        return wait_until_ready(
            self.connection,
            returncode=lambda: None if self.is_running() else 1,
            log=LogWatch(self.log_path, self._log_from),
            deadline=deadline,
        )
