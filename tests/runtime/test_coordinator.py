"""The embedded runtime on the in-memory broker: cut, plan, read, release, crash, restart."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, MemoryConsumer, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.columns.content import only
from keyshard.consumers.receiver import OwnedRange
from keyshard.consumers.subscribe import open_range_consumers
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.backpressure import Backpressure
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import (
    AuthorizationError,
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
from tests.helpers import (
    DEADLINE_S,
    FakeAdmin,
    config,
    key_in,
    keys_of,
    received,
    rows_of,
    running,
    started,
    wait_until,
)
from tests.support.faulty_broker import Fault, ScriptedCall, faulty, giving

RING = split_ring(1)[0]
KEYS = [f"key-{i}" for i in range(12)]


class CoordinatedTopic:
    """A cluster with one topic of two partitions, and its messages."""

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
def orders() -> Iterator[CoordinatedTopic]:
    orders = CoordinatedTopic()
    yield orders
    orders.cluster.validate()


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
    orders: CoordinatedTopic, batching: Batching
) -> None:
    got: list[str] = []
    last: dict[str, int] = {}
    with running(orders.cluster, orders.source) as coordinator:
        for _ in range(5):
            orders.publish(48, batching=batching)
            received(coordinator, orders.count)
            while (end := coordinator.batches.cut(20)) is not None:
                rows = rows_of(coordinator, end)
                assert_in_order(rows, last)
                got += values(rows)
                coordinator.batches.release(end)
        wait_until(lambda: orders.backlog == 0)
        status = coordinator.status()
    assert sorted(got) == orders.all_values()
    assert status["windowRows"] == status["plannedBatches"] == 0
    assert status["misrouted"] == status["keyless"] == status["duplicatesDropped"] == 0


def test_nothing_is_acknowledged_before_its_release(orders: CoordinatedTopic) -> None:
    orders.publish(24)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 24)
        end = cut(coordinator, 10)
        rows_of(coordinator, end)
        taken = coordinator.status()["plannedBatches"], orders.backlog
        assert taken == (1, 24)
        coordinator.batches.release(end)
        rows = sum(len(state.batch) for state in end.partitions.values())
        wait_until(lambda: orders.backlog == 24 - rows)
    assert orders.backlog == 24 - rows, "stopping acknowledges nothing else"


def test_every_range_has_rows_with_any_number_of_partitions(orders: CoordinatedTopic) -> None:
    source = config(orders.topic, parallelism=10, batch_tasks=10)
    for key in keys_of(10):
        orders.cluster.publish(orders.topic, Message(b"x:0", key=key))
    with running(orders.cluster, source) as coordinator:
        received(coordinator, 10)
        assert coordinator.batches.plan(cut(coordinator)) == list(range(10))


def test_a_small_batch_puts_several_ranges_into_one_partition_and_reports_it(
    orders: CoordinatedTopic,
) -> None:
    source = config(orders.topic, parallelism=10)
    for key in keys_of(10):
        orders.cluster.publish(orders.topic, Message(b"x:0", key=key))
    with running(orders.cluster, source) as coordinator:
        received(coordinator, 10)
        end = cut(coordinator)
        assert coordinator.batches.plan(end) == [0]
        assert end.merged == 1
        rows = rows_of(coordinator, end)
    with running(orders.cluster, config(orders.topic, parallelism=3), end, planned=True) as again:
        assert again.batches.plan(end) == [0]
        assert rows_of(again, end) == rows


def test_reading_again_gives_the_same_rows(orders: CoordinatedTopic) -> None:
    orders.publish(30)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 30)
        end = cut(coordinator)
        assert rows_of(coordinator, end) == rows_of(coordinator, end)
        assert coordinator.batches.plan(end) == coordinator.batches.plan(end)


def test_a_read_selects_columns(orders: CoordinatedTopic) -> None:
    orders.publish(1)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        (part,) = coordinator.batches.read(end.batch_id, index, ["__slot", "__key"])
        assert part.to_pylist() == [{"__slot": key_slot("key-0"), "__key": "key-0"}]


def test_a_released_batch_cannot_be_read_or_planned(orders: CoordinatedTopic) -> None:
    orders.publish(1)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        coordinator.batches.release(end)
        coordinator.batches.release(end)
        with pytest.raises(BatchReleasedError) as caught:
            coordinator.batches.read(end.batch_id, index)
        assert caught.value.facts == {"batch_id": end.batch_id}
        with pytest.raises(BatchReleasedError):
            coordinator.batches.plan(end)


def test_an_unknown_batch_or_partition_is_refused(orders: CoordinatedTopic) -> None:
    orders.publish(1)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 1)
        end = cut(coordinator)
        (index,) = coordinator.batches.plan(end)
        for batch_id, part in (("nope", index), (end.batch_id, index + 1)):
            with pytest.raises(BatchUnknownError, match="planned no batch"):
                coordinator.batches.read(batch_id, part)


@pytest.mark.parametrize("parallelism", [1, 3, 16])
def test_a_planned_batch_runs_again_the_same_under_another_parallelism(
    orders: CoordinatedTopic, parallelism: int
) -> None:
    orders.publish(60, batching=Batching.BY_KEY)
    with running(orders.cluster, orders.source) as first:
        received(first, 60)
        committed = cut(first, 15)
        before = values(rows_of(first, committed))
        first.batches.release(committed)
        wait_until(lambda: not first.status()["entriesToAcknowledge"])
        planned = cut(first, 15)
        rows = rows_of(first, planned)
    backlog = orders.backlog

    again = config(orders.topic, parallelism=parallelism)
    last: dict[str, int] = {}
    with running(orders.cluster, again, planned, planned=True) as second:
        wait_until(lambda: second.status()["duplicatesDropped"] >= len(values(rows)))
        wait_until(lambda: not second.status()["entriesToAcknowledge"])
        assert orders.backlog == backlog, "redeliveries of a planned batch are not acknowledged"
        second.consumers.shared.window.validate()
        assert rows_of(second, planned) == rows
        second.consumers.shared.window.validate()
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
        wait_until(lambda: orders.backlog == 0)
    assert sorted(before + values(rows) + rest) == orders.all_values()


def test_committed_entries_that_come_again_are_dropped_and_acknowledged(
    orders: CoordinatedTopic,
) -> None:
    orders.publish(40)
    with running(orders.cluster, orders.source) as first:
        received(first, 40)
        end = cut(first)
    assert orders.backlog == 40, "the host committed, then the process was killed"

    with running(orders.cluster, orders.source, end) as second:
        assert second.newest.partitions == end.partitions, "it continues what was delivered"
        wait_until(lambda: orders.backlog == 0)
        assert second.batches.cut() is None
        assert second.status()["duplicatesDropped"] == 40
        assert second.status()["rowsReceived"] == 0
        orders.publish(3)
        received(second, 3)
        assert len(values(rows_of(second, cut(second)))) == 3


def test_a_reconnect_delivers_nothing_twice(orders: CoordinatedTopic) -> None:
    orders.publish(40)
    made: list[MemoryBroker] = []

    def connect() -> MemoryBroker:
        made.append(MemoryBroker(orders.cluster))
        return made[-1]

    coordinator = Coordinator(orders.source, connect)
    with started(coordinator):
        received(coordinator, 40)
        first = cut(coordinator, 20)
        made[0].disconnect()
        wait_until(lambda: coordinator.status()["duplicatesDropped"] >= 40)
        wait_until(lambda: not coordinator.status()["entriesToAcknowledge"])
        assert orders.backlog == 40, "what is held must not be acknowledged"
        got = values(rows_of(coordinator, first))
        coordinator.batches.release(first)
        second = cut(coordinator)
        got += values(rows_of(coordinator, second))
        coordinator.batches.release(second)
        assert coordinator.batches.cut() is None
        wait_until(lambda: orders.backlog == 0)
    assert sorted(got) == orders.all_values()


def test_acknowledgements_go_through_a_consumer_that_is_connected(orders: CoordinatedTopic) -> None:
    orders.publish(40)
    with running(orders.cluster, orders.source) as coordinator:
        received(coordinator, 40)
        end = cut(coordinator)
        for where in orders.where:
            range_consumer = coordinator.consumers.range_consumers.by_partition[where][0]
            assert isinstance(range_consumer.consumer, MemoryConsumer)
            range_consumer.consumer.drop()
        coordinator.batches.release(end)
        wait_until(lambda: orders.backlog == 0)


def _without_last(block: EntryBlock) -> EntryBlock:
    if block.batch_size != 3 or block.rows < 3:
        return block
    return only(block, frozenset(block.indices[:-1]))


def test_entries_that_stay_partial_are_delivered_and_replayed_in_part(
    orders: CoordinatedTopic,
) -> None:
    where = orders.where[0]
    for number in range(3):
        batch = [Message(b"%d-%d" % (number, i), key="k") for i in range(3)]
        orders.cluster.publish(where, *batch, batching=Batching.BY_KEY)
    orders.cluster.publish(where, Message(b"end", key="k"))
    subscribed: list[tuple[TopicPartition, HashRange]] = []

    def subscribe(call: Fault, spec: SubscriptionSpec, start: StartPosition) -> MemoryConsumer:
        """Another client acknowledged the last message of every batch of three."""
        subscribed.append((spec.topic_partition, spec.hash_range))
        return faulty(
            call(spec, start), receive=lambda call, ms: [_without_last(one) for one in call(ms)]
        )

    broker = faulty(MemoryBroker(orders.cluster), subscribe=subscribe)
    # A queue so small that no consumer subscribes again to get a larger one.
    source = config(orders.topic, receiver_queue_size=100)
    first = Coordinator(source, lambda: broker)
    with started(first):
        received(first, 7)
        end = cut(first)
        rows = rows_of(first, end)
        assert first.status()["rowsReceived"] == 7
    assert values(rows) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "end"]
    assert [*end.partitions[where].partial.values()] == [frozenset({0, 1})] * 3
    assert sorted(Counter(subscribed).values()) == [1] * 7 + [4], (
        "each partial entry is asked about once"
    )

    with running(orders.cluster, orders.source, end, planned=True) as second:
        assert rows_of(second, end) == rows
        second.batches.release(end)
        wait_until(lambda: orders.backlog == 0)


def test_a_first_start_at_latest_skips_stored_messages(orders: CoordinatedTopic) -> None:
    orders.publish(5)
    with running(orders.cluster, config(orders.topic, starting_position="latest")) as coordinator:
        orders.publish(3)
        received(coordinator, 3)
        assert len(values(rows_of(coordinator, cut(coordinator)))) == 3


def test_a_start_from_a_checkpoint_never_skips_even_without_a_subscription(
    orders: CoordinatedTopic,
) -> None:
    orders.publish(4)
    source = config(orders.topic, starting_position="latest")
    start = Checkpoint("", "unit", 4)
    with running(orders.cluster, source, start) as coordinator:
        received(coordinator, 4)


def test_a_full_window_pauses_receiving_and_release_resumes_it(orders: CoordinatedTopic) -> None:
    orders.publish(120)
    source = config(orders.topic, window_rows_max=40, receiver_queue_size=1)
    got: list[str] = []
    with running(orders.cluster, source) as coordinator:
        most = 0
        while len(got) < 120:
            wait_until(lambda: coordinator.batches.wait_for_rows(5))
            most = max(most, coordinator.status()["windowRows"])
            end = cut(coordinator)
            assert len(values(rows_of(coordinator, end))) <= 20 + 4
            got += values(rows_of(coordinator, end))
            coordinator.batches.release(end)
    assert sorted(got) == orders.all_values()
    assert most <= 40 + 4 * 2


def test_waiting_ends_with_the_first_row_or_the_time(orders: CoordinatedTopic) -> None:
    with running(orders.cluster, orders.source) as coordinator:
        assert not coordinator.batches.wait_for_rows(0.0)
        waited: list[bool] = []
        thread = threading.Thread(
            target=lambda: waited.append(coordinator.batches.wait_for_rows(10))
        )
        thread.start()
        orders.publish(1)
        thread.join(DEADLINE_S)
        assert waited == [True]


def test_misrouted_and_keyless_messages_are_counted(orders: CoordinatedTopic) -> None:
    low, high = split_ring(2)
    mixed = [Message(b"", key=key_in(low)), Message(b"", key=key_in(high)), Message(b"")]
    with running(orders.cluster, config(orders.topic, parallelism=2)) as coordinator:
        orders.cluster.publish(orders.where[0], *mixed, batching=Batching.MIXED)
        orders.cluster.publish(orders.where[0], Message(b""), Message(b""))
        received(coordinator, 5)
        wait_until(lambda: coordinator.status()["keyless"] == 3)
        assert coordinator.status()["misrouted"] == 1


def test_an_error_in_a_receive_thread_surfaces_at_the_next_call(orders: CoordinatedTopic) -> None:
    error = BrokerError("The consumer is broken.")
    broker = MemoryBroker(orders.cluster)
    faulty(broker, subscribe=giving(receive=ScriptedCall(raises=error)))
    coordinator = Coordinator(orders.source, lambda: broker)
    with started(coordinator):
        for call in (lambda: coordinator.batches.wait_for_rows(10), coordinator.batches.cut):
            with pytest.raises(BrokerError) as caught:
                call()
            assert caught.value is error
        wait_until(
            lambda: (
                not any(
                    r._thread.is_alive() for r in coordinator.consumers.range_consumers.receivers
                )
            )
        )


def test_reused_entry_ids_stop_the_source_before_it_acknowledges(
    orders: CoordinatedTopic,
) -> None:
    orders.publish(4, publish_ms=2_000)
    resolved = {
        where: PartitionCheckpoint(
            delivered=EntrySet.of(first_ids(orders, where)), published_ms=1_999
        )
        for where in orders.where
    }
    with running(orders.cluster, orders.source, Checkpoint("", "unit", 4, resolved)) as coordinator:
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.wait_for_rows(10)
        with pytest.raises(TopicRecreatedError):
            coordinator.batches.cut()
    assert orders.backlog == 4


def first_ids(orders: CoordinatedTopic, where: TopicPartition) -> list[EntryId]:
    reader = MemoryBroker(orders.cluster).reader(where, EntryId(0, 0))
    blocks = reader.read(0)
    reader.close()
    return [at.id for at in blocks]


def test_a_subscription_that_is_in_use_is_named_after_the_deadline(
    orders: CoordinatedTopic,
) -> None:
    waiting = config(orders.topic, subscribe_timeout_ms=60)
    with running(orders.cluster, orders.source):
        with pytest.raises(SubscriptionInUseError, match=r"'unit' is in use: .*60 ms"):
            Coordinator(waiting, lambda: MemoryBroker(orders.cluster)).start()
        admin = FakeAdmin()
        admin.stats = {"consumers": [{"address": "/10.0.0.7:1234"}]}
        with pytest.raises(SubscriptionInUseError, match=r"in use by /10\.0\.0\.7:1234") as caught:
            Coordinator(waiting, lambda: MemoryBroker(orders.cluster), admin).start()
        assert caught.value.facts == {"holders": ["/10.0.0.7:1234"]}


def test_a_refused_start_gives_back_the_ranges_it_had(orders: CoordinatedTopic) -> None:
    other = MemoryBroker(orders.cluster)
    held = other.subscribe(
        SubscriptionSpec(
            orders.where[0], "unit", split_ring(4)[3], consumer_name="other", receiver_queue_size=1
        ),
        StartPosition.EARLIEST,
    )
    busy = config(orders.topic, subscribe_timeout_ms=50)
    broker = MemoryBroker(orders.cluster)
    owned_ranges = [
        OwnedRange(where, i, part) for where in orders.where for i, part in enumerate(split_ring(4))
    ]
    with pytest.raises(SubscriptionInUseError):
        open_range_consumers(
            broker,
            None,
            busy,
            owned_ranges,
            StartPosition.EARLIEST,
            make_queue=lambda: ReceiverQueueSize(10**6, 100),
        )
    free = other.subscribe(
        SubscriptionSpec(
            orders.where[1], "unit", RING, consumer_name="other", receiver_queue_size=1
        ),
        StartPosition.EARLIEST,
    )
    free.close()
    with pytest.raises(SubscriptionInUseError):
        Coordinator(busy, lambda: broker).start()
    with pytest.raises(BrokerError, match="closed"):
        broker.partitions(orders.topic)
    held.close()
    with running(orders.cluster, busy):
        pass


def test_a_range_that_is_given_up_in_time_is_taken_over(orders: CoordinatedTopic) -> None:
    orders.publish(10)
    first = Coordinator(orders.source, lambda: MemoryBroker(orders.cluster))
    first.start()
    stopper = threading.Timer(0.1, first.stop)
    stopper.start()
    with running(orders.cluster, orders.source) as second:
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
    orders: CoordinatedTopic, checkpoint: Checkpoint, match: str
) -> None:
    def never() -> MemoryBroker:
        raise AssertionError("it connected")

    with pytest.raises(CheckpointMismatchError, match=match):
        Coordinator(orders.source, never, FakeAdmin()).start(checkpoint)


def test_the_checkpoint_names_the_cluster_if_the_admin_interface_does(
    orders: CoordinatedTopic,
) -> None:
    orders.publish(1)
    admin = FakeAdmin("west")
    with running(
        orders.cluster, orders.source, Checkpoint("", "unit", 4), admin=admin
    ) as coordinator:
        received(coordinator, 1)
        assert cut(coordinator).cluster == "west"
    assert admin.closed


def test_a_role_that_may_not_list_clusters_keeps_the_cluster_of_the_checkpoint(
    orders: CoordinatedTopic,
) -> None:
    """Issue: a role with the permission consume could start no source on Pulsar 5.0."""
    error = AuthorizationError("Role r lacks the permission LIST_CLUSTERS.")
    admin = faulty(FakeAdmin(), cluster=ScriptedCall(raises=error))
    orders.publish(1)
    with running(
        orders.cluster, orders.source, Checkpoint("west", "unit", 4), admin=admin
    ) as coordinator:
        received(coordinator, 1)
        assert cut(coordinator).cluster == "west"


def test_without_admin_the_cluster_of_the_checkpoint_is_kept(orders: CoordinatedTopic) -> None:
    with running(orders.cluster, orders.source, Checkpoint("west", "unit", 9)) as coordinator:
        assert coordinator.newest == Checkpoint("west", "unit", 4)


def test_a_topic_that_does_not_exist_is_refused_and_not_created(orders: CoordinatedTopic) -> None:
    admin = FakeAdmin(topics=[orders.topic])
    source = config("ordres")
    with pytest.raises(TopicNotFoundError, match="persistent://public/default/ordres"):
        Coordinator(source, lambda: MemoryBroker(orders.cluster), admin).start()
    with pytest.raises(BrokerError):
        orders.cluster.backlog(TopicPartition("persistent://public/default/ordres"), "unit")


def test_a_broker_that_is_away_at_the_start_is_asked_again(orders: CoordinatedTopic) -> None:
    asks = ScriptedCall(BrokerUnavailableError("away"), BrokerUnavailableError("away"))
    broker = faulty(MemoryBroker(orders.cluster), partitions=asks)
    coordinator = Coordinator(orders.source, lambda: broker)
    coordinator.start()
    coordinator.stop()
    assert asks.raised == 2


def test_a_planned_batch_with_trimmed_entries_is_data_loss(orders: CoordinatedTopic) -> None:
    orders.publish(20)
    with running(orders.cluster, orders.source) as first:
        received(first, 20)
        planned = cut(first)
    for where in orders.where:
        last = planned.partitions[where].batch.last
        assert last is not None
        orders.cluster.trim(where, before=last)
    with (
        running(orders.cluster, orders.source, planned, planned=True) as second,
        pytest.raises(DataLossTrimmedError),
    ):
        second.batches.plan(planned)


def test_a_stopped_source_is_named_and_stops_once(orders: CoordinatedTopic) -> None:
    with running(orders.cluster, orders.source) as coordinator:
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


def test_stopping_wakes_a_host_that_waits_for_rows(orders: CoordinatedTopic) -> None:
    with running(orders.cluster, orders.source) as coordinator:
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(RuntimeStoppedError):
                coordinator.batches.wait_for_rows(60)
            ended.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        coordinator.stop()
        assert ended.wait(DEADLINE_S)


def test_stopping_gives_the_ranges_back_and_leaves_no_thread(orders: CoordinatedTopic) -> None:
    before = set(threading.enumerate())
    with running(orders.cluster, orders.source):
        assert set(threading.enumerate()) > before
    wait_until(lambda: set(threading.enumerate()) <= before)
    with running(orders.cluster, config(orders.topic, subscribe_timeout_ms=1)):
        pass


def test_an_outage_at_the_end_is_no_error_of_the_run(
    orders: CoordinatedTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A source stops while connections stall. 2. The client's close times out."""
    error = BrokerUnavailableError("Could not disconnect.")
    broker = faulty(MemoryBroker(orders.cluster), close=ScriptedCall(error, answer_lost=True))
    coordinator = Coordinator(orders.source, lambda: broker)
    coordinator.start()
    coordinator.stop()
    assert "Could not disconnect" in caplog.text


