"""Keys whose messages fail, on the in-memory broker: they park in order, or their source ends."""

from __future__ import annotations

from datetime import timedelta

import pytest

from keyshard import Message, Reject
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.producer import MemoryProducer
from keyshard.core.dead_letter import DeadLetterKind
from keyshard.core.ring.key_slot import key_slot
from keyshard.dead_letters.subscription import DeadLetterSubscription
from keyshard.dead_letters.writer import DeadLetterWriter
from keyshard.errors import BrokerUnavailableError, HandlerFailedError, TopicNotFoundError
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.documented_dead_letter import SOMETIMES, documented, written
from tests.support.parking_topic import EXECUTORS, ParkingTopic, broken_for_b, handler, numbers


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_key_that_fails_parks_with_all_later_messages_and_the_others_continue(
    parking: ParkingTopic, executor: str
) -> None:
    parking.broken = {"b"}
    parking.publish(*"abc" * 10)
    with parking.run(handler(parking, executor)) as run:
        wait_until(lambda: parking.backlog() == 0)
        parking.publish(*"abc")
        wait_until(lambda: len(parking.dead_letters()) == 11 and parking.backlog() == 0)
        status = run.source.status()
        assert status["parked"] == [{"key": "b", "deadLetters": 11}]
        assert status["counters"]["parked"] == status["counters"]["deadLettered"] == 11
    assert parking.handled == {"a": list(range(11)), "c": list(range(11))}
    assert parking.tried["b"] == [0, 0], "only the first message of a parked key is tried"
    dead_letters = parking.dead_letters()
    assert numbers(dead_letters) == list(range(11))
    assert {dead_letter.kind for dead_letter in dead_letters} == {DeadLetterKind.PARKED}
    assert [dead_letter.attempts for dead_letter in dead_letters] == [2] + [0] * 10
    assert dead_letters[0].error == "ValueError: cannot handle b"
    assert str(dead_letters[0].message.message_id) in dead_letters[1].error
    assert parking.resting() == 11, "letters are kept by a subscription of their own"


def test_a_key_parks_whose_handler_runs_in_a_process(parking: ParkingTopic) -> None:
    parking.publish(*"ab" * 5)
    with parking.run(broken_for_b, executor="processes", workers=2):
        wait_until(lambda: parking.backlog() == 0)
    assert numbers(parking.dead_letters()) == list(range(5))
    assert {dead_letter.key for dead_letter in parking.dead_letters()} == {"b"}


@pytest.mark.parametrize("kind", DeadLetterKind)
def test_the_documentation_names_every_property(
    parking: ParkingTopic, kind: DeadLetterKind
) -> None:
    """The table is compared with dead letters that a source wrote."""

    def fail(_message: Message) -> None:
        raise Reject("no order") if kind is DeadLetterKind.REJECTED else ValueError("no")

    on_failure = "dead_letter" if kind is DeadLetterKind.DEAD_LETTER else "park"
    large = Stored(b"0" * 100_000, key="large", schema_version=3)
    parking.cluster.publish(parking.topic, large)
    parking.cluster.message_bytes_max = 70_000
    with parking.run(fail, on_failure=on_failure, metadata_columns=["__keyBytes"]):
        wait_until(lambda: len(parking.dead_letters()) == 1)
    parking.cluster.publish(parking.topic, Stored(b"1", key="small"))
    with parking.run(fail, on_failure=on_failure):
        wait_until(lambda: len(parking.dead_letters()) == 2)
    assert [one.kind for one in parking.dead_letters()] == [kind] * 2
    assert written(parking.stored()) == [documented(), documented() - SOMETIMES]


def test_a_dead_letter_is_the_message_with_its_failure_as_properties(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"o"}
    seen: list[Message] = []

    def handle(message: Message) -> None:
        seen.append(message)
        parking.handle(message)

    parking.publish("k", ordering_key="o")
    with parking.run(handle):
        wait_until(lambda: len(parking.dead_letters()) == 1)
        (stored,) = parking.stored()
        assert (stored.value, stored.key, stored.ordering_key) == (b"0", "k", "o")
        assert stored.properties["trace"] == "k-0"
        assert stored.properties["keyshard.kind"] == "parked"
        assert stored.properties["keyshard.messageId"] == str(seen[0].message_id)
        assert stored.properties["keyshard.topic"] == parking.topic
        assert stored.properties["keyshard.partition"] == str(seen[0].partition)
        assert stored.properties["keyshard.attempts"] == "2"
        parking.broken.clear()
        place_unparked = len(seen)
        wait_until(lambda: parking.backlog() == 0)
    with parking.run(handle) as run:
        assert run.source.unpark("o")
        wait_until(lambda: parking.handled["o"] == [0])
    again = seen[place_unparked]
    assert again._replace(redelivered=False) == seen[0]._replace(redelivered=False)
    assert abs(again.publish_time - seen[0].publish_time) < timedelta(milliseconds=1)


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize("value", [None, b""])
@pytest.mark.simulated
def test_null_and_empty_values_come_back_unchanged(
    parking: ParkingTopic, key: str, value: bytes | None
) -> None:
    broken, seen = [True], list[Message]()

    def handle(message: Message) -> None:
        seen.append(message)
        if broken:
            raise ValueError("not yet")

    for ordering_key in (None, ""):
        parking.cluster.publish(parking.topic, Stored(value, key, ordering_key))
    with parking.run(handle) as run:
        wait_until(lambda: len(parking.dead_letters()) == 2)
        broken.clear()
        seen.clear()
        for one in {key, ""}:
            run.source.unpark(one)
        wait_until(lambda: parking.resting() == 0)
    assert [one.value for one in seen] == [value, value]
    assert {(one.key, one.ordering_key) for one in seen} == {(key, None), (key, "")}
    assert {one.slot for one in seen} == {key_slot(key), key_slot("")}


