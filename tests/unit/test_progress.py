"""The progress of a source: its pace and delays."""

from __future__ import annotations

import pytest

from keyshard.consumers import intake
from keyshard.consumers.intake import Anomalies
from keyshard.consumers.receiver import OwnedRange
from keyshard.coordinator import progress
from keyshard.coordinator.progress import PaceMonitor
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.admission import Budget
from keyshard.core.window.window import Window
from keyshard.errors import MisroutedError
from tests.helpers import P0, block

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
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(intake, "time", clock)
    return clock


def test_a_window_that_was_full_names_a_sufficient_interval(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = PaceMonitor()
    clock.now_s += 4
    clock.now_s += 56
    seen.cut(full_since_s=clock.now_s - 56)
    assert seen.keeps_up_ms == 4_000
    assert "Set the trigger interval to 4.0 s" in caplog.text
    clock.now_s += 2
    seen.cut(full_since_s=None)
    assert seen.keeps_up_ms is None


def test_a_window_that_is_full_for_a_moment_is_not_worth_a_word(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = PaceMonitor()
    clock.now_s += 4
    clock.now_s += 0.5
    seen.cut(full_since_s=clock.now_s - 0.5)
    assert seen.keeps_up_ms is None
    assert not caplog.text


def test_a_warning_is_not_repeated_within_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen = Anomalies(fail_on_misrouted=False)
    seen.misrouted(SEAT, 3)
    seen.misrouted(SEAT, 4)
    assert len(caplog.records) == 1
    clock.now_s += 61
    seen.misrouted(SEAT, 5)
    assert len(caplog.records) == 2


def test_misrouting_ends_the_source_if_configured() -> None:
    with pytest.raises(MisroutedError, match="3 messages"):
        Anomalies(fail_on_misrouted=True).misrouted(SEAT, 3)


def test_the_age_of_the_oldest_row_is_looked_up_once_a_second(clock: Clock) -> None:
    seen = PaceMonitor()
    window = Window(Checkpoint("c", "s", 4), 4, Budget(100, 10**6))
    window.add_partition(P0)
    assert seen.oldest_ms(window) == {}
    window.receive(P0, 0, [block(1, 0)])
    assert seen.oldest_ms(window) == {}, "not looked up again yet"
    clock.now_s += 2
    assert seen.oldest_ms(window) == {P0: int(clock.now_s * 1_000) - 1_000}
