"""Contract: metadata columns, built if a consumer or Reader names them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from keyshard.broker.memory import Batching, Message
from keyshard.broker.port import ReadOptions
from keyshard.columns.content import CONTENT, METADATA, content_columns
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.contract.contract_harness import BreakableHarness, read_to_end, receive, subscribe

FIRST = EntryId(0, 0)
CLOCK = timedelta(seconds=5)
KEYS: list[dict[str, Any]] = [
    {"key": "text-é"},
    {"key": None},
    {"key": "AP8=", "key_is_base64": True},
    {"key": "AP8=", "key_is_base64": True, "ordering_key": "o"},
]


def test_metadata_columns_are_the_same_from_consumer_and_reader(
    breakable: BreakableHarness,
) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    columns = content_columns(METADATA.names)
    began = datetime.now(timezone.utc)
    breakable.publish(where.name, [Message(b"batch", key="k")] * 3, Batching.MIXED)
    breakable.publish(where.name, [Message(b"alone", key="k")] * 2)
    for one in KEYS:
        breakable.publish(where.name, [Message(b"key", **one)])
    rows = 5 + len(KEYS)
    received = receive([subscribe(broker, where, columns=columns)], rows)
    read = read_to_end(broker.reader(where, FIRST, ReadOptions(columns=columns)))
    found = {
        name: [value for block in read.blocks for value in block.column(name)]
        for name in METADATA.names
    }
    for name, values in found.items():
        assert [one for block in received.blocks for one in block.column(name)] == values, name
        if name in breakable.not_handed_out:
            assert values == [None] * rows, name
    assert found["__replicatedFrom"] == [None] * rows, "they were published here"
    batch, alone, others = (found["__producer"][a:b] for a, b in ((0, 3), (3, 5), (5, rows)))
    assert all(found["__producer"])
    assert (len(set(batch)), len(set(alone)), len(others)) == (1, 1, len(KEYS))
    if "__keyBytes" not in breakable.not_handed_out:
        assert found["__keyBytes"] == [b"k"] * 5 + [
            "text-é".encode(),
            None,
            b"\x00\xff",
            b"\x00\xff",
        ]
        assert found["__sequenceId"][:3] == [0, 1, 2]
        assert found["__sequenceId"][4] == found["__sequenceId"][3] + 1
    if "__brokerPublishTime" not in breakable.not_handed_out:
        now = datetime.now(timezone.utc)
        times = found["__brokerPublishTime"]
        assert all(began - CLOCK < one < now + CLOCK for one in times)


def test_content_without_metadata_columns_is_unchanged(breakable: BreakableHarness) -> None:
    where, broker = TopicPartition(breakable.create_topic()), breakable.broker()
    breakable.publish(where.name, [Message(b"v", key="k")])
    for block in (
        *receive([subscribe(broker, where)], 1).blocks,
        *read_to_end(broker.reader(where, FIRST)).blocks,
    ):
        assert block.content.schema == CONTENT
