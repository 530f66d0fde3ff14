"""A real broker with a proxy before it, one topic, and their faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.devbroker.process import LOOPBACK, free_port
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.chaos.plan import KEEP_ALIVE_S, PARTITIONS
from tests.chaos.proxy import TcpProxy
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

TOPIC = "persistent://public/default/chaos"
SUBSCRIPTION = "chaos"

FORGETFUL = {
    "brokerDeduplicationEnabled": "true",
    "keepAliveIntervalSeconds": str(KEEP_ALIVE_S),
    # Acknowledgements are written down every 50 s instead of every 10 s, so that each death of a
    # broker forgets some.
    "managedLedgerDefaultMarkDeleteRateLimit": "0.02",
}
"""Settings of every broker."""

_PATH = "/admin/v2/persistent/public/default/chaos"
_START_S = deadline(150)
_REQUEST_S = deadline(20)
_POLL_S = 0.1


class Cluster:
    """A context manager: the broker is started on entry, and killed on exit.

    Args:
        directory: Where its data and its log go.
        settings: More settings of the broker; they replace fixed ones of the same name.
        partitions: Partitions of the topic at first; 0: no topic.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        partitions: int = PARTITIONS,
    ) -> None:
        self._direct = free_port()
        behind = free_port({self._direct})
        self._proxied = free_port({self._direct, behind})
        self.broker = DevBroker(
            PULSAR,
            port=self._direct,
            data_dir=directory,
            settings={
                # Every look-up through the proxy returns the proxy's address.
                "advertisedAddress": "",
                "advertisedListeners": (
                    f"direct:{_url(self._direct)},proxied:{_url(self._proxied)}"
                ),
                "internalListenerName": "direct",
                "bindAddresses": f"proxied:{_url(behind)}",
                **FORGETFUL,
                **(settings or {}),
            },
        )
        self.proxy = TcpProxy(self._proxied, behind)
        self._admin = httpx.Client(
            base_url=self.broker.admin_url, timeout=_REQUEST_S, trust_env=False
        )
        self._partitions = partitions
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        with ExitStack() as on_failure:
            on_failure.enter_context(self.broker)
            on_failure.callback(self.broker.kill)
            on_failure.enter_context(self.proxy)
            on_failure.enter_context(self._admin)
            if self._partitions:
                create_partitioned_topic(self.broker.admin_url, TOPIC, self._partitions)
            self._stack = on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def direct_url(self) -> str:
        """URL for clients that have nothing to do with the proxy."""
        return _url(self._direct)

    @property
    def proxied_url(self) -> str:
        """URL for clients that never get around the proxy."""
        return _url(self._proxied)

    @property
    def admin_url(self) -> str:
        """URL of the admin REST interface."""
        return self.broker.admin_url

    def kill(self) -> None:
        """End the broker (SIGKILL)."""
        self.broker.kill()

    def start(self) -> None:
        """Start it again, with what it has on disk.

        Raises:
            DevBrokerError: It was not ready in time.
        """
        self.broker.start(_START_S)

    def tend(self) -> bool:
        """Start again a process that will not get well by itself; whether there was one."""
        return False

    def freeze(self) -> None:
        """Stop the broker (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue it (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def unload(self, deadline: float) -> None:
        """Unload the topic: the broker closes its consumers and producers.

        Raises:
            TimeoutError: The broker refused it until the deadline.
        """
        self.ask("PUT", f"{_PATH}/unload", deadline)

    def grow(self, deadline: float) -> None:
        """Add a partition.

        Raises:
            TimeoutError: The broker refused it until the deadline.
        """
        self._partitions += 1
        self.ask("POST", f"{_PATH}/partitions", deadline, json=self._partitions)

    def backlog(self, deadline: float) -> int:
        """Return the unacknowledged messages; at least 1 without a subscription.

        Raises:
            TimeoutError: The broker did not tell until the deadline.
        """
        backlog = 0
        for number in range(self._partitions):
            path = f"{_PATH}-partition-{number}/stats?getPreciseBacklog=true"
            subscription = self.ask("GET", path, deadline).json()["subscriptions"].get(SUBSCRIPTION)
            backlog += subscription["msgBacklog"] if subscription else 1
        return backlog

    def resting(self, deadline: float) -> int:
        """Messages in the dead-letter topic that are not done.

        Raises:
            TimeoutError: The broker did not tell until the deadline.
        """
        path = f"{_PATH}-{SUBSCRIPTION}-DLQ/stats?getPreciseBacklog=true"
        subscriptions = self.ask("GET", path, deadline).json()["subscriptions"]
        return int(subscriptions[f"{SUBSCRIPTION}-parked"]["msgBacklog"])

    def _signal(self, number: signal.Signals) -> None:
        group = self.broker.pid
        assert group is not None
        os.killpg(group, number)

    def ask(self, method: str, path: str, deadline: float, **content: Any) -> httpx.Response:
        """One request; repeated while the broker is busy with the fault before.

        Raises:
            TimeoutError: The broker refused it until the deadline.
        """
        while True:
            try:
                return self._admin.request(method, path, **content).raise_for_status()
            except httpx.HTTPError as exc:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{method} {path} is refused: {exc}") from exc
            time.sleep(_POLL_S)


def _url(port: int) -> str:
    return f"pulsar://{LOOPBACK}:{port}"
