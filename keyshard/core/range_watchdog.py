"""Health of a running source: the state of each range, the blocking key, and stalled ranges.

State of a range; the first that applies::

    stalled       for STALL_S it had work and made no progress, or a handler has taken
                  unusually long, or a consumer has been disconnected
    disconnected  a consumer of it is not connected to the broker
    draining      it is about to move: running handlers finish, no new ones start
    blocked       messages wait, and all their keys wait for a retry
    running       handlers work, or an executor may take a message at once
    paused        it receives nothing: the window or the checkpoint has no room, or the source
                  is paused
    idle          no work
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, IntEnum
from typing import TypedDict

from keyshard.redaction import listed

KEY_CHARS_MAX = 1_000
"""Most characters of a key that a status shows."""
BLOCKS_S = 1.0
"""Run time from which a handler is reported as blocking its range, seconds."""
STALL_S = 6.0
"""Time without progress after which a range counts as stalled, seconds."""
USUAL_TIMES = 2.0
"""A handler stalls if it takes this many times the 99th percentile of attempts, and at least
``STALL_S``."""
CALLS_MIN = 20
"""Least number of calls of actors that shows how long messages usually take."""
REMIND_S = 60.0
"""Interval at which a range that stays stalled is reported again, seconds."""


class RangeState(str, Enum):
    """State of a range; see the top of this module."""

    STALLED = "stalled"
    DISCONNECTED = "disconnected"
    DRAINING = "draining"
    BLOCKED = "blocked"
    PAUSED = "paused"
    RUNNING = "running"
    IDLE = "idle"


RUNBOOK = "docs/runbook.md"
"""The runbook, in the repository, on the site and among the installed documents."""


def runbook_section(alert: str) -> str:
    """Return where the runbook describes an alert."""
    return f"{RUNBOOK}#{alert.lower()}"


def stall_alert(kind: str) -> str:
    """Return the name of the alert for a kind of stall, also for one of another release."""
    return "KeyshardStalled" + "".join(map(str.title, kind.split("-")))


class StallKind(str, Enum):
    """Why a range or a topic partition is stalled. ``docs/runbook.md`` has a section for each."""

    HANDLER = "handler"
    """A handler has not returned."""
    DEAD_LETTER = "dead-letter"
    """The broker has not confirmed a dead letter."""
    OUTPUTS = "outputs"
    """The broker has not confirmed the outputs of handlers."""
    DISCONNECTED = "disconnected"
    """A consumer is not connected."""
    CIRCUIT = "circuit"
    """Handlers are paused, because most keys fail."""
    RETRIES = "retries"
    """A key fails, and its messages wait for the next attempt."""
    WORKERS = "workers"
    """All workers are busy with other ranges."""
    DRAINING = "draining"
    """The range is about to move."""
    UNKNOWN = "unknown"
    """Messages wait, and none of the other reasons applies."""
    LOOK_AHEAD = "look-ahead"
    """Of a topic partition: the broker reads nothing, as too many entries wait for ranges."""
    UNDELIVERED = "undelivered"
    """Of a topic partition: the broker delivers nothing, though entries are stored."""
    ACTOR = "actor"
    """Of an actor of a Ray job: a call has not returned, or fails again and again."""

    @property
    def alert(self) -> str:
        """Name of the alert for it, and of its section in the runbook."""
        return stall_alert(self.value)

    @property
    def runbook(self) -> str:
        """Its section in the runbook."""
        return runbook_section(self.alert)


class Stalled(TypedDict):
    """Duration and reason of a stalled range, topic partition or actor, as JSON values."""

    forSeconds: float
    kind: str
    """A :class:`StallKind`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Why no handler starts in any range."""

    kind: StallKind
    text: str


class Load(IntEnum):
    """Activity of a range at one moment."""

    WAITING = 0
    """It has no message: it waits for the broker."""
    BUSY = 1
    """Handlers work."""
    HELD_BACK = 2
    """It has messages and no handler works, or it may not receive."""


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """A key whose first message runs or waits for a retry."""

    key: str | None
    """Routing key; ``None`` for messages without one."""
    message_id: str
    """``ledger:entry:index``."""
    attempts: int = 0
    """Failed attempts of the message."""
    running_s: float | None = None
    """Time since the running attempt began, seconds; ``None`` if none runs."""
    retry_in_s: float | None = None
    """Time until the next attempt, seconds; ``None`` if it does not wait for one."""
    error: str = ""
    """Error of the newest attempt."""
    parking: bool = False
    """Whether it runs only to become a dead letter."""
    publishing: bool = False
    """Whether its handler has returned, and its outputs are being published."""

    @property
    def blocks(self) -> bool:
        """Whether to report the key. A handler that has only just started blocks nothing."""
        return self.running_s is None or self.running_s >= BLOCKS_S

    @property
    def kind(self) -> StallKind:
        """The kind of stall that it causes."""
        if self.running_s is not None and self.parking:
            return StallKind.DEAD_LETTER
        if self.running_s is not None and self.publishing:
            return StallKind.OUTPUTS
        return StallKind.HANDLER if self.running_s is not None else StallKind.RETRIES

    @property
    def reason(self) -> str:
        """The reason why the key's later messages wait, in a few words."""
        if self.running_s is not None and self.parking:
            return f"the broker has not confirmed its dead letter for {self.running_s:.1f} s"
        if self.running_s is not None and self.publishing:
            return f"the broker has not confirmed its outputs for {self.running_s:.1f} s"
        if self.running_s is not None:
            return f"the handler has not returned for {self.running_s:.1f} s"
        failed = f" after {self.error}" if self.error else ""
        return f"retry in {max(0.0, self.retry_in_s or 0.0):.1f} s{failed}"

    def __str__(self) -> str:
        name = "a message without a key" if self.key is None else f"key {self.key!r}"
        return f"{name}, message {self.message_id}, attempt {self.attempts + 1}"


