"""Publishes what handlers produce, and completes a message when its outputs are confirmed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from keyshard.broker.connect import connect
from keyshard.broker.port import Broker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.sink import SinkConfig
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import HandlerCounters, OutputsStatus
from keyshard.core.lanes.retry_policy import FailedAttempt
from keyshard.core.message import MessageId, Produce
from keyshard.errors import BrokerError, KeyShardError
from keyshard.handlers.output_log import OpenTopics
from keyshard.publishing.message_writer import MessageWriter
from keyshard.threads import begin, callback


class Concluding(Protocol):
    """The dispatcher, as outputs need it."""

    changed: threading.Condition
    """Guards lanes and tally."""
    tally: HandlerCounters

    def judge(self, work: Work, error: BaseException) -> FailedAttempt:
        """Decide on a failure; called without the lock."""

    def conclude(self, work: Work, setback: FailedAttempt | None) -> None:
        """Complete a message, or decide what follows; ``changed`` is held."""

    def wake(self) -> None:
        """Let executors start runnable messages; ``changed`` is held."""

    def fail(self, error: KeyShardError) -> None:
        """End the source."""


class HandlerOutputs(Protocol):
    """Takes what handlers produce."""

    def take(self, work: Work, produced: Sequence[Produce]) -> bool:
        """Take the outputs of an attempt, with ``changed`` held.

        Returns:
            Whether it concludes the attempt, now or later.
        """

    @property
    def full(self) -> bool:
        """Whether no handler may start, because too many outputs wait."""

    def status(self) -> OutputsStatus:
        """Return JSON values; ``changed`` is held."""

    def abandon(self) -> None:
        """Disconnect while another thread connects or publishes, which then fails."""

    def close(self) -> None:
        """Disconnect. Idempotent."""


class SentOutputs:
    """Sends outputs at once. A message keeps its lane until all its outputs are confirmed.

    If an output fails, the attempt has failed: the retry policy decides, and the handler runs
    again. So outputs are stored at least once.

    Args:
        run: Owner of the lanes.
        sink: Options of the sink.
    """

    def __init__(self, run: Concluding, sink: SinkConfig) -> None:
        self._run = run
        self._sink = sink
        self._broker: Broker | None = None
        self._writers = OpenTopics(sink, self._open_writer)
        self._todo: list[_Sent] = []
        """Outputs to send, and failures to judge; guarded by ``_more``. Each has a lane."""
        self._more = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Connect to the topic of the sink.

        Raises:
            KeyShardError: The broker is not reachable, or refuses.
        """
        self._broker = connect(self._sink.how_to_connect())
        self._writers.of(None)
        self._thread = begin("keyshard-outputs", self._run_thread, fail=self._run.fail)

    full = False

    def take(self, work: Work, produced: Sequence[Produce]) -> bool:
        if not produced:
            return False
        work.publishing, work.started_s = True, time.monotonic()
        self._run.tally.outputs_published += len(produced)
        self._add(_Sent(work, produced, len(produced)))
        return True

    def status(self) -> OutputsStatus:
        tally = self._run.tally
        unconfirmed = tally.outputs_published - tally.outputs_confirmed - tally.outputs_failed
        return {
            "topic": self._sink.topic, "guarantee": "at least once", "waiting": 0,
            "unconfirmed": unconfirmed, "forSeconds": 0.0, "error": "",
        }  # fmt: skip

    def abandon(self) -> None:
        if self._broker is not None:
            with suppress(BrokerError):
                self._broker.close()

    def close(self) -> None:
        with self._more:
            self._closed = True
            self._more.notify_all()
        for writer in self._writers.opened():
            writer.close()
        self.abandon()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _open_writer(self, sink: SinkConfig) -> MessageWriter:
        assert self._broker is not None
        return MessageWriter(self._broker, sink)

    def _add(self, sent: _Sent) -> None:
        with self._more:
            self._todo.append(sent)
            self._more.notify()

    def _run_thread(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._todo or self._closed)
                if self._closed:
                    return
                todo, self._todo = self._todo, []
            for sent in todo:
                if sent.error is None:
                    self._send(sent)
                else:
                    fail_attempt(self._run, sent.work, sent.error)

    def _send(self, sent: _Sent) -> None:
        for number, one in enumerate(sent.produced):
            try:
                future = self._writers.of(one.topic).send(OutgoingMessage.of(one))
            except KeyShardError as exc:
                # The others are not sent: the handler runs again.
                self._confirmed(sent, len(sent.produced) - number, exc)
                return
            future.add_done_callback(callback("Confirming an output", partial(self._stored, sent)))

    def _stored(self, sent: _Sent, future: Future[MessageId]) -> None:
        self._confirmed(sent, 1, future.exception())

    def _confirmed(self, sent: _Sent, count: int, error: BaseException | None) -> None:
        """Note that some outputs are confirmed or have failed; the last one ends the attempt."""
        with self._run.changed:
            tally = self._run.tally
            sent.left -= count
            if error is None:
                tally.outputs_confirmed += count
            else:
                tally.outputs_failed += count
                sent.error = sent.error or error
            if sent.left or self._closed:
                return
            if sent.error is None:
                self._run.conclude(sent.work, None)
                self._run.wake()
                return
        self._add(sent)


def fail_attempt(run: Concluding, work: Work, error: BaseException) -> None:
    """Fail an attempt whose outputs are refused; called without the lock."""
    setback = run.judge(work, error)
    with run.changed:
        run.tally.failed_attempts += 1
        run.conclude(work, setback)
        run.wake()


CLOSE_S = 1.0
"""Longest wait for the thread at the end, seconds."""


@dataclass(slots=True)
class _Sent:
    """The outputs of one attempt."""

    work: Work
    produced: Sequence[Produce]
    left: int
    """Outputs that are neither confirmed nor failed."""
    error: BaseException | None = field(default=None)
    """First failure of an output."""
