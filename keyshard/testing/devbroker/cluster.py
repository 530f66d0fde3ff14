"""A real Pulsar cluster on this machine: ZooKeeper, bookies and brokers, each a process."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from keyshard.broker.admin.http import AdminHttp
from keyshard.config.connection import Connection
from keyshard.core.position.entry import namespace_of
from keyshard.core.releases import DEFAULT_VERSION
from keyshard.errors import BrokerError, ConfigError, DevBrokerError
from keyshard.testing.devbroker.devbroker import DEFAULT_SETTINGS, options_of_broker, render_config
from keyshard.testing.devbroker.distribution import install, template
from keyshard.testing.devbroker.java import java_of, jvm_command
from keyshard.testing.devbroker.members import START_S, Bookie, ClusterBroker, ClusterMember
from keyshard.testing.devbroker.process import (
    LOOPBACK,
    BrokerProcess,
    StartedByBlock,
    free_port,
    give_back,
    log_tail,
    loopback_interface,
)

_POLL_S = 0.1
_CLUSTER = "dev"
_MEMORY = "-Xms64m -Xmx512m -XX:MaxDirectMemorySize=512m"
_SESSION_MS = 6_000
"""Time after which a dead broker loses its topics to the others, milliseconds."""
_MEMBERS_MAX = 5
_ZOOKEEPER = ("org.apache.zookeeper.server.quorum.QuorumPeerMain",)
_BOOKIE = ("org.apache.bookkeeper.server.Main", "--conf")
_BROKER = ("org.apache.pulsar.PulsarBrokerStarter", "--broker-conf")
_INITIALIZE = "org.apache.pulsar.PulsarClusterMetadataSetup"


class DevCluster(StartedByBlock):
    """ZooKeeper, bookies and brokers on loopback, for tests with several brokers.

    Topics are spread over the brokers by bundles. The load balancer moves none by itself: only
    :meth:`move`, :meth:`split` and faults of members do. All processes end with the process that
    started them.

    ::

        with DevCluster(brokers=2, bookies=2) as cluster:
            source = KeyShardSource("orders", service_url=cluster.service_url, ...)
            cluster.brokers[0].kill()
    """

    def __init__(
        self,
        brokers: int = 2,
        bookies: int = 2,
        version: str = DEFAULT_VERSION,
        *,
        data_dir: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a cluster; nothing is started yet.

        Args:
            brokers: Number of brokers.
            bookies: Number of bookies. With two or more, each entry is stored on two of them.
            version: Pulsar version; fetched on the first start ever.
            data_dir: Directory of data and logs; by default a temporary directory that
                :meth:`close` removes.
            settings: Lines for the configuration of every broker.

        Raises:
            ConfigError: A number or a setting is not possible.
        """
        for name, count in (("brokers", brokers), ("bookies", bookies)):
            if not 1 <= count <= _MEMBERS_MAX:
                raise ConfigError(f"{name} is {count}; it must be from 1 to {_MEMBERS_MAX}.")
        render_config("", settings or {})
        self._version = version
        self._temporary = data_dir is None
        self._folder = data_dir or Path(tempfile.mkdtemp(prefix="keyshard-cluster-"))
        self._home: Path | None = None
        self._ports: list[int] = []
        self._java = Path()
        self._options: Sequence[str] = ()
        self.zookeeper = self._member(ClusterMember, "zookeeper", {})
        self.bookies: Sequence[Bookie] = [
            self._member(Bookie, f"bookie-{number}", {}) for number in range(bookies)
        ]
        self.brokers: Sequence[ClusterBroker] = [
            self._member(ClusterBroker, f"broker-{number}", dict(settings or {}))
            for number in range(brokers)
        ]
        for broker in self.brokers:
            broker.admin_port = self._port()

    @property
    def members(self) -> Sequence[ClusterMember]:
        """All processes, in the order of their start."""
        return [self.zookeeper, *self.bookies, *self.brokers]

    @property
    def service_url(self) -> str:
        """URL for Pulsar clients, with every broker."""
        return f"pulsar://{','.join(f'{LOOPBACK}:{broker.port}' for broker in self.brokers)}"

    @property
    def admin_url(self) -> str:
        """Admin URL of the first broker, which redirects requests to the owners of topics."""
        return self.brokers[0].admin_url

    @property
    def connection(self) -> Connection:
        """Connection to the cluster."""
        return Connection(self.service_url, self.admin_url)

    def start(self, timeout_s: float = START_S) -> None:
        """Start the members that do not run, and return when every process serves.

        Args:
            timeout_s: Seconds for each of ZooKeeper, the bookies and the brokers.

        Raises:
            DevBrokerError: A process died or did not serve in time.
        """
        self._home = install(self._version)
        self._java = java_of(self._version)
        self._options = options_of_broker(self._version, self._home, self._java)
        first = not (self._folder / "zookeeper").exists()
        self.zookeeper.start(timeout_s)
        if first:
            self._initialize(timeout_s)
        for group in (self.bookies, self.brokers):
            for member in group:
                member.launch()
            for member in group:
                member.wait(timeout_s)

    def close(self) -> None:
        """Kill every process, and remove a temporary directory."""
        for member in reversed(self.members):
            member.kill()
        for port in self._ports:
            give_back(port)
        if self._temporary:
            shutil.rmtree(self._folder, ignore_errors=True)

    def owner(self, topic: str) -> ClusterBroker:
        """Return the broker that serves a topic, or a topic partition.

        Raises:
            DevBrokerError: No broker names an owner that belongs to this cluster.
        """
        url = self.ask("GET", _lookup(topic)).json()["brokerUrl"]
        for broker in self.brokers:
            if str(url).endswith(f":{broker.port}"):
                return broker
        raise DevBrokerError(
            f"{topic} is served by {url!r}, which is not a broker of this cluster."
        )

    def bundle(self, topic: str) -> str:
        """Return the bundle of a topic, such as ``0x00000000_0x40000000``."""
        return str(self.ask("GET", f"{_lookup(topic)}/bundle").text).strip('"')

    def move(self, topic: str, broker: ClusterBroker, timeout_s: float = 30.0) -> None:
        """Move a topic, and all others of its bundle, to a broker.

        If a bundle has no owner, a look-up with ``authoritative`` makes the asked broker its owner.
        The admin interface's own ``destinationBroker`` sends requests in a circle if the bundle's
        owner is not the leader (Pulsar 4.0.8).

        Args:
            topic: The topic.
            broker: Its next owner.
            timeout_s: Seconds for all attempts; clients look the topic up at the same time.

        Raises:
            DevBrokerError: The brokers refuse it, or clients were faster each time.
        """
        deadline = time.monotonic() + timeout_s
        bundle = f"/admin/v2/namespaces/{namespace_of(topic)}/{self.bundle(topic)}"
        while not self._is_owner(broker, topic):
            if time.monotonic() >= deadline:
                raise DevBrokerError(
                    f"{topic} did not move to {broker.name} within {timeout_s:g} s.",
                    "See the log of the broker.",
                )
            self.ask("PUT", f"{bundle}/unload")
            with closing(AdminHttp(broker.connection)) as admin:
                admin.request("GET", _lookup(topic), params={"authoritative": "true"})

    def _is_owner(self, broker: ClusterBroker, topic: str) -> bool:
        with suppress(DevBrokerError):
            return self.owner(topic) is broker
        return False

    def split(self, topic: str) -> None:
        """Split the bundle of a topic in two, and unload both.

        Raises:
            DevBrokerError: The brokers refuse it.
        """
        path = f"/admin/v2/namespaces/{namespace_of(topic)}/{self.bundle(topic)}/split"
        self.ask("PUT", path, params={"unload": "true"})

    def ask(self, method: str, path: str, timeout_s: float = 30.0, **content: Any) -> Any:
        """Send one admin request to each broker in turn, until one answers with success.

        Args:
            method: HTTP method, such as ``GET``.
            path: Path below the URL of the admin interface.
            timeout_s: Seconds for all attempts.
            **content: Parameters or JSON, as for httpx.

        Raises:
            DevBrokerError: No broker answered with success in time.
        """
        deadline = time.monotonic() + timeout_s
        said: object = "no broker runs"
        while time.monotonic() < deadline:
            for broker in self.brokers:
                if not broker.is_running():
                    continue
                try:
                    with closing(AdminHttp(broker.connection)) as admin:
                        response = admin.request(method, path, **content)
                except BrokerError as exc:
                    said = exc
                    continue
                if response.status_code < 300:
                    return response
                said = f"{response.status_code} {response.text[:200]}"
            time.sleep(_POLL_S)
        raise DevBrokerError(
            f"{method} {path} was refused for {timeout_s:g} s: {said}.",
            "See the log of the broker.",
        )

    # -- processes --------------------------------------------------------------------------------

    def _port(self) -> int:
        self._ports.append(free_port(self._ports))
        return self._ports[-1]

    def _member(
        self,
        kind: type[Any],
        name: str,
        settings: dict[str, str],
    ) -> Any:
        return kind(name, self._port(), self._folder / name, settings, self._launch)

    def _launch(self, member: ClusterMember) -> BrokerProcess:
        assert self._home is not None
        role = member.name.partition("-")[0]
        name, program, settings = {
            "zookeeper": ("zookeeper.conf", _ZOOKEEPER, self._of_zookeeper),
            "bookie": ("bookkeeper.conf", _BOOKIE, self._of_bookie),
            "broker": ("broker.conf", _BROKER, self._of_broker),
        }[role]
        config = member.folder / name
        text = template(self._home, name)
        config.write_text(render_config(text, {**settings(member), **member.settings}))
        return self._process([*program, str(config)], member)

    def _process(self, program: Sequence[str], member: ClusterMember) -> BrokerProcess:
        assert self._home is not None
        return BrokerProcess(
            [*jvm_command(self._home, self._java, memory=_MEMORY, options=self._options), *program],
            member.log_path,
            remove_if_orphaned=self._folder if self._temporary else None,
        )

    def _initialize(self, timeout_s: float) -> None:
        """Write the metadata of a new cluster."""
        store, (broker, *_) = self._store, self.brokers
        arguments = [
            _INITIALIZE,
            *("--cluster", _CLUSTER),
            *("--metadata-store", store),
            *("--configuration-metadata-store", store),
            *("--web-service-url", broker.admin_url),
            *("--broker-service-url", broker.service_url),
        ]
        process = self._process(arguments, self.zookeeper)
        deadline = time.monotonic() + timeout_s
        while process.returncode() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        status = process.returncode()
        process.kill()
        if status != 0:
            raise DevBrokerError(
                f"The metadata of the cluster was not written (exit status {status}, limit "
                f"{timeout_s:g} s). The log ends:\n{log_tail(self.zookeeper.log_path)}"
            )

    @property
    def _store(self) -> str:
        return f"zk:{LOOPBACK}:{self.zookeeper.port}"

    def _of_zookeeper(self, member: ClusterMember) -> dict[str, str]:
        return {
            "dataDir": str(member.folder / "data"),
            "clientPort": str(member.port),
            "clientPortAddress": LOOPBACK,
            "admin.enableServer": "false",
            "metricsProvider.className": "org.apache.zookeeper.metrics.impl.NullMetricsProvider",
            "forceSync": "no",
        }

    def _of_bookie(self, member: ClusterMember) -> dict[str, str]:
        data = member.folder / "data"
        return {
            "bookiePort": str(member.port),
            "listeningInterface": loopback_interface(),
            "advertisedAddress": LOOPBACK,
            "allowLoopback": "true",
            "metadataServiceUri": f"metadata-store:{self._store}",
            "journalDirectory": str(data / "journal"),
            "ledgerDirectories": str(data / "ledgers"),
            # Without it every bookie shares one folder of the distribution.
            "indexDirectories": str(data / "ledgers"),
            "journalSyncData": "false",
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.98",
            "minUsableSizeForIndexFileCreation": "1",
            "dbStorage_writeCacheMaxSizeMb": "32",
            "dbStorage_readAheadCacheMaxSizeMb": "16",
            "dbStorage_rocksDB_blockCacheSize": "16777216",
            # The default provider serves statistics on port 8000 of every address.
            "statsProviderClass": "org.apache.bookkeeper.stats.NullStatsProvider",
            "autoRecoveryDaemonEnabled": "false",
            "zkTimeout": str(_SESSION_MS),
        }

    def _of_broker(self, member: ClusterMember) -> dict[str, str]:
        assert isinstance(member, ClusterBroker)
        copies = str(min(2, len(self.bookies)))
        return {
            **DEFAULT_SETTINGS,
            "clusterName": _CLUSTER,
            "metadataStoreUrl": self._store,
            "configurationMetadataStoreUrl": self._store,
            "metadataStoreSessionTimeoutMillis": str(_SESSION_MS),
            # If a broker continues after its session has ended, it may write the metadata of the
            # same ledger forever, and load no more topics. So it ends, to be started again.
            "zookeeperSessionExpiredPolicy": "shutdown",
            "bindAddress": LOOPBACK,
            "advertisedAddress": LOOPBACK,
            "brokerServicePort": str(member.port),
            "webServicePort": str(member.admin_port),
            "narExtractionDirectory": str(member.folder / "nar"),
            "managedLedgerDefaultEnsembleSize": copies,
            "managedLedgerDefaultWriteQuorum": copies,
            # One bookie may be down: an entry is stored if the other one has it.
            "managedLedgerDefaultAckQuorum": "1",
            "bookkeeper_delayEnsembleChange": "true",
            "managedLedgerCacheSizeMB": "32",
            "numHttpServerThreads": "16",
            "loadBalancerSheddingEnabled": "false",
            "loadBalancerAutoBundleSplitEnabled": "false",
            "topicLevelPoliciesEnabled": "false",
            "functionsWorkerEnabled": "false",
        }


def _lookup(topic: str) -> str:
    return f"/lookup/v2/topic/{topic.replace('://', '/')}"
