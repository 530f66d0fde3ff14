"""The embedded runtime on the in-memory broker: cut, plan, read, release, crash, restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import (
    FakeAdmin,
    config,
    key_in,
    keys_of,
    received,
    rows_of,
    running,
    wait_until,
)
from keyshard.arrow.content import only
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, MemoryConsumer, Message
from keyshard.broker.port import StartPosition
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.client_queue import ClientQueue
from keyshard.core.window.layout import ROWS_PER_PARTITION_MIN
from keyshard.core.window.pauses import Pauses
from keyshard.errors import (
    BatchReleasedError,
    BatchUnknownError,
    BrokerError,
    BrokerUnavailableError,
    CheckpointMismatchError,
    DataLossTrimmedError,
    MisroutedError,
    RuntimeStoppedError,
    SubscriptionInUseError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.worker.receiver import OwnedRange
from keyshard.worker.subscribe import open_range_consumers

RING = split_ring(1)[0]
KEYS = [f"key-{i}" for i in range(12)]


class Bench:
    """A cluster with one topic of two partitions, and what is published to it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(entries_per_ledger=50)
        self.topic = self.cluster.create_topic("orders", partitions=2)
        self.where = self.cluster.partitions(self.topic)
        self.source = config(self.topic)
        self.count = 0

    def publish(
        self, count: int, *, batching: Batching = Batching.NONE, publish_ms: int = 1_000
    ) -> None:
        """Messages with twelve keys; each value says key and sequence number."""
        messages = []
        for _ in range(count):
            key = KEYS[self.count % len(KEYS)]
            messages.append(Message(f"{key}:{self.count}".encode(), key=key))
            self.count += 1
        self.cluster.publish(
            self.topic, *messages, batching=batching, batch_messages_max=4, publish_ms=publish_ms
        )

    @property
    def backlog(self) -> int:
        return sum(self.cluster.backlog(where, "unit") for where in self.where)

    def all_values(self) -> list[str]:
        return sorted(f"{KEYS[i % len(KEYS)]}:{i}" for i in range(self.count))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.cluster.validate()


def values(rows: dict[int, list[dict[str, Any]]]) -> list[str]:
    return [row["value"].decode() for part in rows.values() for row in part]


def assert_in_order(rows: dict[int, list[dict[str, Any]]], last: dict[str, int]) -> None:
    """Rows of a key lie in one partition, in publish order after those of earlier batches."""
    homes: dict[str, int] = {}
    for index, part in rows.items():
        for row in part:
            key, number = row["value"].decode().split(":")
            assert homes.setdefault(key, index) == index
            assert int(number) > last.get(key, -1), "a key is out of order"
            last[key] = int(number)


def cut(coordinator: Coordinator, rows_max: int | None = None) -> Checkpoint:
    end = coordinator.batches.cut(rows_max)
    assert end is not None
    return end


@pytest.mark.parametrize("batching", [Batching.NONE, Batching.BY_KEY])
def test_every_message_comes_once_in_key_order_and_is_acknowledged(
    bench: Bench, batching: Batching
) -> None:
    got: list[str] = []
    last: dict[str, int] = {}
    with running(bench.cluster, bench.source) as coordinator:
        for _ in range(5):
            bench.publish(48, batching=batching)
            received(coordinator, bench.count)
            while (end := coordinator.batches.cut(20)) is not None:
                rows = rows_of(coordinator, end)
                assert_in_order(rows, last)
                got += values(rows)
                coordinator.batches.release(end)
        wait_until(lambda: bench.backlog == 0)
        status = coordinator.status()
    assert sorted(got) == bench.all_values()
    assert status["windowRows"] == status["plannedBatches"] == 0
    assert status["misrouted"] == status["keyless"] == status["duplicatesDropped"] == 0


def test_nothing_is_acknowledged_before_its_release(bench: Bench) -> None:
    bench.publish(24)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 24)
        end = cut(coordinator, 10)
        rows_of(coordinator, end)
        taken = coordinator.status()["plannedBatches"], bench.backlog
        assert taken == (1, 24)
        coordinator.batches.release(end)
        rows = sum(len(state.batch) for state in end.partitions.values())
        wait_until(lambda: bench.backlog == 24 - rows)
    assert bench.backlog == 24 - rows, "stopping acknowledges nothing else"


