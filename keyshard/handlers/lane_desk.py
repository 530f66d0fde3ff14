"""The desk of a handler run: hands out messages of lanes, and judges how their handlers ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Hashable

from keyshard.config.handlers import HandlerConfig
from keyshard.core.lanes.circuit import ON_TRIAL_MAX, Circuit
from keyshard.core.lanes.failure import Failure, FailureKind, times
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.lanes.queues import KeyQueue, Work
from keyshard.core.lanes.retrying import Setback
from keyshard.core.lanes.tally import Tally
from keyshard.errors import HandlerFailedError, KeyShardError, UnfitHandlerError
from keyshard.handlers.executors import Workers
from keyshard.handlers.outcome_log import OutcomeLog
from keyshard.handlers.parked_lanes import ParkedLanes

_log = logging.getLogger(__name__)


class LaneDesk:
    """A :class:`~keyshard.handlers.executors.Desk` over the lanes of one run.

    Args:
        lanes: What waits and runs.
        handling: The policies.
        outcomes: Where failures are logged.
    """

    def __init__(self, lanes: Lanes, handling: HandlerConfig, outcomes: OutcomeLog) -> None:
        self.lanes = lanes
        self.tally = Tally()
        self.changed = threading.Condition()
        """Guards lanes, tally and circuit; notified when there is work."""
        self.circuit = Circuit()
        self.stopping = False
        """Whether no entry is begun any more."""
        self.closed = False
        """Whether nothing is handed out any more."""
        self.error: KeyShardError | None = None
        """What ends the source."""
        self.parking: ParkedLanes | None = None
        """What becomes of messages that no handler gets done; set before any is handed out."""
        self.workers: Workers | None = None
        """Who is woken; set before anything can be runnable."""
        self._retry = handling.retry
        self._outcomes = outcomes
        self._policy_failed = False
        self._on_trial: list[KeyQueue] = []
        self._trial_told = 0
        """Opening of which it is logged that keys are on trial."""
        self._openings = 0
        """Openings of the circuit that were logged."""
        self._has_weather = handling.on_failure != "stop"
        """Whether the circuit may open: where the user wants an end at the last attempt, never."""

    def fail(self, error: KeyShardError) -> None:
        """End the source; the first error is why."""
        if self.error is None:
            self.error = error
        self.stopping = True

    # -- called by workers, which hold ``changed`` ------------------------------------------------

    def next(self) -> Work | None:
        if self.stopping:
            self.lanes.drain()
            if not self.circuit.closed:
                return None
        now = time.monotonic()
        if self.closed:
            return None
        may_start = self._may_start(now)
        work = self.lanes.next_of(self.circuit.controls(), now)
        if work is not None and not self._parking.claims(work):
            self.circuit.started(_lane(work), control=True)
            return work
        if not may_start:
            return None
        while (work := self._next_waiting(now)) is not None:
            if not self._parking.claims(work):
                self.circuit.started(_lane(work))
                return work
        return None

    def _next_waiting(self, now_s: float) -> Work | None:
        work = self._next_on_trial(now_s)
        return work or self.lanes.next(now_s, untried_first=self.pauses)

    def _next_on_trial(self, now_s: float) -> Work | None:
        """The oldest keys that fail go first in a round, once only they can make room."""
        if not self.circuit.judges(now_s):
            return None
        may_try = self.circuit.may_try
        kept = [queue for queue in self._on_trial if queue.work and queue.reason is not None]
        # One that runs since a round before hangs; it does not keep others from making room.
        kept = [queue for queue in kept if not queue.running or not may_try(_name(queue))]
        if len(kept) < ON_TRIAL_MAX:
            oldest = [one for one in self.lanes.oldest_failed(ON_TRIAL_MAX) if one not in kept]
            kept += oldest[: ON_TRIAL_MAX - len(kept)]
        self._on_trial = kept
        keys = [_name(queue) for queue in kept]
        self.circuit.put_on_trial(keys)
        if keys and self._trial_told != self.circuit.openings:
            self._trial_told = self.circuit.openings
            _log.warning("keys that fail fill the window: %s", self.circuit)
        return self.lanes.next_failed([queue for queue in kept if may_try(_name(queue))], now_s)

    def _may_start(self, now_s: float) -> bool:
        """Ask the circuit; an opening is logged."""
        may_start = self.circuit.may_start(now_s)
        if self.circuit.openings != self._openings:
            self._openings = self.circuit.openings
            _log.warning("handlers pause: %s", self.circuit)
        return may_start

    def judge(self, work: Work, error: BaseException) -> Setback:
        failure, queue, now = Failure.of(error), work.queue, time.monotonic()
        circuit = self.circuit
        keeps = queue.weather == circuit.openings or circuit.counts_on(queue.first_failed_s)
        attempts = queue.attempts if keeps else 0
        since_s = queue.failing_since_s if attempts else work.started_s
        decision = self._retry.decide(attempts + 1, now - since_s, failure)
        if decision.problem and not self._policy_failed:
            self._policy_failed = True
            _log.warning(
                "the retry policy failed: %s. The default one decides instead; this is named once",
                decision.problem,
            )
        return Setback(failure, decision)

    def finish(self, work: Work, setback: Setback | None) -> None:
        now = time.monotonic()
        self.tally.attempt(now - work.started_s, failed=setback is not None)
        if self._is_weather(work, setback, now):
            return
        if setback is None:
            self._parking.handled(work)
            return
        failure, delay_s = setback.failure, setback.decision.delay_s
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

    def _is_weather(self, work: Work, setback: Setback | None, now_s: float) -> bool:
        """Tell the circuit of an attempt; whether it failed by weather, and is seen to."""
        circuit, lane = self.circuit, _lane(work)
        kind = None if setback is None else setback.failure.kind
        if setback is None or kind is FailureKind.REJECTED:
            if circuit.succeeded(lane, work.started_s, now_s):
                _log.warning(
                    "a message was handled again after %.1f s: handlers go on",
                    now_s - circuit.since_s,
                )
                self.wake()
            return False
        if kind is not FailureKind.FAILED or not self._has_weather:
            circuit.undecided(lane, now_s)
            return False
        queue, reason = work.queue, setback.failure.reason
        counts = circuit.failed(lane, now_s, reason, queue.first_failed_s)
        self._may_start(now_s)
        if queue.first_failed_s is None:
            queue.first_failed_s = now_s
        if queue.weather != circuit.openings:
            queue.weather = circuit.openings
            if not circuit.counts_on(queue.first_failed_s):
                queue.attempts = 0
        if counts:
            return False
        not_before_s = max(now_s + (setback.decision.delay_s or 0.0), circuit.held_until_s)
        self.lanes.again(work, not_before_s, reason, counted=False)
        return True

    def _give_up(self, work: Work, failure: Failure) -> None:
        if self._parking.give_up(work, failure):
            return
        self.lanes.again(work, math.inf, failure.reason)
        self.fail(
            HandlerFailedError(
                f"Message {work.message.message_id} of {work.message.topic}, key "
                f"{work.queue.key!r}, failed {times(work.queue.attempts)}: {work.queue.reason}. It "
                "is not acknowledged and comes again.",
                message_id=str(work.message.message_id),
                key=work.queue.key,
            )
        )

    def look(self, *, is_full: bool) -> None:
        """Take note of the state of one turn of the run, with ``changed`` held.

        Args:
            is_full: Whether nothing more can be received for now.
        """
        is_stuck = is_full and self.lanes.all_failed
        self.circuit.stuck(time.monotonic(), is_stuck=is_stuck)

    @property
    def pauses(self) -> bool:
        """Whether handlers pause; ``changed`` is held."""
        return not self.circuit.closed

    def wake(self) -> None:
        """Let workers start what is runnable; called with ``changed`` held."""
        if not self._may_start(time.monotonic()) and not any(True for _ in self.circuit.controls()):
            return
        if self._staff.resting:
            due_s = self.lanes.next_due_s()
            due = due_s is not None and due_s <= time.monotonic()
            self._staff.wake(self.lanes.runnable + due)

    @property
    def _parking(self) -> ParkedLanes:
        assert self.parking is not None, "handlers run after the dead letters were read"
        return self.parking

    @property
    def _staff(self) -> Workers:
        assert self.workers is not None, "what may ask for them comes after they are made"
        return self.workers


def _lane(work: Work) -> Hashable:
    return _name(work.queue)


def _name(queue: KeyQueue) -> Hashable:
    """What tells keys apart; a message without one is alone in its queue."""
    return queue if queue.key is None else queue.key