@pytest.mark.parametrize("on_failure", ["park", "dead_letter", "stop"])
@pytest.mark.simulated
def test_a_rejected_message_becomes_a_dead_letter_and_its_key_continues(
    parking: ParkingTopic, on_failure: str
) -> None:
    parking.rejected = {b"1"}
    parking.publish(*"a" * 4)
    with parking.run(on_failure=on_failure) as run:
        wait_until(lambda: parking.backlog() == 0)
        assert not run.source.unpark("a")
    assert parking.handled["a"] == [0, 2, 3]
    assert parking.tried["a"] == [0, 1, 2, 3]
    (dead_letter,) = parking.dead_letters()
    assert (dead_letter.kind, dead_letter.attempts, dead_letter.error) == (
        DeadLetterKind.REJECTED,
        1,
        "not an order",
    )
    with parking.run():
        parking.publish("a")
        wait_until(lambda: parking.handled["a"] == [0, 2, 3, 4])
    assert parking.resting() == 1, "it stays until somebody takes it"


def test_a_failed_message_may_become_a_dead_letter_without_parking_its_key(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    with parking.run(on_failure="dead_letter"):
        wait_until(lambda: parking.backlog() == 0)
        parking.broken.clear()
        parking.publish("b")
        wait_until(lambda: parking.handled["b"] == [3])
    assert parking.tried["b"] == [0, 0, 1, 1, 2, 2, 3]
    assert [(dead_letter.kind, dead_letter.attempts) for dead_letter in parking.dead_letters()] == [
        (DeadLetterKind.DEAD_LETTER, 2)
    ] * 3


def test_the_stop_policy_ends_the_source_and_writes_nothing(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish("b")
    with parking.run(on_failure="stop") as run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, HandlerFailedError)
    assert parking.dead_letters() == []
    assert parking.backlog() == 1


def test_messages_without_key_are_rejected_when_that_is_asked_for(parking: ParkingTopic) -> None:
    parking.cluster.publish(parking.topic, Stored(b"0"), Stored(b"1"), Stored(b"2", key="a"))
    with parking.run(null_keys="reject"):
        wait_until(lambda: parking.backlog() == 0)
    assert parking.tried == {"a": [2]}
    assert sorted(numbers(parking.dead_letters())) == [0, 1]
    assert {dead_letter.kind for dead_letter in parking.dead_letters()} == {DeadLetterKind.REJECTED}


@pytest.mark.parametrize("null_keys", ["spread", "serialise"])
@pytest.mark.simulated
def test_a_message_without_key_cannot_park_others(parking: ParkingTopic, null_keys: str) -> None:
    parking.broken = {None}
    parking.cluster.publish(parking.topic, *(Stored(b"%d" % n) for n in range(3)))
    parking.publish(*"abcdef")  # Some succeed: if most keys failed, the circuit would open.
    with parking.run(null_keys=null_keys):
        wait_until(lambda: parking.backlog() == 0)
    assert sorted(numbers(parking.dead_letters())) == [0, 1, 2]
    assert {dead_letter.kind for dead_letter in parking.dead_letters()} == {
        DeadLetterKind.DEAD_LETTER
    }


@pytest.mark.simulated
def test_nothing_is_acknowledged_while_its_dead_letter_is_not_confirmed(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"b"}
    timeout_ms = int(deadline(1_000))
    with parking.run(operation_timeout_ms=timeout_ms, acknowledge_timeout_ms=timeout_ms) as run:
        parking.publish("b")
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
        for client in list(parking.cluster._clients):
            assert isinstance(client, MemoryBroker)
            for producer in client._producers:
                producer.drop()
        parking.publish("b")
        run.thread.join(deadline(20))
    assert isinstance(run.error, BrokerUnavailableError)
    assert parking.backlog() == 1
    assert len(parking.dead_letters()) == 1
    with parking.run():
        wait_until(lambda: parking.backlog() == 0)
    assert numbers(parking.dead_letters()) == [0, 1]


def test_a_message_whose_dead_letter_ends_the_source_runs_once(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop waits for the rest of the entry, but the message is not handled again meanwhile."""

    def refused(_: DeadLetterWriter) -> None:
        raise TopicNotFoundError("There is none.")

    monkeypatch.setattr(DeadLetterWriter, "_open_producer", refused)
    parking.rejected = {b"0"}
    run = parking.run(drain_timeout_s=deadline(5))
    with run:
        parking.publish(*(f"key-{number}" for number in range(20)))
        run.thread.join(deadline(20))
    assert isinstance(run.error, TopicNotFoundError)
    assert all(tried == [0] for tried in parking.tried.values())
    assert parking.backlog() == 20


@pytest.mark.parametrize("fails", [False, True])
def test_an_outage_at_the_end_is_no_error_and_hides_none(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    closed: list[str] = []

    def close(this: MemoryProducer | DeadLetterSubscription) -> None:
        closed.append(type(this).__name__)
        raise BrokerUnavailableError("The broker did not answer in time.")

    monkeypatch.setattr(MemoryProducer, "close", close)
    monkeypatch.setattr(DeadLetterSubscription, "close", close)
    parking.rejected, parking.broken = {b"0"}, {"a"}
    parking.publish("a")
    with parking.run(on_failure="stop") as run:
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
        if fails:
            parking.publish("a")
            wait_until(lambda: run.error is not None)
    assert type(run.error) is (HandlerFailedError if fails else type(None))
    assert closed[:2] == ["MemoryProducer", "DeadLetterSubscription"]
