"""The connection of a program with handlers: its dead letters are judged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from keyshard.broker.memory import MemoryCluster, MemoryProducer
from keyshard.broker.port import Producer, Reader
from keyshard.columns.messages import messages_of
from keyshard.core.dead_letter import (
    REPLAYED,
    RUNS_AGAIN,
    DeadLetter,
    DoneMarker,
    DoneUpToMarker,
    RunsAgainNote,
    parse,
)
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import BrokerUnavailableError
from tests.simulation.handling.faults import Step
from tests.simulation.handling.promises import Name, Promises
from tests.simulation.network import Client, Consumer, Network
from tests.simulation.network import _Reader as CutReader
from tests.simulation.record import OwnedRange, Record, parse_value
from tests.simulation.scheduler import Process, Scheduler


def is_dead_letters(where: TopicPartition) -> bool:
    """Whether a topic partition is a dead-letter topic, by its name."""
    return where.topic.endswith("-DLQ")


class HandlerRecord(Record):
    """The history of a program, without its dead-letter topic and refused entries.

    Args:
        scheduler: Tells the time.
        trace_max: Lines of the trace that are kept.
        is_refused: Called with an acknowledged entry; whether it is a refused one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        trace_max: int | None,
        is_refused: Callable[[TopicPartition, EntryId], bool],
    ) -> None:
        super().__init__(scheduler, trace_max)
        self._is_refused = is_refused

    def delivered(self, owned_range: OwnedRange, blocks: Iterable[EntryBlock]) -> None:
        if not is_dead_letters(owned_range.topic_partition):
            super().delivered(owned_range, blocks)

    def acked(self, owned_range: OwnedRange, entries: Iterable[EntryId]) -> None:
        where = owned_range.topic_partition
        if not is_dead_letters(where):
            super().acked(owned_range, [one for one in entries if not self._is_refused(where, one)])

    def gained(self, owned_range: OwnedRange) -> None:
        if not is_dead_letters(owned_range.topic_partition):
            super().gained(owned_range)

    def lost(self, owned_range: OwnedRange) -> None:
        if not is_dead_letters(owned_range.topic_partition):
            super().lost(owned_range)


class HandlerNetwork(Network):
    """A network that reports losses.

    Args:
        seed: Source of delays and of cuts.
        scheduler: Owns the time.
        cluster: The broker's side.
        record: Gets the events.
        disturbed: Called when consumers lose or regain their connection. Acknowledgements from
            before may be lost.
    """

    def __init__(
        self, seed: str, scheduler: Scheduler, cluster: MemoryCluster, record: Record,
        disturbed: Callable[[], None],
    ) -> None:  # fmt: skip
        network, readers = Random(f"{seed}:network"), Random(f"{seed}:readers")
        super().__init__(scheduler, network, readers, cluster, record)
        self._disturbed = disturbed

    def lose(self, consumers: Collection[Consumer], back_s: float | None = None) -> bool:
        self._disturbed()
        return super().lose(consumers, back_s)

    def blink(self, consumers: Collection[Consumer]) -> bool:
        self._disturbed()
        return super().blink(consumers)

    def _reconnect(self, lost: Sequence[Consumer], back_s: float) -> None:
        super()._reconnect(lost, back_s)
        self._disturbed()
        # Record the event now, not at the loss: dead letters may be replayed while the connection
        # is away, and redeliveries begin only when it is back.
        self.record.add("disconnected", worker=lost[0].worker)


class Host(Protocol):
    """Owner of the connection."""

    network: HandlerNetwork
    promises: Promises

    def at(self, step: Step) -> None:
        """A step begins; may end the process."""

    def disturbed(self) -> None:
        """Something happened that excuses repetitions."""

    def stored(
        self, found: DeadLetter | DoneMarker | RunsAgainNote | DoneUpToMarker, seq: int
    ) -> None:
        """Something is stored in the dead-letter topic."""


