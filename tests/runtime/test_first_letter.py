"""The dead-letter topic before its first letter: looking for it creates nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from helpers import COMMITTED, P0, config, wait_until
from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.core.dead_letter.letters import Letter, LetterKind
from keyshard.core.dead_letter.parking import State
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.dead_letter.dead_letters import DeadLetters
from keyshard.dead_letter.opening import open_dead_letters
from keyshard.errors import (
    AuthorizationError,
    BrokerUnavailableError,
    DataLossTrimmedError,
    NotRunningError,
    SubscriptionInUseError,
)
from parking_place import Place

WHERE = TopicPartition("persistent://public/default/letters")


class World:
    """A cluster without topics, and sources that park in one of it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.clients: list[MemoryBroker] = []

    def open(
        self, parked: Mapping[str, Any] | None = None, *, unreachable: int = 0, **changes: Any
    ) -> DeadLetters:
        self.clients.append(NoProducerAtFirst(self.cluster, unreachable))
        source = config("orders", **({"acknowledge_timeout_ms": 1_000} | changes))
        return open_dead_letters(self.clients[-1], WHERE.topic, source, parked, fail=print)

    def die(self) -> None:
        """SIGKILL the newest client."""
        self.clients.pop().kill()

    @property
    def topics(self) -> set[str]:
        return set(self.cluster.topics())


class NoProducerAtFirst(MemoryBroker):
    """One that makes no producer the first times."""

    def __init__(self, cluster: MemoryCluster, times: int) -> None:
        super().__init__(cluster)
        self._times = times

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Any:
        if self._times:
            self._times -= 1
            raise BrokerUnavailableError("No producer.")
        return super().producer(topic_partition, send_timeout_ms=send_timeout_ms)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.cluster.validate()
    for client in made.clients:
        client.close()


def letter(number: int, key: str = "k", by: str = "unit") -> Letter:
    message = Message(
        b"%d" % number, key, None, MessageId(7, number, 0), P0.topic, P0.partition,
        datetime(2024, 5, 1, tzinfo=timezone.utc), None, {}, None, redelivered=False,
    )  # fmt: skip
    return Letter(message, by, LetterKind.PARKED, 3, "broken")


@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_topic_without_a_letter_and_none_is_lost_from_the_first_on(
    tmp_path: Path, *, checkpointed: bool
) -> None:
    place = Place(f"first-letter-{checkpointed}")
    options = {"checkpoint": str(tmp_path / "checkpoint")} if checkpointed else {}
    for _ in range(2):
        place.publish("a", "b")
        with place.run(**options) as run:
            wait_until(lambda: place.backlog() == 0)
            assert run.source.discard(all=True, rejected=True) == 0
    assert place.dead_letters.topic not in place.cluster.topics()
    place.broken = {"a"}
    place.publish("a", "b")
    with place.run(**options):
        wait_until(lambda: place.resting() == 1)
    place.broken = set()
    place.publish("a", "b")
    with place.run(**options) as run:
        wait_until(lambda: place.resting() == 2)
        assert run.source.unpark("a")
        wait_until(lambda: place.handled["a"] == [0, 1, 2, 3])
    assert place.handled["b"] == [0, 1, 2, 3]


def test_looking_for_letters_of_several_topics_creates_none() -> None:
    cluster = MemoryCluster.named("first-letter-of-several")
    names = [cluster.create_topic(name) for name in ("one", "two")]
    stop = threading.Event()
    source = KeyShardSource(
        ["one", "two"], subscription="s", service_url="memory://first-letter-of-several"
    )
    thread = threading.Thread(target=lambda: source.run(lambda _: None))
    thread.start()
    try:
        wait_until(lambda: _state(source) == "running")
        assert set(cluster.topics()) == set(names)
    finally:
        source.stop()
        thread.join()
        stop.set()


def _state(source: KeyShardSource) -> str:
    try:
        return str(source.status()["state"])
    except NotRunningError:
        return "not running yet"


def test_who_writes_second_is_told_that_another_source_parks_there(world: World) -> None:
    first, second = world.open(), world.open()
    assert world.topics == set()
    first.send(letter(0))
    with pytest.raises(SubscriptionInUseError, match="another source parks there"):
        second.send(letter(1, "other"))
    first.send(letter(2))
    world.die()
    first.close()
    assert world.open().keys.parking.states() == {"k": State.PARKED}


