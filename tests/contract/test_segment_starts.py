"""Contract: the cursor of a subscription of a segment is moved before it is consumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import pytest

from keyshard.broker.port import PublishOptions
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import RangeConflictError, TopicNotFoundError
from tests.contract.contract_harness import (
    SUBSCRIPTION,
    ScalableHarness,
    read_to_end,
    receive,
    subscribe,
)
from tests.helpers import wait_until

BATCH = 4
END = MessageId((1 << 63) - 1, (1 << 63) - 1, 0)


def _wait_for_later() -> None:
    """Wait until the clock shows another millisecond."""
    now_ms = time.time_ns() // 1_000_000
    wait_until(lambda: time.time_ns() // 1_000_000 > now_ms)


class Segment:
    """The first segment of a topic, with batches of four messages at different times."""

    def __init__(self, harness: ScalableHarness, batches: int = 6) -> None:
        self.harness, self.broker, self.admin = harness, harness.broker(), harness.admin()
        self.topic = harness.create_scalable(1)
        watch = self.broker.watch_segments(self.topic, lambda: None)
        watch.close()
        self.where = watch.graph.partition(0)
        subscribe(self.broker, self.where, subscription="kept").close()
        self.values = [b"%d" % number for number in range(batches * BATCH)]
        with closing(self.broker.entry_producer(self.where, PublishOptions())) as producer:
            for first in range(0, len(self.values), BATCH):
                _wait_for_later()
                rows = [
                    OutgoingMessage(value, "k", None, None, None)
                    for value in self.values[first : first + BATCH]
                ]
                producer.publish(rows, first).result()
        blocks = read_to_end(self.broker.reader(self.where, EntryId(0, 0))).blocks
        self.places = [block.id for block in blocks]
        self.times = [block.publish_ms for block in blocks]

    def begin(self, start: MessageId | int, name: str = SUBSCRIPTION) -> EntryId:
        return self.broker.begin(self.where, name, start, BATCH)

    def received(self, name: str = SUBSCRIPTION, count: int = 0) -> Sequence[bytes | None]:
        """The first messages of a subscription; by default all that are left."""
        with closing(subscribe(self.broker, self.where, subscription=name)) as consumer:
            stats = self.admin.subscription(self.where, name)
            assert stats is not None
            if not count and not stats["msgBacklog"]:
                return []
            found = receive([consumer], count or 1).values
            while not count and found[-1] != self.values[-1]:
                found = [*found, *receive([consumer], 1).values]
            return found


@pytest.fixture
def segment(scalable: ScalableHarness) -> Segment:
    return Segment(scalable)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_subscription_begins_at_an_entry_or_inside_it(segment: Segment, sealed: bool) -> None:
    if sealed:
        segment.harness.split(segment.topic, 0)
    for number, index in ((0, 0), (2, 0), (2, 1), (5, 3)):
        name, at = f"s-{number}-{index}", segment.places[number]
        assert segment.begin(MessageId(*at, index), name) == at
        assert segment.received(name) == segment.values[BATCH * number + index :]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_subscription_begins_at_a_publish_time(segment: Segment, sealed: bool) -> None:
    if sealed:
        segment.harness.split(segment.topic, 0)
    for number, time_ms in enumerate(segment.times):
        assert segment.begin(time_ms, f"s-{number}") == segment.places[number]
    assert segment.received("s-2") == segment.values[2 * BATCH :]
    assert segment.begin(segment.times[0] - 100_000, "early") == segment.places[0]
    last = segment.places[-1]
    assert segment.begin(segment.times[-1] + 1, "late") == EntryId(last.ledger, last.entry + 1)
    assert not segment.received("late")


def test_a_subscription_begins_at_either_end(segment: Segment) -> None:
    last = segment.places[-1]
    assert segment.begin(MessageId(0, 0, 0)) <= segment.places[0]
    assert segment.received() == segment.values
    assert segment.begin(END, "end") == EntryId(last.ledger, last.entry + 1)
    assert not segment.received("end")


def test_a_subscription_is_moved_back_and_forth_and_its_acknowledgements_are_forgotten(
    segment: Segment,
) -> None:
    segment.begin(MessageId(*segment.places[1], 0))
    with closing(subscribe(segment.broker, segment.where)) as consumer:
        got = receive([consumer], 3 * BATCH)
        consumer.acknowledge(got.ids[1:3])
    for number, index in ((4, 2), (0, 1), (2, 0)):
        segment.begin(MessageId(*segment.places[number], index))
        assert segment.received() == segment.values[BATCH * number + index :]


def test_a_subscription_that_is_consumed_is_not_moved(segment: Segment) -> None:
    with (
        closing(subscribe(segment.broker, segment.where)) as consumer,
        pytest.raises(RangeConflictError),
    ):
        segment.begin(MessageId(*segment.places[3], 0))
    assert consumer.hash_range
    assert segment.received() == segment.values


def test_a_move_leaves_no_consumer(segment: Segment) -> None:
    segment.begin(MessageId(*segment.places[3], 0))
    stats = segment.admin.subscription(segment.where, SUBSCRIPTION)
    assert stats is not None
    assert not stats["consumers"]


def test_a_subscription_of_a_missing_segment_is_not_created(segment: Segment) -> None:
    missing = TopicPartition(segment.where.topic[:-1] + "7")
    with pytest.raises(TopicNotFoundError):
        segment.broker.begin(missing, SUBSCRIPTION, MessageId(0, 0, 0))


def test_a_registered_subscription_is_deleted_from_all_segments(segment: Segment) -> None:
    admin, topic = segment.admin, TopicPartition(segment.topic)
    admin.register(segment.topic, "mark")
    subscribe(segment.broker, segment.where).close()
    segment.harness.split(segment.topic, 0)
    assert admin.subscription(topic, "mark") is not None
    for _ in range(2):
        admin.unregister(segment.topic, "mark")
        assert admin.subscription(topic, "mark") is None
    assert admin.subscription(segment.where, SUBSCRIPTION) is not None
    with closing(segment.broker.watch_segments(segment.topic, lambda: None)) as watch:
        where = watch.graph.partitions
    segment.harness.split(segment.topic, 1)
    assert all("mark" not in admin.subscriptions(one) for one in where)
    assert admin.subscription(topic, "mark") is None
