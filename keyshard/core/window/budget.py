"""Most that a window holds, and the share of each topic partition."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """Most that a window holds, received and planned together."""

    rows_max: int
    bytes_max: int
    partition_rows_max: int | None = None
    """Most rows of one topic partition; ``None``: its share of ``rows_max`` only."""
    checkpoint_bytes_max: int = 256 * 1024
    """Size of a checkpoint at which the fast ranges of a topic partition pause."""
    queue_max: int = 1_000
    """Most messages in the client queue of each consumer, beside those rows."""

    def fill(self, rows: int, size: int, shares: int) -> float:
        """How full a topic partition's share is, 0 to 1 and rarely more.

        Args:
            rows: Rows that are held of it.
            size: The same in bytes.
            shares: Number of topic partitions.
        """
        rows_max = self.rows_max / shares
        if self.partition_rows_max is not None:
            rows_max = min(rows_max, self.partition_rows_max)
        return max(rows / rows_max, size * shares / self.bytes_max)
