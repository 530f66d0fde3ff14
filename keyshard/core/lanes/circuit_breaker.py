"""Circuit breaker: distinguishes an outage from poison keys by the history of the keys.

A poison key fails while others succeed. Its attempts count, and it is parked after its retries. In
an outage, most keys that succeeded before fail, or no key succeeds. Then no attempt counts,
handlers pause, and a few messages are tried from time to time.

If an attempt starts after a key failed, and succeeds, the handler works. So it *refutes* the
failure of that key as evidence of an outage: the key itself is at fault.

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

If the window is full of failing keys, no other key can be received, so no key could ever succeed.
So after a time the failures of a few keys count: they are *on trial*, and are parked when their
retries are used up. That makes room for other keys.

While the circuit is not closed, or failures are unrefuted, keys that succeeded before and do not
fail need no pause. Such a key is a *control*: it is tried at once, one at a time, before all
waiting keys. Its success closes the circuit, as that of a probe does, and refutes the failures.

Time is an argument, in seconds of any clock. The circuit is not thread-safe: its owner calls it
under one lock. Its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import TypedDict

KEYS_MIN = 5
"""Fewest failing keys that may be an outage. Fewer cannot be distinguished from poison keys."""
SHARE_MIN = 0.8
"""Share of the compared keys (that succeeded before and were tried recently) that must fail."""
KEYS_MAX = 100
"""Most keys that are compared, the most recently tried ones; also the most probes of a round."""
KNOWN_MAX = 1_000
"""Most keys whose success is remembered, the most recent ones."""
QUIET_S = 1.0
"""Time for which failures of several keys must stay unrefuted, seconds. Meanwhile the failed
keys wait, and all others are tried."""
PROBES = 3
"""Probes of the first round; each further round has twice as many, so that working keys are
found soon, wherever they wait. Also the most controls of a round."""
MEMORY_S = 60.0
"""Age from which a failure is no longer evidence, seconds."""
RECENT_S = 15.0
"""Time for which keys that succeeded before are compared, seconds; about the duration of the
default retries."""
PAUSE_S = 0.5
"""First pause before probes, and the time limit of the round that follows, seconds."""
PAUSE_MAX_S = 10.0
"""Longest pause, seconds."""
CALM_S = 30.0
"""If the circuit opens again within this time after closing, the last pause is used, seconds."""
STUCK_S = 60.0
"""Time for which every available key must fail, while no other can be received, before failures
of keys on trial count, seconds. A shorter outage parks no key."""
ON_TRIAL_MAX = PROBES
"""Most keys on trial at the same time. In a long outage, at most this many keys are parked in
the time that all retries of one key take."""

_NEVER = (0.0, False)


class CircuitState(str, Enum):
    """See the top of this module."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class CircuitStatus(TypedDict):
    """Status of a circuit as JSON values."""

    state: str
    openings: int
    forSeconds: float
    nextProbeInSeconds: float | None
    keysFailing: int
    keysTried: int
    keysOnTrial: int
    error: str


