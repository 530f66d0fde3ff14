"""Parked keys on the in-memory broker: in order into the dead-letter topic, and out of it again."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from keyshard import Message
from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as Stored
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, StoredDeadLetter
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.key_slot import key_slot
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.dead_letters.writer import DeadLetterWriter
from keyshard.errors import (
    BrokerUnavailableError,
    ConfigError,
    HandlerFailedError,
    TopicNotFoundError,
)
from keyshard.handlers.failed_messages import UNPARKED_AT_ONCE
from tests.helpers import present, wait_until
from tests.support.deadlines import DeadlineError, deadline
from tests.support.parking_topic import ParkingRun, ParkingTopic, Record, broken_for_b, numbers

EXECUTORS = ["threads", "async"]


def handler(parking: ParkingTopic, executor: str) -> object:
    async def handle(message: Message) -> None:
        parking.handle(message)

    return handle if executor == "async" else parking.handle


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


@pytest.mark.parametrize("executor", EXECUTORS)
def test_unpark_replays_in_order_and_then_newer_messages_pass(
    parking: ParkingTopic, executor: str
) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 20)
    with parking.run(handler(parking, executor)) as run:
        wait_until(lambda: len(parking.dead_letters()) == 20)
        parking.broken.clear()
        parking.publish(*"ab" * 5)
        assert run.source.unpark("b")
        parking.publish(*"ab" * 5)
        wait_until(lambda: len(parking.handled["b"]) == 30)
        wait_until(lambda: parking.backlog() == 0 and parking.resting() == 0)
        assert not run.source.unpark("b"), "it is parked no more"
    assert parking.handled == {"a": list(range(30)), "b": list(range(30))}


def test_newer_messages_wait_behind_a_slow_replay(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    gate = threading.Event()

    def handle(message: Message) -> None:
        if message.routing_key == "b" and message.value == b"3" and not parking.broken:
            assert gate.wait(deadline(20))
        parking.handle(message)

    parking.publish(*"b" * 6)
    with parking.run(handle) as run:
        wait_until(lambda: len(parking.dead_letters()) == 6)
        parking.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 1, 2])
        parking.publish(*"ab" * 30)
        wait_until(lambda: len(parking.handled["a"]) == 30)
        assert parking.handled["b"] == [0, 1, 2]
        assert run.source.unpark("b"), "it is on its way out"
        gate.set()
        wait_until(lambda: len(parking.handled["b"]) == 36)
        wait_until(lambda: parking.backlog() == 0)
    assert parking.handled["b"] == list(range(36))
    assert len(parking.dead_letters()) == 6, "what came during the replay is no letter"


def test_a_dead_letter_that_fails_again_parks_its_key_with_the_rest(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    stops_at = [2]

    def handle(message: Message) -> None:
        if not parking.broken and int(present(message.value)) == stops_at[0]:
            raise ValueError("still")
        parking.handle(message)

    parking.publish(*"b" * 5)
    with parking.run(handle) as run:
        wait_until(lambda: len(parking.dead_letters()) == 5)
        parking.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 1])
        parking.publish("b")
        wait_until(lambda: len(parking.dead_letters()) == 6 and parking.backlog() == 0)
        assert parking.handled["b"] == [0, 1]
        stops_at[0] = -1
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 6)
    assert parking.handled["b"] == list(range(6))
    assert numbers(parking.dead_letters()) == list(range(6))


def test_a_restart_knows_the_parked_keys_before_it_handles_anything(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 5)
    with parking.run():
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
    parking.broken.clear()
    parking.publish(*"ab" * 5)
    with parking.run() as run:
        wait_until(lambda: len(parking.handled["a"]) == 10 and parking.backlog() == 0)
        assert "b" not in parking.handled
        assert numbers(parking.dead_letters()) == list(range(10))
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 10 and parking.resting() == 0)
    assert parking.handled["b"] == list(range(10))


def test_a_restart_continues_with_a_replay_where_it_was(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    entered, gate = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if not parking.broken and message.value == b"2":
            entered.set()
            gate.wait(deadline(20))
        parking.handle(message)

    parking.publish(*"b" * 5)
    with parking.run(handle, drain_timeout_s=0.1) as run:
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
        parking.broken.clear()
        run.source.unpark("b")
        assert entered.wait(deadline(20))
        assert len(parking.markers()) == 2
    gate.set()
    wait_until(lambda: parking.handled["b"] == [0, 1, 2])
    with parking.run() as run:
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 6)
    # The abandoned handler completed its message, without a marker.
    assert parking.handled["b"] == [0, 1, 2, 2, 3, 4]


def test_messages_that_come_again_behind_their_dead_letters_are_dropped(
    parking: ParkingTopic,
) -> None:
    parking.publish("b")
    with parking.run():
        wait_until(lambda: len(parking.handled["b"]) == 1 and parking.backlog() == 0)
        # The broker has just written its cursor; it will forget acknowledgements from now on.
        parking.broken = {"b"}
        parking.publish(*"b" * 5)
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
    parking.cluster.crash()
    assert parking.backlog() == 5
    parking.broken.clear()
    with parking.run() as run:
        run.source.unpark("b")
        parking.publish("b")
        wait_until(lambda: parking.backlog() == 0 and len(parking.handled["b"]) >= 7)
    assert parking.handled["b"] == list(range(7)), "each once"
    # The newest may have become a dead letter, too: it came while the key was still on its way out.
    assert numbers(parking.dead_letters())[:5] == list(range(1, 6))
    assert len(parking.dead_letters()) <= 6


def test_messages_handled_before_the_first_dead_letter_do_not_run_behind_it(
    parking: ParkingTopic,
) -> None:
    parking.publish("b")
    parking.failing = {3, 5}
    with parking.run():
        wait_until(lambda: parking.handled["b"] == [0] and parking.backlog() == 0)
        # The broker has just written its cursor; it will forget acknowledgements from now on.
        parking.publish(*"b" * 6)
        wait_until(lambda: len(parking.dead_letters()) == 4 and parking.backlog() == 0)
    parking.cluster.crash()
    assert parking.backlog() == 6
    with parking.run() as run:
        wait_until(lambda: parking.backlog() == 0)
        parking.failing.clear()
        assert run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) >= 9)
        wait_until(lambda: parking.resting() == 0)
    assert parking.handled["b"] == [0, 1, 2, 1, 2, 3, 4, 5, 6]
    assert numbers(parking.dead_letters()) == [3, 4, 5, 6]


def test_a_redelivered_message_that_fails_is_replayed_before_newer_dead_letters(
    parking: ParkingTopic,
) -> None:
    parking.publish("b")
    parking.failing = {3}
    with parking.run():
        wait_until(lambda: parking.handled["b"] == [0] and parking.backlog() == 0)
        parking.publish(*"b" * 5)
        wait_until(lambda: len(parking.dead_letters()) == 3 and parking.backlog() == 0)
    parking.cluster.crash()
    parking.failing.add(2)
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 4 and parking.backlog() == 0)
        assert numbers(parking.dead_letters()) == [3, 4, 5, 2]
        parking.failing.clear()
        assert run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) >= 8)
        wait_until(lambda: parking.resting() == 0)
    assert parking.handled["b"] == [0, 1, 2, 1, 2, 3, 4, 5]


def test_a_restart_that_unparks_a_key_at_once_ends_with_its_newest_message(
    parking: ParkingTopic,
) -> None:
    parking.publish("b")
    parking.failing = {3}
    with parking.run():
        wait_until(lambda: parking.handled["b"] == [0] and parking.backlog() == 0)
        parking.publish(*"b" * 3)
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
    for _ in range(2):
        # Whether the dead letter runs before or after those that come again, it is the last.
        parking.cluster.crash()
        parking.failing.clear()
        with parking.run() as run:
            run.source.unpark("b")
            wait_until(lambda: parking.backlog() == 0 and parking.resting() == 0)
        assert parking.handled["b"][-1] == 3
        assert list(dict.fromkeys(parking.handled["b"])) == [0, 1, 2, 3]


def test_a_checkpoint_holds_the_parked_keys(parking: ParkingTopic, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    parking.broken = {"b"}
    parking.publish(*"ab" * 5)
    with parking.run(checkpoint=f"file://{path}"):
        wait_until(lambda: len(parking.dead_letters()) == 5 and parking.backlog() == 0)
    assert json.loads(path.read_text())["parked"]["oldest"]
    parking.broken.clear()
    with parking.run(checkpoint=f"file://{path}") as run:
        parking.publish(*"ab" * 5)
        wait_until(lambda: len(parking.dead_letters()) == 10)
        run.source.unpark("b")
        wait_until(lambda: len(parking.handled["b"]) == 10)
    assert parking.handled["b"] == list(range(10))
    with parking.run(checkpoint=f"file://{path}"):
        parking.publish("a")
        wait_until(lambda: len(parking.handled["a"]) == 11 and parking.backlog() == 0)
    assert json.loads(path.read_text())["parked"]["oldest"] is None


@pytest.mark.parametrize("on_failure", ["park", "dead_letter", "stop"])
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


def test_a_dead_letter_that_is_rejected_at_its_replay_is_done(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"b" * 3)
    with parking.run() as run:
        wait_until(lambda: len(parking.dead_letters()) == 3)
        parking.broken.clear()
        parking.rejected = {b"1"}
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 2] and not run.source.unpark("b"))
    assert [dead_letter.kind for dead_letter in parking.dead_letters()] == [
        DeadLetterKind.PARKED
    ] * 3 + [DeadLetterKind.REJECTED]
    assert parking.resting() == 1


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


def test_many_keys_park_and_are_unparked_under_load(parking: ParkingTopic) -> None:
    keys = [f"key-{number}" for number in range(30)]
    bad = set(keys[:10])
    parking.broken = set(bad)
    record = Record()
    with parking.run(observers=[record]) as run:
        for _ in range(10):
            parking.publish(*keys)
        wait_until(lambda: len({dead_letter.key for dead_letter in parking.dead_letters()}) == 10)
        parking.broken.clear()
        for key in sorted(bad):
            run.source.unpark(key)
            parking.publish(*keys)
        wait_until(lambda: parking.backlog() == 0)
        for key in sorted(bad):
            run.source.unpark(key)
        wait_until(lambda: sum(map(len, parking.handled.values())) == 30 * 20)
        wait_until(lambda: parking.resting() == 0)
    assert parking.handled == {key: list(range(20)) for key in keys}
    record.check(parking)


def test_other_keys_do_not_wait_until_all_parked_keys_are_unparked(parking: ParkingTopic) -> None:
    """Issue: with 5,000 parked keys, other keys waited 6.5 s, and the handler was blamed."""
    keys = [f"key-{number}" for number in range(200)]
    parking.broken = set(keys)
    began, gate, let_out = threading.Event(), threading.Event(), list[str | None]()
    before: list[int] = []

    def handle(message: Message) -> None:
        if message.routing_key == "good":
            before.append(len(let_out))
        elif message.routing_key not in parking.broken:
            began.set()
            gate.wait(deadline(30))
            let_out.append(message.routing_key)
        parking.handle(message)

    with parking.run(handle, parallelism=1, lanes=1) as run:
        parking.publish(*keys)
        # While other keys succeed, failing keys are no outage.

        def all_parked() -> bool:
            parking.publish("good")
            return run.source.status()["parkedKeys"] == 200

        wait_until(all_parked)
        wait_until(lambda: parking.backlog() == 0)
        parking.broken.clear()
        assert run.source.unpark(all=True) == 200
        wait_until(began.is_set)
        parking.publish("good")
        wait_until(lambda: present(run.source.status()["window"])["windowRows"] == 1)
        gate.set()
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
        wait_until(lambda: parking.backlog() == 0)
    assert before[-1] <= 2 * UNPARKED_AT_ONCE
    assert len(let_out) == 200


def test_a_marker_that_is_not_confirmed_is_not_blamed_on_the_handler(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = threading.Event()
    done = DeadLetterStore.done

    def slow(dead_letters: DeadLetterStore, key: str, resting: StoredDeadLetter) -> None:
        confirmed.wait(deadline(30))
        done(dead_letters, key, resting)

    monkeypatch.setattr(DeadLetterStore, "done", slow)
    parking.broken = {"b"}
    with parking.run(parallelism=1) as run:
        parking.publish("b")
        wait_until(lambda: run.source.status()["parkedKeys"] == 1)
        parking.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: run.source.status()["ranges"][0]["blockedBy"])
        reason = present(run.source.status()["ranges"][0]["blockedBy"])["reason"]
        confirmed.set()
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
    assert "has not confirmed its dead letter" in reason


def test_the_dead_letter_topic_must_not_be_consumed_itself(parking: ParkingTopic) -> None:
    with pytest.raises(ConfigError, match="which this source consumes"):
        parking.run(dead_letter_topic="orders").source.run(
            parking.handle, dead_letter_topic=parking.topic
        )


def test_a_partitioned_dead_letter_topic_is_refused(parking: ParkingTopic) -> None:
    parking.cluster.create_topic("letters", partitions=2)
    run = parking.run(dead_letter_topic="letters")
    with run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "partitioned" in str(run.error)


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


def test_a_pattern_does_not_match_the_dead_letters_of_its_own_source(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    dead_letters = TopicPartition("persistent://public/default/keyshard-DLQ")
    for number in range(2):
        with parking.run(discovery_interval_ms=20, **pattern):
            wait_until(lambda: parking.backlog() == 0)
            later = parking.cluster.create_topic(f"later-{number}")
            parking.cluster.publish(later, Stored(b"0", key=f"later-{number}"))

            def handled(key: str = f"later-{number}") -> bool:
                return parking.handled[key] == [0]

            wait_until(handled)
    assert len(parking.cluster.log(dead_letters)) == 3
    assert list(parking.cluster.subscriptions(dead_letters)) == ["keyshard-parked"]
    with pytest.raises(ConfigError, match="which this source consumes"):
        parking.run(**pattern).source.run(parking.handle, dead_letter_topic="other-dead")


def test_ranges_move_while_keys_park_and_are_unparked(parking: ParkingTopic) -> None:
    keys = [f"key-{number}" for number in range(12)]
    parking.broken = set(keys[:6])
    record = Record()

    def handle(message: Message) -> None:
        time.sleep(0.001)
        parking.handle(message)

    with parking.run(handle, observers=[record]) as run:
        for _ in range(10):
            parking.publish(*keys)
        wait_until(lambda: len({dead_letter.key for dead_letter in parking.dead_letters()}) == 6)
        run.source.rescale(5)
        parking.broken = set(keys[3:6])
        for key in keys[:3]:
            assert run.source.unpark(key)
        for ranges in (2, 6, 3):
            parking.publish(*keys)
            run.source.rescale(ranges)
        parking.broken.clear()
        wait_until(lambda: parking.backlog() == 0)
        for key in keys:
            run.source.unpark(key)
        wait_until(lambda: sum(map(len, parking.handled.values())) == 12 * 13)
        wait_until(lambda: parking.resting() == 0)
    assert parking.handled == {key: list(range(13)) for key in keys}
    record.check(parking)


def test_two_pattern_sources_do_not_feed_each_other(parking: ParkingTopic) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    first = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    second = first | {"subscription": "audit"}
    options = {"discovery_interval_ms": 20, "on_failure": "dead_letter"}
    with parking.run(**first, **options), parking.run(**second, **options):
        wait_until(lambda: parking.backlog() == 0 and parking.backlog("audit") == 0)
        later = parking.cluster.create_topic("later")
        parking.cluster.publish(later, Stored(b"0", key="later"))
        wait_until(lambda: parking.handled["later"] == [0, 0])
    for subscription in ("keyshard", "audit"):
        dead_letters = TopicPartition(f"persistent://public/default/{subscription}-DLQ")
        assert len(parking.cluster.log(dead_letters)) == 3
        assert list(parking.cluster.subscriptions(dead_letters)) == [f"{subscription}-parked"]


def test_a_pattern_leaves_out_the_dead_letter_topic_of_another_source(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"b"}
    parking.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": parking.url}
    with parking.run(dead_letter_topic="dead"):
        wait_until(lambda: parking.backlog() == 0)
        with parking.run(**pattern, subscription="audit", discovery_interval_ms=20):
            wait_until(lambda: parking.backlog("audit") == 0)
    dead = TopicPartition("persistent://public/default/dead")
    assert list(parking.cluster.subscriptions(dead)) == ["keyshard-parked"]


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_topic_added_in_front_forgets_no_parked_key(
    parking: ParkingTopic, tmp_path: Path, *, admin: bool, checkpoint: bool
) -> None:
    options: dict[str, object] = {"admin_url": parking.url} if admin else {}
    if checkpoint:
        options["checkpoint"] = f"file://{tmp_path / 'checkpoint.json'}"
    parking.broken = {"b"}
    parking.publish(*"b" * 2)
    with parking.run(**options):
        wait_until(lambda: len(parking.dead_letters()) == 2 and parking.backlog() == 0)
    front = parking.cluster.create_topic("front")
    parking.broken.clear()
    parking.publish("b")
    with parking.run(topics=[front, parking.topic], **options) as run:
        wait_until(lambda: len(parking.dead_letters()) == 3)
        assert parking.handled["b"] == []
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 1, 2])


def test_dead_letters_in_two_topics_are_not_forgotten(parking: ParkingTopic) -> None:
    other = parking.cluster.create_topic("other")
    parking.broken = {"b"}
    parking.publish("b")
    parking.cluster.publish(other, Stored(b"0", key="b"))
    for topic in (parking.topic, other):
        dead = TopicPartition(f"{topic}-keyshard-DLQ")
        with parking.run(topics=topic):

            def rests(dead: TopicPartition = dead) -> bool:
                return parking.resting(dead) == 1

            wait_until(rests)
    with parking.run(topics=[other, parking.topic]) as run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "orders-keyshard-DLQ" in str(run.error)
    assert "other-keyshard-DLQ" in str(run.error)


def test_another_dead_letter_topic_is_refused_while_dead_letters_rest(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    options = {"checkpoint": f"file://{tmp_path / 'checkpoint.json'}"}
    parking.broken = {"b"}
    parking.publish("b")
    with parking.run(**options):
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
    with parking.run(dead_letter_topic="elsewhere", **options) as run:
        run.thread.join(deadline(20))
    assert isinstance(run.error, ConfigError)
    assert "letters of parked keys" in str(run.error)


def park_keys(parking: ParkingTopic, run: ParkingRun) -> None:
    """One of a topic, one of another; three would look like an outage."""
    parking.broken = {"a", "c"}
    parking.publish(*"aa")
    parking.cluster.publish(OTHER, Stored(b"0", key="c"))
    wait_until(lambda: run.source.status()["parkedKeys"] == 2 and len(parking.dead_letters()) == 3)
    parking.broken.clear()


OTHER = "persistent://public/default/other"
BOTH = ("persistent://public/default/orders", OTHER)


def test_keys_are_unparked_by_topic_by_age_and_all_together(parking: ParkingTopic) -> None:
    parking.cluster.create_topic("other")
    with parking.run(topics=BOTH) as run:
        park_keys(parking, run)
        assert run.source.unpark(older_than_s=3_600) == 0
        assert run.source.unpark(topic="other") == 1
        wait_until(lambda: parking.handled == {"c": [0]})
        assert run.source.unpark(older_than_s=0, topic="orders") == 1
        wait_until(lambda: parking.handled == {"a": [0, 1], "c": [0]})
        wait_until(lambda: parking.resting() == 0)
        assert run.source.unpark(all=True) == 0
        with pytest.raises(ConfigError, match="select"):
            run.source.unpark()
        with pytest.raises(ConfigError, match="select"):
            run.source.discard("a", all=True)


def test_dead_letters_of_parked_keys_are_discarded(parking: ParkingTopic) -> None:
    parking.cluster.create_topic("other")
    with parking.run(topics=BOTH) as run:
        park_keys(parking, run)
        assert run.source.discard("a") == 2
        assert run.source.discard("a") == 0
        parking.publish("a")
        wait_until(lambda: parking.handled["a"] == [2])
        assert run.source.discard(all=True) == 1
        assert run.source.status()["parkedKeys"] == 0
        wait_until(lambda: parking.resting() == 0)
    with parking.run(topics=BOTH) as run:
        parking.publish("c")
        wait_until(lambda: parking.handled["c"] == [0])
        assert run.source.unpark(all=True) == 0


def test_a_key_is_unparked_if_its_last_dead_letter_is_discarded_at_its_confirmation(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = DeadLetterStore.send
    discarded: list[int] = []

    def send_and_discard(store: DeadLetterStore, dead_letter: DeadLetter) -> None:
        send(store, dead_letter)
        discarded.append(run.source.discard("b"))

    monkeypatch.setattr(DeadLetterStore, "send", send_and_discard)
    parking.broken = {"b"}
    with parking.run() as run:
        parking.publish("b")
        wait_until(lambda: discarded == [1] and run.source.status()["parkedKeys"] == 0)
        parking.broken.clear()
        parking.publish("b")
        wait_until(lambda: parking.handled["b"] == [1])


def test_a_key_is_unparked_after_its_dead_letters_are_discarded_not_meanwhile(
    parking: ParkingTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = DeadLetterWriter.marker
    unparking = threading.Thread(target=lambda: run.source.unpark("b"))

    def unpark_meanwhile(writer: DeadLetterWriter, key: str | None, says: dict[str, str]) -> Any:
        if not unparking.ident:
            unparking.start()
            with suppress(DeadlineError):  # a replay would begin now
                wait_until(lambda: len(parking.tried["b"]) > 2, 0.5)
        return marker(writer, key, says)

    parking.broken = {"b"}
    with parking.run() as run:
        parking.publish(*"bb")
        wait_until(lambda: len(parking.dead_letters()) == 2 and parking.backlog() == 0)
        parking.broken.clear()
        monkeypatch.setattr(DeadLetterWriter, "marker", unpark_meanwhile)
        assert run.source.discard("b") == 2
        unparking.join(deadline(20))
        parking.publish("b")
        wait_until(lambda: parking.handled["b"] == [2])
        assert run.source.status()["parkedKeys"] == 0


def test_rejected_dead_letters_are_discarded(parking: ParkingTopic) -> None:
    parking.rejected = {b"1", b"2"}
    parking.publish(*"aaab")
    with parking.run() as run:
        wait_until(lambda: parking.backlog() == 0)
        assert run.source.discard("b", rejected=True) == 0
        assert parking.resting() == 2
        assert run.source.discard(topic="orders", rejected=True) == 2
        assert parking.resting() == 0
        parking.publish(*"aaa")
        parking.rejected = {b"4"}
        wait_until(lambda: parking.backlog() == 0 and parking.resting() == 1)
        assert run.source.discard(rejected=True), "alone it means every rejected one"
        assert parking.resting() == 0
        with pytest.raises(ConfigError, match="select"):
            run.source.discard("a", all=True, rejected=True)


def test_dead_letters_of_a_key_that_still_parks_are_discarded_up_to_now(
    parking: ParkingTopic,
) -> None:
    parking.broken = {"b"}
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.001):
            if parking.backlog() < 50:
                parking.publish("b")

    producer = threading.Thread(target=publish)
    with parking.run() as run:
        producer.start()
        try:
            given_up = 0
            while given_up < 200:
                given_up += run.source.discard("b")
        finally:
            stop.set()
            producer.join()
        wait_until(lambda: parking.backlog() == 0)
        given_up += run.source.discard("b")
        assert given_up == len(
            {dead_letter.message.message_id for dead_letter in parking.dead_letters()}
        )
        parking.broken.clear()
        parking.publish("b")
        wait_until(lambda: parking.handled["b"] == [parking.published["b"] - 1])
