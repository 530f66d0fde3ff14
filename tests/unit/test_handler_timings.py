"""The histogram of handler durations, and the usual duration of a handler."""

from __future__ import annotations

import pytest

from keyshard.core.lanes.lane_status import LatencyHistogram


@pytest.mark.parametrize(
    ("seconds", "p99_s"),
    [
        ([], 0.0),
        ([0.003], 0.003),
        ([0.003] * 99 + [40.0], 0.005),
        ([0.003] * 90 + [40.0] * 10, 40.0),
        ([8.0] * 50, 8.0),
        ([45.0, 60.0], 60.0),
    ],
)
def test_the_99th_percentile_is_exact_enough(seconds: list[float], p99_s: float) -> None:
    timings = LatencyHistogram()
    for one in seconds:
        timings.add(one)
    assert timings.p99_s == p99_s


def test_a_sum_of_histograms_has_the_durations_of_both() -> None:
    one, other, both = LatencyHistogram(), LatencyHistogram(), LatencyHistogram()
    for timings, durations_s in ((one, [0.25, 40.0]), (other, [0.5, 0.0]), (both, [])):
        timings.add_each(durations_s)
    for timings in (one, other):
        both.add_all(timings)
    expected = LatencyHistogram()
    expected.add_each([0.25, 40.0, 0.5, 0.0])
    assert both.status() == expected.status()
    assert both.longest_s == 40.0
