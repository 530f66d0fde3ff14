"""Starts of the embedded runtime: positions, checkpoints, and refused ranges."""

from __future__ import annotations

import threading

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.consumers.receiver import OwnedRange
from keyshard.consumers.subscribe import open_range_consumers
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import (
    AuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    CheckpointMismatchError,
    SubscriptionInUseError,
    TopicNotFoundError,
)
from tests.helpers import FakeAdmin, config, received, rows_of, running
from tests.support.coordinated_topic import CoordinatedTopic, cut, values
from tests.support.faulty_broker import ScriptedCall, faulty

RING = split_ring(1)[0]


def test_a_first_start_at_latest_skips_stored_messages(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(5)
    with running(
        coordinated.cluster, config(coordinated.topic, starting_position="latest")
    ) as coordinator:
        coordinated.publish(3)
        received(coordinator, 3)
        assert len(values(rows_of(coordinator, cut(coordinator)))) == 3


def test_a_start_from_a_checkpoint_never_skips_even_without_a_subscription(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(4)
    source = config(coordinated.topic, starting_position="latest")
    start = Checkpoint("", "unit", 4)
    with running(coordinated.cluster, source, start) as coordinator:
        received(coordinator, 4)


def test_a_subscription_that_is_in_use_is_named_after_the_deadline(
    coordinated: CoordinatedTopic,
) -> None:
    waiting = config(coordinated.topic, subscribe_timeout_ms=60)
    with running(coordinated.cluster, coordinated.source):
        with pytest.raises(SubscriptionInUseError, match=r"'unit' is in use: .*60 ms"):
            Coordinator(waiting, lambda: MemoryBroker(coordinated.cluster)).start()
        admin = FakeAdmin()
        admin.stats = {"consumers": [{"address": "/10.0.0.7:1234"}]}
        with pytest.raises(SubscriptionInUseError, match=r"in use by /10\.0\.0\.7:1234") as caught:
            Coordinator(waiting, lambda: MemoryBroker(coordinated.cluster), admin).start()
        assert caught.value.facts == {"holders": ["/10.0.0.7:1234"]}


def test_a_refused_start_gives_back_the_ranges_it_had(coordinated: CoordinatedTopic) -> None:
    other = MemoryBroker(coordinated.cluster)
    held = other.subscribe(
        SubscriptionSpec(
            coordinated.where[0],
            "unit",
            split_ring(4)[3],
            consumer_name="other",
            receiver_queue_size=1,
        ),
        StartPosition.EARLIEST,
    )
    busy = config(coordinated.topic, subscribe_timeout_ms=50)
    broker = MemoryBroker(coordinated.cluster)
    owned_ranges = [
        OwnedRange(where, i, part)
        for where in coordinated.where
        for i, part in enumerate(split_ring(4))
    ]
    with pytest.raises(SubscriptionInUseError):
        open_range_consumers(
            broker,
            None,
            busy,
            owned_ranges,
            StartPosition.EARLIEST,
            make_queue=lambda: ReceiverQueueSize(10**6, 100),
        )
    free = other.subscribe(
        SubscriptionSpec(
            coordinated.where[1], "unit", RING, consumer_name="other", receiver_queue_size=1
        ),
        StartPosition.EARLIEST,
    )
    free.close()
    with pytest.raises(SubscriptionInUseError):
        Coordinator(busy, lambda: broker).start()
    with pytest.raises(BrokerError, match="closed"):
        broker.partitions(coordinated.topic)
    held.close()
    with running(coordinated.cluster, busy):
        pass


def test_a_range_that_is_given_up_in_time_is_taken_over(coordinated: CoordinatedTopic) -> None:
    coordinated.publish(10)
    first = Coordinator(coordinated.source, lambda: MemoryBroker(coordinated.cluster))
    first.start()
    stopper = threading.Timer(0.1, first.stop)
    stopper.start()
    with running(coordinated.cluster, coordinated.source) as second:
        received(second, 10)
    stopper.join()


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        (Checkpoint("standalone", "other", 4), "belongs to subscription 'other'.* uses 'unit'"),
        (Checkpoint("elsewhere", "unit", 4), "belongs to cluster 'elsewhere'.*'standalone'"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_before_connecting(
    coordinated: CoordinatedTopic, checkpoint: Checkpoint, match: str
) -> None:
    def never() -> MemoryBroker:
        raise AssertionError("it connected")

    with pytest.raises(CheckpointMismatchError, match=match):
        Coordinator(coordinated.source, never, FakeAdmin()).start(checkpoint)


def test_the_checkpoint_names_the_cluster_if_the_admin_interface_does(
    coordinated: CoordinatedTopic,
) -> None:
    coordinated.publish(1)
    admin = FakeAdmin("west")
    with running(
        coordinated.cluster, coordinated.source, Checkpoint("", "unit", 4), admin=admin
    ) as coordinator:
        received(coordinator, 1)
        assert cut(coordinator).cluster == "west"
    assert admin.closed


def test_a_role_that_may_not_list_clusters_keeps_the_cluster_of_the_checkpoint(
    coordinated: CoordinatedTopic,
) -> None:
    """Issue: a role with the permission consume could start no source on Pulsar 5.0."""
    error = AuthorizationError("Role r lacks the permission LIST_CLUSTERS.")
    admin = faulty(FakeAdmin(), cluster=ScriptedCall(raises=error))
    coordinated.publish(1)
    with running(
        coordinated.cluster, coordinated.source, Checkpoint("west", "unit", 4), admin=admin
    ) as coordinator:
        received(coordinator, 1)
        assert cut(coordinator).cluster == "west"


def test_without_admin_the_cluster_of_the_checkpoint_is_kept(coordinated: CoordinatedTopic) -> None:
    with running(
        coordinated.cluster, coordinated.source, Checkpoint("west", "unit", 9)
    ) as coordinator:
        assert coordinator.newest == Checkpoint("west", "unit", 4)


def test_a_topic_that_does_not_exist_is_refused_and_not_created(
    coordinated: CoordinatedTopic,
) -> None:
    admin = FakeAdmin(topics=[coordinated.topic])
    source = config("ordres")
    with pytest.raises(TopicNotFoundError, match="persistent://public/default/ordres"):
        Coordinator(source, lambda: MemoryBroker(coordinated.cluster), admin).start()
    with pytest.raises(BrokerError):
        coordinated.cluster.backlog(TopicPartition("persistent://public/default/ordres"), "unit")


def test_a_broker_that_is_away_at_the_start_is_asked_again(coordinated: CoordinatedTopic) -> None:
    asks = ScriptedCall(BrokerUnavailableError("away"), BrokerUnavailableError("away"))
    broker = faulty(MemoryBroker(coordinated.cluster), partitions=asks)
    coordinator = Coordinator(coordinated.source, lambda: broker)
    coordinator.start()
    coordinator.stop()
    assert asks.raised == 2
