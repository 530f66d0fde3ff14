"""Dispatches messages of lanes to executors, and decides what follows from each attempt."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import islice

from keyshard.config.handlers import HandlerConfig
from keyshard.coordinator.rescale import Blocking
from keyshard.core.lanes.bulk import HANGS_S, Arrivals, Bulk, Pace
from keyshard.core.lanes.circuit_breaker import ON_TRIAL_MAX, CircuitBreaker
from keyshard.core.lanes.failure import Failure, FailureKind, times
from keyshard.core.lanes.key_queue import Arrival, KeyQueue, Work
from keyshard.core.lanes.lane_status import (
    HandlerCounters,
    NewestError,
)
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.lanes.rate_limit import RateLimit
from keyshard.core.lanes.retry_policy import FailedAttempt
from keyshard.core.message import Produce
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import HandlerFailedError, KeyShardError, UnfitHandlerError
from keyshard.handlers.executors import Executor
from keyshard.handlers.failed_messages import FailedMessages
from keyshard.handlers.outcomes import FailureLog, Notes
from keyshard.handlers.outputs import HandlerOutputs

_log = logging.getLogger(__name__)


class Dispatcher:
    """A :class:`~keyshard.handlers.executors.WorkSource` over the lanes of one run.

    Args:
        lanes: Waiting and running messages.
        handling: Retry and failure policies.
        outcomes: Log of failures.
    """

    def __init__(self, lanes: Lanes, handling: HandlerConfig, outcomes: FailureLog) -> None:
        self.lanes = lanes
        self.arrivals = Arrivals(lanes)
        """Entries that are not in lanes yet."""
        self.tally = HandlerCounters()
        self.notes = Notes()
        """Notes of handlers, which any thread may read."""
        self.changed = threading.Condition()
        """Guards lanes, arrivals, tally and circuit; notified when there is work."""
        self.circuit = CircuitBreaker()
        self.stopping = False
        """Whether no new entry begins."""
        self.closed = False
        """Whether no message is handed out any more."""
        self.error: KeyShardError | None = None
        """The error that ends the source."""
        self.parking: FailedMessages | None = None
        """Handles messages that exhausted their retries; set before any message is handed out."""
        self.outputs: HandlerOutputs | None = None
        """Publishes what handlers produce; ``None`` without a sink."""
        self.executor: Executor
        """Runs handlers, and is woken; set before any message can be runnable."""
        self._retry = handling.retry
        self._outcomes = outcomes
        self._policy_failed = False
        self._on_trial: list[KeyQueue] = []
        self._trial_logged = 0
        """Number of the opening of the circuit breaker for which keys on trial were logged."""
        self._openings = 0
        """Number of openings of the circuit breaker that were logged."""
        self._has_outage = handling.on_failure != "stop"
        """Whether the circuit breaker may open. With ``on_failure="stop"`` it never opens."""
        self._pace = Pace()
        self.rate = (
            None if handling.rate_limit is None
            else RateLimit(handling.rate_limit, handling.rate_burst)
        )  # fmt: skip
        """Limits the calls of the handler; ``None``: no limit."""
        self._rejects_keyless = handling.null_keys == "reject"

    def fail(self, error: KeyShardError) -> None:
        """End the source; only the first error is kept."""
        if self.error is None:
            self.error = error
        self.stopping = True

    # -- called by executors, which hold ``changed`` ----------------------------------------------

    def next(self) -> Work | None:
        if self.stopping:
            self.drain()
            if not self.circuit.closed:
                return None
        now = time.monotonic()
        full = self.outputs is not None and self.outputs.full
        if self.closed or full or self._is_held_back(now):
            return None
        may_start = self._may_start(now)
        work = self.lanes.next_of(self.circuit.controls(), now)
        if work is not None and not self._parking.claims(work):
            return self._started(work, now, control=True)
        while may_start and (work := self._next_waiting(now)) is not None:
            if not self._parking.claims(work):
                return self._started(work, now)
        if self.arrivals.rows and (self.lanes.waiting or not self.in_bulk(now)):
            self.distribute()
            return self.next()
        if self.rate is not None:
            self.rate.rested(now)
        return None

    def _started(self, work: Work, now_s: float, *, control: bool = False) -> Work:
        self.circuit.started(_lane(work), control=control)
        if self.rate is not None:
            self.rate.started(now_s)
        return work

    def _is_held_back(self, now_s: float) -> bool:
        """Whether the rate limit lets no handler start now."""
        rate = self.rate
        if rate is None or rate.available(now_s):
            return False
        self.distribute()
        if self.lanes.runnable:
            rate.refused(now_s)
        else:
            rate.rested(now_s)
        return True

    def next_bulk(self) -> Bulk | None:
        if not self.arrivals.rows or self.closed:
            return None
        now = time.monotonic()
        return self.arrivals.start(now) if self.in_bulk(now) else None

    def end_bulk(self, bulk: Bulk, *, failed: bool) -> Work | None:
        if failed or bulk.apart:
            self.distribute()
            return bulk.work
        self.arrivals.finish(bulk)
        self._count(bulk)
        return None

    def part(self, bulk: Bulk) -> Work:
        if not bulk.apart:
            self._pace.hung(time.monotonic())
            self.distribute()
        assert bulk.work is not None, "its last message has started"
        return bulk.work

    def _next_waiting(self, now_s: float) -> Work | None:
        work = self._next_on_trial(now_s)
        return work or self.lanes.next(now_s, untried_first=self.pauses)

    def _next_on_trial(self, now_s: float) -> Work | None:
        """Return the next message of a key on trial; ``None`` if there is none.

        While only failing keys can make room in the window, the keys that failed first are on
        trial: see :mod:`keyshard.core.lanes.circuit_breaker`.
        """
        if not self.circuit.judges(now_s):
            return None
        may_try = self.circuit.may_try
        kept = [queue for queue in self._on_trial if queue.work and queue.reason is not None]
        # A key that has run since an earlier round hangs. Another one takes its place on trial.
        kept = [queue for queue in kept if not queue.running or not may_try(_name(queue))]
        if len(kept) < ON_TRIAL_MAX:
            oldest = self.lanes.oldest_failed(ON_TRIAL_MAX, now_s)
            kept += [one for one in oldest if one not in kept][: ON_TRIAL_MAX - len(kept)]
        self._on_trial = kept
        keys = [_name(queue) for queue in kept]
        self.circuit.put_on_trial(keys)
        if keys and self._trial_logged != self.circuit.openings:
            self._trial_logged = self.circuit.openings
            _log.warning("failing keys fill the window: %s", self.circuit)
        return self.lanes.next_failed([queue for queue in kept if may_try(_name(queue))], now_s)

    def _may_start(self, now_s: float) -> bool:
        """Ask the circuit breaker whether a handler may start; log its opening."""
        may_start = self.circuit.may_start(now_s)
        if self.circuit.openings != self._openings:
            self._openings = self.circuit.openings
            _log.warning("handlers are paused: %s", self.circuit)
        return may_start

    def judge(self, work: Work, error: BaseException) -> FailedAttempt:
        failure, queue, now = Failure.of(error), work.queue, time.monotonic()
        circuit = self.circuit
        keeps = queue.outage == circuit.openings or circuit.counts_on(queue.first_failed_s)
        attempts = queue.attempts if keeps else 0
        since_s = queue.failing_since_s if attempts else work.started_s
        decision = self._retry.decide(attempts + 1, now - since_s, failure)
        if decision.problem and not self._policy_failed:
            self._policy_failed = True
            _log.warning(
                "the retry policy failed: %s. The default policy decides instead. Further "
                "failures are not logged",
                decision.problem,
            )
        return FailedAttempt(failure, decision)

    def finish(
        self,
        work: Work,
        seconds: float,
        setback: FailedAttempt | None,
        produced: Sequence[Produce] = (),
    ) -> None:
        self.tally.attempt(seconds, failed=setback is not None)
        if setback is not None:
            self._erred(setback)
        self._pace.add((seconds,))
        if setback is None and self.outputs is not None and self.outputs.take(work, produced):
            return
        self.conclude(work, setback)

    def _erred(self, setback: FailedAttempt) -> None:
        self.tally.newest_error = NewestError(setback.failure.reason, time.monotonic())

    def conclude(self, work: Work, setback: FailedAttempt | None) -> None:
        """Decide what follows from an attempt whose outputs, if any, are confirmed."""
        if self._is_outage(work, setback, time.monotonic()):
            return
        if setback is None:
            self.notes.forget((work.message,))
            self._parking.handled(work)
            return
        now, failure, delay_s = time.monotonic(), setback.failure, setback.decision.delay_s
        if failure.kind is FailureKind.UNFIT:
            self.lanes.again(work, math.inf, failure.reason)
            assert isinstance(failure.error, UnfitHandlerError)
            self.fail(failure.error)
        elif delay_s is not None:
            if not work.queue.attempts:
                self._outcomes.retried(work, failure.error, failure.reason, delay_s)
            self.lanes.again(work, now + delay_s, failure.reason)
        else:
            self._give_up(work, failure)

    def _is_outage(self, work: Work, setback: FailedAttempt | None, now_s: float) -> bool:
        """Report an attempt to the circuit breaker; ``True``: a mass failure, which is requeued."""
        circuit, lane = self.circuit, _lane(work)
        kind = None if setback is None else setback.failure.kind
        if setback is None or kind is FailureKind.REJECTED:
            if circuit.succeeded(lane, work.started_s, now_s):
                _log.warning(
                    "a handler succeeded again after %.1f s: handlers continue",
                    now_s - circuit.since_s,
                )
                self.wake()
            return False
        if kind is not FailureKind.FAILED or not self._has_outage:
            circuit.undecided(lane, now_s)
            return False
        queue, reason = work.queue, setback.failure.reason
        counts = circuit.failed(lane, now_s, reason, queue.first_failed_s)
        self._may_start(now_s)
        if queue.first_failed_s is None:
            queue.first_failed_s = now_s
        if queue.outage != circuit.openings:
            queue.outage = circuit.openings
            if not circuit.counts_on(queue.first_failed_s):
                queue.attempts = 0
        if counts:
            return False
        not_before_s = max(now_s + (setback.decision.delay_s or 0.0), circuit.held_until_s)
        self.lanes.again(work, not_before_s, reason, counted=False)
        return True

    def _give_up(self, work: Work, failure: Failure) -> None:
        self.notes.forget((work.message,))
        if self._parking.give_up(work, failure):
            return
        self.lanes.again(work, math.inf, failure.reason)
        self.fail(
            HandlerFailedError(
                f"Message {work.message.message_id} of {work.message.topic}, key "
                f"{work.queue.key!r}, failed {times(work.queue.attempts)}: {work.queue.reason}. "
                "It is not acknowledged, and is delivered again.",
                "Correct the handler, and start the source again.",
                message_id=str(work.message.message_id),
                key=work.queue.key,
            )
        )

    def look(self, *, is_full: bool) -> None:
        """Update the circuit breaker once per turn of the run, with ``changed`` held.

        Args:
            is_full: Whether nothing more can be received for now.
        """
        now = time.monotonic()
        self.circuit.stuck(now, is_stuck=is_full and self.lanes.all_failed)
        if self.arrivals:
            bulk, running = self.arrivals.bulk, self.lanes.running.values()
            oldest_s = min((work.started_s for work in running), default=now)
            if bulk is not None and now - bulk.running_since_s() >= HANGS_S:
                self._pace.hung(now)
                self.distribute()
            elif now - oldest_s >= HANGS_S or not self.in_bulk(now):
                self.distribute()

    # -- entries that are not in lanes yet; ``changed`` is held ------------------------------------

    def in_bulk(self, now_s: float) -> bool:
        """Whether bulks can handle entries, without lanes; see :mod:`keyshard.core.lanes.bulk`.

        Handlers must return at once. No failure, retry, parked key, moving range or stop may be
        pending. A sink, a rate limit, ``null_keys="reject"`` and some executors always need lanes.
        """
        return (
            self._pace.fast(now_s)
            and self.executor.takes_bulks
            and self.circuit.calm
            and self.outputs is None
            and self.rate is None
            and not (self.stopping or self._rejects_keyless or self.lanes.held.ranges)
            and self.lanes.next_due_s() is None
            and self._parking.idle
        )

    def add(self, arrival: Arrival, *, in_bulk: bool) -> None:
        """Take a received entry: for a bulk, or into the lanes."""
        if in_bulk:
            self.arrivals.add(arrival)
        else:
            self.distribute()
            self.lanes.add(*arrival)

    def distribute(self) -> None:
        """Put every message into a lane, so that the lanes know all of them."""
        if self.arrivals and (bulk := self.arrivals.distribute()) is not None:
            self._count(bulk)

    def drain(self) -> None:
        """Start no further entry."""
        self.distribute()
        self.lanes.drain()

    def _count(self, bulk: Bulk) -> None:
        """Count the done messages of a bulk. The circuit breaker is calm: see :meth:`in_bulk`."""
        durations = bulk.durations()
        if not durations:
            return
        self.notes.forget(islice(bulk.messages, len(durations)))
        self.tally.successes(durations)
        self._pace.add(durations)
        # Without a key, a message is a key of its own.
        names = [
            one.message_id if (key := one.routing_key) is None else key for one in bulk.messages
        ]
        ended_s = bulk.ends[len(durations) - 1]
        self.circuit.succeeded_each(names, ended_s - durations[-1], ended_s)

    @property
    def pauses(self) -> bool:
        """Whether the circuit breaker pauses handlers; ``changed`` is held."""
        return not self.circuit.closed

    def wake(self) -> None:
        """Let executors start runnable messages; called with ``changed`` held."""
        if not self._may_start(time.monotonic()) and not any(True for _ in self.circuit.controls()):
            return
        if self.executor.resting and not self._is_held_back(time.monotonic()):
            due_s = self.lanes.next_due_s()
            due = due_s is not None and due_s <= time.monotonic()
            arrived = self.arrivals.rows > 0 and self.arrivals.bulk is None
            self.executor.wake(self.lanes.runnable + due + arrived)

    @property
    def _parking(self) -> FailedMessages:
        assert self.parking is not None, "handlers run after the dead letters were read"
        return self.parking


def _lane(work: Work) -> Hashable:
    return _name(work.queue)


def _name(queue: KeyQueue) -> Hashable:
    """Identify a key; the queue of a message without a key identifies that message."""
    return queue if queue.key is None else queue.key


# -- Lanes pause for keys whose range moves, and resume under its new owner ------------------------

LOOK_S = 0.002
"""Interval at which the end of handlers is checked, seconds. Waiting for ``changed`` instead would
consume a notification meant for an executor."""


class LanePause:
    """The :class:`~keyshard.coordinator.rescale.Drainable` of handlers.

    The rescaling thread calls it.

    Args:
        run: Owner of the lanes.
        wake: Called, with the lock held, after a move: messages are runnable, and the number of
            ranges may have changed.
    """

    def __init__(self, run: Dispatcher, wake: Callable[[], None]) -> None:
        self._run = run
        self._lanes = run.lanes
        self._changed = run.changed
        self._wake = wake

    def hold(self, slots: Sequence[HashRange]) -> None:
        with self._changed:
            self._run.distribute()
            self._lanes.hold(slots)

    def wait_idle(self, timeout_s: float) -> Blocking | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            with self._changed:
                oldest = min(self._lanes.blocking(), key=lambda work: work.started_s, default=None)
            if oldest is None:
                return None
            if now_s >= deadline_s:
                message = oldest.message
                return Blocking(
                    message.routing_key, str(message.message_id), now_s - oldest.started_s
                )
            time.sleep(min(LOOK_S, deadline_s - now_s))

    def reassign(self, owners: Sequence[int]) -> None:
        with self._changed:
            self._run.distribute()
            self._lanes.reassign(max(owners) + 1, owners.__getitem__)

    def resume(self) -> None:
        with self._changed:
            self._lanes.resume()
            self._wake()
