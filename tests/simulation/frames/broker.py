"""The in-memory cluster as brokers that speak frames."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from keyshard.broker.memory.dispatch import Delivery, Member, Subscription
from keyshard.broker.memory.log import EntryLog, Message, StoredEntry
from keyshard.broker.port import StartPosition
from keyshard.broker.wire.connect import Address
from keyshard.broker.wire.frames import api
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.protobuf import message as protobuf
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import BrokerUnavailableError, RangeConflictError, TopicNotFoundError
from tests.simulation.frames.publishing import PublishingSession
from tests.simulation.frames.sockets import Descriptors, Socket, Way
from tests.stored_entries import BASE, batch_payload, keys_of, properties_of, stored
from tests.support.frame_broker.session import (
    CONFLICT,
    NOT_FOUND,
    NOT_READY,
    STORAGE_FAILS,
    range_of,
)

if TYPE_CHECKING:
    from tests.simulation.frames.client import FramedClient
    from tests.simulation.network import Network

PORT = 6650
BROKERS = 2
CUT_SHARE = 0.1
"""Chance that a piece breaks its connection, as a share of the chance for Readers."""
BARRED_S = 4.0
"""Longest time that a broker does not let a consumer that it ended come back, seconds."""
Key = tuple["FramedClient", TopicPartition, HashRange]
"""A client, a topic partition, and the range that the client has there."""


class Cluster:
    """All brokers of one network.

    Args:
        network: The network before them.
        random: Decides owners of topics, and faults.
        descriptors: Numbers the sockets.
    """

    def __init__(self, network: Network, random: Random, descriptors: Descriptors) -> None:
        self.network = network
        self.random = random
        self.process = network.scheduler.process("brokers")
        self.sessions: list[Session] = []
        self.standing: dict[Key, Session] = {}
        self._barred: dict[Key, float] = {}
        self._descriptors = descriptors
        self._owners: dict[str, int] = {}
        network.cluster.attach(self)  # type: ignore[arg-type]

    def dial(self, client: FramedClient, address: Address, timeout_s: float) -> Socket:
        """Connect a client.

        Raises:
            BrokerUnavailableError: No broker answers in time.
        """
        network, end_s = self.network, self.network.scheduler.now_s + timeout_s
        network.travel()
        while not network.up:
            if network.scheduler.now_s >= end_s:
                raise BrokerUnavailableError(f"No simulated broker answers at {address}.")
            network.scheduler.sleep(0.05)
        made = Socket(network.scheduler, self._descriptors.new(), self.random, self.process)
        self.sessions.append(Session(self, client, address.port - PORT, made))
        return made

    def bar(self, key: Key) -> None:
        """Refuse a client its range for ``BARRED_S`` seconds."""
        self._barred[key] = self.network.scheduler.now_s + BARRED_S

    def admit(self, key: Key) -> None:
        """Let a client have its range again."""
        self._barred.pop(key, None)

    def bars(self, key: Key) -> bool:
        return self._barred.get(key, 0.0) > self.network.scheduler.now_s

    def owner(self, topic: str) -> int:
        """The broker that has a topic partition."""
        if topic not in self._owners:
            self._owners[topic] = self.random.randrange(BROKERS)
        return self._owners[topic]

    # -- actions on clients ------------------------------------------------------------------------

    def drop(self, of: Collection[TopicPartition] | None = None) -> list[Any]:
        """End the consumers of some topic partitions, or all connections."""
        for session in list(self.sessions):
            if of is None:
                session.cut()
            else:
                session.end(lambda one: one.where in of)
                session.end_publishers(lambda one: one.topic_partition in of)
        for where in of or ():
            self._owners[where.name] = self.random.randrange(BROKERS)
        return []

    def reconnect(self, handles: Iterable[Any]) -> None:
        """Do nothing: clients reconnect by themselves."""


@dataclass(slots=True)
class Standing:
    """A consumer or Reader of a connection."""

    where: TopicPartition
    log: EntryLog
    leave: Callable[[], None]
    permit: Callable[[int], None]
    subscription: Subscription | None = None
    """``None``: of a Reader."""
    key: Key | None = None


class Session(PublishingSession):
    """The broker's end of one connection.

    Args:
        cluster: The brokers of the network.
        client: The client that connected.
        broker: Number of the broker.
        socket: The client's end.
    """

    def __init__(self, cluster: Cluster, client: FramedClient, broker: int, socket: Socket) -> None:
        super().__init__()
        self._cluster = cluster
        self.client = client
        self._broker = broker
        self._socket = socket
        self._stored = cluster.network.cluster
        self._random = cluster.random
        self._over = False
        self._standing: dict[int, Standing] = {}
        network = cluster.network
        self._out = Way(network, cluster.random, cluster.process, self._bring)
        self._in = Way(network, cluster.random, cluster.process, self._take)
        socket.out, socket.closed = self._in, lambda: self._in.finish(self.cut)

    def cut(self) -> None:
        """Break the connection off, between any two bytes in both directions. Idempotent."""
        if self._over:
            return
        with self._stored.lock:
            self._understand(self._in.cut())
            self._over = True
            self._socket.came(self._out.cut())
            self._socket.end()
            self._cluster.sessions.remove(self)
            for consumer_id in list(self._standing):
                self._leave(consumer_id)
            self.end_publishers(lambda _: True, told=False)

    def end(self, which: Callable[[Standing], bool]) -> bool:
        """Tell consumers and Readers that they have ended; return whether there were any."""
        with self._stored.lock:
            found = [number for number, one in self._standing.items() if which(one)]
            for number in found:
                self._leave(number)
                self.end_consumer(number)
        return bool(found)

    def answers(self) -> bool:
        """Whether the client is there; a frozen client loses its connection."""
        if self.client.frozen:
            self.cut()
        return not self._over

    # -- bytes -----------------------------------------------------------------------------------

    def _bring(self, piece: bytes) -> None:
        if not self._struck():
            self._socket.came(piece)

    def _take(self, piece: bytes) -> None:
        if not self._struck():
            with self._stored.lock:
                self._understand(piece)

    def _struck(self) -> bool:
        network = self._cluster.network
        struck = network.cut_random.random() < network.cut_share * CUT_SHARE
        if struck and not self._over:
            network.record.note(f"a connection of {self.client.process.name} breaks")
            # Later pieces do not arrive either.
            self._in.cut()
            self._out.cut()
            on_it = {key for key, one in self._cluster.standing.items() if one is self}
            lost = [one for one in self.client.consumers if one.key in on_it]
            network.lose(lost, network.cut_random.random() * 0.1)
            self.cut()
        return struck

    def _understand(self, piece: bytes) -> None:
        if not self._over:
            self.feed(piece)

    def put(self, data: bytes) -> None:
        self.client.step()
        self._out.put(data)

    def received(self, data: bytes) -> None:
        super().received(data)
        self.client.step()

    # -- one command each ------------------------------------------------------------------------

    def _connect(self, _: Any) -> None:
        server = f"Pulsar Server{self._stored.version}".encode()
        self.send("connected", api.Connected(server_version=server, max_message_size=5 << 20))

    def _partitioned_metadata(self, asked: Any) -> None:
        found = self._stored.partitions(asked.topic.decode())
        self.count_partitions(asked, 0 if found[0].partition < 0 else len(found))

    def _lookup(self, asked: Any) -> None:
        owner = self._cluster.owner(asked.topic.decode())
        astray = owner != self._broker and self._random.random() < 0.5
        url = f"pulsar://{self.client.brokers}:{PORT + owner}"
        self.lead_to(asked, url, redirect=astray)

    def _subscribe(self, asked: Any) -> None:
        where = TopicPartition.parse(asked.topic.decode())
        if self._cluster.owner(where.name) != self._broker:
            self.refuse(asked, NOT_READY)
            return
        try:
            made = self._reader(asked, where) if asked.HasField("start_message_id") else (
                self._consumer(asked, where)
            )  # fmt: skip
        except RangeConflictError:
            self.refuse(asked, CONFLICT)
        except TopicNotFoundError:
            self.refuse(asked, NOT_FOUND)
        else:
            if made is None:
                self.refuse(asked, NOT_READY)
                return
            self._standing[asked.consumer_id] = made
            self.succeed(asked)

    def _consumer(self, asked: Any, where: TopicPartition) -> Standing | None:
        hash_range = range_of(asked)
        assert hash_range is not None
        key = self.client, where, hash_range
        if self._cluster.bars(key):
            return None
        start = StartPosition.EARLIEST if asked.initial_position == 1 else StartPosition.LATEST
        subscription = self._stored.open_subscription(where, asked.subscription.decode(), start)

        flows = False

        def deliver(delivery: Delivery) -> None:
            if flows:
                self._message(asked.consumer_id, subscription.log, delivery.entry, delivery.indices)
            else:
                # A redelivery needs permits, too.
                member.return_permits(len(delivery.indices))

        member = Member(
            hash_range, asked.consumer_name.decode(), 0, deliver=deliver, answers=self.answers
        )
        subscription.join(member)

        def leave() -> None:
            subscription.leave(member)
            if self._cluster.standing.get(key) is self:
                del self._cluster.standing[key]

        def permit(messages: int) -> None:
            nonlocal flows
            flows = True
            member.return_permits(messages)
            subscription.dispatch()

        self._cluster.standing[key] = self
        self.client.joined(where, hash_range)
        return Standing(where, subscription.log, leave, permit, subscription, key)

    def _reader(self, asked: Any, where: TopicPartition) -> Standing:
        log = self._stored.open_log(where)
        first = asked.start_message_id
        position, permits = log.first_from(EntryId(first.ledger, first.entry)), 0

        def read() -> None:
            nonlocal position, permits
            position = max(position, log.first)
            while permits > 0 and position < len(log):
                entry = log.get(position)
                assert entry is not None, "only entries before the first are trimmed"
                position += 1
                if not entry.hidden:
                    permits -= len(entry.messages)
                    self._message(asked.consumer_id, log, entry, range(len(entry.messages)))

        def permit(messages: int) -> None:
            nonlocal permits
            permits += messages
            read()

        log.on_append.append(read)
        return Standing(where, log, lambda: log.on_append.remove(read), permit)

    def _message(
        self, consumer_id: int, log: EntryLog, entry: StoredEntry, indices: Collection[int]
    ) -> None:
        some = len(indices) < len(entry.messages)
        ack_set = [sum(1 << index for index in indices)] if some else []
        data = bytes_of(entry)
        if entry.id in log.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.deliver(consumer_id, *entry.id, data, ack_set)

    def _flow(self, given: Any) -> None:
        one = self._standing.get(given.consumer_id)
        if one is not None:
            one.permit(given.permits)

    def _ack(self, given: Any) -> None:
        one = self._standing.get(given.consumer_id)
        if one is None or one.subscription is None or self.client.loses_acks:
            return
        if self._cluster.network.cut_share and self._random.random() < 0.05:
            self.confirm(given, error=STORAGE_FAILS)
            return
        found = [one.log.ordinal(EntryId(named.ledger, named.entry)) for named in given.message_id]
        one.subscription.acknowledge(ordinal for ordinal in found if ordinal is not None)
        self.confirm(given)

    def _get_last_message_id(self, asked: Any) -> None:
        one = self._standing.get(asked.consumer_id)
        if one is None:
            self.refuse(asked, NOT_READY)
            return
        last = one.log.last_id or EntryId(2**64 - 1, 2**64 - 1)
        self.name_last(asked, last.ledger, last.entry)

    def _close_consumer(self, asked: Any) -> None:
        if asked.consumer_id in self._standing:
            self._leave(asked.consumer_id)
        self.succeed(asked)

    def _leave(self, consumer_id: int) -> None:
        self._standing.pop(consumer_id).leave()


def bytes_of(entry: StoredEntry) -> bytes:
    """The stored bytes of an entry."""
    told = [_told(one, entry.sequence_id + at) for at, one in enumerate(entry.messages)]
    fields = BASE | {1: entry.producer.encode(), 2: entry.sequence_id, 3: entry.publish_ms}
    if entry.encrypted:
        fields[13] = protobuf({1: b"key", 2: b"its bytes"})
    if entry.batched:
        payload = batch_payload(told)
        return stored(protobuf(fields | {9: len(payload), 11: len(told)}), payload)
    (one,) = told
    if entry.deliver_at_ms is not None:
        fields[19] = entry.deliver_at_ms
    fields |= keys_of(one, 6, 17, 18) | {9: len(one["value"])}
    if one["event_ms"]:
        fields[12] = one["event_ms"]
    return stored(properties_of(one, 4) + protobuf(fields), one["value"])


def _told(one: Message, sequence_id: int) -> dict[str, Any]:
    hashed = one.hashed
    return {
        "value": one.value, "key": one.key, "ordering_key": one.ordering_key,
        "key_bytes": hashed if isinstance(hashed, bytes) else None,
        "properties": one.properties, "event_ms": one.event_ms, "sequence_id": sequence_id,
    }  # fmt: skip