class CircuitBreaker:
    """The circuit breaker of a run. Keys are any hashable values."""

    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self.openings = 0
        """Number of openings from closed."""
        self.since_s = 0.0
        """Time of the opening; valid while the circuit is not closed."""
        self.error = ""
        """Error of the newest failed attempt."""
        self._known: dict[Hashable, None] = {}
        """Keys that succeeded, newest last."""
        self._latest: dict[Hashable, tuple[float, bool]] = {}
        """Time and failure of the newest attempt of such keys; newest last."""
        self._failing = 0
        """Number of failed ones in ``_latest``."""
        self._unrefuted: dict[Hashable, tuple[float, float]] = {}
        """Keys with unrefuted failures, and the times of the first and last; newest last."""
        self._suspected_s: float | None = None
        """While closed: time since which the unrefuted failures suffice for an outage."""
        self._worked_s = float("-inf")
        """Latest start of an attempt that succeeded."""
        self._worked_before_s = float("-inf")
        """``_worked_s`` at the newest opening."""
        self._pause_s = PAUSE_S
        self._probe_at_s = 0.0
        self._closed_at_s = float("-inf")
        self._probes: set[Hashable] = set()
        """Keys whose running attempt closes the circuit if it succeeds: probes, controls, and
        attempts that started under suspicion."""
        self._to_start = 0
        self._round = PROBES
        self._round_ends_s = 0.0
        self._tried: set[Hashable] = set()
        """Keys tried in this round."""
        self._in_round: set[Hashable] = set()
        """Keys of this round whose attempt runs."""
        self._control: Hashable | None = None
        self._controls_left = 0
        self._stuck_s: float | None = None
        """Time since which no available key could succeed; only while the circuit is not closed."""
        self._on_trial: set[Hashable] = set()

    # -- Events -----------------------------------------------------------------------------------

    def may_start(self, now_s: float) -> bool:
        """Return whether any handler may be called now.

        If due, this opens the circuit, or begins or ends a round of probes.
        """
        if self.state is CircuitState.CLOSED:
            if self._suspected_s is None or now_s < self.held_until_s:
                return True
            self._open(now_s)
            return False
        if self.state is CircuitState.PROBING and now_s >= self._round_ends_s and self._in_round:
            # If a probe hangs, the other keys do not wait for it.
            self._end_round(now_s)
        if self.state is CircuitState.OPEN and now_s >= self._probe_at_s:
            self.state = CircuitState.PROBING
            self._to_start, self._controls_left = self._round, PROBES
            self._round_ends_s = now_s + self._pause_s
            self._tried.clear()
            self._in_round.clear()
        return self.state is CircuitState.PROBING and self._to_start > 0

    def controls(self) -> Iterator[Hashable]:
        """Return keys of which one may be called now as a control; newest successes first."""
        if self.closed and self._suspected_s is None:
            return iter(())
        if self._control is not None or not self._controls_left:
            return iter(())
        latest, newest = self._latest, islice(reversed(self._known), KEYS_MAX)
        return (key for key in newest if not latest.get(key, _NEVER)[1])

    def stuck(self, now_s: float, *, is_stuck: bool) -> None:
        """Record whether every available key failed while no other can be received."""
        if self.closed or not is_stuck:
            self._stuck_s = None
        elif self._stuck_s is None:
            self._stuck_s = now_s

    def judges(self, now_s: float) -> bool:
        """Return whether :meth:`stuck` has lasted ``STUCK_S``: then failures on trial count."""
        return self._stuck_s is not None and now_s - self._stuck_s >= STUCK_S

    def put_on_trial(self, keys: Collection[Hashable]) -> None:
        """Replace the keys on trial; at most ``ON_TRIAL_MAX``."""
        self._on_trial = set(keys)

    def may_try(self, key: Hashable) -> bool:
        """Return whether a key has not been tried in this round of probes."""
        return key not in self._tried

    def started(self, key: Hashable, *, control: bool = False) -> None:
        """Record the call of a handler, after :meth:`may_start` or as one of :meth:`controls`."""
        if control:
            self._control = key
            self._controls_left -= 1
            self._probes.add(key)
        elif self.state is CircuitState.PROBING:
            # A failed key queues after all others. If it comes again, all keys were tried.
            self._to_start = 0 if key in self._tried else self._to_start - 1
            self._tried.add(key)
            self._in_round.add(key)
            self._probes.add(key)
        elif self._suspected_s is not None:
            self._probes.add(key)

    def succeeded(self, key: Hashable, started_s: float, now_s: float) -> bool:
        """Record the success of an attempt; return whether it closes the circuit.

        Args:
            key: Its key.
            started_s: Start of the attempt.
            now_s: The time.
        """
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

    def succeeded_each(self, keys: Sequence[Hashable], started_s: float, now_s: float) -> None:
        """Record successes while the circuit is :attr:`calm`, as :meth:`succeeded` does for each.

        Args:
            keys: The keys, in the order of the successes.
            started_s: Start of the last attempt.
            now_s: The time.
        """
        newest = list(dict.fromkeys(reversed(keys)))
        known = self._known
        for key in reversed(newest):
            known.pop(key, None)
            known[key] = None
        for key in list(islice(known, max(0, len(known) - KNOWN_MAX))):
            del known[key]
        for key in reversed(newest[:KEYS_MAX]):
            self._note(key, now_s, failed=False)
        self._worked_s = max(self._worked_s, started_s)

    def failed(self, key: Hashable, now_s: float, error: str, first_s: float | None = None) -> bool:
        """Record a failed attempt; return whether it counts against its message.

        Args:
            key: Its key.
            now_s: The time.
            error: The error.
            first_s: Time of the message's first failure; ``None``: now.
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
        """Record the end of an attempt whose handler asked for a later retry."""
        self._ended(key, now_s)

    # -- Status -----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether handlers run as usual."""
        return self.state is CircuitState.CLOSED

    @property
    def calm(self) -> bool:
        """Whether handlers run as usual, and no failure is unrefuted."""
        return self.closed and not self._unrefuted

    @property
    def held_until_s(self) -> float:
        """Time until which a key waits if its failure did not count; 0 if no key waits."""
        return 0.0 if self._suspected_s is None else self._suspected_s + QUIET_S

    def counts_on(self, first_s: float | None) -> bool:
        """Return whether a message keeps its failed attempts from before the newest opening.

        Args:
            first_s: Time of the message's first failure.
        """
        return first_s is not None and first_s < self._worked_before_s

    @property
    def keys(self) -> tuple[int, int]:
        """Number of failing keys, and of all keys with a recent attempt or an unrefuted failure."""
        failing = {key for key, (_, failed) in self._latest.items() if failed}
        return len(failing | self._unrefuted.keys()), len(self._latest.keys() | self._unrefuted)

    def status(self, now_s: float) -> CircuitStatus:
        """Return the status as JSON values."""
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
                "they fill the window, so no other key can be received. Up to "
                f"{len(self._on_trial)} of them at a time are parked when their retries are "
                "exhausted"
            )
        return (
            f"{failing} of the last {tried} keys fail, so a single message is not the cause. A "
            f"few keys are tried again, at least every {PAUSE_MAX_S:.0f} s, until one succeeds; "
            f"{parks}. Newest error: {self.error}"
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

    # -- Helpers ----------------------------------------------------------------------------------

    def _note(self, key: Hashable, now_s: float, *, failed: bool) -> None:
        latest = self._latest
        self._failing += failed - latest.pop(key, _NEVER)[1]
        latest[key] = now_s, failed
        while len(latest) > KEYS_MAX or next(iter(latest.values()))[0] < now_s - RECENT_S:
            self._failing -= latest.pop(next(iter(latest)))[1]

    def _suspect(self, now_s: float) -> None:
        """Update the suspicion: several keys with unrefuted failures may mean an outage."""
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
        """End an attempt without success. If it was the last of a round, the round ends."""
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
