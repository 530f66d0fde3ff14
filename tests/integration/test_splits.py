"""Bounded reads of a real broker that trims ledgers, and of unreadable messages."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, Message
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.split import Split, cut
from keyshard.errors import (
    ChunkedMessageError,
    DataLossTrimmedError,
    EncryptedMessageError,
    PositionAheadError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevBroker
from tests.contract.pulsar_harness import PulsarHarness
from tests.contract.raw_protocol import COMMIT, RawConnection
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

pytestmark = [pytest.mark.broker]

T0 = 1_700_000_000_000
UNLOADS = 10
"""Number of topics that are looked up at once; the broker still loads three of ten."""


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    """Lets ledgers be trimmed as soon as they are closed."""
    settings = {
        "managedLedgerMinLedgerRolloverTimeMinutes": "0",
        "defaultRetentionTimeInMinutes": "0",
        "defaultRetentionSizeInMB": "0",
        "transactionCoordinatorEnabled": "true",
    }
    with DevBroker(PULSAR, settings=settings) as started:
        yield started


@pytest.fixture
def harness(broker: DevBroker) -> Iterator[PulsarHarness]:
    made = PulsarHarness(broker.service_url, broker.admin_url)
    yield made
    made.close()


def source_of(broker: DevBroker, topic: str, **options: Any) -> KeyShardSource:
    return KeyShardSource(
        topic, service_url=broker.service_url, admin_url=broker.admin_url, **options
    )


def values(source: KeyShardSource, splits: Sequence[Split], **options: Any) -> list[bytes]:
    batches = read_splits(source.how_to_connect(), splits, ["value"], **options)
    return [value for batch in batches for value in batch.column(0).to_pylist()]


def trim(broker: DevBroker, harness: PulsarHarness, where: TopicPartition) -> None:
    """Make the broker delete every ledger except the open one."""
    harness.roll_ledger(where)
    harness.publish(where.name, [Message(b"newest", key="k")])
    path = where.name.replace("://", "/")

    def trimmed() -> bool:
        httpx.post(
            f"{broker.admin_url}/admin/v2/{path}/trim", timeout=deadline(20)
        ).raise_for_status()
        return len(harness.admin().ledgers(where) or ()) == 1

    wait_until(trimmed)


def test_entries_trimmed_after_planning_are_named_or_left_out(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"%d" % i, key="k") for i in range(50)])
    source = source_of(broker, where.name)
    splits = cut(plan_read(source), 4)
    assert values(source, splits) == [b"%d" % i for i in range(50)]
    first = splits[0].first
    trim(broker, harness, where)
    with pytest.raises(DataLossTrimmedError, match=f"from {first.ledger}:0 to {first.ledger}:"):
        values(source, splits)
    assert values(source, splits, fail_on_data_loss=False) == []
    with pytest.raises(DataLossTrimmedError, match=f"start of .* is {first.ledger}:3:0"):
        plan_read(source, f"{first.ledger}:3")
    lenient = source_of(broker, where.name, fail_on_data_loss=False)
    assert values(lenient, plan_read(lenient, f"{first.ledger}:3")) == [b"newest"]
    assert values(source, plan_read(source)) == [b"newest"]
    assert plan_read(lenient, "999999:0")[0].entries == 0
    with pytest.raises(PositionAheadError, match="this is after all stored entries"):
        plan_read(source, "999999:0")


def test_the_end_of_a_read_is_the_start_of_the_next_where_all_of_it_is_trimmed(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    where = TopicPartition(harness.create_topic())
    harness.publish(where.name, [Message(b"%d" % i, key="k") for i in range(5)])
    source = source_of(broker, where.name)
    (first,) = plan_read(source)
    assert isinstance(first.end, MessageId)
    harness.roll_ledger(where)
    path = where.name.replace("://", "/")

    def trimmed() -> bool:
        httpx.post(
            f"{broker.admin_url}/admin/v2/{path}/trim", timeout=deadline(20)
        ).raise_for_status()
        return not any(ledger.entries for ledger in harness.admin().ledgers(where) or ())

    wait_until(trimmed)
    (second,) = plan_read(source, str(first.end))
    assert (second.entries, values(source, [second])) == (0, [])
    (third,) = plan_read(source, str(second.end))
    with pytest.raises(DataLossTrimmedError):
        plan_read(source, f"{first.end.ledger}:{first.end.entry - 1}")
    # A stream begins there, too, and has what comes.
    stream = source_of(
        broker,
        where.name,
        starting_position=json.dumps({where.name: str(first.end)}),
        subscription="s",
    )
    with stream.open() as running:
        harness.publish(where.name, [Message(b"new", key="k")])
        batch = running.next_batch(20.0)
        assert batch is not None
        assert [one for rows in batch for one in rows.column("value").to_pylist()] == [b"new"]
    for end in (second.end, third.end):
        assert values(source, plan_read(source, str(end))) == [b"new"]


def test_a_topic_that_was_created_again_is_not_read_for_the_old_one(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic(2)
    harness.publish(topic, [Message(b"%d" % i, key=f"{i}") for i in range(20)])
    source = source_of(broker, topic)
    splits = cut(plan_read(source), 5)
    harness.delete_topic(topic)
    with pytest.raises(DataLossTrimmedError, match="deleted topic"):
        values(source, splits)
    assert harness.admin().partition_count(topic) is None, "reading created it"
    httpx.put(
        f"{broker.admin_url}/admin/v2/{topic.replace('://', '/')}/partitions",
        json=2,
        timeout=deadline(20),
    ).raise_for_status()
    harness.publish(topic, [Message(b"new", key="k")])
    with pytest.raises(TopicRecreatedError, match="was deleted and created again"):
        values(source, splits)


def test_a_partition_that_the_broker_deleted_is_named_with_a_remedy(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic(2)
    path = topic.replace("://", "/")
    httpx.delete(f"{broker.admin_url}/admin/v2/{path}-partition-1").raise_for_status()
    with pytest.raises(TopicNotFoundError, match=r"(?s)partition-1 .*create-missed-partitions"):
        plan_read(source_of(broker, topic))
    again = f"{broker.admin_url}/admin/v2/{path}/createMissedPartitions"
    httpx.post(again, timeout=deadline(20)).raise_for_status()
    assert [one.entries for one in plan_read(source_of(broker, topic))] == [0, 0]


def test_a_chunked_message_is_an_error_where_it_is_read(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic()
    harness.publish(topic, [Message(b"plain", key="k")])
    first, last = harness.publish_chunked(topic, "k")
    source = source_of(broker, topic)
    with pytest.raises(
        ChunkedMessageError, match=f"{first.ledger}:({first.entry}|{last.entry}) of"
    ):
        values(source, plan_read(source))
    before = plan_read(source, end=f"{first.ledger}:{first.entry}")
    assert values(source, before) == [b"plain"]


@pytest.mark.parametrize("batched", [False, True])
def test_an_encrypted_message_is_an_error_and_not_left_out(
    broker: DevBroker, harness: PulsarHarness, batched: bool
) -> None:
    topic = harness.create_topic()
    harness.publish(topic, [Message(b"before", key="k")])
    harness.publish_encrypted(topic, "k", 3 if batched else 1)
    harness.publish(topic, [Message(b"behind", key="k")])
    source = source_of(broker, topic)
    (whole,) = plan_read(source)
    with pytest.raises(EncryptedMessageError, match=f"{whole.first.ledger}:1 of"):
        values(source, [whole])
    ledger = whole.first.ledger
    assert values(source, plan_read(source, end=f"{ledger}:1")) == [b"before"]
    assert values(source, plan_read(source, f"{ledger}:{whole.last.entry}")) == [b"behind"]


def test_large_and_batched_entries_are_read_whole_in_bounded_steps(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    topic = harness.create_topic()
    large = [Message(bytes([i]) * 3_000_000, key="k") for i in range(12)]
    batch = [Message(b"%d" % i, key="k") for i in range(4_000)]
    harness.publish(topic, large)
    harness.publish(topic, batch, Batching.MIXED)
    source = source_of(broker, topic)
    batches = list(read_splits(source.how_to_connect(), cut(plan_read(source), 3), ["value"]))
    found = [value for one in batches for value in one.column(0).to_pylist()]
    assert found == [message.value for message in large + batch]
    assert max(one.nbytes for one in batches) < 20_000_000


@pytest.mark.parametrize("seed", range(3))
def test_times_out_of_order_select_exactly_with_and_without_a_known_disorder(
    broker: DevBroker, harness: PulsarHarness, seed: int
) -> None:
    """Without a known disorder no message is lost, wherever the broker's search by time ends."""
    where, chance = TopicPartition(harness.create_topic()), random.Random(seed)
    wild = [T0 + chance.randrange(1_000) for _ in range(60)]
    harness.publish_at(where.name, wild)
    source = source_of(broker, where.name)
    for _ in range(6):
        start = T0 + chance.randrange(1_000)
        end = start + chance.randrange(300)
        expected = [b"%d" % one for one in wild if start <= one < end]
        assert values(source, plan_read(source, start, end)) == expected
        pruned = plan_read(source, start, end, disorder_max_s=1)
        assert values(source, pruned) == expected


