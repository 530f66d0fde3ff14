"""Deduplication of one topic partition of the in-memory broker, as Pulsar 4.0 does it.

Private to :mod:`keyshard.broker.memory`, which documents the package. Call every method under the
lock of the cluster.
"""

from __future__ import annotations

from enum import Enum, auto

from keyshard.core.publishing import NOTHING


class DuplicateCheck(Enum):
    """Judgement of an entry by its producer name and first sequence id."""

    NEW = auto()
    DUPLICATE = auto()
    """It is surely stored."""
    UNDECIDED = auto()
    """It was accepted before, and is not stored yet."""


class Deduplication:
    """Highest sequence ids by producer name: accepted for writing, and stored."""

    def __init__(self) -> None:
        self._pushed: dict[str, int] = {}
        self._stored: dict[str, int] = {}

    def last(self, name: str) -> int:
        """Return the highest accepted id of a name."""
        return self._pushed.get(name, NOTHING)

    def judge(self, name: str, first: int) -> DuplicateCheck:
        """Judge an entry. Only its first id counts."""
        if first <= self._stored.get(name, NOTHING):
            return DuplicateCheck.DUPLICATE
        return DuplicateCheck.UNDECIDED if first <= self.last(name) else DuplicateCheck.NEW

    def accept(self, name: str, last: int) -> None:
        """Record that an entry is being written."""
        self._pushed[name] = max(last, self.last(name))

    def stored(self, name: str, last: int) -> None:
        """Record that an entry was written."""
        self._stored[name] = max(last, self._stored.get(name, NOTHING))

    def failed(self) -> None:
        """Forget entries that were accepted and not written."""
        self._pushed = dict(self._stored)

    def reload(self, names_max: int) -> None:
        """Recover from a snapshot of some names and the stored entries, as another broker does."""
        names = list(self._stored)[:names_max]
        self._stored = {name: self._stored[name] for name in names}
        self.failed()

    def forget(self, name: str, behind: int) -> None:
        """Forget the ids of a name above ``behind``.

        Args:
            name: The name of the producer.
            behind: Highest id that is kept. Pulsar before 5.0 may forget later ids when it loads a
                topic. :data:`NOTHING` forgets the name, as Pulsar does after hours without a
                producer.
        """
        for ids in (self._pushed, self._stored):
            known = min(ids.pop(name, NOTHING), behind)
            if known != NOTHING:
                ids[name] = known
