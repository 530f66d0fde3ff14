"""The network between processes and the in-memory broker: delays, and connections that break.

Every request takes time and may meet a broker that is away. A client gets answers in a
thread of the client. The consumers of a topic partition share a connection: what waits in the
client to be acknowledged is lost with the connection, not with one consumer of several.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from keyshard.broker.memory import MemoryBroker, MemoryCluster, MemoryConsumer, MemoryReader
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import (
    EntryProducer,
    Producer,
    PublishOptions,
    Reader,
    StartPosition,
    SubscriptionSpec,
)
from keyshard.broker.reports import SegmentWatch, WorkerFacts
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_segments import SegmentGraph
from keyshard.errors import BrokerError, BrokerUnavailableError
from tests.simulation.record import Record
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.segments import LateWatch

if TYPE_CHECKING:
    from tests.simulation.frames.client import Frames

ACK_GROUP_S = 0.1
"""Time that a client groups acknowledgements, seconds."""
RECONNECT_S = (0.01, 0.4)
"""Time until a client that lost its connection has it again, seconds."""
LATE_S = (5.0, 60.0)
"""The same for one that has tried in vain, and waits longer and longer."""
LATE_SHARE = 0.1
"""Share of lost connections whose client is late."""
UNNOTICED_S = 3.0
"""Longest time until the broker notices that a client is gone, seconds."""
OPERATION_TIMEOUT_S = 30.0
"""Longest time that a client waits for an answer, seconds."""
SLOW_S = 0.5
"""Time between two receives of a slow range, seconds."""

STALE_SHARE = 0.2
"""Share of the look-ups that are answered with segments from before the last change."""
STALE_S = 1.0
"""Longest time until it hears of the change, seconds."""

CUT_SHARE = (0.0, 0.0, 0.02, 0.2)
"""Shares of the steps of Readers at which one loses its connection; a run has one of them."""

T = TypeVar("T")


class Network:
    """Between all clients and the cluster.

    Args:
        scheduler: Owns the time.
        random: Source of delays.
        cuts: Decides which Readers are cut off, and when.
        cluster: The broker's side.
        record: Gets the events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        random: Random,
        cuts: Random,
        cluster: MemoryCluster,
        record: Record,
    ) -> None:
        self.scheduler = scheduler
        self.random = random
        self.cluster = cluster
        self.record = record
        self.up = True
        """Whether the broker answers."""
        self.outages = 0
        """Times that the broker was away for longer than clients wait."""
        self.late_until_s = 0.0
        """Until when a client lets a consumer wait for a connection, for longer than requests."""
        self.slow: set[tuple[TopicPartition, HashRange]] = set()
        """Whose consumers are rarely received from."""
        self.clients: list[Client] = []
        self.readers: list[_Reader] = []
        self.former_graphs: dict[str, SegmentGraph] = {}
        """The last but one graph of each scalable topic that a client got."""
        self.frames: Frames | None = None
        """The frames of the run, in a world where clients speak them."""
        self.cut_random = cuts
        self.cut_share = self.cut_random.choice(CUT_SHARE)
        """Share of the steps of Readers at which one loses its connection."""
        self.world = scheduler.process("network")
        """Owner of the threads that nobody else has."""

    def travel(self) -> None:
        """Let the time pass that one message takes."""
        roll = self.random.random()
        if roll < 0.5:
            self.scheduler.point()
        else:
            self.scheduler.sleep(self.random.random() * (0.002 if roll < 0.97 else 0.1))

    def request(self, action: Callable[[], T], *, patient: bool = True) -> T:
        """Ask the broker.

        Args:
            action: The request.
            patient: Whether the client waits for a broker that is away, up to its operation
                timeout, or fails at once, as HTTP does.
        """
        self.travel()
        end = self.scheduler.now_s + (OPERATION_TIMEOUT_S if patient else 0)
        while not self.up:
            self.scheduler.sleep(0.05)
            if self.scheduler.now_s >= end:
                raise BrokerUnavailableError("The simulated broker is away.")
        result = action()
        self.travel()
        return result

    def lose(self, consumers: Collection[Consumer], back_s: float | None = None) -> bool:
        """Cut some consumers off; their clients bring them back after a while.

        Returns:
            Whether one of them was connected.
        """
        lost = self._cut(consumers)
        if lost:
            back = self._back_off_s() if back_s is None else back_s
            if back > OPERATION_TIMEOUT_S:
                self.late_until_s = max(self.late_until_s, self.scheduler.now_s + back)
            self.scheduler.spawn(self.world, "reconnect", lambda: self._reconnect(lost, back))
        return bool(lost)

    def blink(self, consumers: Collection[Consumer]) -> bool:
        """As :meth:`lose`, but they are back at once: nobody empties their queues before that."""
        lost = self._cut(consumers)
        for consumer in lost:
            consumer.regain()
        return bool(lost)

    def _cut(self, consumers: Collection[Consumer]) -> list[Consumer]:
        for consumer in consumers:
            if consumer.shares_connection(consumers):
                consumer.flush()
        lost = [consumer for consumer in consumers if consumer.lose()]
        if lost:
            self.record.add("disconnected", worker=lost[0].worker)
        return lost

    def _back_off_s(self) -> float:
        late = self.random.random() < LATE_SHARE
        return self.random.uniform(*(LATE_S if late else RECONNECT_S))

    def lose_readers(self, of: Collection[TopicPartition] | None = None) -> None:
        """Cut Readers off, of all topic partitions by default; their clients bring them back."""
        for reader in self.readers:
            if of is None or reader.topic_partition in of:
                reader.lose()

    def bring_back(self, reader: MemoryReader, back_s: float) -> None:
        """The client of a Reader that was cut off gives it a connection again."""

        def back() -> None:
            self.scheduler.sleep(back_s)
            while not self.up:
                self.scheduler.sleep(0.1)
            reader.reconnect()

        self.scheduler.spawn(self.world, "reconnect", back)

    def lose_client(self, client: Client, unnoticed_s: float) -> None:
        """A process is gone; the broker notices after a while."""
        self.clients.remove(client)

        def notice() -> None:
            self.scheduler.sleep(unnoticed_s)
            client.kill()

        if unnoticed_s:
            client.freeze()
            self.scheduler.spawn(self.world, "notice", notice)
        else:
            client.kill()

    def _reconnect(self, lost: Sequence[Consumer], back_s: float) -> None:
        self.scheduler.sleep(back_s)
        waiting = list(lost)
        while waiting:
            if self.up:
                waiting = [consumer for consumer in waiting if not consumer.regain()]
            if waiting:
                self.scheduler.sleep(0.1)


