"""Messages of the producer, read back from the real broker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean

import pulsar
import pytest

from keyshard.core.ring.key_slot import routing_key
from keyshard.errors import AdminError, BrokerError, BrokerUnavailableError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    partition_key_of,
    produce,
)

pytestmark = pytest.mark.broker

PARTITIONS = 5


@dataclass
class Stored:
    """A topic as it is stored: messages of each entry, in the order of each partition."""

    entries: dict[tuple[int, int, int], list[pulsar.Message]] = field(default_factory=dict)

    def of_partition(self, partition: int) -> list[pulsar.Message]:
        return [
            message
            for (owner, _, _), messages in self.entries.items()
            if owner == partition
            for message in messages
        ]


@pytest.fixture
def client(dev_broker: DevBroker) -> Iterator[pulsar.Client]:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    opened = pulsar.Client(dev_broker.service_url, logger=logger)
    yield opened
    opened.close()


def stored(client: pulsar.Client, topic: str) -> Stored:
    entries: defaultdict[tuple[int, int, int], list[pulsar.Message]] = defaultdict(list)
    for partition in range(PARTITIONS):
        name = f"persistent://public/default/{topic}-partition-{partition}"
        reader = client.create_reader(name, pulsar.MessageId.earliest)
        while reader.has_message_available():
            message = reader.read_next(20_000)
            at = message.message_id()
            entries[partition, at.ledger_id(), at.entry_id()].append(message)
        reader.close()
    return Stored(dict(entries))


def check_sequences(workload: Workload, found: Stored) -> None:
    """Every key is in one partition, complete, and in order there."""
    home: dict[str, int] = {}
    following: Counter[str] = Counter()
    for partition in range(PARTITIONS):
        for message in found.of_partition(partition):
            key, seq = parse_value(message.data())
            assert home.setdefault(key, partition) == partition
            assert seq == following[key]
            assert len(message.data()) == max(workload.size_bytes, len(f"{key}:{seq}:"))
            following[key] += 1
    assert following == Counter(key for key, _ in workload.sequence())


@pytest.mark.parametrize(
    "workload",
    [
        Workload(5_000, 100),
        Workload(5_000, 100, entry_messages=10),
        Workload(5_000, 100, entry_messages=10, zipf=1.1, size_bytes=7),
        Workload(2_000, 100, entry_messages=2, key_kind="ordering"),
        Workload(1_000, 100, batching="none", key_kind="ordering"),
        Workload(3_000, 100, batching="default"),
    ],
    ids=str,
)
def test_published_messages_are_complete_and_in_order_per_key(
    dev_broker: DevBroker, client: pulsar.Client, topic_name: str, workload: Workload
) -> None:
    assert create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    output: list[int] = []
    report = produce(workload, dev_broker.service_url, topic_name, output.append)
    assert report.sent == sum(output) == workload.messages
    assert report.per_key == Counter(key for key, _ in workload.sequence())
    found = stored(client, topic_name)
    check_sequences(workload, found)
    sizes = [len(messages) for messages in found.entries.values()]
    if workload.entry_messages:
        assert mean(sizes) == pytest.approx(workload.entry_messages, rel=0.05)
    if workload.batching == "none":
        assert set(sizes) == {1}
    for messages in found.entries.values():
        keys = set()
        for message in messages:
            key, _ = parse_value(message.data())
            ordering = workload.key_kind == "ordering"
            assert message.partition_key() == (partition_key_of(key) if ordering else key)
            assert (message.ordering_key() == key) is ordering
            keys.add(routing_key(message.partition_key(), message.ordering_key() or None))
        assert len(keys) == 1 or workload.batching == "default"
    if workload.batching == "default":
        assert max(sizes) > 10


def test_messages_without_keys_are_all_stored_without_a_key(
    dev_broker: DevBroker, client: pulsar.Client, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    workload = Workload(2_000, 10, key_kind="none", batching="default")
    produce(workload, dev_broker.service_url, topic_name)
    messages = [m for group in stored(client, topic_name).entries.values() for m in group]
    assert {message.partition_key() for message in messages} == {""}
    assert sorted(parse_value(m.data()) for m in messages) == sorted(workload.sequence())


def test_a_rate_is_kept(dev_broker: DevBroker, topic_name: str) -> None:
    report = produce(Workload(600, 10, rate_per_s=1_000), dev_broker.service_url, topic_name)
    assert report.seconds >= 0.59
    assert report.rate_per_s <= 1_020


def test_a_topic_is_created_once_with_its_partitions(
    dev_broker: DevBroker, topic_name: str
) -> None:
    assert create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    assert not create_partitioned_topic(dev_broker.admin_url, topic_name, 3)
    with pytest.raises(AdminError, match="exists with 3 partitions, but 4"):
        create_partitioned_topic(dev_broker.admin_url, topic_name, 4)
    with pytest.raises(AdminError, match="status 404, Namespace not found"):
        create_partitioned_topic(dev_broker.admin_url, f"no-tenant/none/{topic_name}", 3)


def test_failures_are_named(dev_broker: DevBroker, topic_name: str) -> None:
    too_large = Workload(1, 1, size_bytes=4_000_000, batching="none")
    produce(too_large, dev_broker.service_url, topic_name)
    with pytest.raises(BrokerError, match="no-tenant"):
        produce(Workload(1, 1), dev_broker.service_url, f"no-tenant/none/{topic_name}")
    with pytest.raises(BrokerUnavailableError, match="keyshard broker start"):
        produce(Workload(1, 1), "pulsar://127.0.0.1:1", topic_name)