class HandlerClient(Client):
    """One connection of one process of a program.

    Args:
        host: The program.
        process: Number of the process.
    """

    def __init__(self, host: Host, process: Process) -> None:
        super().__init__(host.network, process)
        self.host = host
        self.dead_letter_writers: list[DeadLetterWriter] = []
        self.dead_letter_readers: list[DeadLetterReader] = []

    def close(self) -> None:
        if any(not one.closed and not one.is_live for one in self.consumers):
            # Their acknowledgements since they lost their connection are lost.
            self.network.record.add("disconnected", worker=self.process.name)
            self.host.disturbed()
        super().close()

    def received(self, blocks: Sequence[EntryBlock]) -> None:
        if blocks and blocks[-1].indices[-1] < blocks[-1].batch_size - 1:
            self.host.at(Step.HALF)

    def reader(self, topic_partition: TopicPartition, start: EntryId, *how: Any) -> Reader:
        inner = super().reader(topic_partition, start, *how)
        if not is_dead_letters(topic_partition):
            return inner
        assert isinstance(inner, CutReader)
        self.dead_letter_readers.append(DeadLetterReader(self, inner))
        return self.dead_letter_readers[-1]

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Producer:
        inner = self.network.request(
            lambda: self._inner.producer(topic_partition, send_timeout_ms=send_timeout_ms)
        )
        self.dead_letter_writers.append(DeadLetterWriter(self, inner))
        return self.dead_letter_writers[-1]


class DeadLetterWriter:
    """Implements the ``Producer`` port."""

    def __init__(self, client: HandlerClient, inner: MemoryProducer) -> None:
        self._client = client
        self._network = client.network
        self._inner = inner
        self.unconfirmed = False
        """Whether the confirmation of the message sent now is lost."""
        self._newest: tuple[Name, ...] = ()
        """The message whose dead letter was stored last."""

    def send(
        self,
        value: bytes | None,
        *,
        key: str | None = None,
        ordering_key: str | None = None,
        properties: Mapping[str, str] | None = None,
        event_ms: int = 0,
    ) -> EntryId:
        host, network = self._client.host, self._network
        is_marker = bool({REPLAYED, RUNS_AGAIN} & {*(properties or {}).values()})
        host.at(Step.MARKER if is_marker else Step.LETTER)

        def action() -> EntryId:
            position = self._inner.send(
                value, key=key, ordering_key=ordering_key, properties=properties, event_ms=event_ms
            )
            self._stored(network.cluster, position)
            return position

        position = network.request(action)
        host.at(Step.RELEASED if is_marker else Step.STORED)
        if self.unconfirmed:
            self.unconfirmed = False
            host.promises.left(self._newest)  # It is sent again.
            raise BrokerUnavailableError("The simulated confirmation is lost.")
        return position

    def cut(self, back_s: float) -> None:
        """Lose the connection for a while."""
        scheduler = self._network.scheduler
        self._inner.drop()

        def back() -> None:
            scheduler.sleep(back_s)
            self._inner.reconnect()

        scheduler.spawn(self._client.process, "client", back)

    def close(self) -> None:
        self._network.scheduler.point()
        self._inner.close()

    def _stored(self, cluster: MemoryCluster, position: EntryId) -> None:
        where = self._inner.topic_partition
        log = cluster.log(where)
        ordinal = log.ordinal(position)
        assert ordinal is not None
        entry = log.get(ordinal)
        assert entry is not None
        (message,) = messages_of(where, entry.block())
        found = parse(message)
        assert found is not None, "what is sent there is a letter or a marker"
        host = self._client.host
        seq = _seq(message.value)
        host.promises.stored(position, found, seq)
        host.stored(found, seq)
        self._newest = ()
        if isinstance(found, DeadLetter):
            message = found.message
            self._newest = (Name(message.topic, message.partition, message.message_id),)


def _seq(value: bytes | None) -> int:
    """Sequence number of a payload; -1 for one that is no payload of the world."""
    try:
        return -1 if value is None else parse_value(value)[1]
    except ValueError:
        return -1


class DeadLetterReader:
    """Implements the ``Reader`` port: each read is a step."""

    def __init__(self, client: HandlerClient, inner: CutReader) -> None:
        self._client = client
        self._inner = inner
        self.lose = inner.lose
        self.at_end = inner.at_end
        self.stayed_connected = inner.stayed_connected

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        self._client.host.at(Step.READING)
        return self._inner.read(timeout_ms)

    def close(self) -> None:
        self._inner.close()
        if self in self._client.dead_letter_readers:
            self._client.dead_letter_readers.remove(self)
