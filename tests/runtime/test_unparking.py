"""Parked keys that are unparked, on the in-memory broker: they are replayed in order."""

from __future__ import annotations

import threading
import time

import pytest

from keyshard import Message
from keyshard.core.dead_letter import DeadLetterKind, StoredDeadLetter
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import ConfigError
from keyshard.handlers.failed_messages import UNPARKED_AT_ONCE
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.parking_topic import (
    BOTH,
    EXECUTORS,
    ParkingTopic,
    Record,
    handler,
    numbers,
    park_keys,
)


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
