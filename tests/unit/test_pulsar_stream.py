"""A stream of format("pulsar") that begins with a checkpoint of the JVM connector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows

from keyshard import Checkpoint
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.columns.record_batches import SCHEMA
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.serialized_id import SerializedId
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import CheckpointError, ConfigError, DataLossAckedElsewhereError
from spark_adapter import stream_runtime
from spark_adapter.pulsar.stream import PulsarStreamReader
from spark_adapter.task_rows import Rows
from tests.helpers import wait_until
from tests.support.memory_topic import MemoryTopic

LIMIT = ReadMaxRows(1_000)
ENTRIES, MESSAGES = 6, 3
Offset = dict[str, Any]


class StreamSetup(MemoryTopic):
    """Two topic partitions with producer batches, and the stream processes that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[TopicPartition, dict[EntryId, list[str]]] = {}
        for where in self.where:
            for number in range(ENTRIES):
                values = [f"{where.partition}-{number}-{index}" for index in range(MESSAGES)]
                messages = [Message(one.encode(), key=f"k{number}") for one in values]
                ((_, entry),) = self.cluster.publish(where, *messages, batching=Batching.BY_KEY)
                self.sent.setdefault(where, {})[entry] = values
        self.readers: list[PulsarStreamReader] = []

    def reader(self, made_up: str | None = None, **changes: Any) -> PulsarStreamReader:
        """A new stream process, after the end of the one before."""
        self.stop()
        source = self.source(**{
            "subscription": made_up or "unit", "admin_url": self.url,
            "starting_position": "latest" if made_up is None else "earliest",
        } | changes)  # fmt: skip
        made = PulsarStreamReader(source, Rows(SCHEMA.names), made_up=made_up is not None)
        self.readers.append(made)
        return made

    def stop(self) -> None:
        for reader in self.readers:
            reader.stop()

    def offset(self, read: tuple[int, int]) -> Offset:
        """The offsets of the JVM connector after a number of entries."""
        offset = {}
        for where, count in zip(self.where, read, strict=True):
            last = SerializedId(-1, -1)
            if count:
                entry = list(self.sent[where])[count - 1]
                last = SerializedId(*entry, where.partition, MESSAGES - 1, MESSAGES)
            offset[where.name] = signed(last)
        return offset

    def behind(self, read: tuple[int, int]) -> list[str]:
        return sorted(
            value
            for where, count in zip(self.where, read, strict=True)
            for values in list(self.sent[where].values())[count:]
            for value in values
        )


def signed(one: SerializedId) -> list[int]:
    return [byte - 256 if byte > 127 else byte for byte in one.to_bytes()]


def values(reader: PulsarStreamReader, start: Offset, end: Offset) -> list[str]:
    indices = [one.ticket.index for one in reader.partitions(start, end)]  # type: ignore[attr-defined]
    assert reader._runtime is not None
    planned, batch_id = reader._runtime.coordinator.batches, Checkpoint.from_dict(end).batch_id
    batches = [batch for index in indices for batch in planned.read(batch_id, index)]
    return [value.decode() for batch in batches for value in batch.column("value").to_pylist()]


def all_behind(reader: PulsarStreamReader, start: Offset, count: int) -> tuple[list[str], Offset]:
    """Commit batches as Spark does until ``count`` rows came; return the rows and the last end."""
    found: list[str] = []
    while len(found) < count:
        ends: list[Offset] = []

        def cut(start: Offset = start, ends: list[Offset] = ends) -> bool:
            ends[:] = [reader.latestOffset(start, LIMIT)]
            return ends[0] != start

        wait_until(cut)
        found += values(reader, start, ends[0])
        reader.commit(ends[0])
        (start,) = ends
    return sorted(found), start


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_runtime, "end_with_host", lambda *_: None)


@pytest.fixture
def setup() -> Iterator[StreamSetup]:
    setup = StreamSetup()
    yield setup
    setup.stop()
    setup.cluster.validate()


@settings(max_examples=12, deadline=None)
@given(read=st.tuples(st.integers(0, ENTRIES), st.integers(0, ENTRIES)), again=st.booleans())
def test_it_continues_behind_each_position_with_nothing_twice(
    read: tuple[int, int], again: bool
) -> None:
    setup = StreamSetup()
    try:
        start, left = setup.offset(read), setup.behind(read)
        reader = setup.reader()
        assert reader.latestOffset(start, LIMIT) is not None
        if again:  # killed before the first batch is planned
            reader = setup.reader()
        found, end = all_behind(reader, start, len(left))
        assert found == left
        assert reader.latestOffset(end, LIMIT) == end
        reader = setup.reader()
        assert reader.latestOffset(end, LIMIT) == end, "its own checkpoint, or still that one"
        wait_until(lambda: not any(setup.cluster.backlog(one, "unit") for one in setup.where))
    finally:
        setup.stop()
    setup.cluster.validate()


