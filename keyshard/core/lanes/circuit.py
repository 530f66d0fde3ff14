"""Whether failing messages are poison or weather: a circuit over the attempts of all keys.

One key that fails while others succeed is poison: its retries are counted, and it is parked in the
end. Most keys failing at once is weather, such as a database that is away: then nothing is counted
or parked, handlers pause, and a few messages are tried from time to time.

=========  ==============================================  ==========
state      event                                           next state
=========  ==============================================  ==========
closed     an attempt fails, and most keys fail by now     open
open       the time of the next probe has come             probing
probing    a probe succeeds                                closed
probing    the last probe of the round fails               open, for twice as long as before
=========  ==============================================  ==========

Time comes in as an argument, in seconds of any clock. It is not thread-safe: the owner calls it
under one lock. What it remembers is bounded.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import TypedDict

KEYS_MIN = 5
"""Fewest keys that must fail: with fewer, nobody can tell weather from poison."""
SHARE_MIN = 0.8
"""Share of the keys that were tried last that must fail."""
KEYS_MAX = 100
"""Keys that are remembered, those that were tried last."""
PROBES = 3
"""Keys that are tried in the first round of probes; twice as many in each that follows, so that the
keys that do succeed are found soon, wherever they wait."""
MEMORY_S = 60.0
"""Time after which an attempt says nothing any more, seconds."""
PAUSE_S = 0.5
"""First pause until keys are tried again, seconds."""
PAUSE_MAX_S = 10.0
"""Longest pause, seconds."""
CALM_S = 30.0
"""Time after a closing in which successes are remembered also while nothing fails: the keys that
opened it are tried again behind all others, and alone they would look like weather. A new opening
after it begins with the first pause again, seconds."""


_NEVER = (0.0, False)


class CircuitState(str, Enum):
    """See the top of this module."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class CircuitStatus(TypedDict):
    """A circuit as plain JSON values."""

    state: str
    openings: int
    forSeconds: float
    nextProbeInSeconds: float | None
    keysFailing: int
    keysTried: int
    error: str


class Circuit:
    """One for a run. Keys are any hashable things."""

    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self.openings = 0
        """How often it opened from closed: attempts that failed before the newest do not count."""
        self.since_s = 0.0
        """When it opened, while it is not closed."""
        self.error = ""
        """Why the newest attempt failed."""
        self._latest: dict[Hashable, tuple[float, bool]] = {}
        """Time of the newest attempt of a key, and whether it failed; newest last. What
        succeeded before the first failure does not count, once it is calm."""
        self._failing = 0
        self._pause_s = PAUSE_S
        self._probe_at_s = 0.0
        self._closed_at_s = float("-inf")
        self._probes: set[Hashable] = set()
        self._to_start = 0
        self._round = PROBES
        self._tried: set[Hashable] = set()
        """Keys that the round has tried."""

    # -- events -----------------------------------------------------------------------------------

    def may_start(self, now_s: float) -> bool:
        """Whether a handler may be called now; a probe may when its time has come."""
        if self.state is CircuitState.CLOSED:
            return True
        if self.state is CircuitState.OPEN and now_s >= self._probe_at_s:
            self.state = CircuitState.PROBING
            self._to_start = self._round
            self._tried.clear()
        return self.state is CircuitState.PROBING and self._to_start > 0

    def started(self, key: Hashable) -> None:
        """A handler is called, after :meth:`may_start`."""
        if self.state is CircuitState.PROBING:
            # Who failed lines up behind all others: one that comes again is the last there is.
            self._to_start = 0 if key in self._tried else self._to_start - 1
            self._tried.add(key)
            self._probes.add(key)

    def succeeded(self, key: Hashable, now_s: float) -> bool:
        """An attempt succeeded; whether that closes the circuit."""
        if self.closed and not self._failing and self._is_calm(now_s):
            return False
        self._note(key, now_s, failed=False)
        if key not in self._probes:
            return False
        self.state = CircuitState.CLOSED
        self._closed_at_s = now_s
        self._latest = {key: seen for key, seen in self._latest.items() if not seen[1]}
        self._failing = 0
        self._probes.clear()
        self._to_start = 0
        return True

    def failed(self, key: Hashable, now_s: float, error: str) -> bool:
        """An attempt failed; whether that opens a closed circuit."""
        self.error = error
        self._note(key, now_s, failed=True)
        if self.state is CircuitState.CLOSED:
            if not self._most_fail:
                return False
            self.state = CircuitState.OPEN
            self.openings += 1
            self.since_s = now_s
            if self._is_calm(now_s):
                self._pause_s = PAUSE_S
            self._round = PROBES
            self._probe_at_s = now_s + self._pause_s
            return True
        self._ended(key, now_s)
        return False

    def undecided(self, key: Hashable, now_s: float) -> None:
        """An attempt ended with neither: its handler asked for another time."""
        self._ended(key, now_s)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether handlers run as usual."""
        return self.state is CircuitState.CLOSED

    @property
    def keys(self) -> tuple[int, int]:
        """How many of the keys that were tried last fail, and how many those are."""
        return self._failing, len(self._latest)

    def status(self, now_s: float) -> CircuitStatus:
        """As plain JSON values."""
        failing, tried = self.keys
        is_open = not self.closed
        return {
            "state": self.state.value,
            "openings": self.openings,
            "forSeconds": round(now_s - self.since_s, 1) if is_open else 0.0,
            "nextProbeInSeconds": (
                round(max(0.0, self._probe_at_s - now_s), 1)
                if self.state is CircuitState.OPEN
                else None
            ),
            "keysFailing": failing,
            "keysTried": tried,
            "error": self.error if is_open else "",
        }

    def __str__(self) -> str:
        failing, tried = self.keys
        return (
            f"{failing} of the {tried} keys tried last fail, so this is no matter of single "
            f"messages. A few are tried again, every {PAUSE_MAX_S:.0f} s at the latest, until one "
            f"succeeds; nothing is parked meanwhile. Newest error: {self.error}"
        )

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert len(self._latest) <= KEYS_MAX
        assert self._failing == sum(failed for _, failed in self._latest.values())
        assert 0 <= self._to_start <= self._round <= KEYS_MAX
        assert len(self._probes) <= len(self._tried) <= self._round
        assert self.state is CircuitState.PROBING or not (self._probes or self._to_start)
        assert PAUSE_S <= self._pause_s <= PAUSE_MAX_S

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _most_fail(self) -> bool:
        return self._failing >= KEYS_MIN and self._failing >= SHARE_MIN * len(self._latest)

    def _note(self, key: Hashable, now_s: float, *, failed: bool) -> None:
        latest = self._latest
        if not self._failing and self._is_calm(now_s):
            latest.clear()
        self._failing += failed - latest.pop(key, _NEVER)[1]
        latest[key] = now_s, failed
        while len(latest) > KEYS_MAX or next(iter(latest.values()))[0] < now_s - MEMORY_S:
            self._failing -= latest.pop(next(iter(latest)))[1]

    def _is_calm(self, now_s: float) -> bool:
        return now_s - self._closed_at_s >= CALM_S

    def _ended(self, key: Hashable, now_s: float) -> None:
        """A probe ended without success; the last of its round ends it."""
        if key not in self._probes:
            return
        self._probes.discard(key)
        if not self._probes and not self._to_start:
            self.state = CircuitState.OPEN
            self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)
            self._round = min(KEYS_MAX, 2 * self._round)
            self._probe_at_s = now_s + self._pause_s
