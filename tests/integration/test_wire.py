"""The wire transport compared with pulsar-client, on valid and invalid messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import pulsar
import pytest

from keyshard import KeyShardSource
from keyshard.broker.client.broker import ClientBroker
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Sent
from keyshard.broker.port import Broker, Consumer
from keyshard.broker.wire.consumer import WireConsumer
from keyshard.broker.wire.frames import api
from keyshard.columns.messages import messages_of
from keyshard.config.connection import Connection
from keyshard.core import partition_watchdog
from keyshard.core.message import Message
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import CorruptEntryError, EncryptedMessageError
from keyshard.testing.devbroker import DevBroker
from tests.contract.contract_harness import read_to_end, receive, subscribe
from tests.contract.raw_protocol import RawEntry
from tests.contract.wire_harness import WireHarness
from tests.helpers import wait_until
from tests.stored_entries import of_kafka
from tests.support.deadlines import deadline
from tests.support.memory_topic import Run

pytestmark = pytest.mark.broker

FIRST = EntryId(0, 0)
COMPRESSIONS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
BATCHED: list[dict[str, object]] = [
    {"batching_enabled": False},
    {"batching_enabled": True, "batching_type": pulsar.BatchingType.Default},
    {"batching_enabled": True, "batching_type": pulsar.BatchingType.KeyBased},
]


@pytest.fixture
def harness(dev_broker: DevBroker) -> Iterator[WireHarness]:
    made = WireHarness(dev_broker.service_url, dev_broker.admin_url)
    yield made
    made.close()


def test_messages_of_every_kind_are_those_that_the_client_reads(
    harness: WireHarness, dev_broker: DevBroker
) -> None:
    where = TopicPartition(harness.create_topic())
    client = pulsar.Client(
        dev_broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    for name in COMPRESSIONS:
        kind = getattr(pulsar.CompressionType, name)
        for batching in BATCHED:
            producer = client.create_producer(
                where.name, compression_type=kind, batching_max_publish_delay_ms=5_000, **batching
            )
            for number in range(20):
                producer.send_async(
                    b"%s %d " % (name.encode(), number) * (number + 1), lambda *_: None,
                    partition_key=f"k{number % 3}" if number % 4 else None,
                    ordering_key="o" if number == 7 else None,
                    properties={"p": "ü", "q": ""} if number % 5 == 0 else None,
                    event_timestamp=number or None,
                )  # fmt: skip
            producer.flush()
            producer.close()
    client.close()
    expected = read_by(ClientBroker(Connection(dev_broker.service_url)), where)
    assert len(expected) == 20 * len(COMPRESSIONS) * len(BATCHED)
    assert read_by(harness.broker(), where) == expected
    consumed = receive([subscribe(harness.broker(), where)], len(expected))
    assert [m for block in consumed.blocks for m in messages_of(where, block)] == expected


def read_by(broker: Broker, where: TopicPartition) -> list[Message]:
    blocks = read_to_end(broker.reader(where, FIRST)).blocks
    found = [message for block in blocks for message in messages_of(where, block)]
    broker.close()
    return found


def test_an_entry_that_cannot_be_unpacked_is_named_and_stays(harness: WireHarness) -> None:
    """pulsar-client acknowledges it silently."""
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    good: RawEntry = ({6: b"k"}, b"good")
    harness.publish_raw(where.name, [good, ({6: b"k", 8: 1, 9: 50}, b"garbage"), good])
    received, refused = receive_until_refused(consumer)
    assert (len(received), refused) == (1, EntryId(received[0].ledger, 1))
    wait_until(lambda: harness.backlog(where) == 3)
    consumer.close()
    assert harness.backlog(where) == 3


def test_an_entry_in_the_format_of_kafka_is_named_and_stays(
    harness: WireHarness, dev_broker: DevBroker
) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish_raw(where.name, [({6: b"k"}, b"good"), of_kafka(3), of_kafka(5)])
    source = KeyShardSource(
        where.name, subscription="kafka", transport="wire",
        service_url=dev_broker.service_url, admin_url=dev_broker.admin_url, parallelism=2,
        starting_position="earliest",
    )  # fmt: skip

    def consume() -> None:
        with source.open() as stream:
            while batch := stream.next_batch(timeout_s=deadline(30)):
                stream.commit(batch)

    with pytest.raises(CorruptEntryError, match="has the format of Kafka"):
        consume()
    assert harness.backlog(where, source.subscription) >= 2


def test_a_source_skips_unreadable_entries_if_configured(
    harness: WireHarness, dev_broker: DevBroker
) -> None:
    where = TopicPartition(harness.create_topic())
    good: RawEntry = ({6: b"k"}, b"good")
    harness.publish_raw(where.name, [good, ({6: b"k", 8: 1, 9: 50}, b"garbage"), good])
    source = KeyShardSource(
        where.name, subscription="skips", service_url=dev_broker.service_url, transport="wire",
        admin_url=dev_broker.admin_url, parallelism=2, starting_position="earliest",
        on_corrupt="skip",
    )  # fmt: skip
    rows = 0
    with source.open() as stream:
        while rows < 2 and (batch := stream.next_batch(timeout_s=deadline(30))):
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
        wait_until(lambda: harness.backlog(where, "skips") == 0)
        assert (rows, stream.status()["corruptSkipped"]) == (2, 1)


def test_a_range_that_the_broker_forgot_in_silence_gets_its_rows_again(
    harness: WireHarness, dev_broker: DevBroker
) -> None:
    where = TopicPartition(harness.create_topic())
    source = KeyShardSource(
        where.name, subscription="forgets", service_url=dev_broker.service_url, transport="wire",
        admin_url=dev_broker.admin_url, parallelism=2, starting_position="earliest",
        discovery_interval_ms=200,
    )  # fmt: skip
    rows = 0
    with source.open() as stream:
        ranges = stream._coordinator.consumers.range_consumers
        before = [one.consumer for one in ranges.by_partition[where]]
        assert isinstance(before[0], WireConsumer)
        connection, consumer_id = before[0].standing()
        assert connection is not None
        # The broker drops it, and answers a request that was never made.
        connection.send("close_consumer", api.CloseConsumer(consumer_id=consumer_id, request_id=0))
        harness.publish(where.name, [Sent(b"v", key=f"k{number}") for number in range(20)])
        while rows < 20 and (batch := stream.next_batch(timeout_s=deadline(30))):
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
        assert rows == 20
        after = [one.consumer for one in ranges.by_partition[where]]
        assert [one is other for one, other in zip(before, after, strict=True)] == [False, True]
        # Entries that were acknowledged through the forgotten consumer do not stay either.
        wait_until(lambda: harness.backlog(where, "forgets") == 0)


def receive_until_refused(consumer: Consumer) -> tuple[list[EntryId], EntryId]:
    """Received entries, and the error after them."""
    found: list[EntryId] = []
    named: list[EntryId] = []

    def refused() -> bool:
        try:
            found.extend(block.id for block in consumer.receive(50))
        except CorruptEntryError as exc:
            named.append(EntryId(*(int(str(exc.facts[one])) for one in ("ledger", "entry"))))
        return bool(named)

    wait_until(refused)
    return found, named[0]


def test_a_source_reads_everything_once_and_writes_dead_letters_through_the_client(
    harness: WireHarness, dev_broker: DevBroker
) -> None:
    topic = harness.create_topic(partitions=2)
    sent = [Sent(b"%d" % number, key=f"k{number % 17}") for number in range(400)]
    harness.publish(topic, sent[:200], Batching.BY_KEY)
    harness.publish(topic, sent[200:])
    source = KeyShardSource(
        topic, subscription="wire", service_url=dev_broker.service_url, transport="wire",
        admin_url=dev_broker.admin_url, parallelism=4, starting_position="earliest",
    )  # fmt: skip
    values: list[bytes] = []
    with source.open() as stream:
        while len(values) < len(sent) and (batch := stream.next_batch(timeout_s=deadline(30))):
            values += [value for part in batch for value in part.column("value").to_pylist()]
            stream.commit(batch)
    assert sorted(map(int, values)) == list(range(len(sent)))
    wheres = [TopicPartition(topic, number) for number in range(2)]
    wait_until(lambda: all(harness.backlog(where, "wire") == 0 for where in wheres))
    producer = harness.broker().producer(wheres[0], send_timeout_ms=5_000)
    assert producer.send(b"letter", key="k") > FIRST


def test_a_broker_confirms_acknowledgements(harness: WireHarness) -> None:
    where = TopicPartition(harness.create_topic())
    consumer = subscribe(harness.broker(), where)
    harness.publish(where.name, [Sent(b"%d" % number, key="k") for number in range(3)])
    received = receive([consumer], 3)
    assert isinstance(consumer, WireConsumer)
    consumer.acknowledge(received.ids)
    assert consumer.unconfirmed(10) == 0
    assert harness.backlog(where) == 0, "no sooner than that"


@pytest.mark.parametrize("choice", ["fail", "skip"])
def test_a_source_names_or_counts_encrypted_messages(
    choice: Literal["fail", "skip"], harness: WireHarness, dev_broker: DevBroker
) -> None:
    where = TopicPartition(harness.create_topic())
    for number in range(3):
        harness.publish(where.name, [Sent(b"%d" % number, key="k")])
        harness.publish_encrypted(where.name, "k", 1 + 2 * number)
    source = KeyShardSource(
        where.name, subscription="encrypted", service_url=dev_broker.service_url, transport="wire",
        admin_url=dev_broker.admin_url, parallelism=2, starting_position="earliest",
        on_encrypted=choice,
    )  # fmt: skip
    rows = 0
    with source.open() as stream:
        if choice == "fail":
            with pytest.raises(
                EncryptedMessageError, match=r"(?s):1 of .*set on_encrypted to skip"
            ):
                wait_until(lambda: not stream.next_batch(timeout_s=deadline(30)))
            assert harness.backlog(where, "encrypted") == 6
            return
        while rows < 3 and (batch := stream.next_batch(timeout_s=deadline(30))):
            rows += sum(part.num_rows for part in batch)
            stream.commit(batch)
        wait_until(lambda: harness.backlog(where, "encrypted") == 0)
        assert (rows, stream.status()["encryptedSkipped"]) == (3, 3)


def test_the_status_names_entries_that_the_broker_does_not_deliver(
    harness: WireHarness, dev_broker: DevBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not harness.release.negative_batch_undelivered:
        pytest.skip("the broker delivers them")
    monkeypatch.setattr(partition_watchdog, "UNDELIVERED_S", 2.0)
    where = TopicPartition(harness.create_topic())
    source = KeyShardSource(
        where.name, subscription="withheld", service_url=dev_broker.service_url, transport="wire",
        admin_url=dev_broker.admin_url, parallelism=2,
    )  # fmt: skip
    run = Run(source, lambda _: None, {})
    with run:
        run.wait_started()
        harness.publish_raw(where.name, [({6: b"k"}, b"good"), ({6: b"k", 11: 2**64 - 1}, b"bad")])

        def stalled() -> list[str]:
            found = (each["stalled"] for each in source.status()["partitions"])
            return [each["reason"] for each in found if each]

        wait_until(stalled)
        assert "entries, though every range asks for messages" in stalled()[0]
        assert not run.errors


@pytest.mark.parametrize("declared", [-1, -(2**20), 2**31 - 1, 2**31, -(2**30)])
def test_a_batch_with_any_declared_size_stops_no_consumer(
    declared: int, harness: WireHarness
) -> None:
    if harness.release.negative_batch_undelivered and (declared < 0 or declared >= 2**31):
        pytest.skip("the broker does not deliver it")
    where, elsewhere = (TopicPartition(harness.create_topic()) for _ in range(2))
    broker = harness.broker()
    consumer, other = subscribe(broker, where), subscribe(broker, elsewhere)
    good: RawEntry = ({6: b"k"}, b"good")
    bad: RawEntry = ({6: b"k", 11: declared % 2**64}, b"bad")
    harness.publish_raw(where.name, [good, bad])
    found, refused = receive_until_refused(consumer)
    consumer.acknowledge([*found, refused])
    # More than it asks for ahead: it comes to a stand where the broker's count is not put right.
    harness.publish_raw(where.name, [good] * 2_500)
    harness.publish_raw(elsewhere.name, [good])
    rows = 0

    def received() -> bool:
        nonlocal rows
        # A new subscription may get unacknowledged entries once more.
        with suppress(CorruptEntryError):
            blocks = consumer.receive(20)
            consumer.acknowledge([block.id for block in blocks])
            rows += len(blocks)
        return rows >= 2_500

    wait_until(received)
    assert len(receive([other], 1).ids) == 1
    assert other.is_connected()
    assert isinstance(other, WireConsumer)
    assert other.losses == 0
