"""State shared by the threads of a job: waiting rows, waiting results, and the job's end.

Every method may be called from any thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from keyshard.base_error import one_line
from keyshard.core.lanes.failure import times
from keyshard.core.lanes.lane_status import (
    HandlerCounters,
    HandlerSlots,
    LatencyHistogram,
    NewestError,
    handler_slots,
)
from keyshard.core.lanes.rate_limit import RateLimit, RateLimitStatus
from keyshard.core.range_watchdog import CALLS_MIN, ActorFacts, actor_stall
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.window.layout import Located
from keyshard.errors import DrainTimeoutError, NotRunningError
from keyshard.handlers.entry_run import HandledMessages
from keyshard.observe.handler_view import Totals
from keyshard.observe.status_types import Status
from ray_adapter.row_slices import (
    Entries,
    PendingRows,
    RowSlice,
    divided_messages,
    entries_done,
    rows_of,
)

VERSION = 1
"""Version of :class:`JobStatus`. A field that is renamed, removed or changes its meaning raises
it."""
UNTAKEN_MAX = 2
"""Most calls of an actor, including the running one, whose results the caller has not taken."""
BYTES_MAX = 64 * 1024 * 1024
"""Most content of one call of an actor, unless one entry has more, bytes."""
CALLS_SHARE = 4
"""All calls at a time copy at most the window divided by this, for each copy that they make."""
LOOK_S = 0.2
"""Polling interval of waits, seconds."""
LEAST_S = 0.001
"""Shortest wait for the rate limit, seconds."""

_log = logging.getLogger(__name__)


class JobResults(TypedDict):
    """Results that a job publishes, as JSON values."""

    published: int
    confirmed: int


class JobStatus(TypedDict):
    """Status of a job, as JSON values; ``docs/status.md`` describes every field."""

    version: int
    state: str
    """``running``, ``stopping`` or ``ended``."""
    actors: list[HandlerSlots]
    """The ``handlerSlots`` of the source."""
    rateLimit: RateLimitStatus | None
    source: Status
    sink: JobResults | None
    """``None`` without a sink."""


@dataclass(eq=False)
class ActorSlot:
    """One actor, the index of its hash range, and its work."""

    index: int
    actor: Any
    pieces: Sequence[RowSlice] = ()
    """Rows that the actor works on."""
    in_flight: int = 0
    """Number of them."""
    since_s: float = 0.0
    """When the actor got them, monotonic seconds."""
    untaken: int = 0
    """Calls, including the running one, whose results the caller has not taken."""
    deaths: int = 0
    lost: bool = False
    """Whether the actor died and has not started again."""
    rows: int = 0
    """Number of rows handled."""
    retired: bool = False
    """Whether a rescale removed the actor. Then it gets no more rows."""
    called_at_s: float | None = None
    """When its running call began, monotonic seconds; ``None`` between calls."""
    failing: tuple[float, str] | None = None
    """When the rows that it tries again failed first, monotonic seconds, and their newest error."""

    def facts(self, now_s: float) -> ActorFacts:
        """Return the facts for the watchdog. A dead actor starts; it neither runs nor fails."""
        at_s, failing = (None, None) if self.lost else (self.called_at_s, self.failing)
        return ActorFacts(
            self.in_flight,
            None if at_s is None else max(0.0, now_s - at_s),
            None if failing is None else max(0.0, now_s - failing[0]),
            "" if failing is None else failing[1],
        )

    def status(
        self, now_s: float, hash_range: HashRange, waiting: int, usual_s: float
    ) -> HandlerSlots:
        """Return JSON values; the lock of the job is held.

        Args:
            now_s: Monotonic time, seconds.
            hash_range: Its part of the ring.
            waiting: Number of rows that wait for it.
            usual_s: Time that a row usually takes, seconds; infinity if unknown.
        """
        process = None if self.actor is None or self.lost else self.actor.process
        rows = self.in_flight
        return handler_slots(
            self.index, process, 1, int(rows > 0 and not self.lost), starting=self.lost,
            in_flight=rows, running_s=now_s - self.since_s if rows else None, handled=self.rows,
            restarts=self.deaths, hash_range=str(hash_range), waiting=waiting,
            untaken_calls=self.untaken, stalled=actor_stall(self.facts(now_s), usual_s),
        )  # fmt: skip


@dataclass(eq=False)
class Done:
    """Results of a call, and the entries that are done when the results are taken."""

    actor_slot: ActorSlot
    pieces: Sequence[RowSlice]
    results: Sequence[Any]
    """In order of the rows: one for each row, or one for all rows."""


class JobState:
    """Passes rows to actors and results to the caller.

    Args:
        actor_slots: One for each actor.
        max_rows: Most rows of a call.
        max_wait_s: Longest wait of an idle actor for more rows after the first, seconds.
        window_bytes_max: Size of the source's window, bytes.
        limit: Rate limit of the rows that actors get; ``None``: no limit.
    """

    def __init__(
        self,
        actor_slots: Sequence[ActorSlot],
        max_rows: int,
        max_wait_s: float,
        window_bytes_max: int,
        limit: RateLimit | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.actor_slots = list(actor_slots)
        self.waiting = PendingRows(len(actor_slots))
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._window_bytes_max = window_bytes_max
        self._limit = limit
        self._turns: deque[ActorSlot] = deque()
        """Actors that wait for the rate limit. The first one gets the next rows, or handles its own
        again."""
        self._done: deque[Done] = deque()
        self._to_commit: Entries = {}
        self._handled: HandledMessages = []
        """Messages whose results were taken, of entries that actors share."""
        self._tally = HandlerCounters()
        self._row_timings = LatencyHistogram()
        """Time that each call took for one of its rows."""
        self._held = False
        self.stopping = False
        self.drain_until_s: float | None = None
        self.error: BaseException | None = None
        self._raised = False

    # -- end ---------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Whether actors get no more rows."""
        return self.stopping or self.drain_until_s is not None or self.error is not None

    def stop(self) -> None:
        """End every wait."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Give actors no more rows, and let them finish those that they have."""
        with self.changed:
            if self.drain_until_s is None:
                self.drain_until_s = time.monotonic() + timeout_s
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the job with an error; the first error counts."""
        with self.changed:
            if self.error is None:
                self.error = error
            else:
                _log.error("another error after the job had failed: %s", one_line(error))
            self.changed.notify_all()

    def raise_error(self) -> None:
        """Raise the error that ended the job, at the first call only."""
        with self.changed:
            error = None if self._raised else self.error
            self._raised = True
        if error is not None:
            raise error

    # -- rows --------------------------------------------------------------------------------------

    def push(self, located: Sequence[Located]) -> None:
        """Add received entries."""
        with self.changed:
            self.waiting.push(located, time.monotonic())
            self.changed.notify_all()

    def next_rows(self, actor_slot: ActorSlot) -> Sequence[RowSlice]:
        """Wait for rows and assign them to an actor; return none when the actor is to end."""
        with self.changed:
            try:
                while not (self.ending or actor_slot.retired):
                    wait_s = self._until_rows_s(actor_slot)
                    if wait_s <= 0 and self._limit is not None:
                        wait_s = self._until_allowed_s(actor_slot, self._limit)
                    elif actor_slot in self._turns:
                        self._turns.remove(actor_slot)  # a rescale has moved its rows
                    if wait_s <= 0:
                        self._give(actor_slot)
                        return actor_slot.pieces
                    self.changed.wait(wait_s)
                return ()
            finally:
                if actor_slot in self._turns:
                    self._turns.remove(actor_slot)
                    self.changed.notify_all()

    def _give(self, actor_slot: ActorSlot) -> None:
        limit = self._limit
        rows_max = self._max_rows if limit is None else min(self._max_rows, limit.burst)
        actor_slot.pieces = self.waiting.pop(
            actor_slot.index, rows_max, self._bytes_max, divides=limit is not None
        )
        actor_slot.since_s = time.monotonic()
        actor_slot.untaken += 1
        actor_slot.in_flight = rows_of(actor_slot.pieces)
        if limit is not None:
            limit.started(actor_slot.since_s, actor_slot.in_flight)

    def _until_allowed_s(self, actor_slot: ActorSlot, limit: RateLimit) -> float:
        """Return the seconds until the rate limit gives an actor rows; actors wait in turn."""
        if actor_slot not in self._turns:
            self._turns.append(actor_slot)
        if self._turns[0] is not actor_slot:
            return LOOK_S
        now_s = time.monotonic()
        waiting = self.waiting.rows[actor_slot.index]
        missing = min(waiting, self._max_rows, limit.burst) - limit.available(now_s)
        if missing <= 0:
            return 0.0
        limit.refused(now_s)
        return min(LOOK_S, max(LEAST_S, missing / limit.per_s))

    def begin_again(self, actor_slot: ActorSlot, rows: int) -> bool:
        """Wait until the rate limit lets an actor handle rows again.

        Actors wait in turn. All rows of the actor begin when one token is available. The limit
        takes the other tokens in advance, so later rows wait longer.

        Returns:
            Whether the rows begin; if not, the actor gives them back.
        """
        limit = self._limit
        if limit is None:
            return not self.interrupted()
        with self.changed:
            self._turns.append(actor_slot)
            try:
                while not self.interrupted():
                    now_s, wait_s = time.monotonic(), LOOK_S
                    if self._turns[0] is actor_slot:
                        if limit.available(now_s) >= 1:
                            limit.started(now_s, rows)
                            return True
                        limit.refused(now_s)
                        wait_s = min(LOOK_S, max(LEAST_S, 1 / limit.per_s))
                    self.changed.wait(wait_s)
                return False
            finally:
                self._turns.remove(actor_slot)
                self.changed.notify_all()

    def rate_limit(self, now_s: float) -> RateLimitStatus | None:
        """Return the status of the rate limit; ``None`` without one."""
        with self.changed:
            return None if self._limit is None else self._limit.status(now_s)

    @property
    def _bytes_max(self) -> int:
        """Most bytes of content of a call, a copy of content that stays in the window."""
        return min(BYTES_MAX, self._window_bytes_max // (CALLS_SHARE * len(self.actor_slots)))

    def _until_rows_s(self, actor_slot: ActorSlot) -> float:
        rows = self.waiting.rows[actor_slot.index]
        if self._held or not rows or actor_slot.untaken >= UNTAKEN_MAX:
            return LOOK_S
        if rows >= self._max_rows:
            return 0.0
        left_s = self.waiting.since_s[actor_slot.index] + self._max_wait_s - time.monotonic()
        return min(LOOK_S, left_s)

    def interrupted(self) -> bool:
        """Whether an actor between two calls gives back its remaining rows."""
        return self._held or self.ending

    def pause(self, seconds: float) -> None:
        """Wait until :meth:`interrupted`, at most a number of seconds."""
        with self.changed:
            self.changed.wait_for(self.interrupted, seconds)

    def deliver(
        self, actor_slot: ActorSlot, done: Done, rest: Sequence[RowSlice], unhandled: int = 0
    ) -> None:
        """Store the results of finished rows, and put the other rows back at the front.

        Args:
            actor_slot: The actor.
            done: The results, with the pieces that they complete.
            rest: The other pieces.
            unhandled: Number of rows that took a token, and that the handler did not get.
        """
        with self.changed:
            if self._limit is not None:
                self._limit.not_started(unhandled)
            if done.pieces:
                self._done.append(done)
                rows = rows_of(done.pieces)
                actor_slot.rows += rows
                self._tally.completed += rows
            else:
                actor_slot.untaken -= 1
            self.waiting.give_back(actor_slot.index, rest)
            actor_slot.pieces, actor_slot.in_flight, actor_slot.failing = (), 0, None
            self.changed.notify_all()

    def hold(self, timeout_s: float) -> None:
        """Give actors no rows until :meth:`go_on`, and wait until they finish those that they have.

        Raises:
            DrainTimeoutError: They did not finish in time; actors get rows again.
            NotRunningError: The job is ending.
        """
        with self.changed:
            self._held = True
            self.changed.notify_all()
            idle = self.changed.wait_for(lambda: self.ending or not self.working, timeout_s)
            if idle and not self.ending:
                return
            self._held = False
            self.changed.notify_all()
            if self.ending:
                raise NotRunningError("The job ends, so it cannot be rescaled.", "Run another job.")
            raise DrainTimeoutError(
                f"{self.working} actors did not finish their rows within {timeout_s:g} s, so "
                "nothing has changed.",
                "Raise drain_timeout_s, or make the handler faster.",
            )

    def go_on(self, actor_slots: Sequence[ActorSlot]) -> None:
        """After :meth:`hold`, divide the ring among these actors and give them rows."""
        with self.changed:
            for actor_slot in set(self.actor_slots) - set(actor_slots):
                actor_slot.retired = True
            self.actor_slots = list(actor_slots)
            self.waiting = self.waiting.split_anew(len(actor_slots), time.monotonic())
            self._held = False
            self.changed.notify_all()

    @property
    def working(self) -> int:
        """Number of actors that have rows."""
        return sum(1 for actor_slot in self.actor_slots if actor_slot.pieces)

    def slots(self, now_s: float) -> list[HandlerSlots]:
        """Return the handler slot of each actor, for the status."""
        with self.changed:
            hash_ranges = split_ring(len(self.actor_slots))
            calls = self._row_timings
            usual_s = calls.p99_s if calls.count >= CALLS_MIN else math.inf
            return [
                actor_slot.status(now_s, hash_range, self.waiting.rows[actor_slot.index], usual_s)
                for actor_slot, hash_range in zip(self.actor_slots, hash_ranges, strict=True)
            ]

    # -- counts ------------------------------------------------------------------------------------

    def called(self, rows: int, seconds: float, timings: LatencyHistogram) -> None:
        """Count a call of an actor.

        Args:
            rows: Number of rows that it handled.
            seconds: Its duration.
            timings: Durations of its attempts.
        """
        with self.changed:
            self._tally.timings.add_all(timings)
            if rows:
                self._row_timings.add(seconds / rows)

    def failed(self, actor_slot: ActorSlot, attempts: int, rows: str, reason: str) -> None:
        """Count a failed attempt.

        Args:
            actor_slot: The actor.
            attempts: Number of failed attempts of these rows.
            rows: Name of the rows.
            reason: The error.
        """
        with self.changed:
            now_s, before = time.monotonic(), actor_slot.failing
            self._tally.failed_attempts += 1
            self._tally.newest_error = NewestError(reason, now_s)
            since_s = now_s if attempts == 1 or before is None else before[0]
            actor_slot.failing = since_s, f"{rows} failed {times(attempts)}: {reason}"

    def totals(self) -> Totals:
        """Return the outcomes of messages since the start, without those of outputs."""
        with self.changed:
            tally = self._tally
            counters = HandlerCounters().counters(handlers=False, sink=False)
            counters["completed"] = tally.completed
            counters["failedAttempts"] = tally.failed_attempts
            return Totals(counters, tally.timings.status(), None, tally.newest_error)

    # -- results -----------------------------------------------------------------------------------

    def next_done(self) -> Done | None:
        """Wait for the oldest results; return ``None`` when there will be no more.

        Raises:
            DrainTimeoutError: Actors did not finish before the deadline of a drain.
        """
        with self.changed:
            while not self.stopping:
                if self._done:
                    return self._done.popleft()
                if self.error is not None:
                    return None
                if self.drain_until_s is not None:
                    if not self.working:
                        return None
                    if time.monotonic() > self.drain_until_s:
                        raise DrainTimeoutError(
                            f"{self.working} actors did not finish their rows within the drain "
                            "timeout. Their rows are not acknowledged, and are delivered again.",
                            "Raise drain_timeout_s, or make the handler faster.",
                        )
                self.changed.wait(LOOK_S)
            return None

    def taken(self, done: Done, pieces: Sequence[RowSlice]) -> None:
        """Mark a call as taken, and queue the entries that ``pieces`` complete for the commit.

        Afterwards the caller takes no more results of this call.
        """
        with self.changed:
            done.actor_slot.untaken -= 1
            self._handled += divided_messages(pieces)
            for where, ids in entries_done(pieces).items():
                self._to_commit.setdefault(where, []).extend(ids)
            self.changed.notify_all()

    def next_to_commit(self) -> tuple[Entries, HandledMessages]:
        """Wait for entries whose results were taken; also return such messages of other entries.

        Both are empty when the job stops and all are returned.
        """
        with self.changed:
            while not (self._to_commit or self.stopping):
                self.changed.wait(LOOK_S)
            entries, self._to_commit = self._to_commit, {}
            handled, self._handled = self._handled, []
            return entries, handled
