"""What a window counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What a user wants to know; all since the start of this run."""

    rows_received: int = 0
    duplicates_dropped: int = 0
    """Messages that were delivered again and dropped."""
    misrouted: int = 0
    """Messages whose slot is outside the range that received them."""
    keyless: int = 0
    unreadable: int = 0
    """Messages with a time, key or property that cannot be what it should."""
    corrupt_skipped: int = 0
    """Entries that could not be read, and were acknowledged because ``on_corrupt`` is ``skip``."""
    encrypted_skipped: int = 0
    """Encrypted entries that were acknowledged because ``on_encrypted`` is ``skip``."""
    holes_settled: int = 0
    """Entries of holes that a checkpoint calls settled."""
    entries_lost: int = 0
    """Entries left out because they are gone or were acknowledged by somebody else."""
