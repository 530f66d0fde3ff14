"""Facts about ranges and keys, for :mod:`keyshard.core.range_watchdog`; counts and timings of a
run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import accumulate
from typing import NamedTuple, TypedDict

from keyshard.core.dead_letter import DeadLetterKind
from keyshard.core.lanes.key_queue import KeyQueue
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message
from keyshard.core.range_watchdog import (
    KeyFacts,
    RangeFacts,
    Stalled,
    most_blocking,
    shown_key,
)
from keyshard.core.ring.hash_range import HashRange, overlap

BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets, seconds, inclusive. Longer durations are in no bucket."""


class HandlerSeconds(TypedDict):
    """Durations of attempts, as JSON values."""

    count: int
    sum: float
    buckets: list[list[float]]
    """Upper bound, and number of durations up to it."""


class LatencyHistogram:
    """Counts of durations. Not thread-safe: the owner calls it under one lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def add_each(self, durations_s: Sequence[float]) -> None:
        """Do the same as :meth:`add` for each of some durations."""
        long = [one for one in durations_s if one > BOUNDS_S[0]]
        short = len(durations_s) - len(long)
        self._counts[0] += short
        self.count += short
        self.sum_s += sum(durations_s) - sum(long)
        if short and not long:
            self.longest_s = max(self.longest_s, *durations_s)
        for one in long:
            self.add(one)

    def add_all(self, other: LatencyHistogram) -> None:
        """Add the durations of another histogram."""
        self._counts = [own + more for own, more in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.sum_s += other.sum_s
        self.longest_s = max(self.longest_s, other.longest_s)

    @property
    def p99_s(self) -> float:
        """99th percentile, to the resolution of the buckets; 0 without data. Seconds."""
        counts = accumulate(self._counts)
        index = next((i for i, count in enumerate(counts) if count >= 0.99 * self.count), 0)
        bound_s = BOUNDS_S[index] if index < len(BOUNDS_S) else self.longest_s
        return min(bound_s, self.longest_s)

    def status(self) -> HandlerSeconds:
        """Return JSON values. Each bucket counts all durations up to its bound."""
        totals = accumulate(self._counts[:-1])
        return {
            "count": self.count,
            "sum": self.sum_s,
            "buckets": [list(pair) for pair in zip(BOUNDS_S, totals, strict=True)],
        }


RETRYING_MAX = 10_000
"""Maximum number of keys with a pending retry among which the blocking key is looked for."""


class LaneStatus(TypedDict):
    """Status of a key, as JSON values."""

    state: str
    messageId: str | None
    attempts: int
    reason: str | None


def key_facts(queue: KeyQueue, now_s: float) -> KeyFacts:
    """Return the facts about a key that has a message."""
    head = queue.work[0]
    return KeyFacts(
        None if queue.key is None else shown_key(queue.key),
        str(head.message.message_id),
        queue.attempts,
        running_s=max(0.0, now_s - head.started_s) if queue.running else None,
        retry_in_s=None if queue.running else max(0.0, queue.not_before_s - now_s),
        error=queue.reason or "",
        parking=queue.running and head.parking,
        publishing=queue.running and head.publishing,
    )


def range_facts(
    lanes: Lanes,
    now_s: float,
    owned: Mapping[int, Sequence[HashRange]],
    disconnected: Mapping[int, Sequence[str]],
    paused: Collection[int],
) -> list[RangeFacts]:
    """Return the present facts about every range.

    Args:
        lanes: Waiting and running messages.
        now_s: Time of the clock of the lanes.
        owned: Hash ranges of each range.
        disconnected: Per range, topic partitions whose consumer is not connected.
        paused: Ranges that receive nothing: the window or the checkpoint has no room, or the
            source is paused.
    """
    blocking: dict[int, KeyFacts] = {}
    for queue in _troubled(lanes):
        worst = most_blocking([key_facts(queue, now_s), *filter(None, [blocking.get(queue.owner)])])
        assert worst is not None
        blocking[queue.owner] = worst
    facts = []
    for index in range(lanes.ranges):
        counts = lanes.counts(index)
        facts.append(
            RangeFacts(
                index,
                waiting=counts.waiting,
                ready=counts.ready,
                in_flight=counts.running,
                handled=counts.done,
                blocking=blocking.get(index),
                paused=index in paused,
                draining=overlap(owned.get(index, ()), lanes.held.ranges),
                disconnected=tuple(disconnected.get(index, ())),
                oldest=counts.oldest,
            )
        )
    return facts


class RunStatus(TypedDict):
    """A message in a handler, or one that waits for a retry, as JSON values."""

    key: str | None
    range: int
    topic: str
    partition: int
    messageId: str
    attempts: int
    state: str
    runningSeconds: float | None
    retryInSeconds: float | None
    error: str
    note: str | None
    noteSecondsAgo: float | None


class Note(NamedTuple):
    """A line about the current step of a handler, which the handler set."""

    text: str
    at_s: float
    """Time of the clock of the lanes, seconds."""


def runs_of(
    lanes: Lanes, now_s: float, count_max: int, note_of: Callable[[Message], Note | None]
) -> list[RunStatus]:
    """Return the messages in handlers, longest first, then those that wait for a retry.

    Args:
        lanes: Waiting and running messages.
        now_s: Time of the clock of the lanes.
        count_max: Maximum number of messages.
        note_of: Returns the newest note of a message.
    """
    facts = ((queue, key_facts(queue, now_s)) for queue in _troubled(lanes))
    longest = nlargest(
        count_max, facts, key=lambda one: (one[1].running_s is not None, one[1].running_s or 0.0)
    )
    return [_run_status(queue, one, now_s, note_of) for queue, one in longest]


def _run_status(
    queue: KeyQueue, facts: KeyFacts, now_s: float, note_of: Callable[[Message], Note | None]
) -> RunStatus:
    head = queue.work[0]
    message, note = head.message, note_of(head.message)
    if note is not None and note.at_s < head.started_s:
        note = None  # An earlier attempt set it, or the handler has returned.
    return {
        "key": facts.key,
        "range": queue.owner,
        "topic": message.topic,
        "partition": message.partition,
        "messageId": facts.message_id,
        "attempts": facts.attempts,
        "state": lane_of(queue, now_s)["state"],
        "runningSeconds": None if facts.running_s is None else round(facts.running_s, 1),
        "retryInSeconds": None if facts.retry_in_s is None else round(facts.retry_in_s, 1),
        "error": facts.error,
        "note": None if note is None else note.text,
        "noteSecondsAgo": None if note is None else round(max(0.0, now_s - note.at_s), 1),
    }


def lane_of(queue: KeyQueue | None, now_s: float) -> LaneStatus:
    """Return the status of a key."""
    if queue is None:
        return {"state": "empty", "messageId": None, "attempts": 0, "reason": None}
    facts = key_facts(queue, now_s)
    waits = queue.attempts and queue.not_before_s > now_s
    busy = "parking" if facts.parking else "publishing" if facts.publishing else "running"
    state = busy if queue.running else "retrying" if waits else "ready"
    return {
        "state": state,
        "messageId": facts.message_id,
        "attempts": facts.attempts,
        "reason": None if state == "ready" else facts.reason,
    }


def _troubled(lanes: Lanes) -> Iterator[KeyQueue]:
    """Return keys that may block their range: they run, or wait for a retry."""
    yield from lanes.running
    yield from lanes.retrying(RETRYING_MAX)


# -- Slots for handlers ----------------------------------------------------------------------------


class HandlerSlots(TypedDict):
    """Slots for handlers in one process or actor, as JSON values."""

    index: int
    pid: int | None
    """``None`` while no process runs. So is the next one."""
    host: str | None
    hashRange: str | None
    """Part of the ring of an actor; ``None`` elsewhere, because slots share all messages."""
    state: str
    """``starting``, ``busy`` if no slot is free, else ``free``."""
    total: int | None
    """Handlers that may run there at the same time; ``None``: only lanes limit."""
    used: int
    waiting: int | None
    """Messages that wait for this actor; ``None`` elsewhere."""
    inFlight: int
    """Messages that handlers work on."""
    runningSeconds: float | None
    """Time for which it has worked on them; ``None`` if it is free, and for threads and
    coroutines."""
    handled: int | None
    """Messages handled there; ``None`` for threads and coroutines. So is the next one."""
    restarts: int | None
    untakenCalls: int | None
    """Calls of an actor whose results the caller has not taken; ``None`` elsewhere."""
    stalled: Stalled | None
    """Stall of an actor; ``None`` elsewhere, because ranges have the stalls."""


def handler_slots(
    index: int,
    process: tuple[int, str] | None,
    total: int | None,
    used: int,
    *,
    starting: bool = False,
    in_flight: int | None = None,
    running_s: float | None = None,
    handled: int | None = None,
    restarts: int | None = None,
    hash_range: str | None = None,
    waiting: int | None = None,
    untaken_calls: int | None = None,
    stalled: Stalled | None = None,
) -> HandlerSlots:
    """Return the slots for handlers in one process or actor.

    Args:
        index: Its number.
        process: Its process id and host; ``None`` while no process runs.
        total: Number of slots; ``None``: only lanes limit.
        used: Number of handlers that run.
        starting: Whether a process or actor starts.
        in_flight: Messages that handlers work on; default: one for each handler.
        running_s: Time for which it has worked on them, seconds.
        handled: Messages handled there.
        restarts: Number of replacements.
        hash_range: Part of the ring of an actor.
        waiting: Messages that wait for this actor.
        untaken_calls: Calls of an actor whose results the caller has not taken.
        stalled: The stall of an actor.
    """
    full = total is not None and used >= total
    return {
        "index": index,
        "pid": None if process is None else process[0],
        "host": None if process is None else process[1],
        "hashRange": hash_range,
        "state": "starting" if starting else "busy" if full else "free",
        "total": total,
        "used": used,
        "waiting": waiting,
        "inFlight": used if in_flight is None else in_flight,
        "runningSeconds": None if running_s is None else round(max(0.0, running_s), 1),
        "handled": handled,
        "restarts": restarts,
        "untakenCalls": untaken_calls,
        "stalled": stalled,
    }


# -- Outcomes of messages since the start of a run -------------------------------------------------


class OutcomeCounts(TypedDict):
    """The counts of :class:`HandlerCounters`, as JSON values.

    Those of handlers are ``None`` without handlers, those of outputs without a sink. Actors of a
    Ray job count only the first two.
    """

    completed: int | None
    failedAttempts: int | None
    rejected: int | None
    parked: int | None
    deadLettered: int | None
    observerErrors: int | None
    outputsPublished: int | None
    outputsConfirmed: int | None
    outputsFailed: int | None


class OutputsStatus(TypedDict):
    """Outputs of handlers, as JSON values."""

    topic: str
    guarantee: str
    waiting: int
    unconfirmed: int
    forSeconds: float
    error: str


class NewestError(NamedTuple):
    """An error, and the time of the run's clock at which it was raised."""

    text: str
    at_s: float


