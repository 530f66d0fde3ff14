"""A consumer that reconnects slowly is replaced, without an end, a loss or disorder."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.consumers import reconnector
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.receiver import RangeConsumer
from keyshard.consumers.reconnector import ConnectionProblems
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core import refusal_timer
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.ring.assignment import assign
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_segments import SegmentOrder
from keyshard.errors import (
    AuthenticationError,
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    RangeConflictError,
)
from tests.helpers import DEADLINE_S, config, received, started, wait_until
from tests.support.changing_topics import PREFIX, ChangingTopics
from tests.support.deadlines import joined
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.rescaled_source import RescaledSource

MakeSource = Callable[..., RescaledSource]
REPLACED = "subscribed again"


@pytest.fixture
def make_source(make_rescaled: MakeSource, monkeypatch: pytest.MonkeyPatch) -> MakeSource:
    """Sources that look for lost connections every few milliseconds."""
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    monkeypatch.setattr(reconnector, "AWAY_S", (0.05, 0.1))
    return make_rescaled


def consumers(rescaled: RescaledSource) -> list[RangeConsumer]:
    return [one for found in rescaled.consumers.values() for one in found]


def all_connected(rescaled: RescaledSource) -> bool:
    return all(one.consumer.is_connected() for one in consumers(rescaled))


def test_a_consumer_that_is_away_for_long_is_subscribed_again(
    make_source: MakeSource, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The broker was away, and is there. 2. The client waits for up to a minute."""
    caplog.set_level(logging.INFO, "keyshard")
    rescaled = make_source()
    rescaled.keep_publishing()
    rescaled.more()
    before = [one.consumer for one in consumers(rescaled)]
    rescaled.broker.drop()
    rescaled.more(600)
    wait_until(lambda: all_connected(rescaled))
    assert not any(one.consumer in before for one in consumers(rescaled))
    assert sorted(rescaled.ring()) == [(i, part) for i, (part,) in enumerate(assign(4))]
    said = [record for record in caplog.records if REPLACED in record.getMessage()]
    assert 1 <= len(said) < 12
    assert all(record.levelno == logging.WARNING for record in said)
    rescaled.check()


def test_the_loss_of_one_topic_partition_keeps_the_consumers_of_the_others(
    make_source: MakeSource,
) -> None:
    rescaled = make_source()
    rescaled.keep_publishing()
    rescaled.more()
    where = TopicPartition(rescaled.topic, 1)
    others = [
        one.consumer for one in consumers(rescaled) if one.owned_range.topic_partition != where
    ]
    rescaled.broker.drop({where})
    wait_until(lambda: all_connected(rescaled))
    assert others == [
        one.consumer for one in consumers(rescaled) if one.owned_range.topic_partition != where
    ]
    rescaled.more(600)
    rescaled.check()


def test_a_consumer_that_reconnects_by_itself_is_left_alone(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnector, "AWAY_S", (60.0, 60.0))
    rescaled = make_source()
    before = [one.consumer for one in consumers(rescaled)]
    for _ in range(3):
        rescaled.broker.drop()
        wait_until(lambda: all(one.replace_at_s for one in consumers(rescaled)))
        rescaled.broker.reconnect()
        wait_until(lambda: not any(one.replace_at_s for one in consumers(rescaled)))
    assert [one.consumer for one in consumers(rescaled)] == before
    rescaled.publish_many(100)
    rescaled.check()


@pytest.mark.parametrize(
    "error", [BrokerUnavailableError("away"), RangeConflictError("taken"), BrokerError("no")]
)
@pytest.mark.simulated
def test_an_attempt_that_fails_ends_nothing(make_source: MakeSource, error: BrokerError) -> None:
    rescaled = make_source()
    rescaled.keep_publishing()
    rescaled.more()
    before = [one.consumer for one in consumers(rescaled)]
    rescaled.subscribes.raises = error
    rescaled.broker.drop()
    wait_until(lambda: rescaled.subscribes.raised >= 5)
    assert rescaled.error is None
    assert [one.consumer for one in consumers(rescaled)] == before, "their clients go on trying"
    rescaled.subscribes.raises = None
    rescaled.more(600)
    rescaled.check()


