"""The results of a job: taken by the caller, or published to a topic before their commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa

from keyshard.columns.outgoing import Outgoing, OutgoingMessage, outgoing_of
from keyshard.columns.routing import by_topic
from keyshard.config.sink import SinkConfig
from keyshard.core.message import Produce
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import BrokerUnavailableError, KeyShardError
from keyshard.handlers.entry_run import EntryRun, RowsByTopic
from keyshard.handlers.handler_call import Take, as_returned, published
from ray_adapter.actor import published_rows
from ray_adapter.job_state import LOOK_S, Done, JobResults, JobState
from ray_adapter.options import JobOptions, Takes
from ray_adapter.row_slices import entries_done, whole_pieces

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of results after which a checkpoint takes no further call."""
AGAIN_S = 1.0
"""Wait before results that were not confirmed are published again, seconds."""
_log = logging.getLogger(__name__)


def take_of(options: JobOptions, sink: SinkConfig | None) -> Take:
    """Return the function that checks and converts the handler's results in the actors."""
    if sink is None:
        return as_returned
    return published_rows if options.takes == "arrow" else published


class Taking:
    """The results of a call, of which the caller takes one after the other.

    Args:
        exchange: State of the job, which commits the entries.
        done: The call.
        takes: Form of the argument of the handler.
    """

    def __init__(self, exchange: JobState, done: Done, takes: Takes) -> None:
        self._exchange = exchange
        self._done: Done | None = done
        self._takes = takes
        self._taken = 0

    def took(self) -> None:
        """Count a result that the caller has taken."""
        self._taken += 1

    def end(self) -> None:
        """Queue the entries whose results were taken for the commit. Idempotent, from any thread.

        The caller takes no more results of this call that count.
        """
        with self._exchange.changed:
            done, self._done = self._done, None
            if done is None:
                return
            pieces = done.pieces
            if self._taken < len(done.results):
                # An Arrow result is one for all rows.
                whole = whole_pieces(pieces, self._taken) if self._takes == "messages" else 0
                pieces = pieces[:whole]
            self._exchange.taken(done, pieces)


class Results:
    """The results of calls. They are published with the commits of the run.

    With a checkpoint, results are in it before they are sent, and are stored exactly once. Without
    one, a result is stored at least once, before its message is acknowledged.

    Args:
        exchange: State of the job, which provides the calls.
        sink: Options of the sink.
    """

    def __init__(self, exchange: JobState, sink: SinkConfig) -> None:
        self._exchange = exchange
        self._sink = sink
        self._waiting: deque[Done] = deque()
        self._unsettled = self._published = self._confirmed = 0
        """Unconfirmed calls; published and confirmed messages. Guarded by ``exchange.changed``."""

    def add(self, done: Done) -> None:
        """Keep the results of a call for the next commit."""
        with self._exchange.changed:
            self._waiting.append(done)
            self._unsettled += 1
            self._exchange.changed.notify_all()

    def commit_all(self, run: EntryRun) -> None:
        """Commit messages with their results, until the job stops.

        Raises:
            KeyShardError: Results cannot be published, or the checkpoint cannot be stored.
        """
        while batch := self._next_batch():
            self._commit(run, batch)

    def wait(self) -> None:
        """Wait until all results are confirmed, or the job has failed or stops.

        Raises:
            BrokerUnavailableError: Not everything was confirmed in time.
        """
        timeout_s = self._sink.send_timeout_ms / 1000 + LOOK_S
        end_s = time.monotonic() + timeout_s
        exchange = self._exchange
        with exchange.changed:
            while self._unsettled and not exchange.stopping and exchange.error is None:
                if time.monotonic() > end_s:
                    raise BrokerUnavailableError(
                        f"Results were not confirmed within {timeout_s:g} s. Their messages are "
                        "not acknowledged.",
                        "Check the health of the broker.",
                    )
                exchange.changed.wait(LOOK_S)

    def status(self) -> JobResults:
        """Return the number of messages published, and of those that are confirmed."""
        with self._exchange.changed:
            return {"published": self._published, "confirmed": self._confirmed}

    def _next_batch(self) -> list[Done]:
        """Wait for calls; return none when the job stops."""
        exchange = self._exchange
        with exchange.changed:
            while not (self._waiting or exchange.stopping or exchange.error is not None):
                exchange.changed.wait(LOOK_S)
            if exchange.stopping:
                return []
            batch, size = [], 0
            while self._waiting and size < BATCH_BYTES_MAX:
                batch.append(self._waiting.popleft())
                size += _size(batch[-1])
            return batch

    def _commit(self, run: EntryRun, batch: list[Done]) -> None:
        rows: RowsByTopic = {}
        for done in batch:
            for topic, columns in _columns(done, self._sink.topic):
                if not self._again(partial(run.checked, topic, columns)):
                    return
                rows.setdefault(topic, []).append(columns)
        count = sum(len(columns) for parts in rows.values() for columns in parts)
        pieces = [piece for done in batch for piece in done.pieces]
        handled = [(one.where, one.block.id, row) for one in pieces for row in one.block.indices]
        with self._exchange.changed:
            entries = entries_done(pieces)
            self._published += count
        if not self._again(partial(run.commit, entries, rows, handled)):
            return
        with self._exchange.changed:
            self._confirmed += count
            self._unsettled -= len(batch)
        for done in batch:
            self._exchange.taken(done, ())

    def _again(self, action: Callable[[], None]) -> bool:
        """Call until it succeeds; return false if the job stops before."""
        while True:
            try:
                action()
            except KeyShardError as exc:  # noqa: PERF203 - an attempt takes much longer
                if self._exchange.stopping:
                    _log.warning("the last results are not confirmed: %s", exc.summary)
                    return False
                if not exc.retriable:
                    raise
                _log.warning("results are not confirmed, and published again: %s", exc.summary)
                time.sleep(AGAIN_S)
            else:
                return True


def _columns(done: Done, default: str) -> Iterator[tuple[str, Outgoing]]:
    """Yield the results of a call by full topic name, as columns that are not empty."""
    produced: dict[str | None, list[OutgoingMessage]] = {}
    for result in done.results:
        if isinstance(result, pa.RecordBatch | pa.Table):
            for topic, rows in by_topic(result, default).items():
                if rows.num_rows:
                    yield topic, outgoing_of(rows)
            continue
        one: Produce
        for one in result:
            produced.setdefault(one.topic, []).append(OutgoingMessage.of(one))
    for name, messages in produced.items():
        yield default if name is None else full_topic_name(name), Outgoing.of(messages)


def _size(done: Done) -> int:
    return sum(
        result.nbytes
        if isinstance(result, pa.RecordBatch | pa.Table)
        else sum(OutgoingMessage.of(one).size() for one in result)
        for result in done.results
    )
