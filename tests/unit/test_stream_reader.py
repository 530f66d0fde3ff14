"""The stream reader under the orders of calls that a recording of Spark 4.3 showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from helpers import config, wait_until
from keyshard import Checkpoint, KeyShardSource
from keyshard.arrow.columns import SCHEMA
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.coordinator.coordinator import Coordinator
from keyshard.errors import AsyncProgressError, CheckpointMismatchError, UnsupportedTriggerError
from spark_adapter import stream_reader
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.structure import Rows

LIMIT = ReadMaxRows(20)


class MemorySource(KeyShardSource):
    """A source on an in-memory cluster."""

    cluster: MemoryCluster

    def coordinator(self) -> Coordinator:
        return Coordinator(self, lambda: MemoryBroker(self.cluster))


class Host:
    """Calls a reader as Spark does; each instance is one stream process."""

    def __init__(self, cluster: MemoryCluster, topic: str, **changes: Any) -> None:
        plain = config(topic, **changes)
        source = MemorySource(
            topic, subscription="unit", parallelism=4, starting_position=plain.starting_position
        )
        object.__setattr__(source, "cluster", cluster)
        self.reader = KeyShardStreamReader(source, Rows(SCHEMA.names))

    def wait(self, rows: int) -> None:
        """Until so many rows were received by this process."""
        wait_until(lambda: self.reader._runtime.coordinator.status()["rowsReceived"] >= rows)  # type: ignore[union-attr]

    def values(self, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
        """Plan and read the batch that ends at ``end``."""
        indices = [ticket.ticket.index for ticket in self.reader.partitions(start, end)]  # type: ignore[attr-defined]
        coordinator = self.reader._runtime.coordinator  # type: ignore[union-attr]
        batch_id = Checkpoint.from_dict(end).batch_id
        return [
            row["value"].decode()
            for index in indices
            for part in coordinator.worker.read(batch_id, index)
            for row in part.to_pylist()
        ]


class Bench:
    """A cluster, its topic, and the stream processes on it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.topic = self.cluster.create_topic("orders", partitions=2)
        self.sent: list[str] = []
        self.hosts: list[Host] = []

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.sent.append(str(len(self.sent)))
            self.cluster.publish(
                self.topic, Message(self.sent[-1].encode(), key=f"k{len(self.sent) % 9}")
            )

    @property
    def backlog(self) -> int:
        where = self.cluster.partitions(self.topic)
        return sum(self.cluster.backlog(one, "unit") for one in where)

    def host(self) -> Host:
        for host in self.hosts:
            host.reader.stop()
        self.hosts.append(Host(self.cluster, self.topic))
        return self.hosts[-1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(stream_reader, "end_with_host", lambda _stop: None)
    bench = Bench()
    yield bench
    for host in bench.hosts:
        host.reader.stop()
    bench.cluster.validate()


def test_batches_in_the_order_of_a_new_query(bench: Bench) -> None:
    host = bench.host()
    bench.publish(60)
    start, got = host.reader.initialOffset(), []
    end = host.reader.latestOffset(start, LIMIT)
    while end == start:
        end = host.reader.latestOffset(start, LIMIT)
    assert host.reader.initialOffset() == start
    while end != start:
        got += host.values(start, end)
        start, end = end, host.reader.latestOffset(end, LIMIT)
        wait = len(got) < 60
        while wait and end == start:
            end = host.reader.latestOffset(start, LIMIT)
        if end != start:
            host.reader.commit(start)
    assert Counter(got) == Counter(bench.sent)
    wait_until(lambda: bench.backlog == 0)


def test_the_first_batch_runs_again_after_a_restart_exactly(bench: Bench) -> None:
    bench.publish(30)
    host = bench.host()
    initial = host.reader.initialOffset()
    host.reader.latestOffset(initial, LIMIT)
    host.wait(30)
    first = host.reader.latestOffset(initial, LIMIT)
    before = host.values(initial, first)
    host = bench.host()  # killed before the batch is committed
    again = host.reader.initialOffset()
    got = host.values(again, first)
    assert got == before
    start = first
    while len(got) < 30:
        end = host.reader.latestOffset(start, LIMIT)
        if end != start:
            host.reader.commit(start)
            got += host.values(start, end)
            start = end
    assert Counter(got) == Counter(bench.sent)
    assert host.reader.latestOffset(start, LIMIT) == start
    wait_until(lambda: bench.backlog == 0)


def test_a_checkpoint_of_another_subscription_is_refused_at_the_first_batch_too(
    bench: Bench,
) -> None:
    host = bench.host()
    initial = host.reader.initialOffset()
    state = {"batch": "1:0", "delivered": "1:0", "published": 1}
    partitions = {f"{bench.topic}-partition-0": state}
    with pytest.raises(CheckpointMismatchError):
        host.reader.partitions(
            initial, {**initial, "subscription": "other", "partitions": partitions}
        )


def test_planning_twice_as_a_union_does_is_no_async_progress(bench: Bench) -> None:
    bench.publish(10)
    host = bench.host()
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    host.wait(10)
    end = host.reader.latestOffset(start, LIMIT)
    assert host.values(start, end) == host.values(start, end) != []


def test_async_progress_is_refused_with_nothing_acknowledged(bench: Bench) -> None:
    bench.publish(60)
    host = bench.host()
    start = host.reader.initialOffset()
    host.reader.latestOffset(start, LIMIT)
    host.wait(60)
    first = host.reader.latestOffset(start, LIMIT)
    host.reader.partitions(start, first)
    second = host.reader.latestOffset(first, LIMIT)
    assert second != first
    with pytest.raises(AsyncProgressError):
        host.reader.partitions(first, second)
    host.reader.stop()
    assert bench.backlog == 60


def test_a_commit_of_an_older_batch_does_not_allow_the_next(bench: Bench) -> None:
    bench.publish(60)
    host = bench.host()
    ends = [host.reader.initialOffset()]
    host.reader.latestOffset(ends[0], LIMIT)
    host.wait(60)
    for _ in range(2):
        ends.append(host.reader.latestOffset(ends[-1], LIMIT))
        host.reader.partitions(ends[-2], ends[-1])
        if len(ends) == 2:
            host.reader.commit(ends[1])
    ends.append(host.reader.latestOffset(ends[-1], LIMIT))
    host.reader.commit(ends[1])  # two batches late, as an interval of 0 ms makes it
    with pytest.raises(AsyncProgressError):
        host.reader.partitions(ends[-2], ends[-1])


def test_a_bounded_query_ends_and_stays_ended(bench: Bench) -> None:
    host = bench.host()
    bench.publish(50)
    host.reader.prepareForTriggerAvailableNow()
    start, got = host.reader.initialOffset(), []
    while (end := host.reader.latestOffset(start, LIMIT)) != start:
        if got:
            host.reader.commit(start)
        bench.publish(5)
        got += host.values(start, end)
        start = end
    assert len(got) == 50
    assert bench.backlog == len(bench.sent) - 50
    assert host.reader.latestOffset(start, LIMIT) == start
    told = host.reader.reportLatestOffset()
    assert told is not None
    assert told["malformedDropped"] == 0


def test_once_is_refused(bench: Bench) -> None:
    host = bench.host()
    with pytest.raises(UnsupportedTriggerError, match="availableNow"):
        host.reader.latestOffset(host.reader.initialOffset(), ReadAllAvailable())
