"""Dead letters over the control socket, on the in-memory broker."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from control_folder import own_control_folder
from helpers import wait_until
from keyshard.broker.memory import Message as Stored
from keyshard.observe.control import RunningSource, running_source
from parking_place import Place

OTHER = "persistent://public/default/other"
BOTH = ("persistent://public/default/orders", OTHER)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with own_control_folder():
        made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
        yield made
        made.cluster.validate()


def control() -> RunningSource:
    return running_source(pid=os.getpid())


def test_dead_letters_are_counted_before_they_are_given_up(place: Place) -> None:
    place.rejected = {b"1"}  # of d; the others park before
    place.cluster.create_topic("other")
    with place.run(topics=BOTH):
        place.broken = {"a", "c"}
        place.publish(*"aadd")
        place.cluster.publish(OTHER, Stored(b"0", key="c"))
        wait_until(lambda: len(place.letters()) == 4)
        source = control()
        for _ in range(2):
            assert source.ask("count_letters", all=True) == {"letters": 3}
            assert source.ask("count_letters", topic="other") == {"letters": 1}
            assert source.ask("count_letters", rejected=True) == {"letters": 1}
        assert source.ask("discard", all=True) == {"letters": 3}
        assert source.ask("discard", rejected=True) == {"letters": 1}
        wait_until(lambda: place.resting() == 0)


def test_an_explanation_says_why_a_key_is_parked(place: Place) -> None:
    place.broken = {"a"}
    place.publish(*"aab")
    with place.run() as run:
        wait_until(lambda: len(place.letters()) == 2)
        source = control()
        told = source.ask("explain", key="a")
        by = told["parkedBy"]
        assert told["parked"]
        assert by["letters"] == 2
        assert 0 <= by["forSeconds"] < 60
        assert by["unknown"] == ""
        first = place.letters()[0]
        assert by["message"] == {
            "topic": first.message.topic, "partition": first.message.partition,
            "messageId": str(first.message.message_id), "attempts": 2, "error": first.error,
            "value": "0", "valueBytes": 1,
        }  # fmt: skip
        assert source.ask("explain", key="b")["parkedBy"] is None
        assert place.resting() == 2, "a look takes nothing away"
        place.broken.clear()
        run.source.unpark("a")
        wait_until(lambda: place.handled.get("a") == [0, 1])
