"""A run over one source whose owner takes entries and commits them in any order."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from keyshard.columns.entry_rows import only
from keyshard.columns.outgoing import Outgoing
from keyshard.config.sink import SinkConfig
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.rescale import Rescaler
from keyshard.coordinator.startup import first_assignment
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.outputs import Handled, Outputs, check_owner, copied, note
from keyshard.dead_letters.store import DeadLetterStore
from keyshard.errors import ConfigError, KeyShardError, RuntimeStoppedError
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.output_log import OutputLog
from keyshard.handlers.range_owners import Actors, RangeOwners
from keyshard.observe.monitor import Monitor
from keyshard.observe.observed_run import ObservedRun
from keyshard.observe.status import StatusView
from keyshard.observe.status_types import Status
from keyshard.threads import owned_by

_logger = logging.getLogger(__name__)
Entries = dict[TopicPartition, list[EntryId]]
RowsByTopic = dict[str, list[Outgoing]]
HandledMessages = list[tuple[TopicPartition, EntryId, int]]
"""Topic partition, entry and batch index of messages."""


class EntryRun:
    """One run over one source, in this process.

    Args:
        coordinator: Coordinator of the source, not started.
        config: Options of the source.
        checkpoint: Path or fsspec URL of the checkpoint; ``None``: none.
        executor: Name of the executor in the status.
        workers: Returns the number of its threads or actors, for the status.
        sink: Publishes rows with the commits; ``None``: there are none.
        actors: The actors that handle its entries, for the status; ``None``: there are none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        checkpoint: str | os.PathLike[str] | None,
        *,
        executor: str,
        workers: Callable[[], int] = lambda: 1,
        sink: SinkConfig | None = None,
        actors: Actors | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._config = config
        self._end_timeout_s = config.operation_timeout_ms / 1000
        """Longest wait at the end for a commit in progress, seconds."""
        self._store = None if checkpoint is None else CheckpointStore(checkpoint)
        # Reentrant: an abandoned iteration can end inside an ack, in the same thread.
        self._lock = threading.RLock()
        self._left: Entries = {}
        self._stopping = self._ended = self._has_committer = False
        self._monitor: Monitor | None = None
        self.rescaler: Rescaler | None = None
        """Moves ranges, once the run has started."""
        self._log = None
        if sink is not None:
            if sink.value_format != "raw":
                raise ConfigError(
                    f"The sink has value_format {sink.value_format!r}, but rows of a source are "
                    "published as they are.",
                    "Encode the values, and leave value_format out.",
                )
            self._log = OutputLog(sink, checkpointed=self._store is not None)
        self._handled: Handled = {}
        """Messages that the checkpoint of an earlier run has: :meth:`take` omits them."""
        self._owners = RangeOwners(self._log, actors)
        self._subject = ObservedRun(
            config, coordinator, self._owners,
            executor=executor, workers=workers, workers_max=None,
            stopping=lambda: self._stopping, rescaler=lambda: self.rescaler,
            kind=executor,
        )  # fmt: skip

    def stop(self) -> None:
        """Ask the owner to end the run; returns at once."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping

    @contextmanager
    def started(self) -> Iterator[None]:
        """Receive entries inside the block; give the ranges back at its end.

        Raises:
            KeyShardError: The source does not start.
        """
        checkpoint = None if self._store is None else self._store.open()
        try:
            if self._log is None:
                check_owner(None if checkpoint is None else checkpoint.outputs, None)
            else:
                self._log.open(checkpoint)
            with owned_by(self.coordinator.fail):
                self._monitor = Monitor(self._subject)
            assignment = first_assignment(self._config, checkpoint)
            self._owners.begin(assignment)
            self.coordinator.measures_load = True
            self.coordinator.start(checkpoint, assignment=assignment)
            self._committer = Committer(self.coordinator, self._store, checkpoint)
            self._has_committer = True
            # Later commits change the original.
            of = self._committer if self._log is None else self._log
            self._handled = copied(of.handled)
            self.rescaler = self.coordinator.rescaler(self._owners, drain_timeout_s=0.0)
            yield
        finally:
            if self._monitor is not None:
                self._monitor.close()
            self._end()

    def take(self, timeout_s: float) -> list[tuple[TopicPartition, EntryBlock]]:
        """Return the entries received since the last call; ``[]`` if none came in time.

        They count against the window until they are committed.

        Raises:
            KeyShardError: The error that ended the source, or the checkpoint could not be stored.
        """
        if self._committer.behind:
            self._save_behind()
        taken = self.coordinator.in_flight.take(timeout_s)
        if not taken and self._left:
            # The gap resolver may have made room in the checkpoint, and perhaps no commit follows.
            self.commit({})
        elif not taken and self._log is not None and self._log.unsaved:
            self._save_behind()
        located = [(topic_partition, block) for topic_partition, _, block in taken]
        return self._unhandled(located) if self._handled else located

    def status(self) -> Status:
        """Return the status as plain JSON values; it shows no lane at work."""
        view = StatusView(self._subject, None) if self._monitor is None else self._monitor.view
        return view.status()

    def not_ready(self) -> str:
        """Return why the source does not take messages; empty if it does."""
        return (
            "The source is starting." if self._monitor is None else self._monitor.view.not_ready()
        )

    def commit(
        self,
        entries: Entries,
        rows: RowsByTopic | None = None,
        handled: HandledMessages | None = None,
    ) -> None:
        """Commit taken entries, and entries that earlier commits had no room for; from any thread.

        Args:
            entries: Emptied once they are in the next checkpoint. If storing that checkpoint
                fails, the next commit stores it.
            rows: Rows to publish with them, by full topic name; emptied like the entries.
            handled: Handled messages, also of entries that are not committed yet: those that
                produced the rows or, without a sink, those of entries that are divided. Emptied
                like the entries. Without it, all messages of the entries count as handled, and no
                others.

        Raises:
            KeyShardError: The source ended, the checkpoint could not be stored, or the rows are not
                confirmed.
        """
        try:
            with self._lock:
                if self._log is not None and self._log.unconfirmed:
                    if self._ended:
                        # The checkpoint may be that of the next source, which has these rows.
                        raise RuntimeStoppedError(
                            "The source has ended. Rows that are not confirmed are in its "
                            "checkpoint, and the next start publishes them."
                        )
                    self._publish(self._log)
                self._commit(entries, rows, handled)
        finally:
            if self._ended:
                self._let_checkpoint_go()

    def _commit(
        self,
        entries: Entries,
        rows: RowsByTopic | None = None,
        handled: HandledMessages | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Do what :meth:`commit` does. The caller holds the lock, and earlier rows are confirmed.

        Args:
            entries: See :meth:`commit`.
            rows: See :meth:`commit`.
            handled: See :meth:`commit`.
            last: Whether it is the last commit of the run.
        """
        completed = {where: list(ids) for where, ids in self._left.items()}
        for topic_partition, ids in entries.items():
            completed.setdefault(topic_partition, []).extend(ids)
        joined = {name: Outgoing.joined(parts) for name, parts in (rows or {}).items()}
        if self._log is None and handled:
            self._committer.note(handled)
            handled.clear()
        self._left = self._committer.plan(completed, last=last)
        entries.clear()
        if self._log is None:
            self._committer.store()
        elif joined or handled or self._committer.pending:
            self._log.begin(joined, handled or ())
            self._log.forget(
                {at: set(ids) - set(self._left.get(at, ())) for at, ids in completed.items()}
            )
            for emptied in (rows, handled):
                if emptied:
                    emptied.clear()
            self._publish(self._log)

    def checked(self, topic: str, rows: Outgoing) -> None:
        """Check rows for :meth:`commit`: their topic and sizes.

        Raises:
            KeyShardError: The topic cannot be opened, or a row is too large.
        """
        assert self._log is not None
        with self._lock:
            opened = self._log.topic(topic)
            for row, size in enumerate(rows.sizes()):
                if size > opened.message_bytes_max:
                    self._log.check(opened, rows.messages(row, row + 1)[0])

    def _unhandled(
        self, located: Sequence[tuple[TopicPartition, EntryBlock]]
    ) -> list[tuple[TopicPartition, EntryBlock]]:
        """Omit messages that an earlier run handled; commit entries that have no others."""
        found: list[tuple[TopicPartition, EntryBlock]] = []
        settled: Entries = {}
        for where, block in located:
            handled = self._handled.get(where, {}).get(block.id, ())
            rest = frozenset(block.indices).difference(handled)
            if not rest:
                settled.setdefault(where, []).append(block.id)
            else:
                found.append((where, only(block, rest) if handled else block))
        if settled:
            self.commit(settled)
        return found

    def _publish(self, log: OutputLog) -> None:
        """Publish the newest batch of rows after its checkpoint is durable, then acknowledge."""
        self._committer.save(log.state())
        log.publish()
        self._committer.release()

    def _save_behind(self) -> None:
        with self._lock:
            if self._log is None:
                self._committer.store()
            else:
                self._committer.save(self._log.state())

    def _end(self) -> None:
        """Stop the source after a commit in progress; later commits find the source ended.

        Otherwise that commit would overwrite the checkpoint of the next source, or return when
        nothing can be acknowledged any more. If it hangs, it keeps the checkpoint locked.
        """
        alone = self._lock.acquire(timeout=self._end_timeout_s)
        try:
            if alone and self._left:
                self._commit_left()
            if self._log is not None:
                self._end_log(self._log, alone=alone)
            self.coordinator.stop()
        finally:
            self._ended = True
            if alone:
                self._lock.release()
            self._let_checkpoint_go()

    def _commit_left(self) -> None:
        """Commit the entries that earlier commits had no room for."""
        try:
            if self._log is not None and self._log.unconfirmed:
                self._publish(self._log)
            self._commit({}, last=True)
        except KeyShardError as exc:
            _logger.warning("completed messages are delivered again: %s", exc.summary)

    def _end_log(self, log: OutputLog, *, alone: bool) -> None:
        try:
            if alone and self._has_committer and log.unsaved:
                self._save_behind()
        except KeyShardError as exc:
            _logger.warning("the checkpoint keeps rows that are confirmed: %s", exc.summary)
        log.close()

    def _let_checkpoint_go(self) -> None:
        """Release the checkpoint, unless a commit in progress does so at its end."""
        if self._store is not None and self._lock.acquire(blocking=False):
            self._store.close()
            self._lock.release()


