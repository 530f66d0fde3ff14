"""Metadata columns that a source names, in every way to get rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryBroker, Message
from keyshard.columns.record_batches import SCHEMA, columns_of
from keyshard.config.connection import Connection
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from tests.helpers import config, received, rows_of
from tests.support.memory_topic import MemoryTopic

NAMED = (
    "__sequenceId", "__producer", "__orderingKey", "__keyBytes", "__brokerPublishTime",
    "__replicatedFrom", "__deliverAt",
)  # fmt: skip
SENT = [
    Message(b'{"id": 1}', key="k"),
    Message(b'{"id": 2}', key="k", ordering_key="o"),
    Message(b'{"id": 3}', key="AP8=", key_is_base64=True),
    Message(b'{"id": 4}'),
]
WANTED = [
    (0, "p", None, b"k", None, None, None),
    (1, "p", "o", b"k", None, None, None),
    (2, "p", None, b"\x00\xff", None, None, None),
    (3, "p", None, None, None, None, None),
]


class Topic(MemoryTopic):
    """A topic with four messages, in one batch and one by one."""

    def __init__(self) -> None:
        super().__init__(partitions=0)
        self.cluster.publish(self.topic, *SENT[:2], batching=Batching.MIXED, producer="p")
        self.cluster.publish(self.topic, *SENT[2:], producer="p")

    def source(self, **changes: Any) -> KeyShardSource:
        given = {"admin_url": self.url, "parallelism": 2, "metadata_columns": NAMED}
        return super().source(**given | changes)


@pytest.fixture
def topic() -> Topic:
    return Topic()


def named(rows: list[dict[str, Any]], columns: tuple[str, ...] = NAMED) -> list[tuple[Any, ...]]:
    rows = sorted(rows, key=lambda row: row["__messageId"])
    return [tuple(row[name] for name in columns) for row in rows]


def test_a_batch_read_again_after_a_restart_has_the_same_metadata_columns(topic: Topic) -> None:
    source = config(topic.topic, metadata_columns=NAMED)
    first = Coordinator(source, lambda: MemoryBroker(topic.cluster), None)
    first.start(None)
    received(first, 4)
    end = first.batches.cut()
    assert end is not None
    found = rows_of(first, end)
    first.stop()
    assert named([row for part in found.values() for row in part]) == WANTED
    again = Coordinator(source, lambda: MemoryBroker(topic.cluster), None)
    again.start(end, planned=True)
    assert rows_of(again, end) == found
    again.stop()


def test_batches_and_streams_of_python_have_metadata_columns_last(topic: Topic) -> None:
    columns = columns_of(NAMED)
    with topic.source(subscription="open").open() as stream:
        rows: list[dict[str, Any]] = []
        while len(rows) < 4 and (batch := stream.next_batch(10)):
            for part in batch:
                assert part.schema.names == columns
                rows += part.to_pylist()
    assert named(rows) == WANTED
    source = topic.source(subscription="batches")
    rows = []
    for one in source.batches(max_wait_s=0.1):
        assert one.records.schema.names == columns
        rows += one.records.to_pylist()
        if len(rows) == 4:
            source.stop()
    assert named(rows) == WANTED
    with topic.source(subscription="none", metadata_columns=()).open() as stream:
        batch = stream.next_batch(10)
        assert batch is not None
        assert all(part.schema == SCHEMA for part in batch)


def test_decoded_rows_have_metadata_columns_too(topic: Topic) -> None:
    fields = [{"name": "id", "type": "long"}]
    definition = json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    topic.cluster.schemas[topic.topic] = [TopicSchema("JSON", definition, 0)]
    source = topic.source()
    decoder = source.decoder()
    rows: list[dict[str, Any]] = []
    for batch in source.batches(max_wait_s=0.1):
        for decoded in decoder.decoded([batch.records]):
            assert decoded.schema.names == ["id", *columns_of(NAMED)[1:]]
            rows += decoded.to_pylist()
        if len(rows) == 4:
            source.stop()
    assert named(rows, ("id", *NAMED)) == [(i, *row) for i, row in enumerate(WANTED, 1)]
    assert source.decoder(["__producer"]).raw_columns == ("__producer",)


def test_splits_have_the_named_columns(topic: Topic) -> None:
    stretches = plan_read(topic.source())
    columns = ("__messageId", *METADATA_COLUMNS)
    (rows,) = read_splits(Connection(topic.url, topic.url), stretches, columns)
    assert rows.schema.names == list(columns)
    assert named(rows.to_pylist()) == WANTED


def test_handlers_are_refused_columns_that_messages_do_not_have(topic: Topic) -> None:
    with pytest.raises(ConfigError, match="but handlers receive messages"):
        topic.source().run(lambda _: None)