class Client:
    """One connection of one process; implements the ``Broker`` port."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.loses_acks = False
        """Whether acknowledgements never leave it; its connections must be cut then."""
        self.heard = True
        """Whether its received messages are delivered."""
        self.consumers: list[Consumer] = []
        self.step: Callable[[], None] = lambda: None
        """Called at each frame, in a world with frames."""
        self._inner = MemoryBroker(network.cluster)
        self._groups = self._timer_set = False
        network.clients.append(self)

    def missing(self, topics: Sequence[str]) -> frozenset[str]:
        return self.network.request(lambda: self._inner.missing(topics))

    def partitions(self, topic: str, *, create: bool = False) -> tuple[TopicPartition, ...]:
        return self.network.request(lambda: self._inner.partitions(topic, create=create))

    def watch_topics(
        self,
        prefix: str,
        changed: Callable[[Collection[str]], None],
    ) -> None:
        """Report nothing: the client cannot."""

    def begin(
        self,
        topic_partition: TopicPartition,
        subscription: str,
        start: MessageId | int,
        batch_size: int = 1,
    ) -> EntryId:
        return self.network.request(
            lambda: self._inner.begin(topic_partition, subscription, start, batch_size)
        )

    def watch_segments(self, topic: str, changed: Callable[[], None]) -> SegmentWatch:
        def report() -> None:
            self.network.scheduler.spawn(self.process, "client", arrive)

        def arrive(after_s: float = 0.0) -> None:
            network.scheduler.sleep(after_s)
            network.travel()
            for watch in opened:
                if watch.is_open:
                    network.former_graphs[topic] = watch.graph
                    watch.arrive()
                    changed()

        network, opened = self.network, list[LateWatch]()
        watch = LateWatch(network.request(lambda: self._inner.watch_segments(topic, report)))
        opened.append(watch)
        former = network.former_graphs.get(topic)
        if former is not None and network.random.random() < STALE_SHARE:
            watch.graph = former
            after_s = network.random.random() * STALE_S
            network.scheduler.spawn(self.process, "client", lambda: arrive(after_s))
        return watch

    def subscribe(self, spec: SubscriptionSpec, start: StartPosition) -> Consumer:
        def action() -> Consumer:
            inner = self._inner.subscribe(spec, start)
            self.consumers.append(Consumer(self, inner))
            return self.consumers[-1]

        return self.network.request(action)

    def reader(self, topic_partition: TopicPartition, start: EntryId, *how: Any) -> Reader:
        inner = self.network.request(lambda: self._inner.reader(topic_partition, start, *how))
        return _Reader(self.network, inner)

    def workers(self) -> tuple[WorkerFacts, ...]:
        return ()

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        inner = self.network.request(
            lambda: self._inner.producer(topic_partition, send_timeout_ms=send_timeout_ms)
        )
        return _Producer(self.network, inner)

    def entry_producer(self, topic_partition: TopicPartition, how: PublishOptions) -> EntryProducer:
        raise NotImplementedError("No simulated program publishes entries.")

    def received(self, blocks: Sequence[EntryBlock]) -> None:
        """One of its consumers received something."""

    def close(self) -> None:
        self.network.travel()
        if self.loses_acks:
            self.network.lose(self.consumers)
        for consumer in self.consumers:
            consumer.close()
        self._inner.close()

    def send_grouped(self) -> None:
        """Send acknowledgements a moment later, as the client's timer does."""

        def send() -> None:
            while self._groups:
                self._groups = False
                self.network.scheduler.sleep(ACK_GROUP_S + 0.001)
                self.network.cluster.catch_up()
            self._timer_set = False

        self._groups = True
        if not self._timer_set:
            self._timer_set = True
            self.network.scheduler.spawn(self.process, "client", send)

    def freeze(self) -> None:
        """Its process is gone and the broker does not know it."""
        self._inner.freeze()

    def thaw(self) -> None:
        """Its process continues, and tries to reconnect."""
        self._inner.thaw()

    def kill(self) -> None:
        """Its process is gone, and the broker knows it."""
        self._inner.kill()


