"""A cluster that was wiped and gives the same ids again: what a source may do from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from keyshard.broker.memory import Message
from keyshard.core.entry import TopicPartition
from keyshard.errors import (
    AvailableNowTimeoutError,
    DataLossTrimmedError,
    KeyShardError,
    TopicRecreatedError,
)
from tests.simulation.debts import Debts
from tests.simulation.spark import Storage

LIVES = 2
"""Lives that must end with the error before it counts as one that stays."""

Name = tuple[str, bytes]
"""Topic and payload: no two messages have the same, positions repeat."""


class Wiped:
    """What was there before, and what came after.

    Args:
        events: Events until then; positions of later ones mean something else.
        debts: What was owed until then.
        storage: The host's.
    """

    def __init__(self, events: int, debts: Debts, storage: Storage) -> None:
        self.events = events
        self.debts = debts
        self._storage = storage
        self._logged = set(storage.offsets)
        self.sent: set[Name] = set()
        """What was sent since."""
        self.named = 0
        """Lives that ended with the error that names it."""

    def publish(self, where: TopicPartition, messages: Iterable[Message]) -> None:
        """The new cluster has messages."""
        self.sent.update((where.topic, message.value) for message in messages)

    def is_named_by(self, error: KeyShardError) -> bool:
        """Whether an error is the one that names a wiped cluster.

        Where a planned batch is read again and nothing tells more, its entries are missing. A
        bounded run to which nothing new comes waits for its targets until its deadline.
        """
        named = isinstance(
            error, TopicRecreatedError | DataLossTrimmedError | AvailableNowTimeoutError
        )
        self.named += named
        return named

    def settled(self, backlog: int) -> bool:
        """Whether the source stays ended with the error, or has committed all that came since.

        It knows nothing of a topic partition from which it has committed nothing. And what it had
        acknowledged at that moment, and was on its way, may have met new entries under those ids:
        then nothing shows the next life what the first one named.

        Args:
            backlog: Entries that are not acknowledged.
        """
        if self.named >= LIVES or (self.named and not backlog):
            return True
        return self.sent <= self._committed().keys()

    def _committed(self) -> Counter[Name]:
        return Counter(
            (row["__topic"], row["value"])
            for batch in self._storage.commits
            for rows in self._storage.sink[batch].values()
            for row in rows
        )

    def problems(self) -> list[str]:
        """What came twice, or in the place of something else."""
        committed = self._committed()
        found = [f"{name} is committed {n} times" for name, n in committed.items() if n > 1]
        for batch in self._logged & self._storage.commits:
            for rows in self._storage.sink[batch].values():
                found += [
                    f"batch {batch} was planned before, and has {row['value']!r}, which came after"
                    for row in rows
                    if (row["__topic"], row["value"]) in self.sent
                ]
        # What was received before and is acknowledged after meets the new entries of the same ids:
        # no source can tell them apart before something new comes, so those are not judged.
        return found
