"""A range consumer that asks for a redelivery never leaves two owners of its range."""

from __future__ import annotations

import threading
from typing import Any

from keyshard.consumers.receiver import OwnedRange, RangeConsumer
from keyshard.consumers.subscribe import reopen_range_consumer
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_assembly import EntryAssembly
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import RangeConflictError
from tests.helpers import P0, FakeConsumer, config


class OneOwner:
    """A broker with one consumer of the range; the next may have it when that is closed."""

    def __init__(self, held: FakeConsumer) -> None:
        self.held = held
        self.overlaps = 0

    def subscribe(self, *_: object, **__: object) -> FakeConsumer:
        self.overlaps += not self.held.closed
        self.held = FakeConsumer()
        return self.held


def test_the_old_consumer_gives_the_range_back_before_the_new_one_takes_it() -> None:
    old = FakeConsumer()
    broker: Any = OneOwner(old)
    assembly = EntryAssembly(doubted={EntryId(1, 0): ((0,), 1, 1)})
    range_consumer = RangeConsumer(
        OwnedRange(P0, 0, split_ring(1)[0]), old, ReceiverQueueSize(10**6, 1), assembly
    )
    reopen_range_consumer(broker, config("t"), range_consumer, threading.Event())
    assert broker.overlaps == 0
    assert range_consumer.consumer is broker.held
    assert range_consumer.assembly.open is None
    assert range_consumer.assembly.doubted == {EntryId(1, 0): ((0,), 1, 1)}, (
        "what ended early is remembered"
    )


def test_a_successor_that_was_subscribed_meanwhile_takes_the_place() -> None:
    old, successor = FakeConsumer(), FakeConsumer()
    range_consumer = RangeConsumer(
        OwnedRange(P0, 0, split_ring(1)[0]), old, ReceiverQueueSize(10**6, 1), successor=successor
    )

    class Taken:
        """Another consumer owns the range until the range consumer has its successor."""

        def subscribe(self, *_: object, **__: object) -> FakeConsumer:
            range_consumer.successor = successor
            raise RangeConflictError("It has a consumer.")

    broker: Any = Taken()
    for at_once in (True, False):
        range_consumer.successor = successor if at_once else None
        range_consumer.consumer = old
        reopen_range_consumer(broker, config("t"), range_consumer, threading.Event())
        assert range_consumer.consumer is successor
        assert range_consumer.successor is None
        assert old.closed
        assert not successor.closed
