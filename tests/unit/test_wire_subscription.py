"""A subscription that is lost while it is made, and earlier acknowledgements."""

from __future__ import annotations

from typing import Any, cast

import pytest

from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.retry import Retrier
from keyshard.broker.wire import ack_grouping
from keyshard.broker.wire.ack_grouping import AckGrouping
from keyshard.broker.wire.connection import WireConnection
from keyshard.broker.wire.consumer import WireConsumer
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.subscription import WireSubscription
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.receiver_queue_size import PrefetchSize
from keyshard.errors import BrokerError
from tests.support.deadlines import deadline
from tests.support.one_broker import shared_at

WHERE = TopicPartition("persistent://public/default/orders", 0)


class At:
    """A connection that ends subscriptions at once, as often as the test says."""

    is_open = True

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.subscribed: list[int] = []
        self.sent: list[Any] = []
        self.flows: list[Any] = []
        self.handle: WireSubscription | None = None

    def register(self, _consumer_id: int, handle: WireSubscription) -> None:
        self.handle = handle

    def ask(self, _name: str, request: Any, *_: object, **_undo: object) -> None:
        self.subscribed.append(request.consumer_id)
        if self.losses and self.handle is not None:
            self.losses -= 1
            self.handle.lost(request.consumer_id, ended=True)
            # A thread that took entries of the subscription before says so late.
            self.handle.lost(-1, ended=False)

    def begin(self, _name: str, request: Any, _done: object) -> int:
        self.sent.append(request)
        return len(self.sent)

    def forget(self, _number: int) -> None: ...

    def send(self, name: str, request: Any, *_: object) -> None:
        if name == "flow":
            self.flows.append(request)


def test_a_subscription_that_ends_while_it_is_made_is_made_again() -> None:
    at = At(losses=1)
    one = WireSubscription(shared_at(at, Retrier()), WHERE, PrefetchSize(10, 1_000), api.Subscribe)
    one.open()
    assert one.standing() == (at, at.subscribed[-1])
    assert len(at.subscribed) == 2


@pytest.mark.parametrize(
    ("message_bytes", "permits"), [(None, 1), (700, 100), (0, 333), (10**9, 1)]
)
def test_a_consumer_begins_with_as_many_messages_as_fit(
    message_bytes: int | None, permits: int
) -> None:
    at, retrier = At(losses=0), Retrier()
    spec = SubscriptionSpec(
        WHERE, "s", split_ring(1)[0], "c", 500, 100_000, message_bytes=message_bytes
    )
    WireConsumer(shared_at(at, retrier), spec, StartPosition.EARLIEST).open()
    assert [one.permits for one in at.flows] == [permits]
    # Its nudges would go on, and draw random numbers while other tests draw theirs.
    retrier.close()
    retrier.join(deadline(10))


def test_old_acknowledgements_are_not_sent_after_a_lost_subscription(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another cluster may have the same ids by then."""
    monkeypatch.setattr(ack_grouping, "SENT_AGAIN_WITHIN_S", -1.0)
    first, second = At(0), At(0)
    standing: list[tuple[WireConnection | None, int]] = [(None, 0)]
    one = AckGrouping(
        WHERE, lambda: standing[0], lambda _: None, lambda _: BrokerError("no"), lambda _: None
    )
    one.subscribed(cast("WireConnection", first), 1)
    one.add([EntryId(7, 1)])
    one.lost(1)
    one.subscribed(cast("WireConnection", first), 1)  # reported before its loss was known
    one.subscribed(cast("WireConnection", second), 2)
    assert (first.sent, second.sent) == ([], [])
