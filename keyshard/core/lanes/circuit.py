"""Circuit breaker: tells an outage from poison keys by the history of the keys.

A poison key fails while others succeed. Its attempts count, and it is parked after its retries. In
an outage, most keys fail that succeeded before, or nothing succeeds at all. Then no attempt counts,
handlers pause, and a few messages are tried from time to time.

An attempt that starts after a key failed, and succeeds, shows that the handler works. So it
*refutes* the failure of that key as evidence of an outage: the key itself is at fault.

=========  ===================================================  ==========
state      event                                                next state
=========  ===================================================  ==========
closed     most keys that succeeded before fail now             open
closed     failures of several keys stay unrefuted for a time   open
open       the time of the next probe has come                  probing
probing    a probe succeeds                                     closed
probing    the last probe of the round fails, or the round      open, for twice as
           takes too long                                       long as before
=========  ===================================================  ==========

If no other key can be received either, because the window is full of keys that fail, nothing could
ever succeed. So after a time the failures of a few keys count: they are *on trial*, and are parked
when their retries are used up, which makes room for others.

While it is not closed, or failures are unrefuted, a key that succeeded before and does not fail
needs no pause: it is a *control*, tried at once, one at a time, before all keys that wait. Its
success closes the circuit, as that of a probe does, and refutes the failures.

Time comes in as an argument, in seconds of any clock. It is not thread-safe: the owner calls it
under one lock. Its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from enum import Enum
from itertools import islice
from typing import TypedDict

KEYS_MIN = 5
"""Fewest keys that must fail: fewer do not tell an outage from poison keys."""
SHARE_MIN = 0.8
"""Share that must fail of the keys that succeeded before and were tried last."""
KEYS_MAX = 100
"""Keys that are compared, those that were tried last; also the most probes of a round."""
KNOWN_MAX = 1_000
"""Keys of which a success is remembered, those that succeeded last."""
QUIET_S = 1.0
"""Time for which failures of several keys must stay unrefuted, seconds. Meanwhile the failed keys
wait, and all others are tried."""
PROBES = 3
"""Keys that are tried in the first round of probes; twice as many in each that follows, so that the
keys that do succeed are found soon, wherever they wait. Also the most controls of a round."""
MEMORY_S = 60.0
"""Time after which a failure is no evidence any more, seconds."""
RECENT_S = 15.0
"""Time for which keys that succeeded before are compared, seconds; about what the default retries
take."""
PAUSE_S = 0.5
"""First pause until keys are tried again, and the time that a round may take after it, seconds."""
PAUSE_MAX_S = 10.0
"""Longest pause, seconds."""
CALM_S = 30.0
"""Time after a closing in which a new opening goes on with the last pause, seconds."""
STUCK_S = 60.0
"""Time for which every key at hand must fail, and no other can be received, until the failures of
keys on trial count, seconds. An outage that ends before parks nothing."""
ON_TRIAL_MAX = PROBES
"""Most keys that are on trial at the same time: in an outage that lasts, no more are parked in the
time that all retries of one key take."""

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
    keysOnTrial: int
    error: str


class Circuit:
    """One for a run. Keys are any hashable things."""

    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self.openings = 0
        """Number of openings from closed."""
        self.since_s = 0.0
        """When it opened, while it is not closed."""
        self.error = ""
        """Why the newest attempt failed."""
        self._known: dict[Hashable, None] = {}
        """Keys that succeeded, newest last."""
        self._latest: dict[Hashable, tuple[float, bool]] = {}
        """Time of the newest attempt of such keys, and whether it failed; newest last."""
        self._failing = 0
        """Number of those that failed."""
        self._unrefuted: dict[Hashable, tuple[float, float]] = {}
        """Keys whose failure nothing refuted, and when they failed first and last; newest last."""
        self._suspected_s: float | None = None
        """Time since which those suffice for an outage, while it is closed."""
        self._worked_s = float("-inf")
        """Latest start of an attempt that succeeded."""
        self._worked_before_s = float("-inf")
        """The same when it opened last."""
        self._pause_s = PAUSE_S
        self._probe_at_s = 0.0
        self._closed_at_s = float("-inf")
        self._probes: set[Hashable] = set()
        """Keys whose running attempt closes it when it succeeds: probes, controls, and what started
        under suspicion."""
        self._to_start = 0
        self._round = PROBES
        self._round_ends_s = 0.0
        self._tried: set[Hashable] = set()
        """Keys that the round has tried."""
        self._in_round: set[Hashable] = set()
        """Those whose attempt runs."""
        self._control: Hashable | None = None
        self._controls_left = 0
        self._stuck_s: float | None = None
        """Since when nothing at hand could succeed, while it is not closed."""
        self._on_trial: set[Hashable] = set()

    # -- events -----------------------------------------------------------------------------------

    def may_start(self, now_s: float) -> bool:
        """Whether any handler may be called now; a probe may when its time has come."""
        if self.state is CircuitState.CLOSED:
            if self._suspected_s is None or now_s < self.held_until_s:
                return True
            self._open(now_s)
            return False
        if self.state is CircuitState.PROBING and now_s >= self._round_ends_s and self._in_round:
            # A probe hangs; the others do not wait for it.
            self._end_round(now_s)
        if self.state is CircuitState.OPEN and now_s >= self._probe_at_s:
            self.state = CircuitState.PROBING
            self._to_start, self._controls_left = self._round, PROBES
            self._round_ends_s = now_s + self._pause_s
            self._tried.clear()
            self._in_round.clear()
        return self.state is CircuitState.PROBING and self._to_start > 0

    def controls(self) -> Iterator[Hashable]:
        """Keys of which one may be called now as a control; those that succeeded last first."""
        calm = self.closed and self._suspected_s is None
        if calm or self._control is not None or not self._controls_left:
            return iter(())
        latest, newest = self._latest, islice(reversed(self._known), KEYS_MAX)
        return (key for key in newest if not latest.get(key, _NEVER)[1])

    def stuck(self, now_s: float, *, is_stuck: bool) -> None:
        """Whether every key at hand failed, and no other can be received; told again and again."""
        if self.closed or not is_stuck:
            self._stuck_s = None
        elif self._stuck_s is None:
            self._stuck_s = now_s

    def judges(self, now_s: float) -> bool:
        """Whether it is stuck for so long that the failures of keys on trial count."""
        return self._stuck_s is not None and now_s - self._stuck_s >= STUCK_S

    def put_on_trial(self, keys: Collection[Hashable]) -> None:
        """These keys, at most ``ON_TRIAL_MAX``, are on trial from now on, and no others."""
        self._on_trial = set(keys)

    def may_try(self, key: Hashable) -> bool:
        """Whether a key is not tried in this round of probes yet."""
        return key not in self._tried

    def started(self, key: Hashable, *, control: bool = False) -> None:
        """A handler is called, after :meth:`may_start` or as one of :meth:`controls`."""
        if control:
            self._control = key
            self._controls_left -= 1
            self._probes.add(key)
        elif self.state is CircuitState.PROBING:
            # A failed key lines up behind all others: one that comes again is the last there is.
            self._to_start = 0 if key in self._tried else self._to_start - 1
            self._tried.add(key)
            self._in_round.add(key)
            self._probes.add(key)
        elif self._suspected_s is not None:
            self._probes.add(key)

    def succeeded(self, key: Hashable, started_s: float, now_s: float) -> bool:
        """An attempt succeeded that began at ``started_s``; whether that closes the circuit."""
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._note(key, now_s, failed=False)
        self._worked_s = max(self._worked_s, started_s)
        if self._unrefuted:
            self._unrefuted.pop(key, None)
            for other in [key for key, (at, _) in self._unrefuted.items() if at < started_s]:
                del self._unrefuted[other]
            enough = sorted(first_s for first_s, _ in self._unrefuted.values())[KEYS_MIN - 1 :]
            self._suspected_s = None
            self._suspect(enough[0] if enough else now_s)
        is_probe = key in self._probes
        self._forget(key)
        if self.closed or not is_probe:
            return False
        self.state = CircuitState.CLOSED
        self._closed_at_s = now_s
        self._latest = {key: seen for key, seen in self._latest.items() if not seen[1]}
        self._failing = 0
        self._probes.clear()
        self._in_round.clear()
        self._control, self._to_start, self._controls_left = None, 0, 0
        self._stuck_s = None
        self._on_trial.clear()
        self._suspect(now_s)
        return True

    def failed(self, key: Hashable, now_s: float, error: str, first_s: float | None = None) -> bool:
        """An attempt failed; whether it counts against its message.

        Args:
            key: Its key.
            now_s: The time.
            error: Why.
            first_s: When the message failed first; ``None``: now.
        """
        self.error = error
        if key in self._known:
            self._note(key, now_s, failed=True)
        refuted = first_s is not None and first_s < self._worked_s
        if not refuted:
            unrefuted = self._unrefuted
            unrefuted[key] = unrefuted.pop(key, (now_s, now_s))[0], now_s
            while (
                len(unrefuted) > KEYS_MAX
                or next(iter(unrefuted.values()))[1] < now_s - MEMORY_S
            ):  # fmt: skip
                del unrefuted[next(iter(unrefuted))]
        if self.state is not CircuitState.CLOSED:
            self._ended(key, now_s)
            return key in self._on_trial and self.judges(now_s)
        self._forget(key)
        self._suspect(now_s)
        if self._failing >= KEYS_MIN and self._failing >= SHARE_MIN * len(self._latest):
            self._open(now_s)
            return False
        return refuted or self._suspected_s is None

    def undecided(self, key: Hashable, now_s: float) -> None:
        """An attempt ended with neither: its handler asked for another time."""
        self._ended(key, now_s)

    # -- looking ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether handlers run as usual."""
        return self.state is CircuitState.CLOSED

    @property
    def held_until_s(self) -> float:
        """End of the wait of keys whose failed attempt did not count; 0 if there is none."""
        return 0.0 if self._suspected_s is None else self._suspected_s + QUIET_S

    def counts_on(self, first_s: float | None) -> bool:
        """Whether a message keeps its failed attempts of before the newest opening.

        Args:
            first_s: When it failed first.
        """
        return first_s is not None and first_s < self._worked_before_s

    @property
    def keys(self) -> tuple[int, int]:
        """Number of keys that fail, and number of keys that are compared."""
        failing = {key for key, (_, failed) in self._latest.items() if failed}
        return len(failing | self._unrefuted.keys()), len(self._latest.keys() | self._unrefuted)

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
            "keysOnTrial": len(self._on_trial),
            "error": self.error if is_open else "",
        }

    def __str__(self) -> str:
        failing, tried = self.keys
        parks = "no key is parked meanwhile"
        if self._on_trial:
            parks = (
                "they fill the window, so no other key can be received, and a few of them are "
                f"parked when their retries are used up ({len(self._on_trial)} at a time)"
            )
        return (
            f"{failing} of the {tried} keys tried last fail, so the cause is not a single message. "
            f"A few keys are tried again, every {PAUSE_MAX_S:.0f} s at the latest, until one "
            f"succeeds; {parks}. Newest error: {self.error}"
        )

    def validate(self) -> None:
        """Assert the invariants; tests call it after every step."""
        assert max(len(self._latest), len(self._unrefuted)) <= KEYS_MAX
        assert len(self._known) <= KNOWN_MAX
        assert self._failing == sum(failed for _, failed in self._latest.values())
        assert 0 <= self._to_start <= self._round <= KEYS_MAX
        assert 0 <= self._controls_left <= PROBES
        assert self._in_round <= self._probes
        assert len(self._in_round) <= len(self._tried) <= self._round
        assert self._control is None or self._control in self._probes
        enough = len(self._unrefuted) >= KEYS_MIN
        assert (self._suspected_s is not None) == (self.closed and enough)
        assert len(self._on_trial) <= ON_TRIAL_MAX
        if self.closed:
            assert (self._stuck_s, self._on_trial) == (None, set())
            assert (len(self._in_round), self._to_start) == (0, 0)
        assert PAUSE_S <= self._pause_s <= PAUSE_MAX_S

    # -- helpers ----------------------------------------------------------------------------------

    def _note(self, key: Hashable, now_s: float, *, failed: bool) -> None:
        latest = self._latest
        self._failing += failed - latest.pop(key, _NEVER)[1]
        latest[key] = now_s, failed
        while len(latest) > KEYS_MAX or next(iter(latest.values()))[0] < now_s - RECENT_S:
            self._failing -= latest.pop(next(iter(latest)))[1]

    def _suspect(self, now_s: float) -> None:
        """Whether so many keys fail that it may be an outage."""
        if not self.closed or len(self._unrefuted) < KEYS_MIN:
            self._suspected_s = None
        elif self._suspected_s is None:
            self._suspected_s, self._controls_left = now_s, PROBES

    def _open(self, now_s: float) -> None:
        self.state = CircuitState.OPEN
        self.openings += 1
        self.since_s = now_s
        self._worked_before_s = self._worked_s
        if now_s - self._closed_at_s >= CALM_S:
            self._pause_s = PAUSE_S
        self._round, self._controls_left, self._control = PROBES, PROBES, None
        self._probe_at_s = now_s + self._pause_s
        self._tried.clear()
        self._suspect(now_s)

    def _forget(self, key: Hashable) -> None:
        self._probes.discard(key)
        self._in_round.discard(key)
        if self._control == key:
            self._control = None

    def _ended(self, key: Hashable, now_s: float) -> None:
        """An attempt ended without success; the last of a round ends it."""
        is_last = key in self._in_round and len(self._in_round) == 1 and not self._to_start
        self._forget(key)
        if is_last and self.state is CircuitState.PROBING:
            self._end_round(now_s)

    def _end_round(self, now_s: float) -> None:
        self.state = CircuitState.OPEN
        self._to_start = 0
        self._in_round.clear()
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)
        self._round = min(KEYS_MAX, 2 * self._round)
        self._probe_at_s = now_s + self._pause_s
