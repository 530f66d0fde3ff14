"""Contract: metadata that fits no column ends no read, and its valid part is kept."""

from __future__ import annotations

from datetime import datetime, timezone

import pyarrow as pa
import pytest

from keyshard.broker.memory import Batching, Message
from keyshard.columns.messages import messages_of
from keyshard.columns.record_batches import record_batches
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.core.ring.key_slot import key_slot
from tests.contract.contract_harness import Harness, receive, subscribe

MICROSECONDS = 1_700_000_000_000_000
LARGEST = 2**64 - 1
GOOD_MS = 1_700_000_000_000
GOOD = datetime(2023, 11, 14, 22, 13, 20, tzinfo=timezone.utc)


@pytest.mark.parametrize("batching", list(Batching))
def test_an_invalid_event_time_is_null_and_its_number_is_a_property(
    harness: Harness, batching: Batching
) -> None:
    where = TopicPartition(harness.create_topic())
    times = (MICROSECONDS, GOOD_MS, LARGEST, 0, MICROSECONDS * 1_000)
    sent = [Message(b"%d" % time, "k", properties={"p": "1"}, event_ms=time) for time in times]
    harness.publish(where.name, sent, batching)
    blocks = receive([subscribe(harness.broker(), where)], len(sent)).blocks
    assert sum(block.unreadable for block in blocks) == 3
    messages = [message for block in blocks for message in messages_of(where, block)]
    table = pa.Table.from_batches(record_batches([(where, block) for block in blocks]))
    expected = [GOOD if time == GOOD_MS else None for time in times]
    assert [message.event_time for message in messages] == expected
    assert table["__eventTime"].to_pylist() == expected
    kept = [{"p": "1"} | ({"__eventTime": str(time)} if time > GOOD_MS else {}) for time in times]
    assert [message.properties for message in messages] == kept
    assert [dict(one) for one in table["__properties"].to_pylist()] == kept


@pytest.mark.broker
def test_every_metadata_value_arrives(request: pytest.FixtureRequest) -> None:
    from tests.contract.pulsar_harness import PulsarHarness  # noqa: PLC0415

    dev_broker = request.getfixturevalue("dev_broker")
    harness = PulsarHarness(dev_broker.service_url, dev_broker.admin_url)
    where = TopicPartition(harness.create_topic())
    harness.publish_raw(
        where.name,
        [
            ({6: b"\xff\xfeab"}, b"partition key"),
            ({18: b"\xff\x01", 6: b"k"}, b"ordering key"),
            ({4: b"\x0a\x02\xffa\x12\x02\xffb"}, b"property"),
            ({3: LARGEST}, b"publish time"),
            ({3: 0, 1: b"\xff"}, b"producer name"),
            ({12: LARGEST, 3: MICROSECONDS, 18: b"\xff"}, b"all"),
        ],
    )
    blocks = receive([subscribe(harness.broker(), where)], 6).blocks
    reader = harness.broker().reader(where, blocks[0].id)
    again: list[EntryBlock] = []
    while len(again) < 6:
        again += reader.read(500)
    harness.close()
    assert [block.unreadable for block in blocks] == [1, 1, 1, 1, 0, 1]
    assert [block.slot for block in again] == [block.slot for block in blocks]
    assert blocks[1].slot == key_slot(b"\xff\x01"), "the broker hashes the bytes"
    messages = {one.value: one for block in blocks for one in messages_of(where, block)}
    assert messages[b"partition key"].key == "\ufffd\ufffdab"
    assert messages[b"ordering key"].ordering_key == "\ufffd\x01"
    assert messages[b"property"].properties == {"__notText": "\ufffda"}
    assert messages[b"publish time"].properties == {"__publishTime": str(LARGEST)}
    assert messages[b"publish time"].publish_time.year == 1970
    assert messages[b"all"].properties == {
        "__eventTime": str(LARGEST),
        "__publishTime": str(MICROSECONDS),
    }
    table = pa.Table.from_batches(record_batches([(where, block) for block in blocks]))
    assert table["__publishTime"].null_count == 3
    assert table.to_pylist()
