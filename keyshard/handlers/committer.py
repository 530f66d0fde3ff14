"""Makes what handlers completed durable, and acknowledges it after that.

A commit has three steps::

    1. plan      completed entries -> checkpoint, with what a restart needs beside them
    2. save      the checkpoint is durable, where the user wants one
    3. release   forget the entries, acknowledge them
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.dead_letter.store import DeadLetterStore
from keyshard.handlers.checkpoint_store import CheckpointStore

Entries = Mapping[TopicPartition, Collection[EntryId]]


class Committer:
    """Commits of one source, one after the other; its owner calls it from one thread at a time.

    Args:
        coordinator: The started source.
        store: Where checkpoints go; ``None`` for a source without.
        stored: The checkpoint that the source began with.
        parked: Tells where the parked keys are, for the checkpoint.
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
        """What the stored checkpoint says."""
        self.stored_bytes = 0
        """Size of the checkpoint stored last; 0 without a store."""

    @property
    def behind(self) -> bool:
        """Whether the stored checkpoint lacks a rescale, or letters that are done."""
        if self._store is None:
            return False
        unsaved = self._parked is not None and self._parked.unsaved
        return unsaved or self._coordinator.rescaled != self._rescaled

    def plan(self, completed: Entries) -> dict[TopicPartition, list[EntryId]]:
        """Take completed entries into the next checkpoint; memory only.

        Returns:
            Those that the checkpoint has no room for; give them again later. The others belong to
            :meth:`store` from now on, also when that fails.

        Raises:
            KeyShardError: The source ended; nothing was taken.
        """
        return self._coordinator.handed_out.plan_completed(completed)

    def store(self) -> None:
        """Make what was planned durable and acknowledge it; what a failed call left, too.

        Raises:
            KeyShardError: The checkpoint could not be stored. Nothing of it is acknowledged.
        """
        if not (self._coordinator.handed_out.completed or self.behind):
            return
        if self._store is not None:
            rescaled = self._coordinator.rescaled
            parked = None
            if self._parked is not None:
                parked = self._parked.checkpoint(self._coordinator.handed_out.positions)
            checkpoint = replace(self._coordinator.newest, parked=parked, rescaled=rescaled)
            self.stored_bytes = self._store.save(checkpoint)
            self._rescaled = rescaled
            if self._parked is not None:
                self._parked.saved()
        self._coordinator.handed_out.release_completed()