@pytest.mark.simulated
def test_topic_partitions_that_cannot_be_subscribed_hold_up_no_other_and_name_no_other(
    make_source: MakeSource,
) -> None:
    """1. All connections are lost. 2. Two of three topic partitions stay away."""
    rescaled = make_source(8)
    last = TopicPartition(rescaled.topic, 2)
    rescaled.subscribes.raises = lambda spec, _: (
        None
        if spec.topic_partition == last
        else BrokerUnavailableError(f"{spec.topic_partition} is away")
    )
    rescaled.broker.drop()
    wait_until(lambda: all(one.consumer.is_connected() for one in rescaled.consumers[last]))
    away = rescaled.consumers.keys() - {last}
    wait_until(lambda: rescaled.coordinator.consumers.problems().keys() == away)
    problems = rescaled.coordinator.consumers.problems()
    assert [f"{where} is away" in problems[where] for where in sorted(away)] == [True, True]
    rescaled.subscribes.raises = None
    wait_until(lambda: all_connected(rescaled))
    rescaled.publish_many(100)
    rescaled.check()


def test_while_the_broker_does_not_answer_nothing_is_tried(make_source: MakeSource) -> None:
    rescaled = make_source()
    missing = ScriptedCall(raises=BrokerUnavailableError("away"))
    faulty(rescaled.broker, missing=missing)
    rescaled.subscribes.raises = missing.raises
    rescaled.broker.drop()
    wait_until(lambda: missing.raised >= 5)
    assert rescaled.subscribes.raised == 0
    missing.raises = rescaled.subscribes.raises = None
    rescaled.broker.reconnect()
    rescaled.publish_many(100)
    rescaled.check()


@pytest.mark.simulated
def test_ranges_move_while_their_consumers_are_away(make_source: MakeSource) -> None:
    rescaled = make_source()
    rescaled.keep_publishing()
    for count in (7, 3, 8, 2):
        rescaled.more()
        rescaled.broker.drop()
        assert rescaled.rescaler.rescale(count).ranges_after == count
    wait_until(lambda: all_connected(rescaled))
    rescaled.more()
    rescaled.check()


@pytest.mark.simulated
def test_topics_come_and_a_source_stops_while_consumers_are_away(make_source: MakeSource) -> None:
    rescaled = make_source()
    for _ in range(5):
        rescaled.publish_many(200)
        rescaled.broker.drop()
    rescaled.check()


def newest(rescaled: RescaledSource) -> RangeConsumer:
    """The consumer that received last: not every range has a key."""
    return max(consumers(rescaled), key=lambda one: one.reception._received_s)


def subscribe_again(one: RangeConsumer, rescaled: RescaledSource) -> None:
    """Let a range consumer find entries that a client kept from before a lost connection."""
    kept = one.consumer
    is_connected, receive = kept.is_connected, kept.receive
    came: list[object] = []

    def away_until_something_came() -> bool:
        receives = threading.current_thread().name.startswith("keyshard-receive")
        return bool(came or not receives) and is_connected()

    def received_late(timeout_ms: int) -> list[EntryBlock]:
        blocks = receive(timeout_ms)
        came.extend(blocks)
        return blocks

    kept.is_connected = away_until_something_came  # type: ignore[method-assign]
    kept.receive = received_late  # type: ignore[method-assign]
    wait_until(lambda: one.consumer is not kept or one.lacking or rescaled.error)


