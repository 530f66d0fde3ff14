"""The status as plain JSON values, field by field; see ``docs/status.md`` for what they mean."""

from __future__ import annotations

from typing import TypedDict

from keyshard.coordinator.progress import Progress
from keyshard.core.lanes.circuit import CircuitStatus
from keyshard.core.lanes.facts import LaneStatus
from keyshard.core.lanes.tally import Counters
from keyshard.core.lanes.timings import HandlerSeconds


class BlockingKey(TypedDict):
    """The key that holds a range back most."""

    key: str | None
    messageId: str
    attempts: int
    reason: str


class Stalled(TypedDict):
    """Since when a range stalls, and why."""

    forSeconds: float
    reason: str


class RangeStatus(TypedDict):
    """One range."""

    index: int
    hashRanges: list[str]
    owner: str
    state: str
    waiting: int
    inFlight: int
    handled: int
    oldestUnacknowledgedMillis: int | None
    blockedBy: BlockingKey | None
    stalled: Stalled | None


class PartitionStatus(TypedDict):
    """One topic partition."""

    topic: str
    partition: int
    covered: bool
    gaps: list[str]
    error: str
    backlog: int | None
    ackHoles: int | None
    ackHolesMax: int | None
    replay: int | None
    replayMax: int | None


class ParkedKeyStatus(TypedDict):
    """One parked key."""

    key: str
    letters: int


class Status(TypedDict):
    """A running source."""

    state: str
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
    ranges: list[RangeStatus]
    partitions: list[PartitionStatus]
    parkedKeys: int
    parked: list[ParkedKeyStatus]
    malformedLetters: int
    counters: Counters
    handlerSeconds: HandlerSeconds
    circuit: CircuitStatus
    window: Progress | None
    """Counts of the coordinator; ``None`` while it starts."""
    brokerError: str


class Place(TypedDict):
    """Where a key lies in the ring."""

    slot: int
    range: int
    hashRange: str


class Located(Place):
    """The same of a key by name."""

    key: str
    ifBytes: Place | None
    """Where it lies when its producer set it as bytes; ``None`` when that is the same."""


class ParkedMessage(TypedDict):
    """The first message of a parked key that has not succeeded."""

    topic: str
    partition: int
    messageId: str
    attempts: int
    """Failed attempts; 0 for one that no handler saw."""
    error: str
    value: str | None
    """Beginning of its content; ``None`` for a message without content."""
    valueBytes: int
    """Length of its content; 0 where that is too large for one dead letter."""


class ParkedBy(TypedDict):
    """Why a key is parked."""

    letters: int
    forSeconds: float | None
    """``None`` when unknown."""
    message: ParkedMessage | None
    unknown: str
    """Why there is no message; else empty."""


class Explanation(Located):
    """Where a key lies, and what a running source does with it."""

    owner: str
    lane: LaneStatus
    waiting: int
    parked: bool
    parkedBy: ParkedBy | None
    """``None`` while it is not parked, or its dead letter is not confirmed."""
