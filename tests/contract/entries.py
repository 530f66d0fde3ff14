"""Entries of a named producer, as the contract cases publish and read them."""

from __future__ import annotations

from collections.abc import Sequence

from keyshard.broker.port import Broker, EntryProducer, PublishOptions
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import KeyShardError
from tests.contract.contract_harness import DEADLINE_S, Harness, Received, read_to_end

NAME = "sink-query-0"


def rows(*values: bytes, key: str | None = "k") -> list[OutgoingMessage]:
    return [OutgoingMessage(value, key) for value in values]


def numbered(start: int, stop: int, key: str = "k") -> list[OutgoingMessage]:
    return rows(*(b"%d" % number for number in range(start, stop)), key=key)


def values(numbers: Sequence[int]) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def deduplicated(harness: Harness) -> TopicPartition:
    harness.deduplicate()
    return TopicPartition(harness.create_topic())


def named(broker: Broker, where: TopicPartition, name: str = NAME) -> EntryProducer:
    return broker.entry_producer(where, PublishOptions(name, send_timeout_s=DEADLINE_S))


def outcome(producer: EntryProducer, start: int, stop: int) -> str:
    """Publish numbered messages as an entry; the code of the error, or ``""``."""
    try:
        producer.publish(numbered(start, stop), start).result(DEADLINE_S)
    except KeyShardError as exc:
        return exc.code
    return ""


def stored(broker: Broker, where: TopicPartition) -> Received:
    return read_to_end(broker.reader(where, EntryId(0, 0)))