@pytest.mark.parametrize(
    "error", [BrokerUnavailableError("away"), RangeConflictError("taken for a moment")]
)
def test_an_outage_while_a_range_is_subscribed_again_is_survived(
    make_source: MakeSource, error: BrokerError
) -> None:
    """1. A range needs a new subscription. 2. The broker is away for long. 3. It is back."""
    conflict = isinstance(error, RangeConflictError)
    rescaled = make_source(subscribe_timeout_ms=20_000 if conflict else 100, receive_threads=1)
    rescaled.keep_publishing()
    rescaled.more()
    one = newest(rescaled)
    others = [
        other for other in consumers(rescaled) if other is not one and other.reception._received_s
    ]
    rescaled.subscribes.raises = lambda spec, _: (
        error if spec.hash_range == one.owned_range.hash_range else None
    )
    subscribe_again(one, rescaled)
    wait_until(lambda: rescaled.subscribes.raised >= 5 or rescaled.error)
    assert rescaled.error is None
    before = {id(other): other.reception._received_s for other in others}
    wait_until(lambda: all(other.reception._received_s > before[id(other)] for other in others))
    problems = rescaled.coordinator.consumers.problems()
    assert str(error.message) in problems[one.owned_range.topic_partition]
    assert error.message in rescaled.coordinator.status()["connectionError"]
    rescaled.subscribes.raises = None
    wait_until(lambda: all_connected(rescaled))
    assert rescaled.coordinator.consumers.problems() == {}
    rescaled.more(300)
    rescaled.check()


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize(
    "error", [AuthorizationError("revoked"), AuthenticationError("expired"), BrokerError("no")]
)
def test_a_refusal_that_does_not_pass_ends_the_source_by_name(
    make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, error: BrokerError, anew: bool
) -> None:
    monkeypatch.setattr(refusal_timer, "REFUSED_S", 0.2)
    monkeypatch.setattr(refusal_timer, "UNAUTHENTICATED_S", 0.4)
    rescaled = make_source()
    rescaled.keep_publishing()
    rescaled.more()
    rescaled.subscribes.raises = error
    if anew:
        subscribe_again(newest(rescaled), rescaled)
    else:
        rescaled.broker.drop()
    wait_until(lambda: rescaled.error is not None)
    assert rescaled.error is error


def test_a_range_that_another_client_holds_for_long_ends_the_source(
    make_source: MakeSource,
) -> None:
    rescaled = make_source(subscribe_timeout_ms=200)
    rescaled.keep_publishing()
    rescaled.more()
    error = RangeConflictError("taken for good")
    rescaled.subscribes.raises = error
    subscribe_again(newest(rescaled), rescaled)
    wait_until(lambda: rescaled.error is error)


def test_ranges_move_while_one_is_subscribed_again(make_source: MakeSource) -> None:
    rescaled = make_source()
    rescaled.keep_publishing()
    for count in (7, 3, 8, 2):
        rescaled.more()
        one = newest(rescaled)
        rescaled.subscribes.raised = 0
        rescaled.subscribes.raises = lambda spec, _, mine=one.owned_range.hash_range: (  # type: ignore[misc]
            BrokerUnavailableError("away") if spec.hash_range == mine else None
        )
        subscribe_again(one, rescaled)
        wait_until(lambda: rescaled.subscribes.raised)
        rescaled.subscribes.raises = None
        assert rescaled.rescaler.rescale(count).ranges_after == count
    wait_until(lambda: all_connected(rescaled))
    rescaled.more()
    rescaled.check()


