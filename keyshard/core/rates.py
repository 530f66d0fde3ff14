"""Rates of counters, trends of lags, and activity of ranges, over the last half minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum

from keyshard.core.range_watchdog import Load, RangeFacts, load_of

HISTORY_S = 30.0
"""Time over which a trend is judged, seconds."""
RATE_S = 10.0
"""Time over which a rate is computed, seconds."""
SAMPLES_MAX = 60
"""Most samples; older ones are forgotten."""
JUDGED_FROM_S = 8.0
"""Shortest time between the first and the last sample of a trend, seconds."""
STEADY_SHARE = 0.2
"""Change of a lag that still counts as steady, as a share of the lag."""


class Trend(str, Enum):
    """Direction of a lag."""

    GROWING = "growing"
    STEADY = "steady"
    SHRINKING = "shrinking"


class Pace:
    """Samples of values by name. Not thread-safe: the owner calls it under one lock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[Hashable, float | None]]] = deque(
            maxlen=SAMPLES_MAX
        )

    def look(self, now_s: float, values: Mapping[Hashable, float | None]) -> None:
        """Add the values of one moment.

        Args:
            now_s: Time of any monotonic clock; not before that of the previous call.
            values: Values by name; ``None``: unknown now.
        """
        while self._samples and now_s - self._samples[0][0] > HISTORY_S:
            self._samples.popleft()
        self._samples.append((now_s, values))

    def rate(self, name: Hashable) -> float | None:
        """Return the growth of a counter per second over ``RATE_S``; ``None`` if unknown."""
        known = self._known(name)
        if len(known) < 2:
            return None
        last_s, last = known[-1]
        first_s, first = next(one for one in known if last_s - one[0] <= RATE_S)
        if first_s == last_s:
            first_s, first = known[-2]
        return max(0.0, last - first) / (last_s - first_s)

    def trend(self, name: Hashable) -> Trend | None:
        """Return the direction of a lag; ``None`` before there are enough samples.

        It compares the mean of the first third of the samples with that of the last third, so a
        saw-tooth of batches is steady.
        """
        known = self._known(name)
        if not known or known[-1][0] - known[0][0] < JUDGED_FROM_S:
            return None
        third = max(1, len(known) // 3)
        before, after = (
            sum(value for _, value in part) / len(part) for part in (known[:third], known[-third:])
        )
        if abs(after - before) <= STEADY_SHARE * max(before, after):
            return Trend.STEADY
        return Trend.GROWING if after > before else Trend.SHRINKING

    def _known(self, name: Hashable) -> list[tuple[float, float]]:
        return [
            (at_s, value)
            for at_s, values in self._samples
            if (value := values.get(name)) is not None
        ]


class Loads:
    """Activity of each range at some moments. Not thread-safe: the owner calls it under a lock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=SAMPLES_MAX)

    def look(self, now_s: float, ranges: Sequence[RangeFacts]) -> None:
        """Add the activity of all ranges at one moment, in the order of their indices."""
        while self._samples and now_s - self._samples[0][0] > HISTORY_S:
            self._samples.popleft()
        sample = bytes(map(load_of, ranges))
        if self._samples and len(self._samples[-1][1]) != len(sample):
            self._samples.clear()  # after a rescale there are other ranges
        self._samples.append((now_s, sample))

    def shares(self, index: int) -> dict[Load, float] | None:
        """Return the share of samples with each activity of a range; ``None`` without samples."""
        loads = [sample[index] for _, sample in self._samples if index < len(sample)]
        if not loads:
            return None
        return {load: loads.count(load) / len(loads) for load in Load}
