"""Floor, ack gaps, fingerprint, audit and partial entries, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pulsar
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.broker.wire.broker import WireBroker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.errors import DataLossAckedElsewhereError, DataLossTrimmedError, TopicRecreatedError
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness
from tests.helpers import commit, key_in, received, rows_of, wait_until
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

pytestmark = [pytest.mark.broker]

RING = split_ring(1)[0]
SUBSCRIPTION = "losses"
KEYS = [key_in(hash_range) for hash_range in split_ring(4)]


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    """Acknowledges batch indices, and lets ledgers be trimmed as soon as they are closed."""
    settings = {
        "acknowledgmentAtBatchIndexLevelEnabled": "true",
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "defaultRetentionTimeInMinutes": "0",
        "defaultRetentionSizeInMB": "0",
    }
    with DevBroker(PULSAR, settings=settings) as started:
        yield started


@pytest.fixture
def harness(broker: DevBroker) -> Iterator[PulsarHarness]:
    made = PulsarHarness(broker.service_url, broker.admin_url)
    yield made
    made.close()


class Running:
    """A source on one topic, started; stopped at the end of the block without a release."""

    def __init__(
        self,
        broker: DevBroker,
        topic: str,
        checkpoint: Checkpoint | None = None,
        *,
        planned: bool = False,
        admin: bool = True,
        **changes: Any,
    ) -> None:
        source = KeyShardSource(
            topic,
            subscription=SUBSCRIPTION,
            service_url=broker.service_url,
            admin_url=broker.admin_url if admin else None,
            parallelism=4,
            starting_position="earliest",
            **changes,
        )
        self._start = checkpoint, planned
        self.coordinator = source.coordinator()

    def __enter__(self) -> Coordinator:
        checkpoint, planned = self._start
        self.coordinator.start(checkpoint, planned=planned)
        return self.coordinator

    def __exit__(self, *_: object) -> None:
        self.coordinator.stop()


def messages(count: int) -> list[Message]:
    return [Message(b"%d" % i, key=KEYS[i % len(KEYS)]) for i in range(count)]


def stored_entries(harness: PulsarHarness, where: TopicPartition, count: int) -> list[EntryId]:
    reader = harness.broker().reader(where, EntryId(0, 0))
    found: dict[EntryId, None] = {}
    wait_until(lambda: found.update({b.id: None for b in reader.read(100)}) or len(found) >= count)
    return list(found)


def acknowledge_by_another_client(
    harness: PulsarHarness, where: TopicPartition, entries: list[EntryId]
) -> None:
    """Acknowledge entries by a sticky consumer of the same subscription; it leaves then."""
    broker = harness.broker()
    consumer = broker.subscribe(
        SubscriptionSpec(
            where, SUBSCRIPTION, RING, consumer_name="somebody-else", receiver_queue_size=10
        ),
        StartPosition.EARLIEST,
    )
    before = harness.backlog(where, SUBSCRIPTION)
    consumer.acknowledge(entries)
    consumer.close()
    broker.close()
    wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == before - len(entries))


def put(broker: DevBroker, where: TopicPartition, call: str, method: str = "PUT") -> None:
    path = where.name.replace("://", "/")
    httpx.request(
        method, f"{broker.admin_url}/admin/v2/{path}/{call}", timeout=deadline(20)
    ).raise_for_status()


def test_a_restored_older_checkpoint_is_named_with_count_and_first_ids(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic()
    where = TopicPartition(topic)
    with Running(broker, topic) as coordinator:
        ends = []
        for number in range(2):
            harness.publish(topic, messages(100))
            received(coordinator, 100 * (number + 1))
            ends.append(commit(coordinator))
        wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
    with pytest.raises(DataLossAckedElsewhereError) as caught, Running(broker, topic, ends[0]):
        pass
    lost = ends[1].partitions[where].batch
    assert caught.value.facts["count"] == 100
    assert caught.value.facts["first"] == str(lost)
    with Running(broker, topic, ends[1]):
        pass
    with Running(broker, topic, ends[0], fail_on_data_loss=False) as coordinator:
        assert coordinator.status()["entriesLost"] == 100


def test_a_trimmed_planned_batch_is_named_or_left_out(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic()
    where = TopicPartition(topic)
    harness.publish(topic, messages(50))
    with Running(broker, topic) as coordinator:
        received(coordinator, 50)
        planned = coordinator.batches.cut()
        assert planned is not None
    gone = planned.partitions[where].batch
    acknowledge_by_another_client(harness, where, list(gone))
    harness.roll_ledger(where)
    harness.publish(topic, messages(4))

    connection = harness.broker()

    def trimmed() -> bool:
        put(broker, where, "trim", "POST")
        with closing(connection.reader(where, EntryId(0, 0))) as reader:
            return all(block.id not in gone for block in reader.read(200))

    wait_until(trimmed, deadline(120))
    with (
        Running(broker, topic, planned, planned=True) as coordinator,
        pytest.raises(DataLossTrimmedError, match="50 entries of a planned batch"),
    ):
        coordinator.batches.plan(planned)
    with Running(broker, topic, planned, planned=True, fail_on_data_loss=False) as coordinator:
        assert coordinator.batches.plan(planned) == []
        assert coordinator.status()["entriesLost"] == 50
        coordinator.batches.release(planned)
        received(coordinator, 4)
        commit(coordinator)
        wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)


def trim(broker: DevBroker, harness: PulsarHarness, where: TopicPartition) -> None:
    """Close the ledger, and let the broker delete it: no subscription retains it."""
    admin = harness.admin()
    before = {one.id for one in admin.ledgers(where) or ()}
    harness.roll_ledger(where)

    def trimmed() -> bool:
        put(broker, where, "trim", "POST")
        return not before & {one.id for one in admin.ledgers(where) or ()}

    wait_until(trimmed, deadline(60))


@pytest.mark.parametrize("anew", [False, True])
def test_messages_deleted_without_a_subscription_are_named_or_counted(
    broker: DevBroker, harness: PulsarHarness, *, anew: bool
) -> None:
    """A job is down, and its subscription expires or is deleted, and perhaps created again."""
    topic, admin = harness.create_topic(), harness.admin()
    where = TopicPartition(topic)
    harness.publish(topic, messages(20))
    with Running(broker, topic) as coordinator:
        received(coordinator, 20)
        end = commit(coordinator)
        wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
    put(broker, where, f"subscription/{SUBSCRIPTION}", "DELETE")
    harness.publish(topic, messages(30))
    trim(broker, harness, where)
    if anew:
        assert admin.begin(where, SUBSCRIPTION, MessageId(0, 0, 0))
    harness.publish(topic, messages(10))
    with (
        pytest.raises(DataLossTrimmedError, match=rf"'{SUBSCRIPTION}' .* has retained"),
        Running(broker, topic, end),
    ):
        pass
    assert (admin.subscription(where, SUBSCRIPTION) is not None) == anew
    with Running(broker, topic, end, fail_on_data_loss=False) as coordinator:
        assert coordinator.status()["entriesLost"] == 1
        received(coordinator, 10)
        end = commit(coordinator)
        wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
    trim(broker, harness, where)
    with Running(broker, topic, end) as coordinator:
        assert coordinator.status()["entriesLost"] == 0, "it is the subscription of the checkpoint"


def test_the_rest_of_a_batch_is_delivered_once_and_replays_the_same(
    broker: DevBroker, harness: PulsarHarness, subscriptions: list[HashRange]
) -> None:
    topic = harness.create_topic()
    where = TopicPartition(topic)
    key = KEYS[0]
    harness.publish(topic, [Message(b"%d" % i, key=key) for i in range(10)], Batching.BY_KEY)
    acknowledged = acknowledge_indices(broker, topic, {0, 3, 4, 9})
    assert acknowledged == {0, 3, 4, 9}
    left = [b"1", b"2", b"5", b"6", b"7", b"8"]
    harness.publish(topic, [Message(b"after", key=key)])

    def values(rows: dict[int, list[dict[str, Any]]]) -> list[bytes]:
        return [row["value"] for part in rows.values() for row in part]

    with Running(broker, topic) as coordinator:
        received(coordinator, 7)
        planned = coordinator.batches.cut()
        assert planned is not None
        first = rows_of(coordinator, planned)
        assert values(first) == [*left, b"after"]
        assert len(subscriptions) == 4, "no range was subscribed again"
    (indices,) = planned.partitions[where].partial.values()
    assert indices == {1, 2, 5, 6, 7, 8}
    with Running(broker, topic, planned, planned=True) as coordinator:
        assert rows_of(coordinator, planned) == first
        coordinator.batches.release(planned)
        wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
        assert coordinator.batches.cut() is None
    with Running(broker, topic, planned) as coordinator:
        harness.publish(topic, [Message(b"end", key=key)])
        received(coordinator, 1)
        end = coordinator.batches.cut()
        assert end is not None
        assert values(rows_of(coordinator, end)) == [b"end"]


@pytest.fixture
def subscriptions(monkeypatch: pytest.MonkeyPatch) -> list[HashRange]:
    """The ranges that the wire transport subscribed, in order."""
    found: list[HashRange] = []
    subscribe = WireBroker.subscribe

    def counted(self: WireBroker, *spec: Any, **how: Any) -> Any:
        consumer = subscribe(self, *spec, **how)
        found.append(consumer.hash_range)
        return consumer

    monkeypatch.setattr(WireBroker, "subscribe", counted)
    return found


def acknowledge_indices(broker: DevBroker, topic: str, indices: set[int]) -> set[int]:
    """Acknowledge single messages of a batch by a sticky consumer; it leaves then."""
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    consumer = client.subscribe(
        topic,
        SUBSCRIPTION,
        consumer_type=pulsar.ConsumerType.KeyShared,
        initial_position=pulsar.InitialPosition.Earliest,
        key_shared_policy=pulsar.ConsumerKeySharedPolicy(
            pulsar.KeySharedMode.Sticky, sticky_ranges=[(0, 65_535)]
        ),
        batch_index_ack_enabled=True,
    )
    done: set[int] = set()
    for _ in range(10):
        message = consumer.receive(10_000)
        index = message.message_id().batch_index()
        if index in indices:
            consumer.acknowledge(message)
            done.add(index)
    consumer.close()
    client.close()
    return done


@pytest.mark.parametrize("admin", [True, False])
def test_a_broker_that_is_wiped_under_a_checkpoint_stops_the_source(*, admin: bool) -> None:
    with DevBroker(PULSAR) as broker:
        topic = "persistent://public/default/wiped"
        where = TopicPartition(topic, 0)

        def produce(harness: PulsarHarness) -> None:
            httpx.put(
                f"{broker.admin_url}/admin/v2/persistent/public/default/wiped/partitions",
                json=1,
                timeout=deadline(20),
            ).raise_for_status()
            harness.publish(topic, messages(100))

        harness = PulsarHarness(broker.service_url, broker.admin_url)
        produce(harness)
        with Running(broker, topic, admin=admin) as coordinator:
            received(coordinator, 100)
            end = commit(coordinator)
            wait_until(lambda: harness.backlog(where, SUBSCRIPTION) == 0)
        harness.close()
        broker.stop()
        broker.wipe()
        broker.start()
        harness = PulsarHarness(broker.service_url, broker.admin_url)
        produce(harness)
        (first, *_) = stored_entries(harness, where, 100)
        assert first in end.partitions[where].delivered, "the same ids are handed out again"

        def stopped() -> bool:
            try:
                coordinator.batches.cut()
            except TopicRecreatedError:
                return True
            return False

        if admin:
            # The audit refuses before anything is subscribed.
            with pytest.raises(TopicRecreatedError), Running(broker, topic, end):
                pass
            harness.close()
            return
        with Running(broker, topic, end, admin=False) as coordinator:
            wait_until(stopped)
        assert harness.backlog(where, SUBSCRIPTION) == 100, "nothing is acknowledged"
        harness.close()


def test_a_broker_that_is_wiped_while_a_source_runs_stops_it() -> None:
    """Entries received earlier are durable only later, and acknowledge nothing new."""
    with DevBroker(PULSAR) as broker:
        topic = "persistent://public/default/wiped"
        where = TopicPartition(topic)
        harness = PulsarHarness(broker.service_url, broker.admin_url)
        harness.publish(topic, messages(100))
        with Running(broker, topic, admin=False) as coordinator:
            received(coordinator, 100)
            end = coordinator.batches.cut()
            assert end is not None
            rows_of(coordinator, end)
            harness.close()
            broker.stop()
            broker.wipe()
            broker.start()
            harness = PulsarHarness(broker.service_url, broker.admin_url)
            harness.publish(topic, messages(100))
            (first, *_) = stored_entries(harness, where, 100)
            assert first in end.partitions[where].delivered, "the same ids are handed out again"
            coordinator.batches.release(end)

            def stopped() -> bool:
                try:
                    coordinator.check()
                except TopicRecreatedError:
                    return True
                return False

            wait_until(stopped)
            assert harness.backlog(where, SUBSCRIPTION) == 100, "nothing is acknowledged"
        harness.close()
