"""Parked keys and their dead letters after a restart of the source or a crash of the broker."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from keyshard import Message
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.parking_topic import ParkingTopic, numbers

pytestmark = pytest.mark.simulated(seeds=1)


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
