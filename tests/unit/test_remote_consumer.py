"""Consumers as the source sees them, whose workers come and go."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from unittest.mock import Mock

import pytest

from keyshard.broker.port import SubscriptionSpec
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.encoding import (
    NOTHING,
    DeliveredTotals,
    WorkerDelivery,
    decode_deliveries,
    encode_deliveries,
)
from tests.support.hosted_consumers import block_of


class Ends:
    """The worker as its consumers see it; records acknowledgements."""

    def __init__(self) -> None:
        self.acknowledged: list[EntryId] = []
        self.closed: list[int] = []
        self.taken = DeliveredTotals()

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None:
        assert number not in self.closed
        self.acknowledged += entries

    def last_entry(self, number: int) -> EntryId | None: ...

    def close_consumer(self, number: int, *, for_another: bool) -> None:
        assert not for_another
        self.closed.append(number)

    def took(self, number: int, taken: DeliveredTotals) -> None:
        self.taken = taken if number not in self.closed else DeliveredTotals()


def test_without_a_connection_nothing_is_given_that_came_before() -> None:
    """The entries come again on the next connection, and may be other entries by then."""
    ends = Ends()
    where = TopicPartition("persistent://a/b/c")
    wanted = SubscriptionSpec(where, "s", split_ring(1)[0], "c", 10)
    consumer = RemoteConsumer(wanted, ends, 1, EntryHolders())
    before, after = [block_of(Random(1))], [block_of(Random(2))]
    rows = before[0].rows
    consumer.arrived(WorkerDelivery(1, before))
    consumer.arrived(WorkerDelivery(1, (), connected=False))
    assert not consumer.is_connected()
    assert not consumer.receive(0)
    # The worker waits until all rows are taken, so dropped rows count.
    assert ends.taken.messages == rows
    consumer.arrived(WorkerDelivery(1, before))  # sent before the loss
    consumer.arrived(WorkerDelivery(1, (), BrokerUnavailableError("told all the same")))
    with pytest.raises(BrokerUnavailableError, match="told all the same"):
        consumer.receive(0)
    assert ends.taken == DeliveredTotals().plus(WorkerDelivery(1, before)).plus(
        WorkerDelivery(1, before)
    )
    assert ends.taken.messages == 2 * rows
    consumer.arrived(WorkerDelivery(1, (), connected=True))
    consumer.arrived(WorkerDelivery(1, after))
    assert consumer.receive(0) == after


def test_a_consumer_has_given_all_by_the_report_of_its_worker_not_by_silence() -> None:
    where = TopicPartition("persistent://a/b/c")
    consumer = RemoteConsumer(
        SubscriptionSpec(where, "s", split_ring(1)[0], "c", 10), Ends(), 1, EntryHolders()
    )
    half = WorkerDelivery(1, [block_of(Random(1))])
    said = encode_deliveries([WorkerDelivery(1, (), gave_all=True)])[0]
    (gave_all,) = decode_deliveries(json.loads(json.dumps(said)), NOTHING)
    after: list[Callable[[], object]] = [
        lambda: consumer.arrived(half),
        lambda: consumer.arrived(WorkerDelivery(1, (), connected=True)),
        consumer.lost,
        lambda: consumer.regaining(2),
    ]
    for what in after:
        consumer.arrived(WorkerDelivery(1, (), connected=True))
        assert consumer.is_connected()
        assert not consumer.has_given_all()
        consumer.arrived(gave_all)
        assert consumer.has_given_all(), "also on the other side"
        what()
        assert not consumer.has_given_all()
    consumer.arrived(gave_all)
    assert not consumer.receive(0), "there is nothing to receive of what was only told"


def test_an_acknowledgement_goes_through_the_worker_that_the_entry_came_by() -> None:
    """Entries that a worker loses come again only through its own consumers."""
    where, holders, one, other = (
        TopicPartition("persistent://a/b/c"),
        EntryHolders(),
        Ends(),
        Ends(),
    )
    low, high = (
        RemoteConsumer(SubscriptionSpec(where, "s", each, "c", 10), ends, number, holders)
        for number, (each, ends) in enumerate(zip(split_ring(2), (one, other), strict=True))
    )
    entries = [block_of(Random(seed)) for seed in range(5)]
    low.arrived(WorkerDelivery(0, entries[:3]))
    high.arrived(WorkerDelivery(1, entries[3:]))
    assert len(low.receive(0)) == 3
    assert len(high.receive(0)) == 2
    high.acknowledge([entry.id for entry in entries[1:]])
    assert one.acknowledged == [entry.id for entry in entries[1:3]]
    assert other.acknowledged == [entry.id for entry in entries[3:]]
    low.close()
    high.acknowledge([entries[0].id])  # no consumer has it: it comes again, or was acknowledged
    assert other.acknowledged[-1] == entries[0].id
    assert not holders._holders


def test_acknowledgements_that_a_dead_worker_did_not_take_go_the_way_their_entries_came() -> None:
    """Otherwise the broker waits for the consumer that has the entry, for ever."""
    where, holders, one, other, dead = (
        TopicPartition("persistent://a/b/c"), EntryHolders(), Ends(), Ends(), Ends()
    )  # fmt: skip
    dead.acknowledge = Mock(side_effect=BrokerUnavailableError("gone"))  # type: ignore[method-assign]
    first, second, third = (
        RemoteConsumer(SubscriptionSpec(where, "s", each, "c", 10), ends, number, holders)
        for number, (each, ends) in enumerate(zip(split_ring(3), (dead, one, other), strict=True))
    )
    entries = [block_of(Random(seed)) for seed in range(4)]
    for consumer, share in ((first, entries[:2]), (second, entries[2:])):
        consumer.arrived(WorkerDelivery(consumer.number, share))
        assert len(consumer.receive(0)) == 2
    ids = [entry.id for entry in entries]
    with pytest.raises(BrokerUnavailableError):
        first.acknowledge(ids)
    first.lost()
    third.acknowledge(ids)
    assert one.acknowledged == ids[2:]
    assert other.acknowledged == ids[:2]
    assert not holders._holders
