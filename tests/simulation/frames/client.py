"""The connection of a process that speaks frames: the real transport, over simulated sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from keyshard.broker.port import Reader, StartPosition, SubscriptionSpec
from keyshard.broker.wire import (
    ack_grouping,
    broker,
    connection,
    connection_pool,
    producer,
    reconnect,
    requests,
)
from keyshard.broker.wire.broker import WireBroker
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.consumer import WireConsumer, WireReader
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerError
from tests.simulation.frames.broker import BROKERS, PORT, Cluster
from tests.simulation.frames.sockets import Descriptors, Socket, answers
from tests.simulation.handling.network import HandlerClient
from tests.simulation.install import replaced
from tests.simulation.network import Client, Consumer, Network
from tests.simulation.network import _Reader as CutReader
from tests.simulation.scheduler import Process, Scheduler


class Frames:
    """The state that the connections of one run share.

    Args:
        seed: Decides all random draws.
        scheduler: Owns the time.
    """

    def __init__(self, seed: str, scheduler: Scheduler) -> None:
        self._seed = seed
        self._scheduler = scheduler
        self._random = Random(f"{seed}:frames")
        self._descriptors = Descriptors(scheduler)
        self._clusters: dict[Network, Cluster] = {}
        self._clients: dict[str, FramedClient] = {}

    def cluster(self, network: Network) -> Cluster:
        """The brokers of a network."""
        if network not in self._clusters:
            self._clusters[network] = Cluster(network, self._random, self._descriptors)
        return self._clusters[network]

    def socket(self, process: Process) -> Socket:
        """A client's end of a new connection."""
        return Socket(self._scheduler, self._descriptors.new(), self._random, process)

    def brokers(self, client: FramedClient) -> str:
        """A host name of the brokers, unique to one client."""
        name = f"brokers-of-{len(self._clients)}"
        self._clients[name] = client
        return name

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Simulated sockets beneath the transport, until the block ends."""
        answer = answers(self._scheduler)
        stand_ins: list[tuple[Any, str, Any]] = [
            (connection, "open_socket", self._open_socket),
            (connection_pool, "resolved", lambda address, _: [address]),
            (connection, "os", self._descriptors),
            (connection, "select", self._descriptors),
            (requests, "_ids", itertools.count(1)),
            (reconnect, "_ids", itertools.count(1)),
            (broker, "close_at_exit", lambda _: None),
            # It has sockets of its own.
            (broker, "missing_topics", lambda *_: frozenset[str]()),
            (broker, "weakref", _Ordered),
            *(
                (module, "Future", answer)
                for module in (connection, reconnect, producer, ack_grouping)
            ),
        ]
        with replaced(*stand_ins):
            yield

    def _open_socket(self, address: Address, _: Connection, timeout_s: float) -> Socket:
        client = self._clients[address.host]
        return client.cluster.dial(client, address, timeout_s)


class _Ordered:
    """Replaces the module ``weakref``: the order of closing does not depend on addresses."""

    class WeakSet(dict[Any, None]):
        def add(self, one: Any) -> None:
            self[one] = None


class FramedClient(Client):
    """One connection of one process; implements the ``Broker`` port.

    Producers, and the question which topics exist, do not go by this transport.
    """

    consumers: list[FramedConsumer]  # type: ignore[assignment]

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        assert network.frames is not None, "a world with frames says so"
        self.cluster: Cluster = network.frames.cluster(network)
        self.brokers: str = network.frames.brokers(self)
        """Their host name, unique to this client."""
        hosts = ",".join(f"{self.brokers}:{PORT + number}" for number in range(BROKERS))
        self._wire = WireBroker(Connection(f"pulsar://{hosts}"))
        self.frozen = False
        """Whether its process is gone, and the broker does not know it."""

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        return self._wire.partitions(topic, create=create)

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> FramedConsumer:
        inner = self._wire.subscribe(spec, start)
        self.consumers.append(FramedConsumer(self, inner))
        return self.consumers[-1]

    def reader(self, topic_partition: TopicPartition, start: EntryId, *how: Any) -> Reader:
        inner = self._wire.reader(topic_partition, start, *how)
        return _FramedReader(self.network, inner, self)

    def joined(self, where: TopicPartition, hash_range: HashRange) -> None:
        """A broker gives it a range."""
        for consumer in self.consumers:
            if (consumer.topic_partition, consumer.hash_range) == (where, hash_range):
                consumer.joined()

    def close(self) -> None:
        super().close()
        self._wire.close()

    def freeze(self) -> None:
        super().freeze()
        self.frozen = True

    def kill(self) -> None:
        super().kill()
        for session in [one for one in self.cluster.sessions if one.client is self]:
            session.cut()


class FramedConsumer(Consumer):
    """Implements the ``Consumer`` port."""

    _client: FramedClient
    _inner: WireConsumer  # type: ignore[assignment]

    def __init__(self, client: FramedClient, inner: WireConsumer) -> None:
        self.key = client, inner.topic_partition, inner.hash_range
        super().__init__(client, inner)  # type: ignore[arg-type]

    @property
    def is_live(self) -> bool:
        return not self.closed and self.key in self._client.cluster.standing

    def when_ready(self, callback: Any) -> None:
        self._inner.when_ready(callback)

    def last_entry(self) -> EntryId | None:
        return self._inner.last_entry()

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self._network.scheduler.point()
        if self.closed:
            raise BrokerError("The simulated consumer is closed.")
        self._network.record.acked(self, entries)
        self._inner.acknowledge(entries)

    def flush(self) -> None:
        """No effect: acknowledgements are sent at once."""

    def lose(self) -> bool:
        cluster = self._client.cluster
        session = cluster.standing.get(self.key)
        if session is None or self.closed:
            return False
        cluster.bar(self.key)
        if cluster.random.random() < 0.3:
            session.cut()
        else:
            session.end(lambda one: one.key == self.key)
        return True

    def regain(self) -> bool:
        self._client.cluster.admit(self.key)
        return True

    def joined(self) -> None:
        """A broker gives it its range again."""
        deletions = self._network.record.deletions(self.topic_partition)
        if not self.closed and self._owns and deletions > self._gains:
            self._gained()


class _FramedReader(CutReader):
    """Implements the ``Reader`` port."""

    def __init__(self, network: Network, inner: WireReader, client: FramedClient) -> None:
        self._client = client
        super().__init__(network, inner)  # type: ignore[arg-type]

    def lose(self) -> None:
        where, client = self.topic_partition, self._client
        for session in list(client.cluster.sessions):
            if session.client is client and session.end(
                lambda one: one.key is None and one.where == where
            ):
                self._network.record.note(f"a reader of {where} is cut off")


class FramedHandlerClient(HandlerClient, FramedClient):
    """The connection of a program with handlers."""
