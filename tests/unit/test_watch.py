"""What a source says of its pace."""

from __future__ import annotations

import pytest

from helpers import P0, block
from keyshard.coordinator import watch
from keyshard.coordinator.watch import Watch
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.budget import Budget
from keyshard.core.window.window import Window
from keyshard.errors import MisroutedError
from keyshard.worker import oddities
from keyshard.worker.oddities import Oddities
from keyshard.worker.receiver import OwnedRange

SEAT = OwnedRange(P0, 0, split_ring(4)[0])


class Clock:
    """Monotonic and wall time that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(oddities, "time", clock)
    return clock


def test_a_window_that_stood_full_says_which_interval_would_keep_up(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Watch()
    clock.now_s += 4
    clock.now_s += 56
    seen.cut(full_since_s=clock.now_s - 56)
    assert seen.keeps_up_ms == 4_000
    assert "a trigger interval of 4.0 s would keep up" in caplog.text
    clock.now_s += 2
    seen.cut(full_since_s=None)
    assert seen.keeps_up_ms is None


def test_a_window_that_is_full_for_a_moment_is_not_worth_a_word(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Watch()
    clock.now_s += 4
    clock.now_s += 0.5
    seen.cut(full_since_s=clock.now_s - 0.5)
    assert seen.keeps_up_ms is None
    assert not caplog.text


def test_a_warning_is_not_repeated_within_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Oddities(fail_on_misrouted=False)
    seen.misrouted(SEAT, 3)
    seen.misrouted(SEAT, 4)
    assert len(caplog.records) == 1
    clock.now_s += 61
    seen.misrouted(SEAT, 5)
    assert len(caplog.records) == 2


def test_misrouting_ends_the_source_when_it_should() -> None:
    with pytest.raises(MisroutedError, match="3 messages"):
        Oddities(fail_on_misrouted=True).misrouted(SEAT, 3)


def test_the_age_of_the_oldest_row_is_looked_up_once_a_second(clock: Clock) -> None:
    seen = Watch()
    window = Window(Checkpoint("c", "s", 4), 4, Budget(100, 10**6))
    window.add_partition(P0)
    assert seen.oldest_ms(window) is None
    window.receive(P0, 0, block(1, 0))
    assert seen.oldest_ms(window) is None, "not looked up again yet"
    clock.now_s += 2
    assert seen.oldest_ms(window) == int(clock.now_s * 1_000) - 1_000
