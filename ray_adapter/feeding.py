"""Feeds one actor: gives it rows, retries failures in place, repeats rows after a death."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keyshard.columns.messages import messages_of
from keyshard.core.lanes.failure import Failure, FailureKind, times
from keyshard.core.message import Message
from keyshard.core.range_watchdog import shown_key
from keyshard.errors import HandlerFailedError, HandlerProcessError
from keyshard.handlers.outcomes import FailureLog
from keyshard.handlers.process_executor import Reply
from ray_adapter.actor import CallResult, arrow_rows, message_rows
from ray_adapter.actor_pool import ActorPool, UnserializableResult
from ray_adapter.job_state import ActorSlot, Done, JobState
from ray_adapter.options import JobOptions
from ray_adapter.row_slices import RowSlice, rows_of, whole_pieces

_AFTER = "Unacknowledged messages are delivered again."
_REMEDY = "Correct the handler, or return a result for such a message."


class ActorFeeder:
    """The thread of one actor.

    Args:
        exchange: State of the job, which provides rows and receives results.
        actor_slot: The actor, and its work.
        actor_pool: Calls and restarts the actor.
        options: Options of the job.
        outcomes: Log of first failures; all feeders share it.
    """

    def __init__(
        self,
        exchange: JobState,
        actor_slot: ActorSlot,
        actor_pool: ActorPool,
        options: JobOptions,
        outcomes: FailureLog,
    ) -> None:
        self._exchange = exchange
        self._actor_slot = actor_slot
        self._actor_pool = actor_pool
        self._options = options
        self._outcomes = outcomes

    def run(self) -> None:
        """Feed the actor until the job ends or the actor is retired.

        Raises:
            HandlerFailedError: A message failed at its last attempt.
            KeyShardError: The actor cannot be restarted, or its answer cannot be obtained.
            JobCancelled: The job has stopped.
        """
        while self._fed():
            pass

    def _fed(self) -> bool:
        """Make one call; return false if the job ends or the actor is retired.

        Keep no references to the rows, so that they can leave the window.
        """
        pieces = self._exchange.next_rows(self._actor_slot)
        if not pieces:
            return False
        rows, results, begun = self._handled(pieces)
        whole = whole_pieces(pieces, rows)
        done = pieces[:whole]
        self._exchange.deliver(
            self._actor_slot, Done(self._actor_slot, done, results[: rows_of(done)]),
            pieces[whole:], rows_of(pieces) - begun,
        )  # fmt: skip
        return True

    def _handled(self, pieces: Sequence[RowSlice]) -> tuple[int, list[Any], int]:
        """Return the number of rows handled, from the first on; their results; the number begun.

        A row that began has used its token of the rate limit, also if its attempt failed.
        """
        arrow = self._options.takes == "arrow"
        rows = arrow_rows(pieces) if arrow else message_rows(pieces)
        results: list[Any] = []
        done = attempts = begun = 0
        began_s = 0.0
        lost = False
        while True:
            if not attempts:
                began_s = time.monotonic()
            try:
                if lost:
                    # Restart also if the rows go to another actor: the old process has ended.
                    self._actor_slot.actor = self._actor_pool.again(self._actor_slot.actor)
                    lost = self._actor_slot.lost = False
                    if begun > done or self._exchange.interrupted():
                        return done, results, begun
                outcome = self._called(rows, done)
            except HandlerProcessError as exc:
                if self._exchange.ending:
                    return done, results, rows_of(pieces)
                lost = self._actor_slot.lost = True
                self._actor_slot.deaths += 1
                failure = Failure.of(exc)
            except UnserializableResult as exc:
                failure = Failure(FailureKind.UNFIT, exc.reason, exc)
                raise self._failed(pieces, exc.row, 1, failure, lost) from exc
            else:
                results += outcome.results
                if outcome.failed is None:
                    return outcome.done, results, outcome.done
                if outcome.done > done:
                    done, attempts, began_s = outcome.done, 0, time.monotonic()
                failure = _failure_of(outcome.failed)
            attempts += 1
            self._exchange.failed(
                self._actor_slot, attempts, self._name_of(pieces, done), failure.reason
            )
            elapsed_s = time.monotonic() - began_s
            decision = self._options.retry.decide(attempts, elapsed_s, failure)
            if decision.delay_s is None or failure.kind is FailureKind.UNFIT:
                raise self._failed(pieces, done, attempts, failure, lost) from failure.error
            self._warn(attempts, _message(pieces, done), failure, decision.delay_s)
            self._exchange.pause(decision.delay_s)
            again = rows_of(pieces) - done if lost or arrow else 1
            begun = done if self._exchange.begin_again(self._actor_slot, again) else done + again
            if not lost and (begun > done or self._exchange.interrupted()):
                return done, results, begun

    def _called(self, rows: Any, done: int) -> CallResult:
        """Call the actor with rows, from row ``done`` on."""
        self._actor_slot.called_at_s = began_s = time.monotonic()
        try:
            outcome = self._actor_pool.call(self._actor_slot.actor, rows, done)
        finally:
            self._actor_slot.called_at_s = None
        self._exchange.called(outcome.done - done, time.monotonic() - began_s, outcome.timings)
        return outcome

    def _name_of(self, pieces: Sequence[RowSlice], done: int) -> str:
        """Return what an actor tries again: a message, or all rows of an Arrow batch."""
        message = _message(pieces, done)
        key = None if message.routing_key is None else shown_key(message.routing_key)
        if self._options.takes == "messages":
            return f"message {message.message_id} of key {key!r}"
        return f"{rows_of(pieces)} rows from message {message.message_id} of key {key!r} on"

    def _warn(self, attempts: int, message: Message, failure: Failure, delay_s: float) -> None:
        """Log a first failure, because retries may take long and then end the job."""
        if attempts > 1:
            return
        with self._exchange.changed:  # also guards the log
            self._outcomes.retried_message(
                message, message.routing_key, failure.error, failure.reason, delay_s
            )

    def _failed(
        self, pieces: Sequence[RowSlice], done: int, attempts: int, failure: Failure, lost: bool
    ) -> HandlerFailedError:
        """Return the error that ends the job."""
        if not lost and self._options.takes == "messages":
            message = _message(pieces, done)
            key = message.routing_key
            return HandlerFailedError(
                f"The handler {self._actor_pool.handler_name} failed {times(attempts)} with "
                f"message {message.message_id} of {message.topic}, partition {message.partition}, "
                f"key {key!r}: {failure.reason}. {_AFTER}",
                _REMEDY,
                topic=message.topic, key=key, message_id=str(message.message_id),
            )  # fmt: skip
        first, last = _message(pieces, done), _message(pieces, rows_of(pieces) - 1)
        return HandlerFailedError(
            f"The handler {self._actor_pool.handler_name} failed {times(attempts)} with "
            f"{rows_of(pieces) - done} rows, from message {first.message_id} of {first.topic}, "
            f"partition {first.partition}, key {first.routing_key!r}, to {last.message_id} of "
            f"{last.topic}, partition {last.partition}, key {last.routing_key!r}: "
            f"{failure.reason}. {_AFTER}",
            _REMEDY,
            topic=first.topic, key=first.routing_key, message_id=str(first.message_id),
        )  # fmt: skip


def _failure_of(reply: Reply) -> Failure:
    """Return the error that a handler raised in its actor, with file and line."""
    failure = Failure.of(reply.to_error())
    if not reply.where:
        return failure
    return replace(failure, reason=f"{failure.reason.rstrip('.')} (at {reply.where})")


def _message(pieces: Sequence[RowSlice], row: int) -> Message:
    for piece in pieces:
        if row < piece.block.rows:
            message: Message = messages_of(piece.where, piece.block)[row]
            return message
        row -= piece.block.rows
    raise AssertionError(f"row {row} is not there")
