"""How a running source does: the state of each range, what blocks it, and which ranges stall.

State of a range, the first that applies::

    stalled       for STALL_S it had something to do and nothing changed, or a handler has not
                  returned though that is not usual for it, or a consumer has been away
    disconnected  a consumer of it is not connected to the broker
    draining      it is about to move: what runs is finished, nothing new starts
    blocked       rows wait, and every key they have waits for a retry
    running       handlers work, or a worker may take a row at once
    paused        it receives nothing, because the window or the checkpoint has no room
    idle          nothing to do
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

BLOCKS_S = 1.0
"""Time after which a handler that has not returned is said to hold back its range, seconds."""
STALL_S = 6.0
"""Time without progress after which a range is called stalled, seconds."""
USUAL_TIMES = 2.0
"""A handler stalls when it takes this many times as long as 99 of 100 attempts do, and at least
``STALL_S``."""
REMIND_S = 60.0
"""Time after which a range that is still stalled is named again, seconds."""


class RangeState(str, Enum):
    """What a range does; see the top of this module."""

    STALLED = "stalled"
    DISCONNECTED = "disconnected"
    DRAINING = "draining"
    BLOCKED = "blocked"
    PAUSED = "paused"
    RUNNING = "running"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key that is worked on, or that waits for a retry: with its first message."""

    key: str | None
    """Routing key; ``None`` for messages without one."""
    message_id: str
    """``ledger:entry:index``."""
    attempts: int = 0
    """How often the handler has failed on the message."""
    running_s: float | None = None
    """How long the handler has been working on it, seconds; ``None`` when it is not."""
    retry_in_s: float | None = None
    """Time until it is tried again, seconds; ``None`` when it does not wait for that."""
    error: str = ""
    """What the handler raised last."""
    parking: bool = False
    """Whether it runs only to become a dead letter."""

    @property
    def blocks(self) -> bool:
        """Whether it is worth a word: a handler that has only just begun holds nothing back."""
        return self.running_s is None or self.running_s >= BLOCKS_S

    @property
    def reason(self) -> str:
        """Why the key's later messages wait, in a few words."""
        if self.running_s is not None and self.parking:
            return f"its dead letter has not been confirmed for {self.running_s:.1f} s"
        if self.running_s is not None:
            return f"the handler has not returned for {self.running_s:.1f} s"
        failed = f" after {self.error}" if self.error else ""
        return f"retry in {max(0.0, self.retry_in_s or 0.0):.1f} s{failed}"

    def __str__(self) -> str:
        name = "a message without a key" if self.key is None else f"key {self.key!r}"
        return f"{name}, message {self.message_id}, attempt {self.attempts + 1}"


@dataclass(frozen=True, slots=True)
class RangeFacts:
    """What is known of one range at one moment."""

    index: int
    waiting: int = 0
    """Messages received and not handed to a handler yet."""
    ready: int = 0
    """Keys of them that a handler could begin at once."""
    in_flight: int = 0
    """Messages that handlers work on."""
    handled: int = 0
    """Messages completed, rejected or parked since the start: it grows when there is progress."""
    blocking: KeyFacts | None = None
    """The key that holds the range back most; see :func:`most_blocking`."""
    paused: bool = False
    draining: bool = False
    disconnected: tuple[str, ...] = ()
    """Topic partitions whose consumer is not connected."""
    oldest: datetime | None = None
    """When the entry that it has had for longest was published; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A range that stalls, and why."""

    index: int
    since_s: float
    """When it began, by the clock that the watchdog is given."""
    reason: str


def most_blocking(keys: Iterable[KeyFacts]) -> KeyFacts | None:
    """The key whose handler has been running longest, else the one that failed most often."""
    return max(
        keys,
        key=lambda one: (one.running_s is not None, one.running_s or 0.0, one.attempts),
        default=None,
    )