def test_a_consumer_that_takes_the_place_of_one_to_be_subscribed_again_stays_open(
    make_source: MakeSource,
) -> None:
    """1. A consumer is being replaced. 2. It reconnects, and needs a new subscription. 3. The first
    attempt at that fails. 4. The replacement takes its place.
    """
    rescaled = make_source()
    rescaled.keep_publishing()
    rescaled.more()
    one = newest(rescaled)
    replacing, go_on = threading.Event(), threading.Event()

    def refuse(spec: SubscriptionSpec, _: object) -> BrokerError | None:
        if spec.hash_range != one.owned_range.hash_range or go_on.is_set():
            return None
        if replacing.is_set():
            return BrokerUnavailableError("away")
        replacing.set()
        go_on.wait(DEADLINE_S)
        return None

    rescaled.subscribes.raises = refuse
    rescaled.broker.drop({one.owned_range.topic_partition})
    assert replacing.wait(DEADLINE_S)
    rescaled.broker.reconnect()
    subscribe_again(one, rescaled)
    wait_until(lambda: rescaled.subscribes.raised > 0 or rescaled.error)
    go_on.set()
    wait_until(lambda: not one.lacking or rescaled.error)
    replacement = one.consumer
    retrier = rescaled.coordinator.consumers._reconnector._retrier
    wait_until(lambda: not retrier._due or rescaled.error)
    rescaled.more(300)
    assert one.consumer is replacement
    rescaled.check()


@pytest.mark.simulated
def test_ranges_move_while_a_look_up_for_a_lost_consumer_waits(make_source: MakeSource) -> None:
    """1. A topic partition is away, and its broker does not answer. 2. Ranges move. 3. It answers,
    when another consumer has the range.
    """
    rescaled = make_source()
    rescaled.publish_many(100)
    rescaled.more(100)
    lost = newest(rescaled)
    asked, go_on = threading.Event(), threading.Event()

    def wait(spec: SubscriptionSpec, _: object) -> None:
        mine = spec.topic_partition, spec.hash_range
        owned = lost.owned_range
        if not asked.is_set() and mine == (owned.topic_partition, owned.hash_range):
            asked.set()
            go_on.wait(DEADLINE_S)

    rescaled.subscribes.raises = wait
    rescaled.broker.drop({lost.owned_range.topic_partition})
    assert asked.wait(DEADLINE_S)
    began_s = time.monotonic()
    assert rescaled.rescaler.rescale(7).ranges_after == 7
    assert time.monotonic() - began_s < DEADLINE_S / 2
    go_on.set()
    wait_until(lambda: all_connected(rescaled))
    assert lost.successor is None
    rescaled.publish_many(100)
    rescaled.check()


@pytest.mark.simulated
def test_a_consumer_that_was_subscribed_when_its_range_had_moved_is_closed(
    make_source: MakeSource,
) -> None:
    rescaled = make_source()
    rescaled.publish_many(100)
    rescaled.more(100)
    lost, subscribe = newest(rescaled), MemoryBroker.subscribe
    made, go_on = threading.Event(), threading.Event()
    late: list[Any] = []

    def slow(spec: SubscriptionSpec, start: StartPosition) -> Any:
        consumer = subscribe(rescaled.broker, spec, start)
        mine = spec.topic_partition, spec.hash_range
        owned = lost.owned_range
        if not late and mine == (owned.topic_partition, owned.hash_range):
            late.append(consumer)
            made.set()
            go_on.wait(DEADLINE_S)
        return consumer

    rescaled.broker.subscribe = slow  # type: ignore[method-assign]
    rescaled.broker.drop({lost.owned_range.topic_partition})
    assert made.wait(DEADLINE_S)
    moving = threading.Thread(target=rescaled.rescaler.rescale, args=(7,))
    moving.start()
    wait_until(lambda: lost.dropped)
    go_on.set()
    joined(moving, DEADLINE_S)
    assert {owner for owner, _ in rescaled.ring()} == set(range(7))
    assert not late[0].is_connected()
    rescaled.publish_many(100)
    rescaled.check()


def test_topic_partitions_may_come_while_another_thread_asks_which_are_consumed() -> None:
    found = RangeConsumers(None, None, config("orders"), assign(1), SegmentOrder())  # type: ignore[arg-type]
    here, later = TopicPartition("orders", 0), TopicPartition("orders", 1)
    found.by_partition[here] = []

    class Meanwhile(set[TopicPartition]):
        def __contains__(self, where: object) -> bool:
            found.by_partition[later] = []
            return False

    found._only_held = Meanwhile()
    assert found.consumed == [here]