class Consumer:
    """Implements the ``Consumer`` port."""

    def __init__(self, client: Client, inner: MemoryConsumer) -> None:
        self._client = client
        self._network = client.network
        self._inner = inner
        self.closed = False
        self._owns = True
        for one in self._neighbours():
            if one.closed and one.hash_range == self.hash_range:
                one._owns = False
        self._gains = 0
        """Topic partitions under its name that were deleted before it gained its range."""
        self._gained()

    def _gained(self) -> None:
        self._gains = self._network.record.deletions(self.topic_partition)
        # A worker that was given up may still finish a request. Its source owns nothing by it.
        if self._client.heard:
            self._network.record.gained(self)

    @property
    def topic_partition(self) -> TopicPartition:
        return self._inner.topic_partition

    @property
    def hash_range(self) -> HashRange:
        return self._inner.hash_range

    @property
    def worker(self) -> str:
        """Name of the process."""
        return self._client.process.name

    @property
    def is_live(self) -> bool:
        """Whether the broker holds it now."""
        return not self.closed and self._inner.is_connected()

    def receive(self, timeout_ms: int) -> list[EntryBlock]:
        network = self._network
        network.scheduler.point()
        if (self.topic_partition, self.hash_range) in network.slow:
            network.scheduler.sleep(SLOW_S)
        blocks = self._inner.receive(timeout_ms)
        if blocks:
            if self._client.heard:
                network.record.delivered(self, blocks)
            self._client.received(blocks)
        return blocks

    def when_ready(self, callback: Callable[[], None]) -> None:
        network = self._network

        def ring() -> None:
            network.travel()
            if not self.closed:
                callback()

        def begin() -> None:
            network.scheduler.spawn(self._client.process, "client", ring)

        self._inner.when_ready(begin)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        network = self._network
        network.scheduler.point()
        if self.closed:
            raise BrokerError("The simulated consumer is closed.")
        network.record.acked(self, entries)
        if not self._client.loses_acks:
            self._way().acknowledge(entries)
            self._client.send_grouped()

    def last_entry(self) -> EntryId | None:
        return self._network.request(self._inner.last_entry)

    def is_connected(self) -> bool:
        self._network.scheduler.point()
        return self._inner.is_connected()

    def has_given_all(self) -> bool:
        return self.is_connected()

    def problem(self) -> str:
        return self._inner.problem()

    def close(self, *, for_another: bool = False) -> None:
        if not self.closed:
            self._network.travel()
            self.closed = True
        others = any(
            one is not self and one.hash_range == self.hash_range and one._owns
            for one in self._neighbours()
        )
        # A consumer that is closed for its successor owns its range until that one exists.
        if self._owns and (others or not for_another):
            self._owns = False
            if not others and self._client.heard:
                self._network.record.lost(self)
        self._inner.close(for_another=for_another)

    def shares_connection(self, leaving: Collection[Consumer]) -> bool:
        """Whether another consumer of the client keeps the connection that this one uses."""
        return any(other.is_live and other not in leaving for other in self._neighbours())

    def flush(self) -> None:
        """Send waiting acknowledgements."""
        self._inner.flush()

    def lose(self) -> bool:
        """Lose the connection. Return whether there was one."""
        was = self.is_live
        self._inner.drop()
        return was

    def _neighbours(self) -> list[Consumer]:
        """All consumers of the client on this topic partition."""
        consumers = self._client.consumers
        return [one for one in consumers if one.topic_partition == self.topic_partition]

    def _way(self) -> MemoryConsumer:
        """Return the consumer whose connection carries acknowledgements of this one.

        If this one has lost its connection, that is any live consumer of the topic partition.
        """
        live = [one for one in self._neighbours() if one.is_live]
        return self._inner if self.is_live or not live else live[0]._inner

    def regain(self) -> bool:
        """Try to reconnect. Return true if connected, or if no further attempt makes sense."""
        if not self.closed and not self._client.process.dead:
            self._inner.reconnect()
            connected = self._inner.is_connected()
            deletions = self._network.record.deletions(self.topic_partition)
            if connected and self._owns and deletions > self._gains:
                # The topic partition was created again. The range of the new one is owned, too.
                self._gained()
            return connected
        return True