def state_of(facts: RangeFacts, *, stalled: bool) -> RangeState:
    """The state of a range; see the top of this module."""
    if stalled:
        return RangeState.STALLED
    if facts.disconnected:
        return RangeState.DISCONNECTED
    if facts.draining:
        return RangeState.DRAINING
    if facts.blocking is not None and not facts.in_flight and not facts.ready:
        return RangeState.BLOCKED
    if facts.paused and not facts.in_flight and not facts.ready:
        return RangeState.PAUSED
    return RangeState.RUNNING if facts.waiting or facts.in_flight else RangeState.IDLE


@dataclass(slots=True)
class _Watched:
    """What the watchdog remembers of one range."""

    handled: int
    still_since_s: float
    """Since when it has had something to do and nothing was handled."""
    away_since_s: float | None = None
    """Since when a consumer of it has been disconnected."""
    named_s: float | None = None
    """When it was named last."""


class Watchdog:
    """Finds ranges that stall. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self.stalls: dict[int, Stall] = {}
        """Ranges that stall now, by index."""

    def look(
        self, now_s: float, ranges: Sequence[RangeFacts], *, usual_s: float = 0.0, pause: str = ""
    ) -> list[Stall]:
        """Take what is known of all ranges now; which stalls are to be named.

        A stall is named when it is found, and again every ``REMIND_S``.

        Args:
            now_s: Time of the clock.
            ranges: All ranges.
            usual_s: What 99 of 100 attempts of the handler do not exceed, seconds.
            pause: Why no handler starts at all, if that is so.
        """
        slow_s = max(STALL_S, USUAL_TIMES * usual_s)
        self._watched = {
            facts.index: self._watched.get(facts.index) or _Watched(facts.handled, now_s)
            for facts in ranges
        }
        found = [
            self._judge(now_s, self._watched[facts.index], facts, slow_s, pause) for facts in ranges
        ]
        self.stalls = {stall.index: stall for stall in found if stall is not None}
        due: list[Stall] = []
        for index, watched in self._watched.items():
            if index not in self.stalls:
                watched.named_s = None
            elif watched.named_s is None or now_s - watched.named_s >= REMIND_S:
                watched.named_s = now_s
                due.append(self.stalls[index])
        return due

    @staticmethod
    def _judge(
        now_s: float, watched: _Watched, facts: RangeFacts, slow_s: float, pause: str
    ) -> Stall | None:
        busy = bool(facts.waiting or facts.in_flight)
        if facts.handled != watched.handled or not busy:
            watched.handled, watched.still_since_s = facts.handled, now_s
        if not facts.disconnected:
            watched.away_since_s = None
        elif watched.away_since_s is None:
            watched.away_since_s = now_s
        key = facts.blocking
        running_s = None if key is None else key.running_s
        if (
            key is not None
            and running_s is not None
            and (running_s >= (STALL_S if key.parking else slow_s))
        ):
            return Stall(facts.index, now_s - running_s, f"{key.reason}: {key}")
        if watched.away_since_s is not None and now_s - watched.away_since_s >= STALL_S:
            names = ", ".join(facts.disconnected[:3])
            more = f" and {len(facts.disconnected) - 3} more" if len(facts.disconnected) > 3 else ""
            reason = f"its consumer is not connected to {names}{more}"
            return Stall(facts.index, watched.away_since_s, reason)
        # What runs, or waits for a worker that does, may rightly take as long as handlers do.
        works = not pause and (facts.in_flight or facts.ready)
        if busy and now_s - watched.still_since_s >= (slow_s if works else STALL_S):
            return Stall(facts.index, watched.still_since_s, _stillness(facts, pause))
        return None


def _stillness(facts: RangeFacts, pause: str) -> str:
    """Why a range that has rows handles none, as far as it is known."""
    text = f"{facts.waiting} messages wait, {facts.in_flight} are in flight, and none was completed"
    if pause:
        return f"{text}: handlers pause: {pause}"
    if facts.ready and not facts.in_flight:
        return f"{text}: no worker is free"
    if facts.blocking is not None:
        return f"{text}: {facts.blocking.reason}: {facts.blocking}"
    return f"{text}: the range is draining" if facts.draining else text
