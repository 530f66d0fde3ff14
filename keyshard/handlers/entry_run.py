"""A run over one source whose owner takes entries, and commits them in any order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.opening import first_assignment
from keyshard.coordinator.rescale import Rescaler
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.committer import Committer
from keyshard.handlers.range_owners import RangeOwners
from keyshard.observe.monitor import Monitor
from keyshard.observe.status import StatusView, Subject
from keyshard.observe.status_types import Status
from keyshard.threads import owned_by

Entries = dict[TopicPartition, list[EntryId]]


class EntryRun:
    """One run over one source, in this process.

    Args:
        coordinator: The source, not started.
        config: The source.
        checkpoint: Path or fsspec URL of the checkpoint; ``None``: none.
        executor: What the status calls those who work on the entries.
        workers: How many they are.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: SourceConfig,
        checkpoint: str | os.PathLike[str] | None,
        *,
        executor: str,
        workers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._coordinator = coordinator
        self._config = config
        self._end_timeout_s = config.operation_timeout_ms / 1000
        """Longest wait at the end for a commit in progress, seconds."""
        self._store = None if checkpoint is None else CheckpointStore(checkpoint)
        # One thread takes it twice where an iteration that nobody holds ends inside an ack.
        self._lock = threading.RLock()
        self._left: Entries = {}
        self._stopping = self._ended = False
        self._monitor: Monitor | None = None
        self.rescaler: Rescaler | None = None
        """Moves ranges, once the run has started."""
        self._owners = RangeOwners()
        self._subject = Subject(
            config, coordinator, self._owners,
            executor=executor, workers=workers, workers_max=None,
            stopping=lambda: self._stopping, rescaler=lambda: self.rescaler,
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
        """Inside, entries are received; the ranges are given back at the end.

        Raises:
            KeyShardError: The source does not start.
        """
        checkpoint = None if self._store is None else self._store.open()
        try:
            with owned_by(self._coordinator.fail):
                self._monitor = Monitor(self._subject)
            assignment = first_assignment(self._config, checkpoint)
            self._owners.begin(assignment)
            self._coordinator.start(checkpoint, assignment=assignment)
            self._committer = Committer(self._coordinator, self._store, checkpoint)
            self.rescaler = self._coordinator.rescaler(self._owners, drain_timeout_s=0.0)
            yield
        finally:
            if self._monitor is not None:
                self._monitor.close()
            self._end()

    def take(self, timeout_s: float) -> list[tuple[TopicPartition, EntryBlock]]:
        """What was received since the last call; ``[]`` when nothing came in time.

        It counts against the window until it is committed.

        Raises:
            KeyShardError: What ended the source, or the checkpoint could not be stored.
        """
        if self._committer.behind:
            with self._lock:
                self._committer.store()
        taken = self._coordinator.handed_out.take(timeout_s)
        return [(topic_partition, block) for topic_partition, _, block in taken]

    @property
    def full(self) -> bool:
        """Whether a topic partition has no room in the window."""
        return self._coordinator.handed_out.full

    def status(self) -> Status:
        """What goes on, as plain JSON values; no lane works on anything."""
        view = StatusView(self._subject, None) if self._monitor is None else self._monitor.view
        return view.status()

    def commit(self, entries: Entries) -> None:
        """Commit entries that were taken, and what was left of others before; from any thread.

        Args:
            entries: Emptied when they are in the next checkpoint, also when storing that fails:
                then the next commit stores it.

        Raises:
            KeyShardError: The source ended, or the checkpoint could not be stored.
        """
        try:
            with self._lock:
                completed = {where: list(ids) for where, ids in self._left.items()}
                for topic_partition, ids in entries.items():
                    completed.setdefault(topic_partition, []).extend(ids)
                self._left = self._committer.plan(completed)
                entries.clear()
                self._committer.store()
        finally:
            if self._ended:
                self._let_checkpoint_go()

    def _end(self) -> None:
        """A commit that another thread is in ends first; those that follow find the source ended.

        Else it would replace the checkpoint of whoever comes next with its own, or return when
        nobody can acknowledge any more. One that hangs keeps the checkpoint from others.
        """
        alone = self._lock.acquire(timeout=self._end_timeout_s)
        try:
            self._coordinator.stop()
        finally:
            if alone:
                self._lock.release()
            self._ended = True
            self._let_checkpoint_go()

    def _let_checkpoint_go(self) -> None:
        """Unless a commit is in progress, which does it then."""
        if self._store is not None and self._lock.acquire(blocking=False):
            self._store.close()
            self._lock.release()
