"""A test under the scheduler of the simulation: its seed decides the order, and waits are free."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.helpers import wait_until
from tests.support.deadlines import DeadlineError
from tests.support.simulated import LaterFixture, run_simulated

HOUR_S = 3_600.0
THREAD = threading.Thread


def takes_turns(turns: list[int]) -> None:
    """Two threads that note their turns."""

    def run(number: int) -> None:
        for _ in range(20):
            turns.append(number)
            threading.Event().wait(0.001)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(turns) == 40)


def test_a_seed_decides_the_order_of_threads() -> None:
    courses = []
    for seed in (1, 1, 2):
        turns: list[int] = []
        run_simulated(takes_turns, {"turns": turns}, seed)
        courses.append(turns)
    assert courses[0] == courses[1] != courses[2]


def waits_in_vain() -> None:
    began_s = time.monotonic()
    assert not threading.Event().wait(HOUR_S)
    assert time.monotonic() == began_s + HOUR_S
    wait_until(lambda: False, 1.0)


def test_a_simulated_wait_takes_no_time_and_has_its_deadline() -> None:
    began_s = time.monotonic()
    with pytest.raises(DeadlineError):
        run_simulated(waits_in_vain, {}, 0)
    assert time.monotonic() - began_s < HOUR_S, "the time is real again"
    assert threading.Thread is THREAD


def test_a_fixture_is_made_once_and_ended_in_the_simulation() -> None:
    steps: list[str] = []

    def lock() -> Iterator[threading.Event]:
        steps.append("made")
        yield threading.Event()
        assert not threading.Event().wait(HOUR_S), "its end waits in the simulation, too"
        steps.append("ended")

    event = LaterFixture(lock, {})
    same = LaterFixture(lambda event: event, {"event": event})

    def test(event: threading.Event, same: threading.Event) -> None:
        assert event is same
        assert not event.wait(HOUR_S)
        steps.append("tested")

    run_simulated(test, {"same": same, "event": event}, 0)
    assert steps == ["made", "tested", "ended"]