def test_a_trouble_is_named_in_the_log_once_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "keyshard")
    problems, one, other = ConnectionProblems(), TopicPartition("t", 0), TopicPartition("t", 1)
    for second in range(200):
        now = {one: f"It has been so for {second} s.", other: "It refuses."}
        problems.look(float(second), now if second < 100 else {other: "It refuses."})
    assert [text for text in caplog.messages if "t-partition-0 receives nothing" in text] == [
        "t-partition-0 receives nothing: It has been so for 2 s.",
        "t-partition-0 receives nothing: It has been so for 62 s.",
    ]
    assert sum("t-partition-1 receives nothing" in text for text in caplog.messages) == 4
    assert sum("serves t-partition-0 again" in text for text in caplog.messages) == 1


@pytest.fixture
def topics(changing: ChangingTopics, monkeypatch: pytest.MonkeyPatch) -> ChangingTopics:
    monkeypatch.setattr(reconnector, "LOOK_S", 0.01)
    changing.cluster.create_topic("a", 2)
    return changing


def served(coordinator: Coordinator) -> list[RangeConsumer]:
    by_partition = coordinator.consumers.range_consumers.by_partition
    return [one for where in sorted(by_partition) for one in by_partition[where]]


@pytest.mark.parametrize("forgotten", [{1}, {0, 3}, {0, 1, 2, 3}])
def test_a_consumer_that_its_broker_forgot_is_subscribed_again(
    topics: ChangingTopics, forgotten: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    clients: list[MemoryBroker] = []
    source = topics.source(PREFIX + "a", parallelism=2, starting_position="earliest")

    def connect() -> MemoryBroker:
        clients.append(MemoryBroker(topics.cluster))
        return clients[-1]

    coordinator = Coordinator(source, connect, topics.admin)
    with started(coordinator):
        topics.publish("a", 8)
        received(coordinator, 16)
        before = [one.consumer for one in served(coordinator)]
        for number in forgotten:
            actor_slot = served(coordinator)[number].owned_range
            clients[0].forget(actor_slot.topic_partition, actor_slot.hash_range)
        assert all(one.is_connected() for one in before), "it says so"
        topics.publish("a", 8)
        coordinator.discovery.round()
        received(coordinator, 32)
        topics.take(coordinator)
        assert topics.got == topics.sent
        after = [one.consumer for one in served(coordinator)]
        assert {n for n, one in enumerate(after) if one is not before[n]} == forgotten
        wait_until(lambda: not topics.backlog("a"))
    said = [one for one in caplog.messages if "had no consumer for range" in one]
    assert len(said) == len(forgotten)


def test_wrong_statistics_cost_no_consumer(
    topics: ChangingTopics, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = topics.source(PREFIX + "a", parallelism=2, starting_position="earliest")
    ask, refused = topics.admin.subscription, list[HashRange]()
    subscribe = MemoryBroker.subscribe

    def wrong(where: TopicPartition, subscription: str) -> Any:
        stats = ask(where, subscription)
        return None if where.partition else dict(stats or {}, consumers=[])

    def counted(broker: MemoryBroker, spec: SubscriptionSpec, start: StartPosition) -> Any:
        try:
            return subscribe(broker, spec, start)
        except RangeConflictError:
            refused.append(spec.hash_range)
            raise

    with topics.running(source) as coordinator:
        before = [one.consumer for one in served(coordinator)]
        monkeypatch.setattr(MemoryBroker, "subscribe", counted)
        monkeypatch.setattr(topics.admin, "subscription", wrong)
        coordinator.discovery.round()
        wait_until(lambda: len(refused) == 4)
        wait_until(lambda: not any(one.forgotten for one in served(coordinator)))
        topics.publish("a", 8)
        received(coordinator, 16)
        assert [one.consumer for one in served(coordinator)] == before
        assert len(refused) == 4, "once for each round"
    assert not [one for one in caplog.messages if "subscribed again" in one]