@dataclass(frozen=True, slots=True)
class RangeFacts:
    """Facts about one range at one moment."""

    index: int
    counted: bool = True
    """Whether its messages are known; if not, the next four are 0."""
    waiting: int = 0
    """Messages received and not handed to a handler yet."""
    ready: int = 0
    """Keys whose handler could start at once."""
    in_flight: int = 0
    """Messages that handlers work on."""
    handled: int = 0
    """Messages completed, rejected or parked since the start; it grows with progress."""
    blocking: KeyFacts | None = None
    """The key that blocks the range most; see :func:`most_blocking`."""
    paused: bool = False
    draining: bool = False
    disconnected: tuple[str, ...] = ()
    """Topic partitions whose consumer is not connected."""
    oldest: datetime | None = None
    """Publish time of the entry that the range has held longest; ``None`` without one."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A range that stalls, and the reason."""

    index: int
    since_s: float
    """Start of the stall, by the clock of the watchdog's caller."""
    kind: StallKind
    reason: str

    @property
    def name(self) -> str:
        """Name of the range."""
        return f"range {self.index}"


def shown_key(key: str) -> str:
    """Return a key; it is cut to ``KEY_CHARS_MAX`` characters and three dots."""
    return key if len(key) <= KEY_CHARS_MAX else f"{key[:KEY_CHARS_MAX]}..."


def most_blocking(keys: Iterable[KeyFacts]) -> KeyFacts | None:
    """Return the key whose handler has run longest, else the one that failed most often."""
    return max(
        keys,
        key=lambda one: (one.running_s is not None, one.running_s or 0.0, one.attempts),
        default=None,
    )


def state_of(facts: RangeFacts, *, stalled: bool) -> RangeState:
    """Return the state of a range; see the top of this module."""
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


def reason_of(
    facts: RangeFacts,
    stall: Stall | None,
    pause: Pause | None = None,
    *,
    held_back: bool = False,
    source_paused: bool = False,
) -> str:
    """Return why a range makes no progress, or less than it could; ``""`` if nothing blocks it.

    Args:
        facts: The range.
        stall: Its stall, if it stalls.
        pause: The reason why no handler starts in any range; ``None`` if handlers may start.
        held_back: Whether a rate limit makes messages wait.
        source_paused: Whether the whole source receives nothing until it is resumed.
    """
    reason = ""
    if stall is not None:
        reason = stall.reason
    elif facts.disconnected:
        reason = _away(facts.disconnected)
    elif facts.draining:
        reason = "the range is about to move"
    elif facts.blocking is not None and facts.blocking.blocks:
        reason = f"{facts.blocking.reason}: {facts.blocking}"
    elif pause is not None and facts.waiting:
        reason = f"handlers are paused: {pause.text}"
    elif held_back and facts.ready:
        reason = "rate_limit holds handlers back"
    elif source_paused:
        reason = "the source is paused until keyshard resume"
    elif facts.paused:
        reason = "the window or the checkpoint has no room until work is committed"
    return reason


def load_of(facts: RangeFacts) -> Load:
    """Return the activity of a range at this moment."""
    if facts.in_flight:
        return Load.BUSY
    held = facts.disconnected or facts.draining or facts.paused or facts.waiting
    return Load.HELD_BACK if held else Load.WAITING


@dataclass(slots=True)
class _Watched:
    """The watchdog's memory of one range."""

    handled: int
    still_since_s: float
    """Time since which it has had messages and completed none."""
    away_since_s: float | None = None
    """Time since which one of its consumers has been disconnected."""
    named_s: float | None = None
    """Time of the newest report."""