def test_every_range_has_rows_whatever_the_number_of_partitions(bench: Bench) -> None:
    source = config(bench.topic, parallelism=10)
    for key in keys_of(10) * ROWS_PER_PARTITION_MIN:
        bench.cluster.publish(bench.topic, Message(b"x:0", key=key))
    with running(bench.cluster, source) as coordinator:
        received(coordinator, 10 * ROWS_PER_PARTITION_MIN)
        assert coordinator.batches.plan(cut(coordinator)) == list(range(10))


def test_a_small_batch_puts_several_ranges_into_one_partition_and_says_so(bench: Bench) -> None:
    source = config(bench.topic, parallelism=10)
    for key in keys_of(10):
        bench.cluster.publish(bench.topic, Message(b"x:0", key=key))
    with running(bench.cluster, source) as coordinator:
        received(coordinator, 10)
        end = cut(coordinator)
        assert coordinator.batches.plan(end) == [0]
        assert end.merged == 1
        rows = rows_of(coordinator, end)
    with running(bench.cluster, config(bench.topic, parallelism=3), end, planned=True) as again:
        assert again.batches.plan(end) == [0]
        assert rows_of(again, end) == rows


def test_reading_again_gives_the_same_rows(bench: Bench) -> None:
    bench.publish(30)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 30)
        end = cut(coordinator)
        assert rows_of(coordinator, end) == rows_of(coordinator, end)
        assert coordinator.batches.plan(end) == coordinator.batches.plan(end)


def test_a_read_selects_columns(bench: Bench) -> None:
    bench.publish(1)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        (part,) = coordinator.worker.read(end.batch_id, index, ["__slot", "__key"])
        assert part.to_pylist() == [{"__slot": key_slot("key-0"), "__key": "key-0"}]


def test_a_released_batch_cannot_be_read_or_planned(bench: Bench) -> None:
    bench.publish(1)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        coordinator.batches.release(end)
        coordinator.batches.release(end)
        with pytest.raises(BatchReleasedError) as caught:
            coordinator.worker.read(end.batch_id, index)
        assert caught.value.facts == {"batch_id": end.batch_id}
        with pytest.raises(BatchReleasedError):
            coordinator.batches.plan(end)


def test_an_unknown_batch_or_partition_is_refused(bench: Bench) -> None:
    bench.publish(1)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        for batch_id, part in (("nope", index), (end.batch_id, index + 1)):
            with pytest.raises(BatchUnknownError, match="planned no batch"):
                coordinator.worker.read(batch_id, part)


@pytest.mark.parametrize("parallelism", [1, 3, 16])
def test_a_planned_batch_runs_again_the_same_under_another_parallelism(
    bench: Bench, parallelism: int
) -> None:
    bench.publish(60, batching=Batching.BY_KEY)
    with running(bench.cluster, bench.source) as first:
        received(first, 60)
        committed = cut(first, 15)
        before = values(rows_of(first, committed))
        first.batches.release(committed)
        wait_until(lambda: not first.status()["entriesToAcknowledge"])
        planned = cut(first, 15)
        rows = rows_of(first, planned)
    backlog = bench.backlog

    again = config(bench.topic, parallelism=parallelism)
    last: dict[str, int] = {}
    with running(bench.cluster, again, planned, planned=True) as second:
        wait_until(lambda: second.status()["duplicatesDropped"] >= len(values(rows)))
        wait_until(lambda: not second.status()["entriesToAcknowledge"])
        assert bench.backlog == backlog, "redeliveries of a planned batch are not acknowledged"
        second.worker.shared.window.validate()
        assert rows_of(second, planned) == rows
        second.worker.shared.window.validate()
        received(second, 60 - len(before) - len(values(rows)))
        second.batches.release(planned)
        assert_in_order(rows, last)
        rest: list[str] = []
        while (end := second.batches.cut(15)) is not None:
            assert end.ranges == parallelism
            found = rows_of(second, end)
            assert_in_order(found, last)
            rest += values(found)
            second.batches.release(end)
        wait_until(lambda: bench.backlog == 0)
    assert sorted(before + values(rows) + rest) == bench.all_values()


