"""Entries that handlers work on, or a program that acknowledges its batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.worker.worker import Worker


class HandedOut:
    """Hands received entries out, and takes what is completed into the newest checkpoint.

    Args:
        worker: Has the window.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._shared = worker.shared
        self._window = worker.shared.window

    @property
    def full(self) -> bool:
        """Whether a topic partition has no room in the window."""
        return self._window.pauses.any_full

    def take(
        self, timeout_s: float, rows_max: int | None = None
    ) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand out received entries to handlers; ``[]`` when nothing came in time.

        Args:
            timeout_s: Longest wait for rows, seconds.
            rows_max: About how many rows, the same of each topic partition; default: all.

        Returns:
            (topic partition, index of the range that received it, entry), in order of receipt per
            topic partition. They count against the window until their release.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with self._shared.lock:
            self._shared.wait_for_rows(timeout_s)
            return self._window.take(rows_max)

    def plan_completed(
        self, completed: Mapping[TopicPartition, Collection[EntryId]]
    ) -> dict[TopicPartition, list[EntryId]]:
        """Put entries that :meth:`take` handed out into the newest checkpoint.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with self._shared.lock:
            self._shared.check()
            return self._window.plan_completed(completed)

    @property
    def positions(self) -> Mapping[TopicPartition, PartitionCheckpoint]:
        """What the newest checkpoint has of each topic partition that is not gone, also nothing."""
        with self._shared.lock:
            return {at: one.state for at, one in self._window.known.items() if not one.gone}

    @property
    def completed(self) -> bool:
        """Whether the newest checkpoint has entries that are not acknowledged yet."""
        return bool(self._window.completed)

    def release_completed(self) -> None:
        """The newest checkpoint is durable, or there is to be none: acknowledge its entries."""
        with self._shared.lock:
            released = self._window.release_completed()
        self._worker.acknowledge(released)