def test_messages_behind_an_open_transaction_are_in_the_next_read(
    broker: DevBroker, harness: PulsarHarness
) -> None:
    """1. before; 2. in a transaction, open; 3. behind it, without one; planned; 4. committed."""
    where = TopicPartition(harness.create_topic())
    source = source_of(broker, where.topic)
    harness.publish(where.name, [Message(b"1", key="k")])
    coordinator = "persistent/pulsar/system/transaction_coordinator_assign-partition-0"
    # A coordinator starts after the first look-up.
    httpx.get(f"{broker.admin_url}/lookup/v2/topic/{coordinator}").raise_for_status()
    with RawConnection("127.0.0.1", broker.port) as connection:
        transaction = connection.begin(where.name, ["k"])
        harness.publish(where.name, [Message(b"3", key="k")])
        (first,) = plan_read(source)
        assert values(source, [first]) == [b"1"]
        with pytest.raises(PositionAheadError, match="without those of open transactions"):
            plan_read(source, end=f"{first.first.ledger}:3")
        for _ in range(UNLOADS):
            # Until it has read the topic's transactions again, the broker tells of none.
            harness.unload(where)
            assert plan_read(source)[0].end == first.end
        connection.end(transaction, COMMIT)
    wait_until(lambda: values(source, plan_read(source)) == [b"1", b"value", b"3"])
    assert values(source, plan_read(source, str(first.end))) == [b"value", b"3"]