def test_committed_entries_that_come_again_are_dropped_and_acknowledged(bench: Bench) -> None:
    bench.publish(40)
    with running(bench.cluster, bench.source) as first:
        received(first, 40)
        end = cut(first)
    assert bench.backlog == 40, "the host committed, then the process was killed"

    with running(bench.cluster, bench.source, end) as second:
        assert second.newest.partitions == end.partitions, "it continues what was delivered"
        wait_until(lambda: bench.backlog == 0)
        assert second.batches.cut() is None
        assert second.status()["duplicatesDropped"] == 40
        assert second.status()["rowsReceived"] == 0
        bench.publish(3)
        received(second, 3)
        assert len(values(rows_of(second, cut(second)))) == 3


def test_a_reconnect_delivers_nothing_twice(bench: Bench) -> None:
    bench.publish(40)
    made: list[MemoryBroker] = []

    def connect() -> MemoryBroker:
        made.append(MemoryBroker(bench.cluster))
        return made[-1]

    coordinator = Coordinator(bench.source, connect)
    coordinator.start()
    try:
        received(coordinator, 40)
        first = cut(coordinator, 20)
        made[0].disconnect()
        wait_until(lambda: coordinator.status()["duplicatesDropped"] >= 40)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        assert bench.backlog == 40, "what is held must not be acknowledged"
        got = values(rows_of(coordinator, first))
        coordinator.batches.release(first)
        second = cut(coordinator)
        got += values(rows_of(coordinator, second))
        coordinator.batches.release(second)
        assert coordinator.batches.cut() is None
        wait_until(lambda: bench.backlog == 0)
    finally:
        coordinator.stop()
    assert sorted(got) == bench.all_values()


def test_acknowledgements_go_through_a_consumer_that_is_connected(bench: Bench) -> None:
    bench.publish(40)
    with running(bench.cluster, bench.source) as coordinator:
        received(coordinator, 40)
        end = cut(coordinator)
        for where in bench.where:
            range_consumer = coordinator.worker.range_consumers.by_partition[where][0]
            assert isinstance(range_consumer.consumer, MemoryConsumer)
            range_consumer.consumer.drop()
        coordinator.batches.release(end)
        wait_until(lambda: bench.backlog == 0)


