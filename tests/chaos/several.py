"""A cluster of several brokers and two bookies, with a proxy before each broker."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.members import ClusterBroker
from keyshard.testing.devbroker.process import LOOPBACK, free_port
from keyshard.testing.verify.workloads import create_partitioned_topic
from tests.chaos.cluster import FORGETFUL, TOPIC, Cluster
from tests.chaos.plan import PARTITIONS
from tests.chaos.proxy import Proxies, TcpProxy
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

_REQUEST_S = deadline(20)
_START_S = deadline(150)
_BOOKIES = 2
_LOOK_S = 15.0
"""Time between two looks at the bookies, seconds."""


class SeveralBrokers(Cluster):
    """As :class:`Cluster`; a fault affects one broker that serves a partition of the topic.

    Args:
        directory: Folder for data and logs.
        brokers: Number of brokers.
        seed: Chooses partitions, and so the brokers that faults affect.
    """

    def __init__(self, directory: Path, brokers: int, seed: int) -> None:
        self._chooser = random.Random(f"{seed}: which broker?")
        self._dev = DevCluster(brokers, _BOOKIES, PULSAR, data_dir=directory)
        self._frozen: ClusterBroker | None = None
        self._is_down = False
        """Whether a fault ended a process, and starts it again."""
        self._looks_at_s = 0.0
        self._partitions = PARTITIONS
        self._stack = ExitStack()
        proxies = []
        taken: set[int] = set()
        self._proxied = 0
        self._urls = []
        for broker in self._dev.brokers:
            behind = free_port(taken)
            before = free_port(taken | {behind})
            taken |= {behind, before}
            direct, proxied = f"pulsar://{LOOPBACK}:{broker.port}", f"pulsar://{LOOPBACK}:{before}"
            broker.settings.update(
                {
                    **FORGETFUL,
                    "advertisedAddress": "",
                    "advertisedListeners": f"direct:{direct},proxied:{proxied}",
                    "internalListenerName": "direct",
                    "bindAddresses": f"proxied:pulsar://{LOOPBACK}:{behind}",
                }
            )
            proxies.append(TcpProxy(before, behind))
            self._urls.append(f"{LOOPBACK}:{before}")
        # Only runs on one broker cut a connection behind a number of bytes.
        self.proxy = Proxies(proxies)  # type: ignore[assignment]
        self._admin_port = free_port(taken)
        self._balancer = TcpProxy(self._admin_port, self._answering)
        self._admin = httpx.Client(
            base_url=self.admin_url, timeout=_REQUEST_S, trust_env=False, follow_redirects=True
        )

    def __enter__(self) -> SeveralBrokers:
        with ExitStack() as on_failure:
            on_failure.enter_context(self._dev)
            on_failure.enter_context(self.proxy)
            on_failure.enter_context(self._balancer)
            on_failure.enter_context(self._admin)
            create_partitioned_topic(self.admin_url, TOPIC, PARTITIONS)
            self._stack = on_failure.pop_all()
        return self

    @property
    def direct_url(self) -> str:
        return self._dev.service_url

    @property
    def proxied_url(self) -> str:
        return f"pulsar://{','.join(self._urls)}"

    @property
    def admin_url(self) -> str:
        """URL of a balancer that sends each connection to a broker that answers."""
        return f"http://{LOOPBACK}:{self._admin_port}"

    def kill(self) -> None:
        """End a broker (SIGKILL)."""
        self._is_down = True
        self._one().kill()

    def shut_down(self) -> None:
        """Shut a broker down in an orderly way (SIGTERM)."""
        self._is_down = True
        self._one().stop()

    def kill_bookie(self) -> None:
        """End a bookie (SIGKILL)."""
        self._is_down = True
        self._chooser.choice(self._dev.bookies).kill()

    def start(self) -> None:
        """Start the brokers and bookies that do not run.

        Raises:
            DevBrokerError: It did not serve in time.
        """
        self._dev.start(_START_S)
        self._is_down = False

    def tend(self) -> bool:
        """Start a bookie or a broker again that ended by itself.

        A bookie that finds the registration of its former process may end a while after its start
        (apache/pulsar#17759). Without it no ledger is created or recovered. A broker that was
        stopped for longer than its session with ZooKeeper lasts ends when it goes on.
        """
        if self._is_down or time.monotonic() < self._looks_at_s:
            return False
        self._looks_at_s = time.monotonic() + _LOOK_S
        ended = [one for one in self._dev.bookies if one.has_shut_down]
        for bookie in ended:
            bookie.kill()
        if not ended and all(one.is_running() for one in self._dev.brokers):
            return False
        self.start()
        return True

    def freeze(self) -> None:
        """Stop a broker (SIGSTOP)."""
        self._frozen = self._one()
        self._frozen.freeze()

    def thaw(self) -> None:
        """Continue it (SIGCONT); it ends if its session with ZooKeeper has expired meanwhile."""
        broker, self._frozen = self._frozen, None
        if broker is None:
            return
        broker.resume()
        self.start()

    def move(self) -> None:
        """Have another broker serve the bundle of a partition."""
        partition = self._partition()
        others = [one for one in self._dev.brokers if one is not self._dev.owner(partition)]
        self._dev.move(partition, self._chooser.choice(others))

    def split(self) -> None:
        """Split the bundle of a partition."""
        self._dev.split(self._partition())

    def _partition(self) -> str:
        return f"{TOPIC}-partition-{self._chooser.randrange(self._partitions)}"

    def _one(self) -> ClusterBroker:
        return self._dev.owner(self._partition())

    def _answering(self) -> int:
        running = [one for one in self._dev.brokers if one.is_running() and one is not self._frozen]
        return (running or self._dev.brokers)[0].admin_port