_NEVER = EntryId(2**63, 0)
"""After every entry."""

# -- Commits: completed entries become durable, then they are acknowledged -------------------------


class Committer:
    """Commits entries of one source, one commit after the other, from one thread at a time.

    A commit has three steps::

        1. plan      completed entries -> checkpoint, with the facts that a restart needs
        2. save      store the checkpoint, if the user configured one
        3. release   forget the entries, acknowledge them

    Args:
        coordinator: Coordinator of the source, started.
        store: Store of checkpoints; ``None``: the source has none.
        stored: The checkpoint that the source began with.
        parked: Returns the part of the checkpoint about parked keys; ``None``: there is none.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: CheckpointStore | None,
        stored: Checkpoint | None,
        parked: DeadLetterStore | None = None,
    ) -> None:
        self._parked = parked
        self._coordinator = coordinator
        self._store = store
        self._rescaled = None if stored is None else stored.rescaled
        """The rescale that the stored checkpoint contains."""
        self.handled = copied({} if stored is None else stored.handled)
        """Handled messages of entries of several keys that are not delivered, without a sink."""
        self._noted: list[tuple[TopicPartition, EntryId, int]] = []
        """Further ones, which no checkpoint has yet."""
        self._unfit: dict[TopicPartition, EntryId] = {}
        """First completed entry for which the checkpoint has no room."""
        self.stored_bytes = 0
        """Size of the checkpoint stored last; 0 without a store."""

    @property
    def behind(self) -> bool:
        """Whether the stored checkpoint lacks a rescale or completed dead letters."""
        if self._store is None:
            return False
        unsaved = self._parked is not None and self._parked.unsaved
        return unsaved or self._coordinator.rescaled != self._rescaled

    @property
    def pending(self) -> bool:
        """Whether there is something to store or to acknowledge."""
        return self._coordinator.in_flight.completed or bool(self._noted) or self.behind

    def note(self, done: Sequence[tuple[TopicPartition, EntryId, int]]) -> None:
        """Put handled messages of entries that are not completed into the next checkpoint.

        Args:
            done: Topic partition, entry and batch index of each.
        """
        if self._store is not None:
            self._noted += done

    def plan(
        self, completed: Mapping[TopicPartition, Collection[EntryId]], *, last: bool = False
    ) -> dict[TopicPartition, list[EntryId]]:
        """Take completed entries into the next checkpoint; memory only.

        Args:
            completed: The entries.
            last: Whether it is the last checkpoint of the run. It has no limit, because an orderly
                stop repeats nothing.

        Returns:
            Entries that the checkpoint has no room for; pass them again later. The others belong to
            :meth:`store` from now on, even if it fails.

        Raises:
            KeyShardError: The source ended; nothing was taken.
        """
        left = self._coordinator.in_flight.plan_completed(completed, limited=not last)
        self._unfit = {where: min(ids) for where, ids in left.items()}
        return left

    def store(self) -> None:
        """Store the planned checkpoint and acknowledge its entries, also those of a failed call.

        Raises:
            KeyShardError: The checkpoint could not be stored. Nothing of it is acknowledged.
        """
        if self.pending:
            self.save()
            self.release()

    def save(self, outputs: Outputs | None = None) -> None:
        """Store the planned checkpoint.

        Args:
            outputs: Outputs that the checkpoint has to hold; ``None`` without a sink.

        Raises:
            KeyShardError: The checkpoint could not be stored.
        """
        if self._store is None:
            return
        rescaled = self._coordinator.rescaled
        parked = None
        if self._parked is not None:
            parked = self._parked.checkpoint(self._coordinator.in_flight.positions)
        newest = self._coordinator.newest
        checkpoint = replace(
            newest, parked=parked, rescaled=rescaled, outputs=outputs,
            handled={} if outputs is not None else self._newly_handled(),
        )  # fmt: skip
        self.stored_bytes = self._store.save(checkpoint)
        self._coordinator.saved(self.stored_bytes)
        self._rescaled = rescaled
        if self._parked is not None:
            self._parked.saved()

    def _newly_handled(self) -> Handled:
        """Return the handled messages of the next checkpoint.

        Of an entry for which the checkpoint has no room, and of those after it, all messages come
        again, in their order: so no further ones are added, nor those of segments that succeed
        it. Nor are they in a topic partition of which nothing is delivered yet, because then all
        comes again.
        """
        noted, self._noted = self._noted, []
        wheres = {where for where, _, _ in noted}
        begun = self._coordinator.in_flight.begun(wheres, self._unfit)
        for one in noted:
            where, entry, _ = one
            if where in begun and entry < self._unfit.get(where, _NEVER):
                note(self.handled, [one])
            else:
                self._noted.append(one)
        self._coordinator.in_flight.drop_delivered(self.handled)
        return self.handled

    def release(self) -> None:
        """Acknowledge the entries of the checkpoint that was stored."""
        self._coordinator.in_flight.release_completed()
