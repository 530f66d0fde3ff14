"""Entries that are with handlers, and the commit of those that are completed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from keyshard.consumers.consumers import Consumers
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.outputs import Handled


class InFlightEntries:
    """Hands out received entries, and puts completed ones into the newest checkpoint.

    Args:
        consumers: Has the window.
    """

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._shared = consumers.shared
        self._window = consumers.shared.window

    @property
    def full(self) -> bool:
        """Whether a topic partition has no room in the window."""
        return self._window.pauses.any_full

    @property
    def without_room(self) -> bool:
        """Whether the checkpoint has no room for some entries of a topic partition."""
        return bool(self._window.tight)

    def take(
        self, timeout_s: float, rows_max: int | None = None
    ) -> list[tuple[TopicPartition, int, EntryBlock]]:
        """Hand out received entries; ``[]`` if none came in time.

        Args:
            timeout_s: Longest wait for rows, seconds.
            rows_max: About how many rows, split equally over topic partitions; default: all.

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
        self, completed: Mapping[TopicPartition, Collection[EntryId]], *, limited: bool = True
    ) -> dict[TopicPartition, list[EntryId]]:
        """Put completed entries, which :meth:`take` handed out, into the newest checkpoint.

        Args:
            completed: The entries.
            limited: Whether the checkpoint has a limit; the last one of a run has none.

        Returns:
            Entries that do not fit.

        Raises:
            KeyShardError: The error that ended the source.
        """
        with self._shared.lock:
            self._shared.check()
            left = self._window.plan_completed(completed, limited=limited)
            self._shared.look_for_room()
            return left

    def begun(
        self, wheres: Collection[TopicPartition], unfit: Collection[TopicPartition]
    ) -> set[TopicPartition]:
        """Return those topic partitions of which the newest checkpoint has an entry.

        It may also have one of a segment that succeeds them. Segments are left out if the
        checkpoint has no room for all completed entries of an ancestor.

        Args:
            wheres: The topic partitions.
            unfit: Those for whose completed entries the checkpoint has no room.
        """
        order = self._window.order
        with self._shared.lock:
            found = set(filter(self._has_entry, wheres))
            if left := set(wheres) - found:
                for where in filter(self._has_entry, order.parents):
                    found |= left & order.ancestors(where)
            return {where for where in found if order.ancestors(where).isdisjoint(unfit)}

    def _has_entry(self, where: TopicPartition) -> bool:
        """Return whether the newest checkpoint has an entry of a topic partition."""
        of = self._window.known.get(where)
        return of is not None and bool(of.state.delivered or of.state.floor)

    def drop_delivered(self, handled: Handled) -> None:
        """Remove messages of entries that the newest checkpoint has, or that never come again."""
        with self._shared.lock:
            for where in list(handled):
                known, of = self._window.known.get(where), handled[where]
                if known is None or known.gone:
                    of.clear()
                for entry in list(filter(known.state.covers, of)) if known else ():
                    del of[entry]
                if not of:
                    del handled[where]

    @property
    def positions(self) -> Mapping[TopicPartition, PartitionCheckpoint]:
        """The newest checkpoint's state of each topic partition that exists; may be empty."""
        with self._shared.lock:
            return {at: one.state for at, one in self._window.known.items() if not one.gone}

    @property
    def completed(self) -> bool:
        """Whether the newest checkpoint has entries that are not acknowledged yet."""
        return bool(self._window.completed)

    def release_completed(self) -> None:
        """Acknowledge the entries of the newest checkpoint: it is durable, or none is kept."""
        with self._shared.lock:
            released = self._window.release_completed()
            self._shared.history.committed(time.monotonic(), sum(map(len, released.values())))
        self._consumers.acknowledge(released)
