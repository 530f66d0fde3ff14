"""Start positions of scalable topics: times, positions by segment, and starts that died."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, MemoryReader
from keyshard.broker.memory import Message as Stored
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.coordinator.segment_starts import SegmentStarts
from keyshard.coordinator.start_positions import positions_of
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.read_bounds import Edge
from keyshard.core.topic_segments import STARTING
from keyshard.errors import (
    AdminError,
    BrokerUnavailableError,
    ConfigError,
    DataLossTrimmedError,
    NotRunningError,
    PositionAheadError,
    SubscriptionInUseError,
)
from keyshard.reading.segment_ledgers import first_stored
from keyshard.testing import run_until_idle
from tests.support.deadlines import deadline
from tests.support.memory_scalable_topic import KEYS, TOPIC, ScalableTopic

SUBSCRIPTION = "s"


class StartedTopic(ScalableTopic):
    """A scalable topic with ledgers of seven entries, read and consumed from positions."""

    def __init__(self, segments: int = 2) -> None:
        self.name = uuid.uuid4().hex
        super().__init__(segments, MemoryCluster.named(self.name, entries_per_ledger=7))
        self.admin = MemoryAdmin(self.cluster)

    def source(self, **changes: Any) -> KeyShardSource:
        url = f"memory://{self.name}"
        fields: dict[str, Any] = {"subscription": SUBSCRIPTION, "parallelism": 3} | changes
        return KeyShardSource(TOPIC, service_url=url, admin_url=url, **fields)

    def consume(self, start: object, **changes: Any) -> list[int]:
        """Numbers of the messages of a run from a start position, until nothing is left."""
        self.got = []
        text = start if isinstance(start, str) else json.dumps(start)
        source = self.source(starting_position=text, **changes)
        run_until_idle(source, self.handle)
        for key in KEYS:
            of_key = [number for one, number in self.got if one == key]
            assert of_key == sorted(of_key), key
        return sorted(number for _, number in self.got)

    def read(self, **bounds: Any) -> list[int]:
        rows = self.source().read(**bounds)
        return sorted(int(one) for batch in rows for one in batch.column("value").to_pylist())

    def ends(self) -> dict[str, str]:
        return self.source().read().ends

    @property
    def segments(self) -> tuple[TopicPartition, ...]:
        return self.cluster.scalable.graph(TOPIC).partitions

    def change(self) -> None:
        """Make three generations of segments, with messages in each."""
        self.split(0)
        self.publish(20)
        self.cluster.scalable.merge(TOPIC, 3, 1)
        self.publish(20)

    def subscriptions(self) -> set[str]:
        return {name for where in self.segments for name in self.cluster.subscriptions(where)}


@pytest.fixture
def topic() -> StartedTopic:
    made = StartedTopic()
    made.publish(40)
    return made


def test_the_ends_of_a_read_are_the_start_of_the_next_while_segments_change(
    topic: StartedTopic,
) -> None:
    read: list[int] = []
    start: Any = "earliest"
    for _ in range(4):
        rows = topic.source().read(start=start)
        read += [int(one) for batch in rows for one in batch.column("value").to_pylist()]
        start = rows.ends
        newest = max(topic.cluster.scalable.graph(TOPIC).segments)
        topic.publish(10)
        topic.split(newest)
        topic.publish(10)
    read += topic.read(start=start)
    assert sorted(read) == list(range(topic.sent))


def test_a_read_up_to_positions_has_nothing_of_segments_that_came_later(
    topic: StartedTopic,
) -> None:
    ends = topic.ends()
    topic.change()
    assert topic.read(end=ends) == list(range(40))
    assert topic.read(start=ends) == list(range(40, topic.sent))
    assert topic.read(start=ends, end=topic.ends()) == list(range(40, topic.sent))


def test_a_source_starts_at_positions_and_goes_on_with_segments_that_came_later(
    topic: StartedTopic,
) -> None:
    ends = topic.ends()
    topic.change()
    assert topic.consume(ends) == list(range(40, topic.sent))
    assert topic.subscriptions() == {SUBSCRIPTION}


def test_a_source_starts_at_a_time_in_all_segments(topic: StartedTopic) -> None:
    topic.change()
    assert topic.consume("2001-01-01T00:00:00Z") == list(range(topic.sent))


def test_a_source_starts_at_the_first_entry_that_is_not_earlier_than_a_time() -> None:
    topic = StartedTopic()
    for number in range(6):
        message = Stored(b"%d" % number, key=KEYS[number % 3])
        topic.cluster.publish(TOPIC, message, publish_ms=10**12 + 20_000 * number)
    assert topic.consume("2001-09-09T01:47:20Z") == [2, 3, 4, 5]


@pytest.mark.parametrize("index", [1, 4, 5])
def test_a_source_starts_inside_an_entry(topic: StartedTopic, index: int) -> None:
    (where, _) = topic.segments
    ends = topic.ends()
    before = topic.sent
    rows = [Stored(b"%d" % number, key=KEYS[number % 8]) for number in range(before, before + 5)]
    topic.cluster.publish(where, *rows, batching=Batching.MIXED, batch_messages_max=5)
    topic.sent += 5
    ledger, entry, _ = ends[where.name].split(":")
    ends[where.name] = f"{ledger}:{entry}:{index}"
    assert topic.consume(ends) == list(range(before + index, before + 5))
    assert topic.read(start=ends) == list(range(before + index, before + 5))


def test_a_broker_that_keeps_no_parts_of_entries_is_named(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = MemoryBroker.begin

    def whole(
        self: MemoryBroker, where: TopicPartition, name: str, start: Any, batch_size: int = 1
    ) -> EntryId:
        at = start if isinstance(start, int) else start._replace(batch_index=0)
        return begin(self, where, name, at, batch_size)

    monkeypatch.setattr(MemoryBroker, "begin", whole)
    (where, other) = topic.segments
    rows = [Stored(b"0", key=KEYS[0])] * 5
    ((_, at),) = topic.cluster.publish(where, *rows, batching=Batching.MIXED, batch_messages_max=5)
    start = {where.name: f"{at.ledger}:{at.entry}:2", other.name: "earliest"}
    with pytest.raises(ConfigError, match="Set acknowledgmentAtBatchIndexLevelEnabled"):
        topic.consume(start)


def test_a_subscription_that_begins_elsewhere_is_named(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = topic.ends()
    topic.publish(20)
    begin = MemoryBroker.begin

    def elsewhere(self: MemoryBroker, where: TopicPartition, name: str, *_: Any) -> EntryId:
        return begin(self, where, name, MessageId(0, 0, 0))

    monkeypatch.setattr(MemoryBroker, "begin", elsewhere)
    with pytest.raises(AdminError, match=r"should begin at .* Nothing was consumed"):
        topic.consume(ends)


@pytest.mark.parametrize("dies_at", range(6))
def test_a_start_that_died_is_made_again_and_nothing_is_lost_or_repeated(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """The start dies before its nth change of the broker, or between the two steps of a move."""
    ends = topic.ends()
    topic.change()
    calls = [0]

    class Died(BaseException):
        pass

    def dying(owner: type, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def change(self: Any, *of: Any) -> Any:
            calls[0] += 1
            if calls[0] > dies_at:
                if name == "begin":
                    real(self, of[0], of[1], MessageId(0, 0, 0))
                raise Died
            return real(self, *of)

        monkeypatch.setattr(owner, name, change)

    for owner, name in ((MemoryBroker, "begin"), (MemoryAdmin, "register"),
                        (MemoryAdmin, "unregister")):  # fmt: skip
        dying(owner, name)
    with pytest.raises(Died), topic.source(starting_position=json.dumps(ends)).open():
        pass
    monkeypatch.undo()
    topic.publish(10)
    assert topic.consume(ends) == list(range(40, topic.sent))
    assert topic.subscriptions() == {SUBSCRIPTION}
    assert topic.consume(ends) == []


def test_an_existing_subscription_stays_where_it_is(
    topic: StartedTopic, caplog: pytest.LogCaptureFixture
) -> None:
    assert topic.consume("earliest") == list(range(40))
    before = topic.ends()
    topic.publish(10)
    topic.split(0)
    topic.publish(10)
    assert topic.consume("2100-01-01T00:00:00Z") == list(range(40, 60))
    assert "the starting position '2100-01-01T00:00:00Z' is ignored" in caplog.text
    assert topic.consume(before) == []


def test_a_wrong_position_creates_no_subscription(topic: StartedTopic) -> None:
    low, high = (where.name for where in topic.segments)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({low: "earliest"}, ConfigError, f"starting_position has no position for {high}"),
        ({low: "earliest", high: "999:0"}, PositionAheadError, "after all stored entries"),
        ({low: "earliest", high: "latest", "orders": "1:0"}, ConfigError, "is no segment of"),
    ]
    for start, kind, text in wrong:
        with pytest.raises(kind, match=text):
            topic.consume(start)
        assert not topic.subscriptions()


@pytest.mark.parametrize("strict", [True, False])
def test_positions_in_a_segment_that_was_deleted_are_data_loss(
    topic: StartedTopic, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ends = topic.ends()
    topic.split(0)
    topic.publish(20)
    assert topic.cluster.scalable.collect(TOPIC) == [0]
    lenient = {"fail_on_data_loss": strict}
    if strict:
        with pytest.raises(DataLossTrimmedError, match="0000-7fff-0, which the broker has deleted"):
            topic.source(**lenient).read(start=ends)
        with pytest.raises(DataLossTrimmedError, match="starting_position has a position in"):
            topic.consume(ends)
        return
    rows = topic.source(**lenient).read(start=ends)
    read = [int(one) for batch in rows for one in batch.column("value").to_pylist()]
    assert sorted(read) == topic.consume(ends, **lenient) == list(range(40, 60))
    assert "which the broker has deleted since" in caplog.text


def test_a_position_in_a_segment_without_stored_messages_is_data_loss(
    topic: StartedTopic,
) -> None:
    where = topic.segments[0]
    ends = topic.ends()
    last = topic.cluster.log(where).last_written
    topic.cluster.trim(where, EntryId(last.ledger, last.entry + 1))
    with pytest.raises(DataLossTrimmedError, match="nothing is stored there any more"):
        topic.read(start=ends)
    assert topic.source(fail_on_data_loss=False).read(start=ends).plan.by_broker == 0


def test_a_subscription_that_another_client_uses_is_named(topic: StartedTopic) -> None:
    start = topic.ends()
    with topic.source(starting_position="earliest").open():
        topic.admin.register(TOPIC, SUBSCRIPTION + STARTING)
        with pytest.raises(SubscriptionInUseError, match="is in use, so it cannot begin at"):
            topic.consume(start, subscribe_timeout_ms=50)


def test_the_positions_of_an_existing_subscription_may_be_in_deleted_segments(
    topic: StartedTopic,
) -> None:
    start = topic.ends()
    topic.split(0)
    topic.publish(20)
    assert topic.consume(start) == list(range(40, 60))
    assert topic.cluster.scalable.collect(TOPIC) == [0]
    topic.publish(10)
    assert topic.consume(start) == list(range(60, 70))


def test_a_start_at_an_edge_ends_an_earlier_start_at_positions(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = topic.ends()

    class Died(BaseException):
        pass

    def dies(*_: Any) -> None:
        raise Died

    monkeypatch.setattr(MemoryBroker, "begin", dies)
    with pytest.raises(Died), topic.source(starting_position=json.dumps(start)).open():
        pass
    monkeypatch.undo()
    topic.publish(10)
    assert topic.consume("earliest") == list(range(50))
    assert "at positions has not ended; segments in which it" in caplog.text
    assert topic.subscriptions() == {SUBSCRIPTION}
    topic.publish(5)
    assert topic.consume(start) == list(range(50, 55))


@pytest.mark.parametrize("dead_before", [False, True])
def test_a_start_moves_nothing_that_another_start_has_consumed_meanwhile(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch, dead_before: bool
) -> None:
    start = topic.ends()
    topic.publish(10)
    if dead_before:
        topic.admin.register(TOPIC, SUBSCRIPTION + STARTING)
    find = SegmentStarts._find
    consumed: list[list[int]] = []

    def slowly(self: SegmentStarts, where: TopicPartition, bound: Any) -> Any:
        found = find(self, where, bound)
        with one_at_a_time:
            if not consumed:
                monkeypatch.undo()
                consumed.append(topic.consume(start))
        return found

    one_at_a_time = threading.Lock()
    monkeypatch.setattr(SegmentStarts, "_find", slowly)
    with topic.source(starting_position=json.dumps(start)).open():
        pass
    assert consumed == [list(range(40, 50))]
    assert topic.subscriptions() == {SUBSCRIPTION}
    topic.publish(5)
    assert topic.consume(start) == list(range(50, 55))


def test_a_subscription_that_a_start_would_delete_is_refused(topic: StartedTopic) -> None:
    with pytest.raises(ConfigError, match="keyshard deletes subscriptions of scalable topics"):
        topic.source(subscription=SUBSCRIPTION + STARTING)


def test_a_reader_that_loses_its_connection_at_the_end_of_a_segment_is_replaced(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_end, lost = MemoryReader.at_end, list[MemoryReader]()

    def loses(self: MemoryReader) -> bool:
        if not lost:
            lost.append(self)
            self.drop()
            self.reconnect()
        return at_end(self)

    where = topic.segments[0]
    last = topic.cluster.log(where).last_written
    with closing(MemoryBroker(topic.cluster)) as broker:
        monkeypatch.setattr(MemoryReader, "at_end", loses)
        after = EntryId(last.ledger, last.entry + 1)
        assert first_stored(broker, where, deadline(1), after) is None
    assert lost


def test_a_mark_that_cannot_be_removed_fails_the_start(
    topic: StartedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise BrokerUnavailableError("The admin interface is away.", "Wait.")

    monkeypatch.setattr(MemoryAdmin, "unregister", fails)
    with pytest.raises(BrokerUnavailableError, match="is away"):
        topic.consume(topic.ends(), operation_timeout_ms=1_000)
    monkeypatch.undo()
    assert topic.subscriptions() == {SUBSCRIPTION, SUBSCRIPTION + STARTING}
    topic.publish(5)
    assert topic.consume(topic.ends()) == []


def test_a_read_up_to_the_positions_of_a_stream_has_its_rows(topic: StartedTopic) -> None:
    source = topic.source(starting_position="earliest", batch_rows_max=7)
    found: list[int] = []
    with source.open() as stream:
        while len(found) < topic.sent:
            batch = stream.next_batch(timeout_s=10)
            assert batch is not None
            found += [int(one["value"]) for rows in batch for one in rows.to_pylist()]
            stream.commit(batch)
            ends = positions_of(source, Checkpoint.from_json(batch.checkpoint))
            assert topic.read(end=ends) == sorted(found)
            if len(found) == 40:
                topic.change()
    assert sorted(found) == list(range(topic.sent))


def test_the_position_of_an_unread_segment_follows_from_its_backlog(topic: StartedTopic) -> None:
    source = topic.source(starting_position="latest")
    empty = Checkpoint("", SUBSCRIPTION, 3)
    with source.open():
        ends = positions_of(source, empty)
        assert topic.read(end=ends) == list(range(40))
        topic.split(0)
        assert [positions_of(source, empty)[where.name] for where in topic.segments[2:]] == [
            Edge.EARLIEST, Edge.EARLIEST
        ]  # fmt: skip
        topic.publish(10)
        with pytest.raises(NotRunningError, match=r"No entry of .* is in a batch yet"):
            positions_of(source, empty)
