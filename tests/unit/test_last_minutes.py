"""The last minutes of commits and rescales."""

from __future__ import annotations

from keyshard.core.recent_history import (
    ERROR_MAX,
    INTERVAL_S,
    INTERVALS_MAX,
    RESCALES_MAX,
    History,
    Rescale,
)


def test_commits_are_summed_by_interval() -> None:
    history = History()
    history.committed(101.0, 5)
    history.committed(109.9, 0)
    history.committed(109.9, 7)
    history.saved(109.9, 4_000)
    history.committed(125.0, 1)
    assert history.status(126.0) == {
        "commits": [
            {"secondsAgo": 26.0, "commits": 2, "entries": 12, "checkpointBytes": 4_000},
            {"secondsAgo": 6.0, "commits": 1, "entries": 1, "checkpointBytes": None},
        ],
        "rescales": [],
    }


def test_old_intervals_and_rescales_are_forgotten() -> None:
    history = History()
    for number in range(3 * INTERVALS_MAX):
        history.committed(number * INTERVAL_S, 1)
        history.rescaled(
            number * INTERVAL_S, Rescale(number, 4, 8, 0.5, 120.0, 90.0, "x" * 2 * ERROR_MAX)
        )
    now_s = (3 * INTERVALS_MAX - 1) * INTERVAL_S
    status = history.status(now_s)
    assert len(status["commits"]) == INTERVALS_MAX
    assert [each["epoch"] for each in status["rescales"]] == list(
        range(3 * INTERVALS_MAX - RESCALES_MAX, 3 * INTERVALS_MAX)
    )
    assert status["rescales"][-1] == {
        "secondsAgo": 0.0, "epoch": 89, "before": 4, "after": 8, "movedFraction": 0.5,
        "durationMillis": 120.0, "pauseMillis": 90.0, "error": "x" * ERROR_MAX,
    }  # fmt: skip
    later = history.status(now_s + 10 * INTERVAL_S)
    assert len(later["commits"]) == INTERVALS_MAX - 10, "a source that commits nothing"
    assert history.status(now_s + INTERVALS_MAX * INTERVAL_S)["commits"] == []
