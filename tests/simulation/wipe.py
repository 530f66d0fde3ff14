"""A cluster that was wiped and assigns the same ids again: judges the source from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from keyshard.broker.memory import MemoryCluster, Message
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import (
    AvailableNowTimeoutError,
    DataLossAckedElsewhereError,
    DataLossTrimmedError,
    KeyShardError,
    TopicRecreatedError,
)
from tests.helpers import present
from tests.simulation.owed import Debts
from tests.simulation.shape import SUBSCRIPTION
from tests.simulation.spark import Storage

LIVES = 2
"""Lives that must end with the error before it counts as one that stays."""

Name = tuple[str, bytes]
"""Topic and payload: no two messages have the same, positions repeat."""


class Wiped:
    """The state before a wipe, and the messages after it.

    Args:
        events: Events until then; positions of later ones mean something else.
        debts: Messages owed until then.
        storage: The host's.
    """

    def __init__(self, events: int, debts: Debts, storage: Storage) -> None:
        self.events = events
        self.debts = debts
        self._storage = storage
        self._logged = set(storage.offsets)
        self.sent: set[Name] = set()
        """Messages sent since."""
        self.named = 0
        """Lives that ended with the error that names it."""

    def publish(self, where: TopicPartition, messages: Iterable[Message]) -> None:
        """The new cluster has messages."""
        self.sent.update((where.topic, present(message.value)) for message in messages)

    def is_named_by(self, error: KeyShardError) -> bool:
        """Whether an error is the one that names a wiped cluster.

        Without evidence of the wipe, other errors may come first:

        - A planned batch is read again, and its entries are missing.
        - The new cursor has acknowledged an entry, such as a marker, with the id of an entry in
          an old ack gap.
        - A bounded run without new entries waits for its targets until its deadline.
        """
        named = isinstance(
            error,
            TopicRecreatedError
            | DataLossTrimmedError
            | DataLossAckedElsewhereError
            | AvailableNowTimeoutError,
        )
        self.named += named
        return named

    def settled(self) -> bool:
        """Whether the source stays ended with the error, or has committed all that came since.

        It knows nothing of a topic partition from which it has committed nothing.
        """
        return self.named >= LIVES or self.sent <= self._committed().keys()

    def _committed(self) -> Counter[Name]:
        return Counter(
            (row["__topic"], row["value"])
            for batch in self._storage.commits
            for rows in self._storage.sink[batch].values()
            for row in rows
        )

    def problems(self, cluster: MemoryCluster, where: Iterable[TopicPartition]) -> list[str]:
        """Messages that came twice or under a wrong id, or were lost silently."""
        committed = self._committed()
        found = [f"{name} is committed {n} times" for name, n in committed.items() if n > 1]
        for batch in self._logged & self._storage.commits:
            for rows in self._storage.sink[batch].values():
                found += [
                    f"batch {batch} was planned before, and has {row['value']!r}, which came after"
                    for row in rows
                    if (row["__topic"], row["value"]) in self.sent
                ]
        for one in where:
            subscription = cluster.subscriptions(one).get(SUBSCRIPTION)
            for ordinal in range(len(subscription.log) if subscription else 0):
                assert subscription is not None
                entry = subscription.log.get(ordinal)
                if entry is None or entry.hidden or not subscription.cursor.is_acked(ordinal):
                    continue
                found += [
                    f"{message.value!r} of {one} is acknowledged and in no batch"
                    for message in entry.messages
                    if (one.topic, message.value) not in committed
                ]
        return found
