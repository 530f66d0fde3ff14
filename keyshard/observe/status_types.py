"""The status as plain JSON values; ``docs/status.md`` describes every field."""

from __future__ import annotations

from typing import TypedDict

from keyshard.coordinator.progress import Progress
from keyshard.core.lanes.circuit_breaker import CircuitStatus
from keyshard.core.lanes.lane_status import (
    HandlerSeconds,
    HandlerSlots,
    LaneStatus,
    OutcomeCounts,
    OutputsStatus,
)
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.range_watchdog import Stalled
from keyshard.core.recent_history import HistoryStatus


class BlockingKey(TypedDict):
    """The key that delays a range most."""

    key: str | None
    messageId: str
    attempts: int
    reason: str


class Lag(TypedDict):
    """Messages that are not acknowledged yet; ``None`` where the number is unknown."""

    entries: int | None
    rows: int | None
    """Estimate: entries times the rows that an entry has on average."""
    seconds: float | None
    """Age of the oldest row that was received and is not acknowledged; without one, that of the
    oldest entry that the broker holds."""
    brokerSeconds: float | None
    """Age of the backlog as the broker measured it at its newest check of quotas."""
    trend: str | None


class Shares(TypedDict):
    """Shares of time, which add up to 1."""

    busy: float
    waiting: float
    heldBack: float


class NewestErrorStatus(TypedDict):
    """The newest error of a run."""

    error: str
    secondsAgo: float | None


class Rates(TypedDict):
    """Messages per second; ``None`` while they are unknown."""

    received: float | None
    completed: float | None
    failedAttempts: float | None


class RangeStatus(TypedDict):
    """Status of one range."""

    index: int
    hashRanges: list[str]
    owner: str
    state: str
    waiting: int | None
    """``None`` without handlers and without an actor of the same slots. So are the next two."""
    inFlight: int | None
    handled: int | None
    oldestUnacknowledgedMillis: int | None
    blockedBy: BlockingKey | None
    stalled: Stalled | None
    reason: str
    shares: Shares | None


class PartitionStatus(TypedDict):
    """Status of one topic partition."""

    topic: str
    partition: int
    covered: bool
    gaps: list[str]
    error: str
    stalled: Stalled | None
    lag: Lag
    backlog: int | None
    ackGaps: int | None
    ackGapsMax: int | None
    replay: int | None
    replayMax: int | None
    unknown: str
    """Why the numbers of the broker are unknown; otherwise empty."""
    limitsAssumed: bool | None
    """Whether both limits are defaults, because the role may not read the broker's
    configuration."""


class ParkedKeyStatus(TypedDict):
    """One parked key."""

    key: str
    deadLetters: int


class HotKeyStatus(TypedDict):
    """A key with many messages."""

    key: str
    share: float
    ranges: list[int]
    """The ranges that may handle it: two if text and bytes of the key have different slots."""


class Status(TypedDict):
    """Status of a running source."""

    version: int
    kind: str
    name: str
    state: str
    uptimeSeconds: float
    newestError: NewestErrorStatus | None
    lag: Lag
    rates: Rates
    subscription: str
    topics: list[str]
    topicsPattern: str | None
    serviceUrl: str
    transport: str
    decoder: str | None
    pid: int
    host: str
    epoch: int
    lanes: int
    workers: int
    workersMax: int | None
    executor: str
    handlerSlots: list[HandlerSlots]
    ranges: list[RangeStatus]
    partitions: list[PartitionStatus]
    parkedKeys: int | None
    parked: list[ParkedKeyStatus]
    malformedDeadLetters: int | None
    counters: OutcomeCounts
    handlerSeconds: HandlerSeconds | None
    """``None`` without handlers."""
    circuit: CircuitStatus | None
    """``None`` without handlers in lanes."""
    rateLimit: RateLimitStatus | None
    hotKeys: list[HotKeyStatus] | None
    """``None`` during the start, and if workers keep the keys."""
    outputs: OutputsStatus | None
    """``None`` without a sink."""
    window: Progress | None
    """Counts of the coordinator; ``None`` during the start."""
    history: HistoryStatus | None
    """Commits and rescales of the last minutes; ``None`` during the start."""
    brokerError: str


class SlotAssignment(TypedDict):
    """The range that a slot of the ring is assigned to."""

    slot: int
    range: int
    hashRange: str


class KeyAssignment(SlotAssignment):
    """The slot and range of a key."""

    key: str
    ifBytes: SlotAssignment | None
    """Assignment if the producer set the key as bytes; ``None`` if that is the same."""


class ParkedMessage(TypedDict):
    """The first message of a parked key that has not succeeded."""

    topic: str
    partition: int
    messageId: str
    attempts: int
    """Failed attempts; 0 if no handler got the message."""
    error: str
    value: str | None
    """Beginning of its content; ``None`` without content, or if it is too large."""
    valueBytes: int | None
    """Length of its content, bytes; ``None`` if the content is too large for one dead letter."""


class ParkedBy(TypedDict):
    """Reason why a key is parked."""

    deadLetters: int
    forSeconds: float | None
    """``None`` if unknown."""
    message: ParkedMessage | None
    unknown: str
    """Why there is no message; otherwise empty."""


class StackStatus(TypedDict):
    """Calls that the handler of a message executes now."""

    key: str | None
    runningSeconds: float
    stack: list[str]
    """Lines of text, the newest call last; empty if the handler is beginning or returning."""


class Explanation(KeyAssignment):
    """Range of a key, and its state in a running source."""

    owner: str
    lane: LaneStatus | None
    """``None`` without handlers."""
    waiting: int | None
    parked: bool
    parkedBy: ParkedBy | None
    """``None`` if the key is not parked, or its dead letter is not confirmed."""