class RangeWatchdog:
    """Finds stalled ranges. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self.stalls: dict[int, Stall] = {}
        """Ranges that stall now, by index."""

    def look(
        self,
        now_s: float,
        ranges: Sequence[RangeFacts],
        *,
        usual_s: float = 0.0,
        pause: Pause | None = None,
        held_back: bool = False,
    ) -> list[Stall]:
        """Take the facts about all ranges, and return the stalls to report.

        A stall is reported when it is found, and again every ``REMIND_S``.

        Args:
            now_s: Time of the clock.
            ranges: All ranges.
            usual_s: 99th percentile of the attempts of the handler, seconds.
            pause: The reason why no handler starts in any range; ``None`` if handlers may start.
            held_back: Whether a rate limit makes messages wait. If so, a range with ready keys and
                no running handler does not stall for lack of progress.
        """
        slow_s = max(STALL_S, USUAL_TIMES * usual_s)
        self._watched = {
            facts.index: self._watched.get(facts.index) or _Watched(facts.handled, now_s)
            for facts in ranges
        }
        for facts in ranges if held_back else ():
            if facts.ready and not facts.in_flight:
                self._watched[facts.index].still_since_s = now_s
        found = [
            self._judge(now_s, self._watched[facts.index], facts, slow_s, pause) for facts in ranges
        ]
        self.stalls = {stall.index: stall for stall in found if stall is not None}
        due: list[Stall] = []
        for index, watched in self._watched.items():
            stall = self.stalls.get(index)
            if stall is None:
                watched.named_s = None
            elif watched.named_s is None or now_s - watched.named_s >= REMIND_S:
                watched.named_s = now_s
                due.append(stall)
        return due

    @staticmethod
    def _judge(
        now_s: float, watched: _Watched, facts: RangeFacts, slow_s: float, pause: Pause | None
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
            and running_s >= (STALL_S if key.parking or key.publishing else slow_s)
        ):
            return Stall(facts.index, now_s - running_s, key.kind, f"{key.reason}: {key}")
        if watched.away_since_s is not None and now_s - watched.away_since_s >= STALL_S:
            return Stall(
                facts.index,
                watched.away_since_s,
                StallKind.DISCONNECTED,
                _away(facts.disconnected),
            )
        # A running message, or one that waits for a busy executor, may take as long as handlers do.
        works = not pause and (facts.in_flight or facts.ready)
        if busy and now_s - watched.still_since_s >= (slow_s if works else STALL_S):
            return Stall(facts.index, watched.still_since_s, *_stillness(facts, pause))
        return None


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """Facts about one actor of a Ray job at one moment."""

    messages: int
    """Messages that it works on."""
    called_s: float | None
    """Time since its running call began, seconds; ``None`` between calls."""
    failing_s: float | None = None
    """Time since the first failure of what it tries again, seconds; ``None`` without one."""
    failure: str = ""
    """What fails, and the newest error."""


def actor_stall(facts: ActorFacts, usual_s: float) -> Stalled | None:
    """Return the stall of an actor; ``None`` if it does not stall.

    Args:
        facts: The actor.
        usual_s: 99th percentile of the time that a message takes, seconds; infinity while fewer
            than ``CALLS_MIN`` calls have shown it.
    """
    called_s, failing_s = facts.called_s or 0.0, facts.failing_s or 0.0
    if called_s >= STALL_S:
        # A retry may have succeeded: the call continues with the next messages.
        for_s = called_s if called_s >= USUAL_TIMES * usual_s * facts.messages else 0.0
        reason = f"a call with {facts.messages} messages has not returned for {called_s:.1f} s"
    else:
        for_s = failing_s if failing_s >= STALL_S else 0.0
        reason = facts.failure
    if not for_s:
        return None
    return {"forSeconds": round(for_s, 1), "kind": StallKind.ACTOR.value, "reason": reason}


def _away(disconnected: Sequence[str]) -> str:
    return f"its consumer is not connected to {listed(disconnected)}"


def _stillness(facts: RangeFacts, pause: Pause | None) -> tuple[StallKind, str]:
    """Return the reason why a range with messages completes none, as far as it is known."""
    text = f"{facts.waiting} messages wait, {facts.in_flight} are in flight, and none is completed"
    if pause is not None:
        return pause.kind, f"{text}: handlers are paused: {pause.text}"
    if facts.ready and not facts.in_flight:
        return StallKind.WORKERS, f"{text}: no worker is free"
    key = facts.blocking
    if key is not None:
        # Attempts that fail fast never run for long; the retries are the reason.
        kind = StallKind.RETRIES if key.attempts and key.kind is StallKind.HANDLER else key.kind
        return kind, f"{text}: {key.reason}: {key}"
    if facts.draining:
        return StallKind.DRAINING, f"{text}: the range is draining"
    return StallKind.UNKNOWN, text
