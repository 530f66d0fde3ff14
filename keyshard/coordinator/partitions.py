"""Topic partitions that come and go while a source runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from keyshard.broker.port import Consumer, StartPosition
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange, overlap
from keyshard.errors import KeyShardError
from keyshard.worker.receiver import RangeConsumer
from keyshard.worker.worker import Worker


class Partitions:
    """The :class:`~keyshard.coordinator.discovery.Owner` of the topic partitions of a source.

    Args:
        worker: Hosts their ranges.
        checkpoint: The checkpoint of the start; only its batch may be read again.
        planned: Whether it is: then some of its topics may be dropped since.
        gone: Topic partitions of it that exist no more.
    """

    def __init__(
        self,
        worker: Worker,
        checkpoint: Checkpoint | None,
        *,
        planned: bool,
        gone: Collection[TopicPartition],
    ) -> None:
        self._worker = worker
        self._shared = worker.shared
        self._before = frozenset(() if checkpoint is None else checkpoint.partitions)
        self._ending = checkpoint if planned else None
        self.gone = set(gone)
        """Topic partitions of the batch that may be read again of which nothing is stored."""

    def grow(self, found: Collection[TopicPartition]) -> None:
        consumers, window = self._worker.range_consumers, self._shared.window
        with self._worker.changing:
            range_consumers = consumers.open(found, StartPosition.EARLIEST)
            with self._shared.lock:
                for topic_partition in found:
                    window.add_partition(topic_partition)
                window.pauses.shared_anew()
                self.gone.difference_update(found)
            consumers.serve(range_consumers)

    def shrink(self, gone: Collection[TopicPartition], *, again: bool) -> None:
        window = self._shared.window
        with self._worker.changing:
            self._worker.range_consumers.drop(gone, for_others=again)
            with self._shared.lock:
                for topic_partition in gone:
                    window.drop_partition(topic_partition, gone=False)
                window.pauses.shared_anew()
                self.gone.update(self._before.intersection(gone))

    def forget(self, gone: TopicPartition) -> None:
        with self._shared.lock:
            self._shared.window.drop_partition(gone, gone=True)

    def standing(self, where: TopicPartition) -> list[tuple[RangeConsumer, Consumer]]:
        return self._worker.range_consumers.standing(where)

    def compare(
        self, standing: Collection[tuple[RangeConsumer, Consumer]], gaps: Sequence[HashRange]
    ) -> None:
        for one, consumer in standing:
            if overlap((one.owned_range.hash_range,), gaps):
                one.replace_at_s = time.monotonic()
                one.forgotten = consumer

    def tidy(self) -> None:
        if self._ending is None:
            return
        with self._shared.lock:
            ended = self._shared.window.batches.is_released(self._ending.batch_id)
        if ended and not self._worker.acknowledger.waiting:
            self._worker.range_consumers.let_go(
                self._ending.partitions.keys() - set(self._shared.window.partitions)
            )
            self._ending = None

    def fail(self, error: KeyShardError) -> None:
        self._shared.fail(error)