def test_letters_that_came_since_the_start_are_not_written_over(world: World) -> None:
    late = world.open()
    world.open().send(letter(0))
    world.die()
    for _ in range(2):
        with pytest.raises(SubscriptionInUseError, match="since this source started"):
            late.send(letter(1))
    late.close()
    again = world.open()
    assert again.keys.parking.parked.keys["k"].count == 1


def test_letters_of_another_subscription_are_no_hindrance(world: World) -> None:
    ours, theirs = world.open(), world.open(subscription="theirs")
    theirs.send(letter(0, by="theirs"))
    ours.send(letter(1))
    assert world.cluster.backlog(WHERE, "unit-parked") == 1
    assert world.cluster.backlog(WHERE, "theirs-parked") == 2


def test_a_topic_that_was_created_for_a_letter_that_never_came_is_empty(world: World) -> None:
    letters = world.open(unreachable=1_000)
    with pytest.raises(BrokerUnavailableError):
        letters.send(letter(0))
    assert world.topics == {WHERE.topic}
    world.die()
    again = world.open(unreachable=2)
    assert again.keys.parking.states() == {}
    again.send(letter(0))
    assert world.cluster.backlog(WHERE, "unit-parked") == 1


def test_a_producer_that_may_not_come_back_ends_a_letter_by_name() -> None:
    """The client of one that waits to come back only says that time is up."""
    revoked = Revoked(MemoryCluster())
    source = config("orders", acknowledge_timeout_ms=3_000)
    letters = open_dead_letters(revoked, WHERE.topic, source, fail=print)
    letters.send(letter(0))
    revoked.refuses = True
    with pytest.raises(AuthorizationError, match="produce"):
        letters.send(letter(1))
    assert revoked.open_producers == 0
    letters.close()
    revoked.close()


class Revoked(MemoryBroker):
    """One whose producers send nothing, and that makes no other, once it refuses."""

    refuses = False
    open_producers = 0

    def producer(self, topic_partition: TopicPartition, *, send_timeout_ms: int) -> Any:
        if self.refuses:
            raise AuthorizationError("The role lacks produce.")
        self.open_producers += 1
        made = super().producer(topic_partition, send_timeout_ms=send_timeout_ms)
        send, close = made.send, made.close

        def refused(*values: Any, **options: Any) -> Any:
            if self.refuses:
                raise BrokerUnavailableError("Time is up.")
            return send(*values, **options)

        def closed() -> None:
            self.open_producers -= 1
            close()

        made.send, made.close = refused, closed  # type: ignore[method-assign]
        return made


def test_first_letters_at_the_same_time_are_all_kept(world: World) -> None:
    letters = world.open()
    threads = [threading.Thread(target=letters.send, args=(letter(n, f"k{n}"),)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.cluster.backlog(WHERE, "unit-parked") == 16
    world.die()
    assert len(world.open().keys.parking.states()) == 16


def test_a_resting_letter_is_missed_where_the_topic_is_gone(world: World) -> None:
    letters = world.open()
    letters.send(letter(0))
    saved = letters.checkpoint(COMMITTED)
    world.die()
    world.cluster.delete_topic(WHERE.topic)
    with pytest.raises(DataLossTrimmedError, match="no longer stored"):
        world.open(saved)
    accepted = world.open(saved, fail_on_data_loss=False)
    accepted.send(letter(1))
    assert accepted.keys.parking.states() == {"k": State.PARKED}


def test_a_topic_that_is_gone_with_nothing_in_it_is_begun_anew(world: World) -> None:
    letters = world.open()
    letters.send(letter(0))
    assert letters.discard(["k"]) == 1
    saved = letters.checkpoint(COMMITTED)
    world.die()
    world.cluster.delete_topic(WHERE.topic)
    again = world.open(saved)
    assert world.topics == set()
    again.send(letter(1))
    saved = again.checkpoint(COMMITTED)
    world.die()
    assert world.open(saved).keys.parking.states() == {"k": State.PARKED}