def test_the_first_batch_here_runs_again_after_a_restart_exactly(setup: StreamSetup) -> None:
    start, left = setup.offset((2, 0)), setup.behind((2, 0))
    reader = setup.reader()
    ends: list[Offset] = []

    def cut() -> bool:
        ends[:] = [reader.latestOffset(start, LIMIT)]
        return ends[0] != start

    wait_until(cut)
    before = values(reader, start, ends[0])
    reader = setup.reader()
    assert values(reader, start, ends[0]) == before
    reader.commit(start)
    reader.commit(ends[0])
    rest, _ = all_behind(reader, ends[0], len(left) - len(before))
    assert sorted([*before, *rest]) == left


def test_an_empty_batch_has_no_parts_and_the_jvm_connectors_first_one_is_refused(
    setup: StreamSetup,
) -> None:
    reader, end = setup.reader(), setup.offset((1, 1))
    assert reader.partitions(end, dict(end)) == []
    with pytest.raises(
        CheckpointError, match="The JVM connector planned the first batch of this checkpoint"
    ):
        reader.partitions(reader.initialOffset(), end)


def test_a_cursor_ahead_of_the_checkpoint_loses_no_entry(
    setup: StreamSetup,
) -> None:
    """Each start of the JVM connector moves its cursor to the end, until the first commit."""
    broker = MemoryBroker(setup.cluster)
    whole = HashRange(0, 65_535)
    for where in setup.where:
        broker.subscribe(
            SubscriptionSpec(where, "unit", whole, consumer_name="c", receiver_queue_size=1),
            StartPosition.LATEST,
        ).close()
    broker.close()
    with pytest.raises(DataLossAckedElsewhereError, match="are acknowledged for 'unit'"):
        setup.reader().latestOffset(setup.offset((2, 3)), LIMIT)
    with pytest.raises(ConfigError, match=r"subscription with it\.\nRemedy: Set admin"):
        setup.reader(admin_url=None).latestOffset(setup.offset((2, 3)), LIMIT)


@pytest.mark.parametrize(
    "last",
    [
        [], [8], [1, 2, 3], signed(SerializedId(3, 5, 1)), signed(SerializedId(3, -1, 0)),
        signed(SerializedId(2**63 - 1, 2**63 - 1)), ["8"], [8, 1, 16, 1, 58, 0],
    ],
)  # fmt: skip
def test_invalid_offsets_are_refused_by_name(setup: StreamSetup, last: list[Any]) -> None:
    name = setup.where[0].name
    reader = setup.reader()
    with pytest.raises(CheckpointError, match=f"The JVM connector's offset of {name} is "):
        reader.latestOffset({name: last}, LIMIT)
    assert reader._runtime is None


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("from_jvm", [True, False])
def test_an_unnamed_subscription_is_kept_by_the_checkpoint(
    setup: StreamSetup, caplog: pytest.LogCaptureFixture, committed: bool, from_jvm: bool
) -> None:
    read = (2, 0) if from_jvm else (0, 0)
    first = setup.reader(made_up="spark-pulsar-1")
    start = setup.offset(read) if from_jvm else first.initialOffset()
    ends: list[Offset] = []

    def cut() -> bool:
        ends[:] = [first.latestOffset(start, ReadMaxRows(5))]
        return ends[0] != start

    wait_until(cut)
    (end,) = ends
    had = values(first, start, end)
    if committed:
        first.commit(end)
    assert [one.levelname for one in caplog.records if "spark-pulsar-1" in one.message] == [
        "WARNING"
    ]
    second = setup.reader(made_up="spark-pulsar-2")
    if not committed:
        assert values(second, start if from_jvm else second.initialOffset(), end) == had
        second.commit(end)
    rest, _ = all_behind(second, end, len(setup.behind(read)) - len(had))
    assert sorted(had + rest) == setup.behind(read)
    assert "spark-pulsar-2" not in caplog.text
    for where in setup.where:
        assert set(setup.cluster.subscriptions(where)) == {"spark-pulsar-1"}
