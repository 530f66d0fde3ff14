"""Readers of the in-memory broker that lose their connection at steps which a test names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from keyshard.broker.memory import MemoryBroker, MemoryCluster, MemoryReader
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.support.faulty_broker import Fault, faulty

NEVER = 10**9
BACK_AFTER = (1, 2, 4, NEVER)
"""Steps until a Reader that was cut off has its connection again; the last is for good."""


class DisconnectingBroker(MemoryBroker):
    """A broker whose Readers lose their connection at some steps, before or after a call.

    Args:
        cluster: The broker's side.
        cuts: Numbers of the steps, counted over all its Readers.
        back_after: Steps until the Reader has its connection again.
    """

    def __init__(
        self, cluster: MemoryCluster, cuts: Collection[int] = (), back_after: int = NEVER
    ) -> None:
        super().__init__(cluster)
        self.cuts = cuts
        self.back_after = back_after
        self.steps = 0
        self._lost: dict[MemoryReader, int] = {}

    def reader(self, topic_partition: TopicPartition, start: EntryId, *how: Any) -> Any:
        reader = super().reader(topic_partition, start, *how)
        self.step(reader)

        def between_steps(call: Fault, *args: Any) -> Any:
            self.step(reader)
            answer = call(*args)
            self.step(reader)
            return answer

        return faulty(
            reader, read=between_steps, at_end=between_steps, stayed_connected=between_steps
        )

    def step(self, reader: MemoryReader) -> None:
        """One more step."""
        with self._cluster.lock:
            if self.steps in self.cuts:
                reader.drop()
                self._lost[reader] = self.steps
            elif self.steps >= self._lost.get(reader, NEVER) + self.back_after:
                reader.reconnect()
            self.steps += 1


def every_disconnect(
    cluster: MemoryCluster, steps: int, at_once: int = 1
) -> Iterator[DisconnectingBroker]:
    """A broker for each way to cut Readers off at one step of so many, or at several of them."""
    for cuts in itertools.combinations(range(steps), at_once):
        for back_after in BACK_AFTER:
            yield DisconnectingBroker(cluster, cuts, back_after)
