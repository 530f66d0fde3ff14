"""A topic on the in-memory broker that tests plan and read split by split."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.read_bounds import parse_bounds
from keyshard.core.position.split import Split
from keyshard.reading.split_planner import stretches
from keyshard.reading.split_reader import read_split
from tests.support.faulty_broker import Fault

T0 = 1_700_000_000_000
IDS = ("__partition", "__messageId")


class SplitTopic:
    """Partitions with ledgers of seven entries: single messages, batches and markers."""

    def __init__(self, partitions: int = 3, entries: int = 21) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=7)
        self.topic = self.cluster.create_topic("orders", partitions)
        self.partitions = self.cluster.partitions(self.topic)
        self.admin = MemoryAdmin(self.cluster)
        self.ids: list[tuple[int, str]] = []
        self.times: dict[tuple[int, str], int] = {}
        for where in self.partitions:
            for number in range(entries):
                if number % 5 == 2:
                    self.cluster.publish_marker(where)
                else:
                    self.publish(where, 3 if number % 4 == 0 else 1, T0 + number)

    def publish(self, where: TopicPartition, messages: int, time_ms: int) -> EntryId:
        batch = [Message(b"m", key="k")] * messages
        ((_, entry_id),) = self.cluster.publish(
            where, *batch, batching=Batching.BY_KEY, publish_ms=time_ms
        )
        for index in range(messages):
            name = (where.partition, f"{entry_id.ledger}:{entry_id.entry}:{index}")
            self.ids.append(name)
            self.times[name] = time_ms
        return entry_id

    def plan(self, start: Any = "earliest", end: Any = "latest", **options: Any) -> list[Split]:
        starts = parse_bounds("start", start, self.partitions)
        ends = parse_bounds("end", end, self.partitions)
        return list(stretches(self.admin, starts, ends, 5.0, **options))

    def read(
        self, splits: Iterable[Split], broker: MemoryBroker | None = None, **options: Any
    ) -> list[tuple[int, str]]:
        broker = broker or MemoryBroker(self.cluster)
        return [
            row
            for split in splits
            for batch in read_split(broker, self.admin, split, IDS, 5.0, **options)
            for row in rows_of(batch)
        ]


def rows_of(batch: pa.RecordBatch) -> list[tuple[int, str]]:
    return list(zip(*(batch.column(name).to_pylist() for name in IDS), strict=True))


def without(ids: Collection[int]) -> Fault:
    """A fault of a list of ledgers that leaves some of them out."""
    return lambda call, where: tuple(one for one in call(where) or () if one.id not in ids)
