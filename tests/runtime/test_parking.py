"""Parked keys on the in-memory broker: in order into the dead-letter topic, and out of it again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from helpers import wait_until
from keyshard import Message
from keyshard.broker.memory import Message as Stored
from keyshard.core.dead_letter.letters import LetterKind, Resting
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.key_slot import key_slot
from keyshard.dead_letter.dead_letters import DeadLetters
from keyshard.errors import BrokerUnavailableError, ConfigError, HandlerFailedError
from keyshard.handlers.parked_lanes import LET_OUT_AT_ONCE
from parking_place import Place, Record, Run, broken_for_b, numbers


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


EXECUTORS = ["threads", "async"]


def handler(place: Place, executor: str) -> object:
    async def handle(message: Message) -> None:
        place.handle(message)

    return handle if executor == "async" else place.handle


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_key_that_fails_parks_with_all_later_messages_and_the_others_go_on(
    place: Place, executor: str
) -> None:
    place.broken = {"b"}
    place.publish(*"abc" * 10)
    with place.run(handler(place, executor)) as run:
        wait_until(lambda: place.backlog() == 0)
        place.publish(*"abc")
        wait_until(lambda: len(place.letters()) == 11 and place.backlog() == 0)
        status = run.source.status()
        assert status["parked"] == [{"key": "b", "letters": 11}]
        assert status["counters"]["parked"] == status["counters"]["deadLettered"] == 11
    assert place.handled == {"a": list(range(11)), "c": list(range(11))}
    assert place.tried["b"] == [0, 0], "only the first message of a parked key is tried"
    letters = place.letters()
    assert numbers(letters) == list(range(11))
    assert {letter.kind for letter in letters} == {LetterKind.PARKED}
    assert [letter.attempts for letter in letters] == [2] + [0] * 10
    assert letters[0].error == "ValueError: cannot handle b"
    assert str(letters[0].message.message_id) in letters[1].error
    assert place.resting() == 11, "letters are kept by a subscription of their own"


def test_a_key_parks_whose_handler_runs_in_a_process(place: Place) -> None:
    place.publish(*"ab" * 5)
    with place.run(broken_for_b, executor="processes", workers=2):
        wait_until(lambda: place.backlog() == 0)
    assert numbers(place.letters()) == list(range(5))
    assert {letter.key for letter in place.letters()} == {"b"}


def test_a_letter_is_the_message_with_what_happened_to_it_as_properties(place: Place) -> None:
    place.broken = {"o"}
    seen: list[Message] = []

    def handle(message: Message) -> None:
        seen.append(message)
        place.handle(message)

    place.publish("k", ordering_key="o")
    with place.run(handle):
        wait_until(lambda: len(place.letters()) == 1)
        (stored,) = place.stored()
        assert (stored.value, stored.key, stored.ordering_key) == (b"0", "k", "o")
        assert stored.properties["trace"] == "k-0"
        assert stored.properties["keyshard.kind"] == "parked"
        assert stored.properties["keyshard.messageId"] == str(seen[0].message_id)
        assert stored.properties["keyshard.topic"] == place.topic
        assert stored.properties["keyshard.partition"] == str(seen[0].partition)
        assert stored.properties["keyshard.attempts"] == "2"
        place.broken.clear()
        place_unparked = len(seen)
        wait_until(lambda: place.backlog() == 0)
    with place.run(handle) as run:
        assert run.source.unpark("o")
        wait_until(lambda: place.handled["o"] == [0])
    again = seen[place_unparked]
    assert again._replace(redelivered=False) == seen[0]._replace(redelivered=False)
    assert abs(again.publish_time - seen[0].publish_time) < timedelta(milliseconds=1)


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize("value", [None, b""])
def test_nothing_and_what_is_empty_come_back_as_they_were(
    place: Place, key: str, value: bytes | None
) -> None:
    broken, seen = [True], list[Message]()

    def handle(message: Message) -> None:
        seen.append(message)
        if broken:
            raise ValueError("not yet")

    for ordering_key in (None, ""):
        place.cluster.publish(place.topic, Stored(value, key, ordering_key))
    with place.run(handle) as run:
        wait_until(lambda: len(place.letters()) == 2)
        broken.clear()
        seen.clear()
        for one in {key, ""}:
            run.source.unpark(one)
        wait_until(lambda: place.resting() == 0)
    assert [one.value for one in seen] == [value, value]
    assert {(one.key, one.ordering_key) for one in seen} == {(key, None), (key, "")}
    assert {one.slot for one in seen} == {key_slot(key), key_slot("")}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_unpark_replays_in_order_and_then_newer_messages_pass(place: Place, executor: str) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 20)
    with place.run(handler(place, executor)) as run:
        wait_until(lambda: len(place.letters()) == 20)
        place.broken.clear()
        place.publish(*"ab" * 5)
        assert run.source.unpark("b")
        place.publish(*"ab" * 5)
        wait_until(lambda: len(place.handled["b"]) == 30)
        wait_until(lambda: place.backlog() == 0 and place.resting() == 0)
        assert not run.source.unpark("b"), "it is parked no more"
    assert place.handled == {"a": list(range(30)), "b": list(range(30))}


def test_newer_messages_wait_behind_a_slow_replay_whatever_comes(place: Place) -> None:
    place.broken = {"b"}
    gate = threading.Event()

    def handle(message: Message) -> None:
        if message.routing_key == "b" and message.value == b"3" and not place.broken:
            assert gate.wait(20)
        place.handle(message)

    place.publish(*"b" * 6)
    with place.run(handle) as run:
        wait_until(lambda: len(place.letters()) == 6)
        place.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: place.handled["b"] == [0, 1, 2])
        place.publish(*"ab" * 30)
        wait_until(lambda: len(place.handled["a"]) == 30)
        assert place.handled["b"] == [0, 1, 2]
        assert run.source.unpark("b"), "it is on its way out"
        gate.set()
        wait_until(lambda: len(place.handled["b"]) == 36)
        wait_until(lambda: place.backlog() == 0)
    assert place.handled["b"] == list(range(36))
    assert len(place.letters()) == 6, "what came during the replay is no letter"


def test_a_letter_that_fails_again_parks_its_key_with_the_rest(place: Place) -> None:
    place.broken = {"b"}
    stops_at = [2]

    def handle(message: Message) -> None:
        if not place.broken and int(message.value) == stops_at[0]:
            raise ValueError("still")
        place.handle(message)

    place.publish(*"b" * 5)
    with place.run(handle) as run:
        wait_until(lambda: len(place.letters()) == 5)
        place.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: place.handled["b"] == [0, 1])
        place.publish("b")
        wait_until(lambda: len(place.letters()) == 6 and place.backlog() == 0)
        assert place.handled["b"] == [0, 1]
        stops_at[0] = -1
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 6)
    assert place.handled["b"] == list(range(6))
    assert numbers(place.letters()) == list(range(6))


def test_a_restart_knows_the_parked_keys_before_it_handles_anything(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 5)
    with place.run():
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
    place.broken.clear()
    place.publish(*"ab" * 5)
    with place.run() as run:
        wait_until(lambda: len(place.handled["a"]) == 10 and place.backlog() == 0)
        assert "b" not in place.handled
        assert numbers(place.letters()) == list(range(10))
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 10 and place.resting() == 0)
    assert place.handled["b"] == list(range(10))


def test_a_restart_goes_on_with_a_replay_where_it_was(place: Place) -> None:
    place.broken = {"b"}
    entered, gate = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if not place.broken and message.value == b"2":
            entered.set()
            gate.wait(20)
        place.handle(message)

    place.publish(*"b" * 5)
    with place.run(handle, drain_timeout_s=0.1) as run:
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
        place.broken.clear()
        run.source.unpark("b")
        assert entered.wait(20)
        assert len(place.markers()) == 2
    gate.set()
    wait_until(lambda: place.handled["b"] == [0, 1, 2])
    with place.run() as run:
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 6)
    # The handler that was left behind got its message done, and nobody marked it.
    assert place.handled["b"] == [0, 1, 2, 2, 3, 4]


def test_messages_that_come_again_behind_their_letters_are_dropped(place: Place) -> None:
    place.publish("b")
    with place.run():
        wait_until(lambda: len(place.handled["b"]) == 1 and place.backlog() == 0)
        # The broker has just written its cursor; what is acknowledged now it will forget.
        place.broken = {"b"}
        place.publish(*"b" * 5)
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
    place.cluster.crash()
    assert place.backlog() == 5
    place.broken.clear()
    with place.run() as run:
        run.source.unpark("b")
        place.publish("b")
        wait_until(lambda: place.backlog() == 0 and len(place.handled["b"]) >= 7)
    assert place.handled["b"] == list(range(7)), "each once"
    # The newest may have become a letter, too: it came while the key was still on its way out.
    assert numbers(place.letters())[:5] == list(range(1, 6))
    assert len(place.letters()) <= 6


def test_what_was_handled_before_the_first_letter_does_not_run_behind_it(place: Place) -> None:
    place.publish("b")
    bad = {3, 5}

    def handle(message: Message) -> None:
        if int(message.value) in bad:
            raise ValueError("cannot handle it")
        place.handle(message)

    with place.run(handle):
        wait_until(lambda: place.handled["b"] == [0] and place.backlog() == 0)
        # The broker has just written its cursor; what is acknowledged now it will forget.
        place.publish(*"b" * 6)
        wait_until(lambda: len(place.letters()) == 4 and place.backlog() == 0)
    place.cluster.crash()
    assert place.backlog() == 6
    with place.run(handle) as run:
        wait_until(lambda: place.backlog() == 0)
        bad.clear()
        assert run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) >= 9)
        wait_until(lambda: place.resting() == 0)
    assert place.handled["b"] == [0, 1, 2, 1, 2, 3, 4, 5, 6]
    assert numbers(place.letters()) == [3, 4, 5, 6]


def test_a_message_that_fails_when_it_comes_again_is_replayed_before_newer_letters(
    place: Place,
) -> None:
    place.publish("b")
    bad = {3}

    def handle(message: Message) -> None:
        if int(message.value) in bad:
            raise ValueError("cannot handle it")
        place.handle(message)

    with place.run(handle):
        wait_until(lambda: place.handled["b"] == [0] and place.backlog() == 0)
        place.publish(*"b" * 5)
        wait_until(lambda: len(place.letters()) == 3 and place.backlog() == 0)
    place.cluster.crash()
    bad.add(2)
    with place.run(handle) as run:
        wait_until(lambda: len(place.letters()) == 4 and place.backlog() == 0)
        assert numbers(place.letters()) == [3, 4, 5, 2]
        bad.clear()
        assert run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) >= 8)
        wait_until(lambda: place.resting() == 0)
    assert place.handled["b"] == [0, 1, 2, 1, 2, 3, 4, 5]


def test_a_restart_that_lets_a_key_out_at_once_ends_with_its_newest_message(place: Place) -> None:
    place.publish("b")
    bad = {3}

    def handle(message: Message) -> None:
        if int(message.value) in bad:
            raise ValueError("cannot handle it")
        place.handle(message)

    with place.run(handle):
        wait_until(lambda: place.handled["b"] == [0] and place.backlog() == 0)
        place.publish(*"b" * 3)
        wait_until(lambda: len(place.letters()) == 1 and place.backlog() == 0)
    for _ in range(2):
        # Whether the letter runs before or after those that come again, it is the last.
        place.cluster.crash()
        bad.clear()
        with place.run(handle) as run:
            run.source.unpark("b")
            wait_until(lambda: place.backlog() == 0 and place.resting() == 0)
        assert place.handled["b"][-1] == 3
        assert list(dict.fromkeys(place.handled["b"])) == [0, 1, 2, 3]


def test_a_checkpoint_holds_the_parked_keys(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    place.broken = {"b"}
    place.publish(*"ab" * 5)
    with place.run(checkpoint=f"file://{path}"):
        wait_until(lambda: len(place.letters()) == 5 and place.backlog() == 0)
    assert json.loads(path.read_text())["parked"]["oldest"]
    place.broken.clear()
    with place.run(checkpoint=f"file://{path}") as run:
        place.publish(*"ab" * 5)
        wait_until(lambda: len(place.letters()) == 10)
        run.source.unpark("b")
        wait_until(lambda: len(place.handled["b"]) == 10)
    assert place.handled["b"] == list(range(10))
    with place.run(checkpoint=f"file://{path}"):
        place.publish("a")
        wait_until(lambda: len(place.handled["a"]) == 11 and place.backlog() == 0)
    assert json.loads(path.read_text())["parked"]["oldest"] is None


@pytest.mark.parametrize("on_failure", ["park", "dead_letter", "stop"])
def test_a_rejected_message_becomes_a_letter_and_its_key_goes_on(
    place: Place, on_failure: str
) -> None:
    place.rejected = {b"1"}
    place.publish(*"a" * 4)
    with place.run(on_failure=on_failure) as run:
        wait_until(lambda: place.backlog() == 0)
        assert not run.source.unpark("a")
    assert place.handled["a"] == [0, 2, 3]
    assert place.tried["a"] == [0, 1, 2, 3]
    (letter,) = place.letters()
    assert (letter.kind, letter.attempts, letter.error) == (LetterKind.REJECTED, 1, "not an order")
    with place.run():
        place.publish("a")
        wait_until(lambda: place.handled["a"] == [0, 2, 3, 4])
    assert place.resting() == 1, "it stays until somebody takes it"


def test_a_message_may_go_without_its_key(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 3)
    with place.run(on_failure="dead_letter"):
        wait_until(lambda: place.backlog() == 0)
        place.broken.clear()
        place.publish("b")
        wait_until(lambda: place.handled["b"] == [3])
    assert place.tried["b"] == [0, 0, 1, 1, 2, 2, 3]
    assert [(letter.kind, letter.attempts) for letter in place.letters()] == [
        (LetterKind.DEAD_LETTER, 2)
    ] * 3


def test_a_letter_that_is_rejected_at_its_replay_is_done(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"b" * 3)
    with place.run() as run:
        wait_until(lambda: len(place.letters()) == 3)
        place.broken.clear()
        place.rejected = {b"1"}
        run.source.unpark("b")
        wait_until(lambda: place.handled["b"] == [0, 2] and not run.source.unpark("b"))
    assert [letter.kind for letter in place.letters()] == [LetterKind.PARKED] * 3 + [
        LetterKind.REJECTED
    ]
    assert place.resting() == 1


def test_the_stop_policy_ends_the_source_and_writes_nothing(place: Place) -> None:
    place.broken = {"b"}
    place.publish("b")
    with place.run(on_failure="stop") as run:
        run.thread.join(20)
    assert isinstance(run.error, HandlerFailedError)
    assert place.letters() == []
    assert place.backlog() == 1


def test_messages_without_key_are_rejected_when_that_is_asked_for(place: Place) -> None:
    place.cluster.publish(place.topic, Stored(b"0"), Stored(b"1"), Stored(b"2", key="a"))
    with place.run(null_keys="reject"):
        wait_until(lambda: place.backlog() == 0)
    assert place.tried == {"a": [2]}
    assert sorted(numbers(place.letters())) == [0, 1]
    assert {letter.kind for letter in place.letters()} == {LetterKind.REJECTED}


@pytest.mark.parametrize("null_keys", ["spread", "serialise"])
def test_a_message_without_key_cannot_park_others(place: Place, null_keys: str) -> None:
    place.broken = {None}
    place.cluster.publish(place.topic, *(Stored(b"%d" % n) for n in range(3)))
    place.publish(*"abcdef")  # Some succeed: most keys failing would be weather.
    with place.run(null_keys=null_keys):
        wait_until(lambda: place.backlog() == 0)
    assert sorted(numbers(place.letters())) == [0, 1, 2]
    assert {letter.kind for letter in place.letters()} == {LetterKind.DEAD_LETTER}


def test_nothing_is_acknowledged_while_its_letter_is_not_confirmed(place: Place) -> None:
    place.broken = {"b"}
    with place.run(operation_timeout_ms=1_000, acknowledge_timeout_ms=1_000) as run:
        place.publish("b")
        wait_until(lambda: len(place.letters()) == 1 and place.backlog() == 0)
        for client in list(place.cluster._clients):
            for producer in client._producers:
                producer.drop()
        place.publish("b")
        run.thread.join(20)
    assert isinstance(run.error, BrokerUnavailableError)
    assert place.backlog() == 1
    assert len(place.letters()) == 1
    with place.run():
        wait_until(lambda: place.backlog() == 0)
    assert numbers(place.letters()) == [0, 1]


def test_many_keys_park_and_are_let_out_under_load(place: Place) -> None:
    keys = [f"key-{number}" for number in range(30)]
    bad = set(keys[:10])
    place.broken = set(bad)
    record = Record()
    with place.run(observers=[record]) as run:
        for _ in range(10):
            place.publish(*keys)
        wait_until(lambda: len({letter.key for letter in place.letters()}) == 10)
        place.broken.clear()
        for key in sorted(bad):
            run.source.unpark(key)
            place.publish(*keys)
        wait_until(lambda: place.backlog() == 0)
        for key in sorted(bad):
            run.source.unpark(key)
        wait_until(lambda: sum(map(len, place.handled.values())) == 30 * 20)
        wait_until(lambda: place.resting() == 0)
    assert place.handled == {key: list(range(20)) for key in keys}
    record.check(place)


def test_other_keys_do_not_wait_until_all_parked_keys_are_let_out(place: Place) -> None:
    """Issue: with 5,000 parked keys, other keys waited 6.5 s, and the handler was blamed."""
    keys = [f"key-{number}" for number in range(200)]
    place.broken = set(keys)
    began, gate, let_out = threading.Event(), threading.Event(), list[str | None]()

    def handle(message: Message) -> None:
        if message.routing_key != "good" and message.routing_key not in place.broken:
            began.set()
            gate.wait(30)
            let_out.append(message.routing_key)
        place.handle(message)

    with place.run(handle, parallelism=1, lanes=1) as run:
        place.publish(*keys)
        # Beside keys that work, those that fail are no outage.
        wait_until(lambda: place.publish("good") or run.source.status()["parkedKeys"] == 200)
        wait_until(lambda: place.backlog() == 0)
        place.broken.clear()
        assert run.source.unpark(all=True) == 200
        wait_until(began.is_set)
        handled = len(place.handled["good"])
        place.publish("good")
        running: Any = vars(run.source)["_running"]
        wait_until(lambda: running.lanes.queue("good"))
        gate.set()
        wait_until(lambda: len(place.handled["good"]) > handled)
        before = len(let_out)
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
    assert before <= 2 * LET_OUT_AT_ONCE
    assert len(let_out) == 200


def test_a_marker_that_is_not_confirmed_is_not_blamed_on_the_handler(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = threading.Event()
    done = DeadLetters.done

    def slow(letters: DeadLetters, key: str, resting: Resting) -> None:
        confirmed.wait(30)
        done(letters, key, resting)

    monkeypatch.setattr(DeadLetters, "done", slow)
    place.broken = {"b"}
    with place.run(parallelism=1) as run:
        place.publish("b")
        wait_until(lambda: run.source.status()["parkedKeys"] == 1)
        place.broken.clear()
        run.source.unpark("b")
        wait_until(lambda: run.source.status()["ranges"][0]["blockedBy"])
        reason = run.source.status()["ranges"][0]["blockedBy"]["reason"]
        confirmed.set()
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
    assert "dead letter has not been confirmed" in reason


def test_the_dead_letter_topic_must_not_be_consumed_itself(place: Place) -> None:
    with pytest.raises(ConfigError, match="which this source consumes"):
        place.run(dead_letter_topic="orders").source.run(
            place.handle, dead_letter_topic=place.topic
        )


def test_a_partitioned_dead_letter_topic_is_refused(place: Place) -> None:
    place.cluster.create_topic("letters", partitions=2)
    run = place.run(dead_letter_topic="letters")
    with run:
        run.thread.join(20)
    assert isinstance(run.error, ConfigError)
    assert "partitioned" in str(run.error)


def test_a_pattern_does_not_match_the_dead_letters_of_its_own_source(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": place.url}
    letters = TopicPartition("persistent://public/default/keyshard-DLQ")
    for number in range(2):
        with place.run(discovery_interval_ms=20, **pattern):
            wait_until(lambda: place.backlog() == 0)
            later = place.cluster.create_topic(f"later-{number}")
            place.cluster.publish(later, Stored(b"0", key=f"later-{number}"))
            wait_until(lambda number=number: place.handled[f"later-{number}"] == [0])
    assert len(place.cluster.log(letters)) == 3
    assert list(place.cluster.subscriptions(letters)) == ["keyshard-parked"]
    with pytest.raises(ConfigError, match="which this source consumes"):
        place.run(**pattern).source.run(place.handle, dead_letter_topic="other-dead")


def test_ranges_move_while_keys_park_and_come_out(place: Place) -> None:
    keys = [f"key-{number}" for number in range(12)]
    place.broken = set(keys[:6])
    record = Record()

    def handle(message: Message) -> None:
        time.sleep(0.001)
        place.handle(message)

    with place.run(handle, observers=[record]) as run:
        for _ in range(10):
            place.publish(*keys)
        wait_until(lambda: len({letter.key for letter in place.letters()}) == 6)
        run.source.rescale(5)
        place.broken = set(keys[3:6])
        for key in keys[:3]:
            assert run.source.unpark(key)
        for ranges in (2, 6, 3):
            place.publish(*keys)
            run.source.rescale(ranges)
        place.broken.clear()
        wait_until(lambda: place.backlog() == 0)
        for key in keys:
            run.source.unpark(key)
        wait_until(lambda: sum(map(len, place.handled.values())) == 12 * 13)
        wait_until(lambda: place.resting() == 0)
    assert place.handled == {key: list(range(13)) for key in keys}
    record.check(place)


def test_two_pattern_sources_do_not_feed_each_other(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 3)
    first = {"topics_pattern": "persistent://public/default/.*", "admin_url": place.url}
    second = first | {"subscription": "audit"}
    options = {"discovery_interval_ms": 20, "on_failure": "dead_letter"}
    with place.run(**first, **options), place.run(**second, **options):
        wait_until(lambda: place.backlog() == 0 and place.backlog("audit") == 0)
        later = place.cluster.create_topic("later")
        place.cluster.publish(later, Stored(b"0", key="later"))
        wait_until(lambda: place.handled["later"] == [0, 0])
    for subscription in ("keyshard", "audit"):
        letters = TopicPartition(f"persistent://public/default/{subscription}-DLQ")
        assert len(place.cluster.log(letters)) == 3
        assert list(place.cluster.subscriptions(letters)) == [f"{subscription}-parked"]


def test_a_pattern_leaves_out_where_another_source_parks_whatever_its_name(place: Place) -> None:
    place.broken = {"b"}
    place.publish(*"ab" * 3)
    pattern = {"topics_pattern": "persistent://public/default/.*", "admin_url": place.url}
    with place.run(dead_letter_topic="dead"):
        wait_until(lambda: place.backlog() == 0)
        with place.run(**pattern, subscription="audit", discovery_interval_ms=20):
            wait_until(lambda: place.backlog("audit") == 0)
    dead = TopicPartition("persistent://public/default/dead")
    assert list(place.cluster.subscriptions(dead)) == ["keyshard-parked"]


@pytest.mark.parametrize("admin", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_topic_added_in_front_forgets_no_parked_key(
    place: Place, tmp_path: Path, *, admin: bool, checkpoint: bool
) -> None:
    options: dict[str, object] = {"admin_url": place.url} if admin else {}
    if checkpoint:
        options["checkpoint"] = f"file://{tmp_path / 'checkpoint.json'}"
    place.broken = {"b"}
    place.publish(*"b" * 2)
    with place.run(**options):
        wait_until(lambda: len(place.letters()) == 2 and place.backlog() == 0)
    front = place.cluster.create_topic("front")
    place.broken.clear()
    place.publish("b")
    with place.run(topics=[front, place.topic], **options) as run:
        wait_until(lambda: len(place.letters()) == 3)
        assert place.handled["b"] == []
        run.source.unpark("b")
        wait_until(lambda: place.handled["b"] == [0, 1, 2])


def test_letters_in_two_topics_are_not_forgotten(place: Place) -> None:
    other = place.cluster.create_topic("other")
    place.broken = {"b"}
    place.publish("b")
    place.cluster.publish(other, Stored(b"0", key="b"))
    for topic in (place.topic, other):
        dead = TopicPartition(f"{topic}-keyshard-DLQ")
        with place.run(topics=topic):
            wait_until(lambda dead=dead: place.resting(dead) == 1)
    with place.run(topics=[other, place.topic]) as run:
        run.thread.join(20)
    assert isinstance(run.error, ConfigError)
    assert "orders-keyshard-DLQ" in str(run.error)
    assert "other-keyshard-DLQ" in str(run.error)


def test_another_dead_letter_topic_is_refused_while_letters_rest(
    place: Place, tmp_path: Path
) -> None:
    options = {"checkpoint": f"file://{tmp_path / 'checkpoint.json'}"}
    place.broken = {"b"}
    place.publish("b")
    with place.run(**options):
        wait_until(lambda: len(place.letters()) == 1 and place.backlog() == 0)
    with place.run(dead_letter_topic="elsewhere", **options) as run:
        run.thread.join(20)
    assert isinstance(run.error, ConfigError)
    assert "letters of parked keys rest in" in str(run.error)


def park_keys(place: Place, run: Run) -> None:
    """One of a topic, one of another; three would look like an outage."""
    place.broken = {"a", "c"}
    place.publish(*"aa")
    place.cluster.publish(OTHER, Stored(b"0", key="c"))
    wait_until(lambda: run.source.status()["parkedKeys"] == 2 and len(place.letters()) == 3)
    place.broken.clear()


OTHER = "persistent://public/default/other"
BOTH = ("persistent://public/default/orders", OTHER)


def test_keys_are_let_out_by_topic_by_age_and_all_together(place: Place) -> None:
    place.cluster.create_topic("other")
    with place.run(topics=BOTH) as run:
        park_keys(place, run)
        assert run.source.unpark(older_than_s=3_600) == 0
        assert run.source.unpark(topic="other") == 1
        wait_until(lambda: place.handled == {"c": [0]})
        assert run.source.unpark(older_than_s=0, topic="orders") == 1
        wait_until(lambda: place.handled == {"a": [0, 1], "c": [0]})
        wait_until(lambda: place.resting() == 0)
        assert run.source.unpark(all=True) == 0
        with pytest.raises(ConfigError, match="Name one key"):
            run.source.unpark()
        with pytest.raises(ConfigError, match="Name one key"):
            run.source.discard("a", all=True)


def test_letters_of_parked_keys_are_given_up(place: Place) -> None:
    place.cluster.create_topic("other")
    with place.run(topics=BOTH) as run:
        park_keys(place, run)
        assert run.source.discard("a") == 2
        assert run.source.discard("a") == 0
        place.publish("a")
        wait_until(lambda: place.handled["a"] == [2])
        assert run.source.discard(all=True) == 1
        assert run.source.status()["parkedKeys"] == 0
        wait_until(lambda: place.resting() == 0)
    with place.run(topics=BOTH) as run:
        place.publish("c")
        wait_until(lambda: place.handled["c"] == [0])
        assert run.source.unpark(all=True) == 0


def test_rejected_letters_are_given_up(place: Place) -> None:
    place.rejected = {b"1", b"2"}
    place.publish(*"aaab")
    with place.run() as run:
        wait_until(lambda: place.backlog() == 0)
        assert run.source.discard("b", rejected=True) == 0
        assert place.resting() == 2
        assert run.source.discard(topic="orders", rejected=True) == 2
        assert place.resting() == 0
        place.publish(*"aaa")
        place.rejected = {b"4"}
        wait_until(lambda: place.backlog() == 0 and place.resting() == 1)
        assert run.source.discard(rejected=True), "alone it means every rejected one"
        assert place.resting() == 0
        with pytest.raises(ConfigError, match="Name one key"):
            run.source.discard("a", all=True, rejected=True)


def test_letters_of_a_key_that_goes_on_parking_are_given_up_up_to_now(place: Place) -> None:
    place.broken = {"b"}
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.001):
            place.publish("b")

    producer = threading.Thread(target=publish)
    with place.run() as run:
        producer.start()
        try:
            given_up = 0
            while given_up < 200:
                given_up += run.source.discard("b")
        finally:
            stop.set()
            producer.join()
        wait_until(lambda: place.backlog() == 0)
        given_up += run.source.discard("b")
        assert given_up == len({letter.message.message_id for letter in place.letters()})
        place.broken.clear()
        place.publish("b")
        wait_until(lambda: place.handled["b"] == [place.published["b"] - 1])