class _Reader:
    """Implements the ``Reader`` port. It may lose its connection before and after every step."""

    def __init__(self, network: Network, inner: MemoryReader) -> None:
        self._network = network
        self._inner = inner
        network.readers.append(self)
        self._step()

    @property
    def topic_partition(self) -> TopicPartition:
        return self._inner.topic_partition

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        self._step()
        self._network.travel()
        blocks = self._inner.read(timeout_ms)
        self._step()
        return blocks

    def at_end(self) -> bool:
        self._step()
        return self._network.request(self._ask_for_end)

    def stayed_connected(self) -> bool:
        self._step()
        return self._inner.stayed_connected()

    def close(self) -> None:
        self._network.scheduler.point()
        if self in self._network.readers:
            self._network.readers.remove(self)
        self._inner.close()

    def lose(self) -> None:
        """Lose the connection for a while."""
        network = self._network
        if self._inner.is_connected():
            network.record.note(f"a reader of {self.topic_partition} is cut off")
            self._inner.drop()
            network.bring_back(self._inner, network.cut_random.uniform(*RECONNECT_S))

    def _ask_for_end(self) -> bool:
        self._step()
        answer = self._inner.at_end()
        self._step()
        return answer

    def _step(self) -> None:
        if self._network.cut_random.random() < self._network.cut_share:
            self.lose()


class _Producer:
    """Implements the ``Producer`` port."""

    def __init__(self, network: Network, inner: Producer) -> None:
        self._network = network
        self._inner = inner

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        return self._network.request(
            lambda: self._inner.send(
                value, key=key, ordering_key=ordering_key, properties=properties, event_ms=event_ms
            )
        )

    def close(self) -> None:
        self._network.scheduler.point()
        self._inner.close()


class Admin:
    """The admin interface over the network."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._inner = MemoryAdmin(network.cluster)

    def close(self) -> None:
        """Nothing is asked."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._inner, name)

        def ask(*arguments: Any, **options: Any) -> Any:
            return self._network.request(lambda: method(*arguments, **options), patient=False)

        return ask