class AckedElsewhere(MemoryBroker):
    """Somebody acknowledged the last message of every batch of three."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.subscribed: list[tuple[TopicPartition, HashRange]] = []

    def subscribe(self, *args: Any, **options: Any) -> MemoryConsumer:
        consumer = super().subscribe(*args, **options)
        self.subscribed.append((consumer.topic_partition, consumer.hash_range))
        receive = consumer.receive

        def receive_less(timeout_ms: int) -> list[EntryBlock]:
            return [_without_last(block) for block in receive(timeout_ms)]

        consumer.receive = receive_less  # type: ignore[method-assign]
        return consumer


def _without_last(block: EntryBlock) -> EntryBlock:
    if block.batch_size != 3 or block.rows < 3:
        return block
    return only(block, frozenset(block.indices[:-1]))


def test_entries_that_stay_partial_are_delivered_in_part_and_run_again_so(bench: Bench) -> None:
    where = bench.where[0]
    for number in range(3):
        batch = [Message(b"%d-%d" % (number, i), key="k") for i in range(3)]
        bench.cluster.publish(where, *batch, batching=Batching.BY_KEY)
    bench.cluster.publish(where, Message(b"end", key="k"))
    broker = AckedElsewhere(bench.cluster)
    # So few messages ahead that no consumer subscribes anew to have more of them.
    source = config(bench.topic, receiver_queue_size=100)
    first = Coordinator(source, lambda: broker)
    first.start()
    try:
        received(first, 7)
        end = cut(first)
        rows = rows_of(first, end)
        assert first.status()["rowsReceived"] == 7
    finally:
        first.stop()
    assert values(rows) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "end"]
    assert [*end.partitions[where].partial.values()] == [frozenset({0, 1})] * 3
    asked = {owned_range: broker.subscribed.count(owned_range) for owned_range in broker.subscribed}
    assert sorted(asked.values()) == [1] * 7 + [4], "each partial entry is asked about once"

    with running(bench.cluster, bench.source, end, planned=True) as second:
        assert rows_of(second, end) == rows
        second.batches.release(end)
        wait_until(lambda: bench.backlog == 0)


def test_a_first_start_at_latest_skips_what_is_there(bench: Bench) -> None:
    bench.publish(5)
    with running(bench.cluster, config(bench.topic, starting_position="latest")) as coordinator:
        bench.publish(3)
        received(coordinator, 3)
        assert len(values(rows_of(coordinator, cut(coordinator)))) == 3


def test_a_start_from_a_checkpoint_never_skips_even_without_a_subscription(bench: Bench) -> None:
    bench.publish(4)
    source = config(bench.topic, starting_position="latest")
    start = Checkpoint("", "unit", 4)
    with running(bench.cluster, source, start) as coordinator:
        received(coordinator, 4)


def test_a_full_window_pauses_receiving_and_release_resumes_it(bench: Bench) -> None:
    bench.publish(120)
    source = config(bench.topic, window_rows_max=40, receiver_queue_size=1)
    got: list[str] = []
    with running(bench.cluster, source) as coordinator:
        most = 0
        while len(got) < 120:
            wait_until(lambda: coordinator.batches.wait_for_rows(5))
            most = max(most, coordinator.status()["windowRows"])
            end = cut(coordinator)
            assert len(values(rows_of(coordinator, end))) <= 20 + 4
            got += values(rows_of(coordinator, end))
            coordinator.batches.release(end)
    assert sorted(got) == bench.all_values()
    assert most <= 40 + 4 * 2


def test_waiting_ends_with_the_first_row_or_the_time(bench: Bench) -> None:
    with running(bench.cluster, bench.source) as coordinator:
        assert not coordinator.batches.wait_for_rows(0.0)
        waited: list[bool] = []
        thread = threading.Thread(
            target=lambda: waited.append(coordinator.batches.wait_for_rows(10))
        )
        thread.start()
        bench.publish(1)
        thread.join(10)
        assert waited == [True]


def test_misrouted_and_keyless_messages_are_counted(bench: Bench) -> None:
    low, high = split_ring(2)
    mixed = [Message(b"", key=key_in(low)), Message(b"", key=key_in(high)), Message(b"")]
    with running(bench.cluster, config(bench.topic, parallelism=2)) as coordinator:
        bench.cluster.publish(bench.where[0], *mixed, batching=Batching.MIXED)
        bench.cluster.publish(bench.where[0], Message(b""), Message(b""))
        received(coordinator, 5)
        wait_until(lambda: coordinator.status()["keyless"] == 3)
        assert coordinator.status()["misrouted"] == 1


def test_an_error_in_a_receive_thread_surfaces_at_the_next_call(bench: Bench) -> None:
    error = BrokerError("The consumer is broken.")

    class Breaking(MemoryBroker):
        def subscribe(self, *args: Any, **options: Any) -> Any:
            consumer = super().subscribe(*args, **options)
            consumer.receive = broken  # type: ignore[method-assign]
            return consumer

    def broken(timeout_ms: int) -> Any:
        raise error

    coordinator = Coordinator(bench.source, lambda: Breaking(bench.cluster))
    coordinator.start()
    try:
        for call in (lambda: coordinator.batches.wait_for_rows(10), coordinator.batches.cut):
            with pytest.raises(BrokerError) as caught:
                call()
            assert caught.value is error
        wait_until(
            lambda: (
                not any(r._thread.is_alive() for r in coordinator.worker.range_consumers.receivers)
            )
        )
    finally:
        coordinator.stop()


def test_ids_that_are_handed_out_again_stop_the_source_unacknowledged(bench: Bench) -> None:
    bench.publish(4, publish_ms=2_000)
    settled = {
        where: PartitionCheckpoint(
            delivered=EntrySet.of(first_ids(bench, where)), published_ms=1_999
        )
        for where in bench.where
    }
    with running(bench.cluster, bench.source, Checkpoint("", "unit", 4, settled)) as coordinator:
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.wait_for_rows(10)
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.cut()
    assert bench.backlog == 4


def first_ids(bench: Bench, where: TopicPartition) -> list[EntryId]:
    reader = MemoryBroker(bench.cluster).reader(where, EntryId(0, 0))
    blocks = reader.read(0)
    reader.close()
    return [at.id for at in blocks]


def test_a_subscription_that_is_in_use_is_named_after_the_deadline(bench: Bench) -> None:
    waiting = config(bench.topic, subscribe_timeout_ms=60)
    with running(bench.cluster, bench.source):
        with pytest.raises(SubscriptionInUseError, match=r"'unit' is in use: .*60 ms"):
            Coordinator(waiting, lambda: MemoryBroker(bench.cluster)).start()
        admin = FakeAdmin()
        admin.stats = {"consumers": [{"address": "/10.0.0.7:1234"}]}
        with pytest.raises(SubscriptionInUseError, match=r"in use by /10\.0\.0\.7:1234") as caught:
            Coordinator(waiting, lambda: MemoryBroker(bench.cluster), admin).start()
        assert caught.value.facts == {"holders": ["/10.0.0.7:1234"]}


def test_a_refused_start_gives_back_the_ranges_it_had(bench: Bench) -> None:
    other = MemoryBroker(bench.cluster)
    held = other.subscribe(
        bench.where[0],
        "unit",
        split_ring(4)[3],
        start=StartPosition.EARLIEST,
        consumer_name="other",
        receiver_queue_size=1,
    )
    busy = config(bench.topic, subscribe_timeout_ms=50)
    broker = MemoryBroker(bench.cluster)
    owned_ranges = [
        OwnedRange(where, i, part) for where in bench.where for i, part in enumerate(split_ring(4))
    ]
    with pytest.raises(SubscriptionInUseError):
        open_range_consumers(
            broker,
            None,
            busy,
            owned_ranges,
            StartPosition.EARLIEST,
            make_queue=lambda: ClientQueue(10**6, 100),
        )
    free = other.subscribe(
        bench.where[1],
        "unit",
        RING,
        start=StartPosition.EARLIEST,
        consumer_name="other",
        receiver_queue_size=1,
    )
    free.close()
    with pytest.raises(SubscriptionInUseError):
        Coordinator(busy, lambda: broker).start()
    with pytest.raises(BrokerError, match="closed"):
        broker.partitions(bench.topic)
    held.close()
    with running(bench.cluster, busy):
        pass


def test_a_range_that_is_given_up_in_time_is_taken_over(bench: Bench) -> None:
    bench.publish(10)
    first = Coordinator(bench.source, lambda: MemoryBroker(bench.cluster))
    first.start()
    stopper = threading.Timer(0.1, first.stop)
    stopper.start()
    with running(bench.cluster, bench.source) as second:
        received(second, 10)
    stopper.join()


@pytest.mark.parametrize(
    ("checkpoint", "match"),
    [
        (Checkpoint("standalone", "other", 4), "belongs to subscription 'other'.* uses 'unit'"),
        (Checkpoint("elsewhere", "unit", 4), "belongs to cluster 'elsewhere'.*'standalone'"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_before_connecting(
    bench: Bench, checkpoint: Checkpoint, match: str
) -> None:
    def never() -> MemoryBroker:
        raise AssertionError("it connected")

    with pytest.raises(CheckpointMismatchError, match=match):
        Coordinator(bench.source, never, FakeAdmin()).start(checkpoint)


def test_the_checkpoint_names_the_cluster_where_admin_tells_it(bench: Bench) -> None:
    bench.publish(1)
    admin = FakeAdmin("west")
    coordinator = Coordinator(bench.source, lambda: MemoryBroker(bench.cluster), admin)
    coordinator.start(Checkpoint("", "unit", 4))
    try:
        received(coordinator, 1)
        assert cut(coordinator).cluster == "west"
    finally:
        coordinator.stop()
    assert admin.closed


def test_without_admin_the_cluster_of_the_checkpoint_is_kept(bench: Bench) -> None:
    with running(bench.cluster, bench.source, Checkpoint("west", "unit", 9)) as coordinator:
        assert coordinator.newest == Checkpoint("west", "unit", 4)


def test_a_topic_that_does_not_exist_is_refused_and_not_created(bench: Bench) -> None:
    admin = FakeAdmin(topics=[bench.topic])
    source = config("ordres")
    with pytest.raises(TopicNotFoundError, match="persistent://public/default/ordres"):
        Coordinator(source, lambda: MemoryBroker(bench.cluster), admin).start()
    with pytest.raises(BrokerError):
        bench.cluster.backlog(TopicPartition("persistent://public/default/ordres"), "unit")


def test_a_broker_that_is_away_at_the_start_is_asked_again(bench: Bench) -> None:
    away = [BrokerUnavailableError("away"), BrokerUnavailableError("away")]

    class Late(MemoryBroker):
        def partitions(self, topic: str) -> tuple[TopicPartition, ...]:
            if away:
                raise away.pop()
            return super().partitions(topic)

    coordinator = Coordinator(bench.source, lambda: Late(bench.cluster))
    coordinator.start()
    coordinator.stop()
    assert away == []


def test_a_planned_batch_with_trimmed_entries_is_data_loss(bench: Bench) -> None:
    bench.publish(20)
    with running(bench.cluster, bench.source) as first:
        received(first, 20)
        planned = cut(first)
    for where in bench.where:
        last = planned.partitions[where].batch.last
        assert last is not None
        bench.cluster.trim(where, before=last)
    with (
        running(bench.cluster, bench.source, planned, planned=True) as second,
        pytest.raises(DataLossTrimmedError),
    ):
        second.batches.plan(planned)


def test_a_stopped_source_says_so_and_stops_once(bench: Bench) -> None:
    with running(bench.cluster, bench.source) as coordinator:
        coordinator.stop()
        coordinator.stop()
        calls: list[Callable[[], object]] = [
            coordinator.batches.cut,
            lambda: coordinator.batches.wait_for_rows(0),
            lambda: coordinator.batches.plan(Checkpoint("", "unit", 4)),
        ]
        for call in calls:
            with pytest.raises(RuntimeStoppedError):
                call()


def test_stopping_wakes_a_host_that_waits_for_rows(bench: Bench) -> None:
    with running(bench.cluster, bench.source) as coordinator:
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(RuntimeStoppedError):
                coordinator.batches.wait_for_rows(60)
            ended.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        coordinator.stop()
        assert ended.wait(5)


def test_stopping_gives_the_ranges_back_and_leaves_no_thread(bench: Bench) -> None:
    before = set(threading.enumerate())
    with running(bench.cluster, bench.source):
        assert set(threading.enumerate()) > before
    wait_until(lambda: set(threading.enumerate()) <= before)
    with running(bench.cluster, config(bench.topic, subscribe_timeout_ms=1)):
        pass


def test_an_outage_at_the_end_is_no_error_of_the_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A source stops while connections stall. 2. The client's close times out."""

    class Stalled(MemoryBroker):
        def close(self) -> None:
            super().close()
            raise BrokerUnavailableError("Could not disconnect.")

    coordinator = Coordinator(bench.source, lambda: Stalled(bench.cluster))
    coordinator.start()
    coordinator.stop()
    assert "Could not disconnect" in caplog.text