@dataclass(slots=True)
class HandlerCounters:
    """Counts of one run. Not thread-safe: the owner changes it under one lock."""

    completed: int = 0
    """Messages whose handler returned."""
    failed_attempts: int = 0
    """Attempts that raised."""
    rejected: int = 0
    """Messages rejected by a handler, or by the policy for messages without a key."""
    parked: int = 0
    """Messages of parked keys that went to the dead-letter topic."""
    dead_lettered: int = 0
    """Messages written to the dead-letter topic, for any reason."""
    observer_errors: int = 0
    """Calls of observers that raised."""
    outputs_published: int = 0
    """Messages of handlers that were given to the sink; each attempt counts."""
    outputs_confirmed: int = 0
    """Those that the broker confirmed."""
    outputs_failed: int = 0
    """Those that the broker refused, or did not confirm in time."""
    timings: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Durations of attempts."""
    newest_error: NewestError | None = None
    """The newest failed attempt."""

    def attempt(self, seconds: float, *, failed: bool) -> None:
        """Count one attempt of the handler."""
        self.timings.add(seconds)
        if failed:
            self.failed_attempts += 1
        else:
            self.completed += 1

    def successes(self, durations_s: Sequence[float]) -> None:
        """Count attempts of the handler that returned."""
        self.timings.add_each(durations_s)
        self.completed += len(durations_s)

    def dead_letter(self, kind: DeadLetterKind) -> None:
        """Count a message that was written to the dead-letter topic."""
        self.dead_lettered += 1
        self.rejected += kind is DeadLetterKind.REJECTED
        self.parked += kind is DeadLetterKind.PARKED

    def counters(self, *, handlers: bool, sink: bool) -> OutcomeCounts:
        """Return the counts as JSON values.

        Args:
            handlers: Whether the run has handlers.
            sink: Whether it has a sink.
        """
        return {
            "completed": self.completed if handlers else None,
            "failedAttempts": self.failed_attempts if handlers else None,
            "rejected": self.rejected if handlers else None,
            "parked": self.parked if handlers else None,
            "deadLettered": self.dead_lettered if handlers else None,
            "observerErrors": self.observer_errors if handlers else None,
            "outputsPublished": self.outputs_published if sink else None,
            "outputsConfirmed": self.outputs_confirmed if sink else None,
            "outputsFailed": self.outputs_failed if sink else None,
        }
