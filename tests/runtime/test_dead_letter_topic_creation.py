"""The dead-letter topic before its first dead letter: looking for it creates nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.core.position.entry import TopicPartition
from keyshard.dead_letters.parking import ParkingState
from keyshard.dead_letters.startup import open_dead_letters
from keyshard.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    ConfigError,
    DataLossTrimmedError,
    NotRunningError,
    SubscriptionInUseError,
    SubscriptionNotFoundError,
    TopicNotFoundError,
)
from tests.helpers import COMMITTED, config, wait_until
from tests.support.dead_letter_topic import DeadLetterTopic, dead_letter, discard
from tests.support.faulty_broker import Fault, ScriptedCall, faulty, giving
from tests.support.memory_topic import MemoryTopic, Run
from tests.support.parking_topic import ParkingTopic

pytestmark = pytest.mark.simulated(seeds=1)

WHERE = TopicPartition("persistent://public/default/letters")
NO_PRODUCER = BrokerUnavailableError("No producer.")


@pytest.fixture
def dlq() -> Iterator[DeadLetterTopic]:
    """A cluster without topics."""
    made = DeadLetterTopic(exists=False)
    yield made
    made.close()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_first_dead_letter_creates_the_topic_and_none_is_lost(
    parking: ParkingTopic, tmp_path: Path, *, checkpointed: bool
) -> None:
    options = {"checkpoint": str(tmp_path / "checkpoint")} if checkpointed else {}
    for _ in range(2):
        parking.publish("a", "b")
        with parking.run(**options) as run:
            wait_until(lambda: parking.backlog() == 0)
            assert run.source.discard(all=True, rejected=True) == 0
    assert parking.dead_letter_partition.topic not in parking.cluster.topics()
    parking.broken = {"a"}
    parking.publish("a", "b")
    with parking.run(**options):
        wait_until(lambda: parking.resting() == 1)
    parking.broken = set()
    parking.publish("a", "b")
    with parking.run(**options) as run:
        wait_until(lambda: parking.resting() == 2)
        assert run.source.unpark("a")
        wait_until(lambda: parking.handled["a"] == [0, 1, 2, 3])
    assert parking.handled["b"] == [0, 1, 2, 3]


def test_looking_for_dead_letters_of_several_topics_creates_none() -> None:
    topic = MemoryTopic()
    names = {topic.topic, topic.cluster.create_topic("two")}
    source = topic.source(topics=names)
    with Run(source, lambda _: None, {}) as run:
        wait_until(lambda: _state(source) == "running")
        assert set(topic.cluster.topics()) == names
    assert run.error is None


def _state(source: KeyShardSource) -> str:
    try:
        return str(source.status()["state"])
    except NotRunningError:
        return "not running yet"


def test_the_second_writer_learns_that_another_source_parks_there(dlq: DeadLetterTopic) -> None:
    first, second = dlq.open(), dlq.open()
    assert set(dlq.cluster.topics()) == set()
    first.send(dead_letter(0))
    with pytest.raises(SubscriptionInUseError, match="parks keys there"):
        second.send(dead_letter(1, "other"))
    first.send(dead_letter(2))
    dlq.die()
    first.close()
    assert dlq.open().keys.parking.states() == {"k": ParkingState.PARKED}


def test_dead_letters_that_came_since_the_start_are_not_written_over(dlq: DeadLetterTopic) -> None:
    late = dlq.open()
    dlq.open().send(dead_letter(0))
    dlq.die()
    for _ in range(2):
        with pytest.raises(SubscriptionInUseError, match="since this source started"):
            late.send(dead_letter(1))
    late.close()
    again = dlq.open()
    assert again.keys.parking.parked.keys["k"].count == 1


def test_dead_letters_of_another_subscription_are_no_hindrance(dlq: DeadLetterTopic) -> None:
    ours, theirs = dlq.open(), dlq.open(subscription="theirs")
    theirs.send(dead_letter(0, by="theirs"))
    ours.send(dead_letter(1))
    assert dlq.cluster.backlog(WHERE, "unit-parked") == 1
    assert dlq.cluster.backlog(WHERE, "theirs-parked") == 2


def test_a_topic_that_was_created_for_a_dead_letter_that_never_came_is_empty(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dlq.producers.raises = NO_PRODUCER
    with pytest.raises(BrokerUnavailableError):
        dead_letters.send(dead_letter(0))
    assert set(dlq.cluster.topics()) == {WHERE.topic}
    dlq.die()
    dlq.producers.raises = None
    dlq.producers.errors.extend([NO_PRODUCER] * 2)
    again = dlq.open()
    assert again.keys.parking.states() == {}
    again.send(dead_letter(0))
    assert dlq.cluster.backlog(WHERE, "unit-parked") == 1


def test_a_dead_letter_of_a_producer_without_permission_raises_the_refusal() -> None:
    """A producer that waits for its reconnection only reports a timeout."""
    producers, sends, closes = ScriptedCall(), ScriptedCall(), ScriptedCall()
    revoked = faulty(MemoryBroker(MemoryCluster()), producer=giving(send=sends, close=closes))
    faulty(revoked, producer=producers)
    source = config("orders", acknowledge_timeout_ms=3_000)
    dead_letters = open_dead_letters(revoked, WHERE.topic, source, fail=print)
    dead_letters.send(dead_letter(0))
    producers.raises = AuthorizationError("The role lacks produce.")
    sends.raises = BrokerUnavailableError("Time is up.")
    with pytest.raises(AuthorizationError, match="produce"):
        dead_letters.send(dead_letter(1))
    assert producers.raised
    assert len(closes.asked) == len(producers.asked) - producers.raised, "none is left open"
    dead_letters.close()
    revoked.close()


def test_first_dead_letters_at_the_same_time_are_all_kept(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    threads = [
        threading.Thread(target=dead_letters.send, args=(dead_letter(n, f"k{n}"),))
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dlq.cluster.backlog(WHERE, "unit-parked") == 16
    dlq.die()
    assert len(dlq.open().keys.parking.states()) == 16


def test_a_resting_dead_letter_is_reported_lost_if_its_topic_was_deleted(
    dlq: DeadLetterTopic,
) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    saved = dead_letters.checkpoint(COMMITTED)
    dlq.die()
    dlq.cluster.delete_topic(WHERE.topic)
    with pytest.raises(DataLossTrimmedError, match="no longer stored"):
        dlq.open(saved)
    accepted = dlq.open(saved, fail_on_data_loss=False)
    accepted.send(dead_letter(1))
    assert accepted.keys.parking.states() == {"k": ParkingState.PARKED}


def test_a_topic_that_is_gone_with_nothing_in_it_is_begun_again(dlq: DeadLetterTopic) -> None:
    dead_letters = dlq.open()
    dead_letters.send(dead_letter(0))
    assert discard(dead_letters, "k") == 1
    saved = dead_letters.checkpoint(COMMITTED)
    dlq.die()
    dlq.cluster.delete_topic(WHERE.topic)
    again = dlq.open(saved)
    assert set(dlq.cluster.topics()) == set()
    again.send(dead_letter(1))
    saved = again.checkpoint(COMMITTED)
    dlq.die()
    assert dlq.open(saved).keys.parking.states() == {"k": ParkingState.PARKED}


@pytest.mark.parametrize("needed", [True, False])
def test_a_topic_that_is_not_created_by_itself_is_named_at_the_start_if_needed(
    *, needed: bool
) -> None:
    def partitions(call: Fault, topic: str, *, create: bool = False) -> Any:
        """A broker without auto-creation of topics."""
        if create and broker.missing([topic]):
            raise TopicNotFoundError("There is none.")
        return call(topic)

    broker, source = faulty(MemoryBroker(MemoryCluster()), partitions=partitions), config("orders")
    if needed:
        with pytest.raises(TopicNotFoundError, match=f"pulsar-admin topics create {WHERE}"):
            open_dead_letters(broker, WHERE.topic, source, fail=print)
    else:
        open_dead_letters(broker, WHERE.topic, source, needed=False, fail=print).close()
    broker.close()


def test_a_subscription_that_is_not_created_by_itself_is_named_at_the_start(
    dlq: DeadLetterTopic,
) -> None:
    broker = MemoryBroker(dlq.cluster)
    admin = faulty(MemoryAdmin(dlq.cluster), creates_subscriptions=lambda *_: False)
    with pytest.raises(SubscriptionNotFoundError, match="--subscription unit-parked"):
        open_dead_letters(broker, WHERE.topic, config("orders"), admin=admin, fail=print)
    assert set(dlq.cluster.topics()) == set()
    broker.close()


def test_a_partitioned_topic_is_named_with_the_command_that_deletes_it(
    dlq: DeadLetterTopic,
) -> None:
    dlq.cluster.create_topic(WHERE.topic, 2)
    command = f"pulsar-admin topics delete-partitioned-topic {WHERE}"
    with pytest.raises(ConfigError, match=f"(?s)is partitioned.*{command}"):
        dlq.open()
