"""Readers of the in-memory broker that lose their connection at steps which a test names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from keyshard.broker.memory import MemoryBroker, MemoryCluster, MemoryReader
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition

NEVER = 10**9
BACK_AFTER = (1, 2, 4, NEVER)
"""Steps until a Reader that was cut off has its connection again; the last is for good."""
T = TypeVar("T")


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
        inner = super().reader(topic_partition, start, *how)
        self.step(inner)
        return _DisconnectingReader(self, inner)

    def step(self, reader: MemoryReader) -> None:
        """One more step."""
        with self._cluster.lock:
            if self.steps in self.cuts:
                reader.drop()
                self._lost[reader] = self.steps
            elif self.steps >= self._lost.get(reader, NEVER) + self.back_after:
                reader.reconnect()
            self.steps += 1


class _DisconnectingReader:
    def __init__(self, broker: DisconnectingBroker, inner: MemoryReader) -> None:
        self._broker, self._inner = broker, inner

    def read(self, timeout_ms: int) -> list[EntryBlock]:
        return self._between_steps(lambda: self._inner.read(timeout_ms))

    def at_end(self) -> bool:
        return self._between_steps(self._inner.at_end)

    def stayed_connected(self) -> bool:
        return self._between_steps(self._inner.stayed_connected)

    def close(self) -> None:
        self._inner.close()

    def _between_steps(self, call: Callable[[], T]) -> T:
        self._broker.step(self._inner)
        answer = call()
        self._broker.step(self._inner)
        return answer


def every_disconnect(
    cluster: MemoryCluster, steps: int, at_once: int = 1
) -> Iterator[DisconnectingBroker]:
    """A broker for each way to cut Readers off at one step of so many, or at several of them."""
    for cuts in itertools.combinations(range(steps), at_once):
        for back_after in BACK_AFTER:
            yield DisconnectingBroker(cluster, cuts, back_after)
