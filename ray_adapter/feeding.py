"""Feeds one actor: rows, retries in their place, and the same rows again after a death."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keyshard.arrow.messages import messages_of
from keyshard.core.lanes.failure import Failure, FailureKind, times
from keyshard.core.message import Message
from keyshard.errors import HandlerFailedError, HandlerProcessError
from keyshard.handlers.outcome_log import OutcomeLog
from keyshard.handlers.processes import Reply
from ray_adapter.crew import Crew, Unsendable
from ray_adapter.exchange import Done, Exchange, Seat
from ray_adapter.options import JobOptions
from ray_adapter.portions import Piece, rows_of, whole_pieces
from ray_adapter.wire import arrow_rows, message_rows


class Feeder:
    """The work of one thread, for one actor.

    Args:
        exchange: Where rows come from and results go.
        seat: Of the actor.
        crew: Calls it.
        options: Of the job.
        outcomes: Where first failures are logged; that of all feeders.
    """

    def __init__(
        self, exchange: Exchange, seat: Seat, crew: Crew, options: JobOptions, outcomes: OutcomeLog
    ) -> None:
        self._exchange = exchange
        self._seat = seat
        self._crew = crew
        self._options = options
        self._outcomes = outcomes

    def run(self) -> None:
        """Until the job ends, or the actor is retired.

        Raises:
            HandlerFailedError: A message failed at its last attempt.
            KeyShardError: The actor cannot be had again, or its answer.
            GivenUp: The job has stopped.
        """
        while self._fed():
            pass

    def _fed(self) -> bool:
        """One call, of which nothing stays here: its rows leave the window when they are taken."""
        pieces = self._exchange.next_rows(self._seat)
        if not pieces:
            return False
        rows, results = self._handled(pieces)
        whole = whole_pieces(pieces, rows)
        done = pieces[:whole]
        self._exchange.deliver(
            self._seat, Done(self._seat, done, results[: rows_of(done)]), pieces[whole:]
        )
        return True

    def _handled(self, pieces: Sequence[Piece]) -> tuple[int, list[Any]]:
        """How many rows were handled, from the first on, and their results."""
        arrow = self._options.takes == "arrow"
        rows = arrow_rows(pieces) if arrow else message_rows(pieces)
        results: list[Any] = []
        done = attempts = 0
        began_s = 0.0
        lost = False
        while True:
            if not attempts:
                began_s = time.monotonic()
            try:
                if lost:
                    # Also where the rest is left to another actor: what this one was in has ended.
                    self._seat.actor = self._crew.again(self._seat.actor)
                    lost = False
                    if self._exchange.interrupted():
                        return done, results
                outcome = self._crew.call(self._seat.actor, rows, done)
            except HandlerProcessError as exc:
                if self._exchange.ending:
                    return done, results
                lost = True
                self._seat.deaths += 1
                failure = Failure.of(exc)
            except Unsendable as exc:
                failure = Failure(FailureKind.UNFIT, exc.reason, exc)
                raise self._failed(pieces, exc.row, 1, failure, lost) from exc
            else:
                results += outcome.results
                if outcome.failed is None:
                    return outcome.done, results
                if outcome.done > done:
                    done, attempts, began_s = outcome.done, 0, time.monotonic()
                failure = _failure_of(outcome.failed)
            attempts += 1
            elapsed_s = time.monotonic() - began_s
            decision = self._options.retry.decide(attempts, elapsed_s, failure)
            if decision.delay_s is None or failure.kind is FailureKind.UNFIT:
                raise self._failed(pieces, done, attempts, failure, lost) from failure.error
            self._warn(attempts, _message(pieces, done), failure, decision.delay_s)
            self._exchange.pause(decision.delay_s)
            if self._exchange.interrupted() and not lost:
                return done, results

    def _warn(self, attempts: int, message: Message, failure: Failure, delay_s: float) -> None:
        """Log a first failure: the retries may take long, and then end the job."""
        if attempts > 1:
            return
        with self._exchange.changed:  # guards the log, too
            self._outcomes.retried_message(
                message, message.routing_key, failure.error, failure.reason, delay_s
            )

    def _failed(
        self, pieces: Sequence[Piece], done: int, attempts: int, failure: Failure, lost: bool
    ) -> HandlerFailedError:
        """The error that ends the job."""
        after = (
            "Nothing of it, or behind it in its key, is acknowledged; it comes again. Mend the "
            "handler, or let it return a result for such a message."
        )
        if not lost and self._options.takes == "messages":
            message = _message(pieces, done)
            key = message.routing_key
            return HandlerFailedError(
                f"The handler {self._crew.handler_name} failed {times(attempts)} with message "
                f"{message.message_id} of {message.topic}, partition {message.partition}, key "
                f"{key!r}: {failure.reason}. {after}",
                topic=message.topic, key=key, message_id=str(message.message_id),
            )  # fmt: skip
        first, last = _message(pieces, done), _message(pieces, rows_of(pieces) - 1)
        return HandlerFailedError(
            f"The handler {self._crew.handler_name} failed {times(attempts)} with "
            f"{rows_of(pieces) - done} rows, from message {first.message_id} of {first.topic}, "
            f"partition {first.partition}, key {first.routing_key!r}, to {last.message_id} of "
            f"{last.topic}, partition {last.partition}, key {last.routing_key!r}: "
            f"{failure.reason}. {after}",
            topic=first.topic, key=first.routing_key, message_id=str(first.message_id),
        )  # fmt: skip


def _failure_of(reply: Reply) -> Failure:
    """The error that a handler raised in its actor, with file and line."""
    failure = Failure.of(reply.to_error())
    if not reply.where:
        return failure
    return replace(failure, reason=f"{failure.reason.rstrip('.')} (at {reply.where})")


def _message(pieces: Sequence[Piece], row: int) -> Message:
    for piece in pieces:
        if row < piece.block.rows:
            message: Message = messages_of(piece.where, piece.block)[row]
            return message
        row -= piece.block.rows
    raise AssertionError(f"row {row} is not there")
