"""Recent failures of bookies and ledgers, which later splits of a process do not repeat.

All threads of the process share them, because every task has connections of its own. Otherwise,
each task would wait for the same dead bookie, and leave the same ledger to the broker halfway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from keyshard.core.position.entry import EntryId

REMEMBERED_S = 60.0
"""How long a failure is remembered, seconds."""
FAILURES_MAX = 10_000
"""Most failures of each kind that are remembered."""

K = TypeVar("K", bound=Hashable)


class _Failure(NamedTuple):
    why: str
    entry: int
    end_s: float


class _Recent(Generic[K]):
    """The newest failures, by the key of the bookie or ledger."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[K, _Failure] = {}
        self._lock = threading.Lock()

    def note(self, failed: K, why: str, entry: int = 0) -> None:
        with self._lock:
            self._found.pop(failed, None)
            while len(self._found) >= FAILURES_MAX:
                del self._found[next(iter(self._found))]
            self._found[failed] = _Failure(why, entry, self._clock() + REMEMBERED_S)

    def get(self, asked: K) -> _Failure | None:
        found = self._found.get(asked)
        return found if found is not None and self._clock() < found.end_s else None


class Failures:
    """Bookies and ledgers that failed, or refused batch reads, less than :data:`REMEMBERED_S` ago.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bookies: _Recent[Hashable] = _Recent(clock)
        self._ledgers: _Recent[tuple[Hashable, int]] = _Recent(clock)
        self._single: _Recent[Hashable] = _Recent(clock)

    def note_bookie(self, address: Hashable, why: str) -> None:
        """Remember that a bookie failed; its address includes how TLS is spoken with it.

        A store of offloads counts as a bookie, whose address is its URL.
        """
        self._bookies.note(address, why)

    def bookie(self, address: Hashable) -> str:
        """Return why a bookie failed lately; empty if it did not."""
        found = self._bookies.get(address)
        return "" if found is None else found.why

    def note_single(self, address: Hashable) -> None:
        """Remember that a bookie refuses batch reads, but returns single entries."""
        self._single.note(address, "it refuses batch reads")

    def is_single(self, address: Hashable) -> bool:
        """Return whether a bookie has refused batch reads lately."""
        return self._single.get(address) is not None

    def note_ledger(self, cluster: Hashable, at: EntryId, why: str) -> None:
        """Remember that a ledger is left to the broker from an entry on."""
        known = self._ledgers.get((cluster, at.ledger))
        if known is None or at.entry < known.entry:
            self._ledgers.note((cluster, at.ledger), why, at.entry)

    def ledger(self, cluster: Hashable, at: EntryId) -> str:
        """Return why a ledger is left to the broker at an entry; empty if it is not."""
        found = self._ledgers.get((cluster, at.ledger))
        return found.why if found is not None and at.entry >= found.entry else ""


OF_PROCESS = Failures()
"""The failures that all reads of this process share."""
