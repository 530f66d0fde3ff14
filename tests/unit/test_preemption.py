"""The mode in which threads of a test stop at random calls."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from keyshard.core.ring.key_slot import key_slot
from tests.support import preemption


@pytest.fixture
def slept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the threads stopped. Only calls count, because the time between them varies."""
    if request.config.getoption("preempt") is not None:
        pytest.skip("threads of this test stop already")
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    monkeypatch.setattr(preemption, "BETWEEN_S", 1e9)
    return found


def test_a_thread_stops_at_its_start_or_at_some_calls(slept: list[float]) -> None:
    with preemption.preempted("seed"):
        threads = [
            threading.Thread(target=key_slot, args=("k",), name=f"thread {number}")
            for number in range(50)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert 5 < len(slept) < 50
    assert set(slept) <= set(preemption.STOPS_S)


def test_a_seed_stops_the_same_calls_again(slept: list[float]) -> None:
    found = []
    for seed in ("1", "1", "2"):
        with preemption.preempted(seed):
            for number in range(1_000):
                key_slot(str(number))
        found.append(slept.copy())
        slept.clear()
    assert found[0]
    assert found[0] == found[1] != found[2]


def test_nothing_stops_afterwards(slept: list[float]) -> None:
    before = sys.gettrace(), sys.getswitchinterval()
    with preemption.preempted("seed"):
        pass
    slept.clear()
    for number in range(1_000):
        key_slot(str(number))
    thread = threading.Thread(target=key_slot, args=("k",))
    thread.start()
    thread.join()
    assert not slept
    assert (sys.gettrace(), sys.getswitchinterval()) == before
