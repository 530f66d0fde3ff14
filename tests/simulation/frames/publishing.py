"""Producers at the brokers that speak frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keyshard.broker.memory.deduplication import DuplicateCheck
from keyshard.broker.memory.log import Message
from keyshard.broker.memory.publishing import Write
from keyshard.broker.wire.decoding import decode
from keyshard.broker.wire.entries import RawEntry
from keyshard.broker.wire.frames import api
from keyshard.columns.messages import messages_of
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import ProducerBusyError, QuotaExceededError
from tests.support.frame_broker.session import NOT_READY, STORAGE_FAILS, FrameSession

if TYPE_CHECKING:
    from keyshard.broker.memory import MemoryCluster
    from tests.simulation.frames.broker import Cluster

BUSY, QUOTA = 16, 7
UNDECIDED = b"Cannot determine whether the message is a duplicate at this time"
NO_ID = 2**64 - 1


class FramedPublisher:
    """A producer of a connection, as the broker sees it.

    Args:
        session: Its connection.
        producer_id: Its number there.
        where: Its topic partition.
        name: Its name.
    """

    def __init__(
        self, session: PublishingSession, producer_id: int, where: TopicPartition, name: str
    ) -> None:
        self.topic_partition = where
        self.name = name
        self.producer_id = producer_id
        self._session = session

    def answers(self) -> bool:
        return self._session.answers()

    def confirmed(self, sequence_id: int, stored: EntryId | None) -> None:
        if self._session.publishers.get(self.producer_id) is self:
            ledger, entry = (NO_ID, NO_ID) if stored is None else stored
            self._session.receipt(self.producer_id, sequence_id, ledger, entry)

    def drop(self) -> None:
        self._session.end_publishers(lambda one: one is self)

    def reconnect(self) -> None:
        """It comes back by itself."""


class PublishingSession(FrameSession):
    """The commands of producers."""

    _cluster: Cluster
    _stored: MemoryCluster
    _broker: int

    def __init__(self) -> None:
        super().__init__()
        self.publishers: dict[int, FramedPublisher] = {}

    def answers(self) -> bool:
        """Whether the client is there."""
        raise NotImplementedError

    def end_publishers(
        self, which: Callable[[FramedPublisher], bool], *, told: bool = True
    ) -> bool:
        """End producers; whether there were any.

        Args:
            which: Selects them.
            told: Whether the client learns it.
        """
        found = [one for one in self.publishers.values() if which(one)]
        for one in found:
            self._give_back(one)
            if told:
                self.send(
                    "close_producer", api.CloseProducer(producer_id=one.producer_id, request_id=0)
                )
        return bool(found)

    def _producer(self, asked: Any) -> None:
        where = TopicPartition.parse(asked.topic.decode())
        if self._cluster.owner(where.name) != self._broker:
            self.refuse(asked, NOT_READY)
            return
        name = asked.producer_name.decode()
        publisher = FramedPublisher(self, asked.producer_id, where, name)
        try:
            last = self._stored.publishing.open(where, name, publisher)
        except ProducerBusyError:
            self.refuse(asked, BUSY)
        except QuotaExceededError:
            self.refuse(asked, QUOTA)
        else:
            self.publishers[asked.producer_id] = publisher
            self.open_producer(asked, asked.producer_name, last)

    def _send(self, command: Any) -> None:
        publisher = self.publishers.get(command.producer_id)
        if publisher is None:
            return
        where, first = publisher.topic_partition, command.sequence_id
        last = max(first, command.highest_sequence_id)
        publishing = self._stored.publishing
        messages = messages_in(self.carried, where)
        if len(messages) != last - first + 1:
            raise AssertionError(f"{len(messages)} messages have the ids {first} to {last}")
        if publishing._ids(where).judge(publisher.name, first) is DuplicateCheck.UNDECIDED:
            self.send("send_error", api.SendError(
                producer_id=command.producer_id, sequence_id=first, error=STORAGE_FAILS,
                message=UNDECIDED,
            ))  # fmt: skip
            return

        def store() -> EntryId:
            return self._stored.store_entry(where, messages, publisher.name, first)

        publishing.write(
            where, Write(publisher, publisher.name, first, last, store, publisher.confirmed)
        )

    def _close_producer(self, asked: Any) -> None:
        found = self.publishers.get(asked.producer_id)
        if found is not None:
            self._give_back(found)
        self.succeed(asked)

    def _give_back(self, publisher: FramedPublisher) -> None:
        del self.publishers[publisher.producer_id]
        self._stored.publishing.leave(publisher.topic_partition, publisher.name, publisher)


def messages_in(carried: bytes, where: TopicPartition) -> list[Message]:
    """The messages of an entry as a producer sends it."""
    decoded = decode(
        [RawEntry(EntryId(0, 0), redelivered=False, ack_set=(), data=carried, position=0)], where
    )
    if decoded.refused is not None:
        raise decoded.refused
    (block,) = decoded.blocks
    return [
        Message(one.value, one.key, one.ordering_key, dict(one.properties))
        for one in messages_of(where, block)
    ]
