"""The acknowledgements of a subscription of the in-memory broker, and their loss in a crash.

Private to :mod:`keyshard.broker.memory`, which documents the package.
"""

from __future__ import annotations

from collections.abc import Collection

Journal = list[tuple[int, Collection[int] | None]]
"""Acknowledgements since the last write: ordinal, and batch indices, or ``None`` for all."""


class Cursor:
    """The mark-delete position, and the acknowledged entries and parts of batches above it.

    It is written at most every ``write_ms``. :meth:`forget` undoes later acknowledgements.

    Args:
        mark_delete: Initial ordinal, which counts as written.
        write_ms: Shortest time between two writes, milliseconds.
    """

    def __init__(self, mark_delete: int, write_ms: int) -> None:
        self.mark_delete = mark_delete
        """Highest ordinal up to which every entry is acknowledged, inclusive."""
        self.acked: set[int] = set()
        """Acknowledged ordinals above it."""
        self._partial: dict[int, frozenset[int]] = {}
        self._write_ms = write_ms
        self._journal: Journal = []
        self._written_mark = mark_delete
        self._written_ms: int | None = None

    @property
    def ack_gaps(self) -> int:
        """Number of ack gaps: one before each run of acknowledged entries above the mark-delete."""
        return sum(ordinal - 1 not in self.acked for ordinal in self.acked)

    @property
    def unwritten(self) -> bool:
        """Whether a crash would lose acknowledgements."""
        return bool(self._journal)

    def acked_indices(self, ordinal: int) -> frozenset[int]:
        """Acknowledged batch indices of an entry that is not fully acknowledged."""
        return self._partial.get(ordinal, frozenset())

    def ack(self, ordinal: int) -> bool:
        """Acknowledge one entry. Return whether it was unacknowledged before."""
        if self.is_acked(ordinal):
            return False
        self._journal.append((ordinal, None))
        self._add(ordinal)
        return True

    def ack_indices(self, ordinal: int, indices: Collection[int], batch_size: int) -> bool:
        """Acknowledge some messages of one entry. Return whether all of it is acknowledged now."""
        if self.is_acked(ordinal):
            return True
        known = self.acked_indices(ordinal)
        new = frozenset(indices) - known
        if len(known) + len(new) >= batch_size:
            return self.ack(ordinal)
        self._journal.append((ordinal, new))
        self._partial[ordinal] = known | new
        return False

    def advance(self, ordinal: int) -> None:
        """Acknowledge everything up to ``ordinal``, and write it, because trimming is permanent."""
        if ordinal > self.mark_delete:
            self.mark_delete = ordinal
            self.acked = {other for other in self.acked if other > ordinal}
            self._move()
            self.write(self._written_ms)

    def is_acked(self, ordinal: int) -> bool:
        """Return whether an entry is acknowledged."""
        return ordinal <= self.mark_delete or ordinal in self.acked

    def write_if_due(self, now_ms: int) -> None:
        """Write the cursor if the last write is long enough ago."""
        due = self._written_ms is None or now_ms - self._written_ms >= self._write_ms
        if self._journal and due:
            self.write(now_ms)

    def write(self, now_ms: int | None) -> None:
        """Make all acknowledgements so far survive a crash."""
        self._journal.clear()
        self._written_mark = self.mark_delete
        self._written_ms = now_ms
        for ordinal in [ordinal for ordinal in self._partial if self.is_acked(ordinal)]:
            del self._partial[ordinal]

    def forget(self) -> None:
        """Restore the last written state, as a killed broker does."""
        undone = {ordinal for ordinal, indices in self._journal if indices is None}
        passed = range(self._written_mark + 1, self.mark_delete + 1)
        parts = dict(self._partial)
        self.acked = (self.acked | set(passed)) - undone
        self.mark_delete = self._written_mark
        for ordinal, indices in self._journal:
            if indices is not None and ordinal in parts:
                parts[ordinal] -= frozenset(indices)
        self._partial = {ordinal: part for ordinal, part in parts.items() if part}
        self._journal.clear()
        self._move()

    def _add(self, ordinal: int) -> None:
        self.acked.add(ordinal)
        self._move()

    def _move(self) -> None:
        """Advance the mark-delete over adjacent acknowledged entries."""
        while self.mark_delete + 1 in self.acked:
            self.mark_delete += 1
            self.acked.discard(self.mark_delete)
