"""Deliveries, errors and keys, encoded on the way from a worker."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshard.broker.unreadable_entries import corrupt_entry
from keyshard.columns.content import entry_block
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.errors import (
    BrokerUnavailableError,
    ChunkedMessageError,
    CorruptEntryError,
    KeyShardError,
    RangeConflictError,
)
from keyshard.workers.encoding import (
    WorkerDelivery,
    decode_deliveries,
    decode_error,
    encode_deliveries,
    encode_error,
    keys_of,
)
from tests.support.hosted_consumers import block_of


def content_of(block: EntryBlock) -> list[list[object]]:
    columns = ("value", "__key", "__orderingKey", "__eventTime", "__properties")
    return [block.column(name) for name in columns]


@given(st.integers(0, 2**64))
def test_delivered_entries_equal_received_ones(seed: int) -> None:
    chosen = Random(seed)
    sent = [
        (number, [block_of(chosen) for _ in range(chosen.randint(0, 3))])
        for number in range(chosen.randint(0, 4))
    ]
    listed, content = encode_deliveries(WorkerDelivery(number, entries) for number, entries in sent)
    came = decode_deliveries(json.loads(json.dumps(listed)), content)
    assert [one.consumer for one in came] == [number for number, _ in sent]
    for delivery, (_, entries) in zip(came, sent, strict=True):
        assert len(delivery.blocks) == len(entries)
        for after, before in zip(delivery.blocks, entries, strict=True):
            assert list(after.indices) == list(before.indices)
            for name in EntryBlock.__struct_fields__:
                if name not in ("content", "start", "indices"):
                    assert getattr(after, name) == getattr(before, name), name
            assert content_of(after) == content_of(before)


@pytest.mark.parametrize(
    "error",
    [
        RangeConflictError("somebody has it"),
        ChunkedMessageError("too long", topic_partition=TopicPartition("persistent://a/b/c", 3)),
        BrokerUnavailableError("away"),
    ],
)
def test_an_error_keeps_its_class_across_processes(error: KeyShardError) -> None:
    after = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(after) is type(error)
    assert (after.message, after.retriable) == (error.message, error.retriable)
    assert after.facts == {name: str(fact) for name, fact in error.facts.items()} or after.facts


def test_the_stored_bytes_of_an_unreadable_entry_travel_with_the_error() -> None:
    error = corrupt_entry(TopicPartition("t"), EntryId(1, 2), "it is wrong", b"\x00\xff")
    after = decode_error(json.loads(json.dumps(encode_error(error))))
    assert isinstance(after, CorruptEntryError)
    assert after.stored == b"\x00\xff"


def test_keys_cross_where_the_layout_may_ask_for_them() -> None:
    def delivery(**changes: Any) -> WorkerDelivery:
        fields: dict[str, Any] = {"batch_size": 1, "batched": False, "indices": [0]} | changes
        block = entry_block(
            EntryId(1, 2), values=[b"v"], partition_keys=["k"], ordering_keys=[None],
            publish_ms=1, event_ms=[0], properties=[{}], **fields,
        )  # fmt: skip
        return WorkerDelivery(1, [block])

    def crossing(*deliveries: WorkerDelivery) -> list[object]:
        _, content = encode_deliveries(deliveries)
        keys = keys_of(deliveries, content)
        assert keys.schema.names == ["__key", "__orderingKey"]
        return keys.column("__key").to_pylist()

    part, of_bytes = delivery(batch_size=2, batched=True), delivery()
    of_bytes.blocks[0].keys_of_bytes = True
    assert crossing(delivery(), delivery()) == []
    assert crossing(delivery(), part) == ["k", "k"]
    assert crossing(of_bytes) == ["k"]