def test_the_threads_of_a_source_are_daemons(bench: Bench) -> None:
    before = set(threading.enumerate())
    with running(bench.cluster, bench.source):
        own = set(threading.enumerate()) - before
        assert own
        assert all(thread.daemon for thread in own)


def test_the_status_is_of_plain_json_values(bench: Bench) -> None:
    bench.publish(8)
    with running(bench.cluster, config(bench.topic, window_rows_max=1_000)) as coordinator:
        received(coordinator, 8)
        end = cut(coordinator, 4)
        status = coordinator.status()
        assert json.loads(json.dumps(status)) == status
        assert status == {
            "ranges": 4,
            "topicPartitions": 2,
            "rowsReceived": 8,
            "windowRows": 8,
            "windowFill": status["windowFill"],
            "keepsUpTriggerMillis": None,
            "oldestUnacknowledgedMillis": status["oldestUnacknowledgedMillis"],
            "duplicatesDropped": 0,
            "misrouted": 0,
            "keyless": 0,
            "unreadable": 0,
            "corruptSkipped": 0,
            "encryptedSkipped": 0,
            "ackHoles": 0,
            "holesSettled": 0,
            "entriesLost": 0,
            "rangesPaused": 0,
            "connectionError": "",
            "settlingError": "",
            "plannedBatches": 1,
            "entriesAcknowledged": 0,
            "entriesToAcknowledge": 0,
            "partitionsDiscovered": 0,
            "partitionsGone": 0,
            "backlogEntries": None,
            "discoveryError": "",
            "sourceWorkers": [],
        }
        assert 0 < status["windowFill"] < 1
        coordinator.batches.release(end)
        wait_until(lambda: coordinator.status()["entriesAcknowledged"])


