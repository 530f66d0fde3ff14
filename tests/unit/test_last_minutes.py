"""The last minutes of commits and rescales."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from keyshard.coordinator import recorded_rescale
from keyshard.coordinator.recorded_rescale import Outcome, RecordedRescale
from keyshard.core import rescale_history
from keyshard.core.recent_history import (
    INTERVAL_S,
    INTERVALS_MAX,
    History,
    rescales_of,
)
from keyshard.core.rescale_history import ERROR_MAX, RESCALES_MAX, Rescale, RescaleEnd


def test_commits_are_summed_by_interval() -> None:
    history = History()
    history.committed(101.0, 5)
    history.committed(109.9, 0)
    history.committed(109.9, 7)
    history.saved(109.9, 4_000)
    history.committed(125.0, 1)
    assert history.status(126.0)["commits"] == [
        {"secondsAgo": 26.0, "commits": 2, "entries": 12, "checkpointBytes": 4_000},
        {"secondsAgo": 6.0, "commits": 1, "entries": 1, "checkpointBytes": None},
    ]


def test_old_intervals_and_rescales_are_forgotten() -> None:
    history = History()
    for number in range(3 * INTERVALS_MAX):
        now_s = number * INTERVAL_S
        history.committed(now_s, 1)
        running = history.rescales.begins(rescale(now_s))
        history.rescales.ends(
            running, now_s, RescaleEnd.KEPT, epoch=number, error="x" * 2 * ERROR_MAX
        )
    status = history.status(now_s)
    assert len(status["commits"]) == INTERVALS_MAX
    assert [each["epoch"] for each in status["rescales"]] == list(
        range(3 * INTERVALS_MAX - RESCALES_MAX, 3 * INTERVALS_MAX)
    )
    assert status["rescales"][-1]["error"] == "x" * ERROR_MAX
    assert status["rescaleSummary"]["kept"] == 3 * INTERVALS_MAX, "all count"
    later = history.status(now_s + 10 * INTERVAL_S)
    assert len(later["commits"]) == INTERVALS_MAX - 10, "a source that commits nothing"
    assert history.status(now_s + INTERVALS_MAX * INTERVAL_S)["commits"] == []


def test_the_rescales_of_a_history_are_all_of_it_but_commits() -> None:
    status = History().status(0.0)
    assert rescales_of(status) == {
        name: value for name, value in status.items() if name != "commits"
    }


def rescale(began_s: float) -> Rescale:
    return Rescale({"ranges": 8}, 4, 8, began_s, drain_timeout_s=60.0)


def test_a_rescale_is_shown_by_phase_while_it_runs_and_after_its_end() -> None:
    rescales = History().rescales
    assert rescales.running(0.0) is None
    running = rescales.begins(rescale(100.0))
    began = rescales.running(100.5)
    assert began is not None
    assert (began["forSeconds"], began["phases"], began["waitsFor"]) == (0.5, [], None)
    running.phase_begins(100.5, "check")
    running.phase_begins(101.0, "drain")
    running.drain_waits({"key": "a", "messageId": "1:2:0", "runningSeconds": 7.0})
    assert rescales.running(104.0) == {
        "asked": {"ranges": 8}, "before": 4, "after": 8, "forSeconds": 4.0,
        "phases": [{"phase": "check", "millis": 500.0}, {"phase": "drain", "millis": 3_000.0}],
        "drainTimeoutSeconds": 60.0,
        "waitsFor": {"key": "a", "messageId": "1:2:0", "runningSeconds": 7.0},
    }  # fmt: skip
    running.phase_begins(105.0, "close")
    closing = rescales.running(105.0)
    assert closing is not None
    assert closing["waitsFor"] is None, "only a drain waits for a message"
    rescales.ends(running, 105.25, RescaleEnd.MOVED, epoch=1, moved_fraction=0.5, pause_ms=4_250.0)
    assert rescales.running(106.0) is None
    assert rescales.last(115.25) == [{
        "secondsAgo": 10.0, "asked": {"ranges": 8}, "epoch": 1, "before": 4, "after": 8,
        "movedFraction": 0.5, "durationMillis": 5_250.0,
        "phases": [
            {"phase": "check", "millis": 500.0}, {"phase": "drain", "millis": 4_000.0},
            {"phase": "close", "millis": 250.0},
        ],
        "pauseMillis": 4_250.0, "end": "moved", "error": "",
    }]  # fmt: skip


def test_a_rescale_of_actors_runs_beside_one_of_ranges() -> None:
    """One of them ended the other one in the history."""
    rescales = History().rescales
    ranges = rescales.begins(rescale(100.0))
    actors = rescales.begins(Rescale({"actors": 3}, 2, 3, 101.0, drain_timeout_s=30.0))
    actors.phase_begins(101.0, "start")
    shown = rescales.running(102.0)
    assert shown is not None
    assert (shown["asked"], shown["forSeconds"]) == ({"actors": 3}, 1.0)
    rescales.ends(ranges, 103.0, RescaleEnd.MOVED, epoch=1, pause_ms=1.0)
    assert rescales.running(104.0) is not None
    rescales.ends(actors, 105.0, RescaleEnd.KEPT, epoch=1, error="no node")
    assert rescales.running(105.0) is None
    assert [(one["asked"], one["end"], one["phases"]) for one in rescales.last(105.0)] == [
        ({"ranges": 8}, "moved", []),
        ({"actors": 3}, "kept", [{"phase": "start", "millis": 4_000.0}]),
    ]


def test_the_summary_of_rescales_counts_their_ends_and_measures_those_that_moved() -> None:
    rescales = History().rescales
    assert rescales.summary() == {
        "moved": 0, "unchanged": 0, "kept": 0, "lost": 0, "meanMillis": None, "maxMillis": None,
        "maxPauseMillis": None, "drainTimeoutSeconds": None,
    }  # fmt: skip
    for seconds, end, pause_ms in (
        (0.1, RescaleEnd.MOVED, 80.0),
        (0.3, RescaleEnd.MOVED, 60.0),
        (60.0, RescaleEnd.KEPT, None),
        (0.0, RescaleEnd.UNCHANGED, 0.0),
    ):
        running = rescales.begins(rescale(100.0))
        rescales.ends(running, 100.0 + seconds, end, epoch=1, pause_ms=pause_ms)
    assert rescales.summary() == {
        "moved": 2, "unchanged": 1, "kept": 1, "lost": 0, "meanMillis": 200.0, "maxMillis": 300.0,
        "maxPauseMillis": 80.0, "drainTimeoutSeconds": None,
    }  # fmt: skip


def interrupted(line: int, run: Callable[[], None]) -> bool:
    """Run a function, and interrupt it before a line of the modules that record a rescale.

    Args:
        line: Number of such lines that run before.
        run: The function.

    Returns:
        Whether it had so many lines.
    """
    files, left = {recorded_rescale.__file__, rescale_history.__file__}, line

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "call" and frame.f_code.co_name == "__exit__":
            left += 1  # No block is left in order if its exit does not reach its first line.
        elif event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_at_any_line_leaves_no_rescale_that_runs(*, fails: bool) -> None:
    """Issue: an interrupt between two lines left a rescale that ran for ever in the status."""

    def outcome(_: BaseException | None) -> Outcome:
        return Outcome(RescaleEnd.KEPT, epoch=1)

    def run() -> None:
        with suppress(ValueError), RecordedRescale(shared, rescale(100.0), outcome) as recorded:
            recorded.phase("check")
            if fails:
                raise ValueError("no")

    for line in count():
        shared: Any = SimpleNamespace(lock=threading.Condition(), history=History())
        had_line = interrupted(line, run)
        assert shared.history.rescales.running(101.0) is None, line
        if not had_line:
            break
    assert line > 20
    assert [one["end"] for one in shared.history.rescales.last(101.0)] == ["kept"]