def test_the_threads_of_a_source_are_daemons(orders: CoordinatedTopic) -> None:
    before = set(threading.enumerate())
    with running(orders.cluster, orders.source):
        own = set(threading.enumerate()) - before
        assert own
        assert all(thread.daemon for thread in own)


def test_the_status_is_of_plain_json_values(orders: CoordinatedTopic) -> None:
    orders.publish(8)
    with running(orders.cluster, config(orders.topic, window_rows_max=1_000)) as coordinator:
        received(coordinator, 8)
        end = cut(coordinator, 4)
        status = coordinator.status()
        assert json.loads(json.dumps(status)) == status
        assert status == {
            "ranges": 4,
            "topicPartitions": 2,
            "rowsReceived": 8,
            "entriesReceived": status["entriesReceived"],
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
            "ackGaps": 0,
            "ackGapsResolved": 0,
            "entriesNotDue": 0,
            "entriesLost": 0,
            "rangesPaused": 0,
            "checkpointBytes": status["checkpointBytes"],
            "partitionsWithoutRoom": 0,
            "withoutRoomMillis": 0,
            "connectionError": "",
            "gapResolverError": "",
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


def test_a_cut_waits_for_the_fewest_rows_until_the_delay_is_over(orders: CoordinatedTopic) -> None:
    orders.publish(3)
    source = config(orders.topic, batch_rows_min=5, batch_delay_max_ms=60_000)
    with running(orders.cluster, source) as coordinator:
        received(coordinator, 3)
        assert coordinator.batches.cut() is None
        orders.publish(2)
        received(coordinator, 5)
        assert coordinator.batches.cut() is not None
    late = config(orders.topic, batch_rows_min=100, batch_delay_max_ms=1)
    with running(orders.cluster, late) as coordinator:
        received(coordinator, 5)
        wait_until(lambda: coordinator.batches.cut() is not None)


def test_a_cut_checks_no_backpressure_while_every_topic_partition_has_room(
    orders: CoordinatedTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[TopicPartition] = []
    fitted = Backpressure.fitted

    def noted(pauses: Backpressure, where: TopicPartition) -> None:
        looked.append(where)
        fitted(pauses, where)

    with running(orders.cluster, orders.source) as coordinator:
        orders.publish(10)
        received(coordinator, 10)
        monkeypatch.setattr(Backpressure, "fitted", noted)
        assert coordinator.batches.cut() is not None
        assert [coordinator.batches.cut() for _ in range(100)] == [None] * 100
        assert looked == [], "none waited for room"


def test_a_full_window_does_not_wait_for_the_fewest_rows(orders: CoordinatedTopic) -> None:
    orders.publish(40)
    source = config(orders.topic, batch_rows_min=100, window_rows_max=8)
    with running(orders.cluster, source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)


def mixed_batch(orders: CoordinatedTopic) -> None:
    messages = [Message(b"x:0", key=key) for key in keys_of(4)]
    orders.cluster.publish(orders.where[0], *messages, batching=Batching.MIXED)


def test_a_misrouted_message_ends_the_source_if_configured(orders: CoordinatedTopic) -> None:
    mixed_batch(orders)
    with (
        running(orders.cluster, config(orders.topic, on_misrouted="fail")) as coordinator,
        pytest.raises(MisroutedError, match=r"BatchingType\.KeyBased"),
    ):
        wait_until(lambda: coordinator.batches.cut() is not None)
    assert orders.backlog == 1


def test_a_misrouted_message_is_counted_and_warned_of(
    orders: CoordinatedTopic, caplog: pytest.LogCaptureFixture
) -> None:
    mixed_batch(orders)
    with running(orders.cluster, orders.source) as coordinator:
        wait_until(lambda: coordinator.batches.cut() is not None)
        assert coordinator.status()["misrouted"] == 3
    assert "Enable batching by key" in caplog.text


def test_receiving_pauses_while_handlers_have_enough(orders: CoordinatedTopic) -> None:
    orders.publish(40)
    with running(orders.cluster, orders.source) as coordinator:
        coordinator.consumers.intake.ahead_rows_max = 40
        owned_range = OwnedRange(orders.where[0], 0, split_ring(4)[0])
        received(coordinator, 40)
        assert coordinator.consumers.intake.is_paused(owned_range)
        assert len(coordinator.in_flight.take(0, 10)) == 10
        assert not coordinator.consumers.intake.is_paused(owned_range)
        assert len(coordinator.in_flight.take(0)) == 30
