"""The events that a recorder makes of messages and batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.port import Consumer, StartPosition, SubscriptionSpec
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock
from keyshard.core.ring.hash_range import RING_SIZE, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.layout import lay_out
from keyshard.testing.verify.check_workers import ring_coverage, routing
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recorder import part_range
from keyshard.testing.verify.recording_broker import RecordingBroker, message_name
from tests.helpers import DEADLINE_S, P0, block

RING = split_ring(1)[0]


def test_messages_of_a_workload_are_named_by_key_and_number() -> None:
    assert message_name(b"k12:345:xxx", "k12") == ("k12", 345)
    assert message_name(b"k12:345:xxx", "an ordering key") == ("k12", 345)


def test_other_messages_are_named_by_their_position() -> None:
    assert message_name(b"{}", "customer") == ("customer", None)
    assert message_name(b"k12:345:xxx", None) == (None, None)


@pytest.mark.parametrize(("ranges", "merged"), [(1, None), (10, None), (10, 3), (7, 7), (16, 1)])
def test_a_key_lies_in_the_range_of_its_part(ranges: int, merged: int | None) -> None:
    end = Checkpoint("", "s", ranges, merged=merged)
    parts = [part_range(end, part) for part in range(merged or ranges)]
    assert sum(map(len, parts)) == RING_SIZE
    blocks = [block(1, i, f"key-{i}") for i in range(200)]
    for part, located in lay_out({P0: blocks}, ranges, merged).items():
        for _, one in located:
            assert key_slot(one.partition_keys[0] or "") in parts[part]


class Ranges:
    """Two workers on one topic, and their recorded events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._cluster = MemoryCluster()
        self._topic = self._cluster.create_topic("t")
        self._clock: Iterator[int] = count()
        self.a, self.b = map(self._broker, "ab")

    def subscribe(self, broker: RecordingBroker) -> Consumer:
        (where,) = broker.partitions(self._topic)
        return broker.subscribe(
            SubscriptionSpec(where, "s", RING, consumer_name="c", receiver_queue_size=1),
            StartPosition.EARLIEST,
        )

    def start_handler(self, worker: str) -> None:
        self.events.append(
            Event(
                next(self._clock), "started", topic=self._topic, partition=-1, ledger=1, entry=0,
                index=0, key="k", seq=0, worker=worker,
            )
        )  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        return [f"{event.kind} {event.worker}" for event in self.events]

    def _broker(self, worker: str) -> RecordingBroker:
        broker = MemoryBroker(self._cluster)
        return RecordingBroker(
            broker, self.events.extend, worker, lambda: next(self._clock), epoch=lambda: 0
        )


def test_a_range_has_its_owner_while_its_consumer_is_subscribed_again() -> None:
    ranges = Ranges()
    first = ranges.subscribe(ranges.a)
    first.close(for_another=True)
    ranges.start_handler("a")
    second = ranges.subscribe(ranges.a)
    first.close()
    assert ranges.kinds == ["range_gained a", "started a", "range_gained a"]
    assert routing(ranges.events).holds
    assert ring_coverage(ranges.events).holds
    second.close()
    ranges.start_handler("a")
    assert not routing(ranges.events).holds


@pytest.mark.parametrize("by", ["consumer", "broker"])
def test_a_range_that_is_not_subscribed_again_is_given_up_once(by: str) -> None:
    ranges = Ranges()
    consumer = ranges.subscribe(ranges.a)
    consumer.close(for_another=True)
    (consumer if by == "consumer" else ranges.a).close()
    ranges.a.close()
    assert ranges.kinds == ["range_gained a", "range_lost a"]


def test_a_consumer_that_takes_a_range_before_it_is_subscribed_again_is_a_second_owner() -> None:
    ranges = Ranges()
    ranges.subscribe(ranges.a).close(for_another=True)
    ranges.subscribe(ranges.b)
    assert not ring_coverage(ranges.events).holds


def test_a_consumer_that_came_before_the_old_one_went_continues_owning() -> None:
    """1. The old one loses its connection. 2. Another comes. 3. The old one is closed for it."""
    ranges = Ranges()
    old = ranges.subscribe(ranges.a)
    old.consumer.drop()  # type: ignore[attr-defined]
    new = ranges.subscribe(ranges.a)
    old.close(for_another=True)
    new.close()
    assert ranges.kinds == ["range_gained a", "range_gained a", "range_lost a"]


def test_a_range_is_not_lost_between_a_receive_and_its_record() -> None:
    """A source that stops closes its broker, perhaps while a thread of it receives."""
    ranges = Ranges()
    consumer = ranges.subscribe(ranges.a)
    receiving, may_return = threading.Event(), threading.Event()

    def receive(timeout_ms: int) -> list[EntryBlock]:
        receiving.set()
        assert may_return.wait(DEADLINE_S)
        return [block(1, 0, "k")]

    consumer.consumer.receive = receive  # type: ignore[attr-defined]
    receiver = threading.Thread(target=consumer.receive, args=(0,))
    receiver.start()
    assert receiving.wait(DEADLINE_S)
    closer = threading.Thread(target=ranges.a.close)
    closer.start()
    closer.join(0.2)  # It waits for the receive; without that, the range is lost by now.
    may_return.set()
    for thread in (receiver, closer):
        thread.join(DEADLINE_S)
    assert ranges.kinds == ["range_gained a", "delivered a", "range_lost a"]
    assert consumer.receive(0) == []
