"""Collects what handlers produce for the next checkpoint, and publishes it exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.config.sink import SinkConfig
from keyshard.core.lanes.key_queue import Work
from keyshard.core.lanes.lane_status import OutputsStatus
from keyshard.core.message import Produce
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.outputs import Outputs
from keyshard.errors import KeyShardError
from keyshard.handlers.output_log import OutputLog, OutputTopic
from keyshard.handlers.outputs import CLOSE_S, Concluding, fail_attempt
from keyshard.threads import begin

BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of outputs that wait for the next checkpoint, bytes; the last one may exceed it."""
AGAIN_S = 1.0
"""Time before a batch that was not confirmed is published again, seconds."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collected:
    """Outputs that wait for the next checkpoint."""

    rows: dict[str, list[OutgoingMessage]] = field(default_factory=dict)
    done: list[tuple[TopicPartition, EntryId, int]] = field(default_factory=list)
    replayed: list[Work] = field(default_factory=list)
    """Dead letters, whose markers are written after their outputs are confirmed."""
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.done or self.replayed)


class LoggedOutputs:
    """Collects outputs for the next checkpoint, and publishes them once that is durable.

    A message is completed when its outputs are collected, so its key continues. The owner of the
    commits calls, in this order: :meth:`begin`, :meth:`prepared` with the committed entries,
    :meth:`publish` after the checkpoint is durable, and :meth:`settled` until it is true.

    Args:
        run: Owner of the lanes.
        sink: Options of the sink.
    """

    def __init__(self, run: Concluding, sink: SinkConfig) -> None:
        self._run = run
        self.log = OutputLog(sink)
        self._bytes_max = min(BYTES_MAX, sink.pending_bytes_max)
        self._collected = _Collected()
        """Guarded by ``changed`` of the run."""
        self._begun = _Collected()
        self._more = threading.Condition()
        self._checks: list[tuple[Work, Sequence[Produce]]] = []
        """Outputs for topics to open, or with sizes to check; guarded by ``_more``."""
        self._ordered = False
        """Whether the batch is to be published; guarded by ``_more``."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.busy = False
        """Whether a batch has begun and is not settled."""
        self._saved = False
        """Whether the durable checkpoint has that batch."""
        self._began_s = 0.0
        self._error = ""
        """Why the newest attempt to publish failed."""

    def open(self, stored: Checkpoint | None) -> None:
        """Publish the outputs that the checkpoint holds, and open the topic of the sink.

        Raises:
            KeyShardError: See :meth:`OutputLog.open`.
        """
        self.log.open(stored)
        self._thread = begin("keyshard-outputs", self._run_thread, fail=self._run.fail)

    # -- called with ``changed`` held --------------------------------------------------------------

    def take(self, work: Work, produced: Sequence[Produce]) -> bool:
        found: list[tuple[OutputTopic, OutgoingMessage]] = []
        for one in produced:
            topic = self.log.known(one.topic)
            message = OutgoingMessage.of(one)
            if topic is None or message.size() > topic.message_bytes_max:
                work.publishing, work.started_s = True, time.monotonic()
                with self._more:
                    self._checks.append((work, produced))
                    self._more.notify()
                return True
            found.append((topic, message))
        self._collect(work, found)
        return True

    @property
    def full(self) -> bool:
        return self._collected.bytes >= self._bytes_max

    @property
    def waiting(self) -> bool:
        """Whether outputs or handled messages wait for a checkpoint."""
        return bool(self._collected)

    @property
    def stuck(self) -> bool:
        """Whether nothing is confirmed any more: a commit or the thread failed. Not in a commit."""
        unsaved = self.busy and not self._saved
        return unsaved or (self._thread is not None and not self._thread.is_alive())

    def begin(self) -> None:
        """Make the collected outputs the next batch."""
        self._begun, self._collected = self._collected, _Collected()
        self.busy, self._began_s = True, time.monotonic()

    def status(self) -> OutputsStatus:
        unconfirmed = self.log.unconfirmed
        return self.log.status() | {
            "waiting": sum(map(len, self._collected.rows.values())),
            "forSeconds": round(time.monotonic() - self._began_s, 1) if unconfirmed else 0.0,
            "error": self._error,
        }

    # -- called by the owner of the commits --------------------------------------------------------

    def prepared(
        self,
        entries: Mapping[TopicPartition, Collection[EntryId]],
        done_apart: Sequence[tuple[TopicPartition, EntryId, int]],
    ) -> Outputs:
        """Return the part of the checkpoint for the batch that has begun.

        Args:
            entries: Entries that the checkpoint has as delivered from now on.
            done_apart: Done messages of other entries, also those without outputs: rejected ones
                and dead letters.
        """
        columns = {name: Outgoing.of(rows) for name, rows in self._begun.rows.items()}
        self.log.begin(columns, [*self._begun.done, *done_apart])
        self.log.forget(entries)
        return self.log.state()

    def publish(self) -> None:
        """Publish the batch: the checkpoint that holds it is durable. Returns at once."""
        count = self.log.unconfirmed
        self._saved = True
        if count:
            with self._run.changed:
                self._run.tally.outputs_published += count
            with self._more:
                self._ordered = True
                self._more.notify()

    def settled(self) -> bool:
        """Whether a batch is confirmed since the last call. Then its entries are acknowledged."""
        if not self._saved or self.log.unconfirmed:
            return False
        with self._run.changed:
            for work in self._begun.replayed:
                self._run.conclude(work, None)
            self._run.wake()
        self._begun = _Collected()
        self.busy = self._saved = False
        return True

    def abandon(self) -> None:
        self.log.abandon()

    def close(self) -> None:
        self._closed.set()
        with self._more:
            self._more.notify()
        if self.log.unconfirmed:
            self.log.abandon()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self.log.close()

    # -- in the thread -----------------------------------------------------------------------------

    def _run_thread(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._checks or self._ordered or self._closed.is_set())
                if self._closed.is_set():
                    return
                checks, self._checks = self._checks, []
                ordered, self._ordered = self._ordered, False
            for work, produced in checks:
                self._check(work, produced)
            if ordered:
                self._publish()

    def _publish(self) -> None:
        count = self.log.unconfirmed
        while not self._closed.is_set():
            try:
                self.log.publish()
            except KeyShardError as exc:  # noqa: PERF203 - an attempt takes much longer
                with self._run.changed:
                    self._run.tally.outputs_failed += count
                if self._closed.is_set():
                    return
                if not exc.retriable:
                    raise
                if not self._error:
                    _log.warning("outputs are not confirmed, and published again: %s", exc.summary)
                self._error = exc.message
                self._closed.wait(AGAIN_S)
            else:
                with self._run.changed:
                    self._run.tally.outputs_confirmed += count
                self._error = ""
                return

    def _check(self, work: Work, produced: Sequence[Produce]) -> None:
        """Open topics and check sizes: a refused output fails its attempt."""
        found: list[tuple[OutputTopic, OutgoingMessage]] = []
        try:
            for one in produced:
                topic, message = self.log.topic(one.topic), OutgoingMessage.of(one)
                self.log.check(topic, message)
                found.append((topic, message))
        except KeyShardError as exc:
            fail_attempt(self._run, work, exc)
            return
        with self._run.changed:
            self._collect(work, found)
            self._run.wake()

    def _collect(self, work: Work, found: Sequence[tuple[OutputTopic, OutgoingMessage]]) -> None:
        collected, entry = self._collected, work.entry
        for topic, message in found:
            collected.rows.setdefault(topic.name, []).append(message)
            collected.bytes += message.size()
        if entry is None:
            work.publishing = True
            collected.replayed.append(work)
            return
        index = work.message.message_id.batch_index
        collected.done.append((entry.topic_partition, entry.id, index))
        self._run.conclude(work, None)