def test_a_cut_waits_for_the_fewest_rows_until_the_delay_is_over(bench: Bench) -> None:
    bench.publish(3)
    source = config(bench.topic, batch_rows_min=5, batch_delay_max_ms=60_000)
    with running(bench.cluster, source) as coordinator:
        received(coordinator, 3)
        assert coordinator.batches.cut() is None
        bench.publish(2)
        received(coordinator, 5)
        assert coordinator.batches.cut() is not None
    late = config(bench.topic, batch_rows_min=100, batch_delay_max_ms=1)
    with running(bench.cluster, late) as coordinator:
        received(coordinator, 5)
        wait_until(lambda: coordinator.batches.cut() is not None)


def test_an_idle_cut_looks_at_no_pause(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[TopicPartition] = []
    fitted = Pauses.fitted

    def noted(pauses: Pauses, where: TopicPartition) -> None:
        looked.append(where)
        fitted(pauses, where)

    with running(bench.cluster, bench.source) as coordinator:
        bench.publish(10)
        received(coordinator, 10)
        monkeypatch.setattr(Pauses, "fitted", noted)
        assert coordinator.batches.cut() is not None
        assert [coordinator.batches.cut() for _ in range(100)] == [None] * 100
        assert looked == [], "none waited for room"


def test_a_full_window_does_not_wait_for_the_fewest_rows(bench: Bench) -> None:
    bench.publish(40)
    source = config(bench.topic, batch_rows_min=100, window_rows_max=8)
    with running(bench.cluster, source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)


def mixed_batch(bench: Bench) -> None:
    messages = [Message(b"x:0", key=key) for key in keys_of(4)]
    bench.cluster.publish(bench.where[0], *messages, batching=Batching.MIXED)


def test_a_misrouted_message_ends_the_source_when_it_should(bench: Bench) -> None:
    mixed_batch(bench)
    with (
        running(bench.cluster, config(bench.topic, on_misrouted="fail")) as coordinator,
        pytest.raises(MisroutedError, match=r"BatchingType\.KeyBased"),
    ):
        wait_until(lambda: coordinator.batches.cut() is not None)
    assert bench.backlog == 1


def test_a_misrouted_message_is_counted_and_warned_of(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    mixed_batch(bench)
    with running(bench.cluster, bench.source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)
        assert coordinator.status()["misrouted"] == 3
    assert "batches by default" in caplog.text


def test_receiving_pauses_while_handlers_have_enough(bench: Bench) -> None:
    bench.publish(40)
    with running(bench.cluster, bench.source) as coordinator:
        coordinator.worker.intake.ahead_rows_max = 40
        owned_range = OwnedRange(bench.where[0], 0, split_ring(4)[0])
        received(coordinator, 40)
        assert coordinator.worker.intake.is_paused(owned_range)
        assert len(coordinator.handed_out.take(0, 10)) == 10
        assert not coordinator.worker.intake.is_paused(owned_range)
        assert len(coordinator.handed_out.take(0)) == 30
