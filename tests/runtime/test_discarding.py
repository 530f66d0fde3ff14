"""Dead letters that a program discards."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from keyshard.core.dead_letter import DeadLetter
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.dead_letters.writer import DeadLetterWriter
from keyshard.errors import ConfigError
from tests.helpers import wait_until
from tests.support.deadlines import DeadlineError, deadline
from tests.support.parking_topic import BOTH, ParkingTopic, park_keys


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
