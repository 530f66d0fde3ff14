"""Separated keys of KEY_VALUE schemas: as a producer set them, as bytes or as text."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import keyshard
from keyshard import Connection, KeyShardSource
from keyshard.broker.memory import MemoryBroker, Message
from keyshard.columns.record_batches import COLUMNS, SCHEMA
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, parse
from keyshard.core.topic_schema import TopicSchema
from keyshard.errors import ConfigError, MalformedMessageError, SchemaError, UnfitHandlerError
from keyshard.reading.decoder import RowDecoder
from keyshard.reading.decoding_plan import plan_decoding
from keyshard.reading.message_decoder import MessageDecoder
from tests.helpers import received
from tests.support.memory_topic import MemoryTopic

KINDS = {"key.schema.type": "STRING", "value.schema.type": "STRING"}
APART = KINDS | {"kv.encoding.type": "SEPARATED"}
SENT = [
    Message(b"text", "abcd"),
    Message(b"bytes", "YWJjZA==", key_is_base64=True),
    Message(b"looks like bytes", "YWJjZA=="),
    Message(b"ordered", "YWJjZA==", "o", key_is_base64=True),
    Message(b"empty", ""),
    Message(b"none"),
    Message(None, "gone"),
]
WANTED = [
    ("abcd", "text"), ("abcd", "bytes"), ("YWJjZA==", "looks like bytes"), ("abcd", "ordered"),
    ("", "empty"), (None, "none"), ("gone", None),
]  # fmt: skip


class Topic(MemoryTopic):
    """A topic with separated keys, and messages of each sort."""

    def __init__(self, properties: dict[str, str] = APART) -> None:
        super().__init__(partitions=0)
        definition = b'{"key": "", "value": ""}'
        self.cluster.schemas[self.topic] = [TopicSchema("KEY_VALUE", definition, 0, properties)]
        for message in SENT:
            self.cluster.publish(self.topic, message)

    def source(self, **changes: Any) -> KeyShardSource:
        given = {"admin_url": self.url, "parallelism": 1, "metadata_columns": ["__keyBytes"]}
        return super().source(**given | changes)


@pytest.fixture
def topic() -> Topic:
    return Topic()


def test_a_stream_and_its_replay_read_each_key_as_it_was_set(topic: Topic) -> None:
    source = topic.source()
    decoder = source.decoder(["key", "value"])

    def pairs(coordinator: Coordinator, checkpoint: Any) -> list[tuple[Any, Any]]:
        (index,) = coordinator.batches.plan(checkpoint)
        raw = coordinator.batches.read(checkpoint.batch_id, index)
        return [tuple(row.values()) for one in decoder.decoded(raw) for row in one.to_pylist()]

    first = Coordinator(source, lambda: MemoryBroker(topic.cluster), None)
    first.start(None)
    received(first, len(SENT))
    end = first.batches.cut()
    assert end is not None
    assert pairs(first, end) == WANTED
    first.stop()
    again = Coordinator(source, lambda: MemoryBroker(topic.cluster), None)
    again.start(end, planned=True)
    assert pairs(again, end) == WANTED
    again.stop()


def handled(topic: Topic, **options: Any) -> list[Any]:
    source = topic.source()
    seen: list[Any] = []

    def note(message: keyshard.Message) -> None:
        seen.append((message.message_id, message.data))
        if len(seen) == len(SENT):
            source.stop()

    source.run(note, **options)
    return [tuple(data.values()) for _, data in sorted(seen, key=lambda one: one[0])]


def test_a_handler_reads_each_key_as_it_was_set(topic: Topic) -> None:
    assert handled(topic) == WANTED


def test_a_query_without_the_column_of_key_bytes_is_refused(topic: Topic) -> None:
    source = topic.source(metadata_columns=())
    with pytest.raises(ConfigError, match=r"metadata_columns=\['__keyBytes'\]"):
        source.decoder()
    with pytest.raises(UnfitHandlerError, match=r"metadata_columns=\['__keyBytes'\]"):
        source.run(lambda message: message.data)
    # It ended the run: nothing was acknowledged.
    assert handled(topic) == WANTED
    assert Topic(KINDS).source(metadata_columns=()).decoder().raw_columns


def test_another_version_may_store_keys_separately(topic: Topic) -> None:
    inline = TopicSchema("KEY_VALUE", b'{"key": "", "value": ""}', 1, KINDS)
    topic.cluster.schemas[topic.topic].append(inline)
    pair = b"\0\0\0\1k\0\0\0\1v"
    rows = [
        {"value": pair, "__topic": topic.topic, "__schemaVersion": 1},
        {"value": b"v", "__topic": topic.topic, "__schemaVersion": 0, "__keyBytes": b"abcd"},
    ]
    fields = [*SCHEMA, COLUMNS.field("__keyBytes")]
    raw = pa.RecordBatch.from_pylist(rows, schema=pa.schema(fields))
    plan = plan_decoding(Connection(topic.url), [topic.topic])
    decoder = RowDecoder(plan, plan.only(["key", "value"]))
    assert "__keyBytes" in decoder.raw_columns
    (found,) = decoder.decoded([raw])
    assert found.to_pylist() == [{"key": "k", "value": "v"}, {"key": "abcd", "value": "v"}]
    read = MessageDecoder(Connection(topic.url))
    one = keyshard.Message.for_test(pair)._replace(topic=topic.topic, schema_version=1)
    assert read(one) == {"key": "k", "value": "v"}
    with pytest.raises(UnfitHandlerError, match="__keyBytes"):
        read(one._replace(value=b"v", schema_version=0))


def test_a_version_with_keys_apart_that_follows_another_type_is_malformed(topic: Topic) -> None:
    """If its policy allows it, a broker accepts any schema after any other."""
    schemas = topic.cluster.schemas[topic.topic]
    schemas.insert(0, TopicSchema("STRING", b"", 0))
    schemas[1] = replace(schemas[1], version=1)
    plan = plan_decoding(Connection(topic.url), [topic.topic], "DROPMALFORMED")
    plan = replace(plan, schemas={topic.topic: schemas[0]})
    rows = [
        {"value": b"text", "__topic": topic.topic, "__schemaVersion": 0},
        {"value": b"v", "__topic": topic.topic, "__schemaVersion": 1},
    ]
    decoder = RowDecoder(plan, plan.only(["value"]))
    assert "__keyBytes" not in decoder.raw_columns
    (found,) = decoder.decoded([pa.RecordBatch.from_pylist(rows, schema=SCHEMA)])
    assert found.to_pylist() == [{"value": "text"}]
    assert decoder.malformed == 1
    read = MessageDecoder(Connection(topic.url))
    one = keyshard.Message.for_test(b"text")._replace(topic=topic.topic, schema_version=0)
    apart = schemas.pop()
    assert read(one) == "text"
    schemas.append(apart)
    with pytest.raises(MalformedMessageError, match="it was written as KEY_VALUE"):
        read(one._replace(value=b"v", schema_version=1))


def test_pulsar_client_cannot_read_separated_keys(topic: Topic) -> None:
    apart = topic.cluster.schemas[topic.topic][0]
    connection = Connection("pulsar://localhost:1", transport="client")
    plan = plan_decoding(Connection(topic.url), [topic.topic])
    plan = type(plan)(connection, {topic.topic: apart})
    with pytest.raises(SchemaError, match=r"(?s)pulsar-client .*transport='wire'.*valueFormat=raw"):
        RowDecoder(plan, plan.columns)
    # Columns of keyshard alone, and bytes, need no key.
    RowDecoder(plan, plan.only(["__key"]))


def test_a_topic_found_later_is_an_error_if_its_key_bytes_are_not_read(
    topic: Topic,
) -> None:
    other = topic.cluster.create_topic("words")
    topic.cluster.schemas[other] = [TopicSchema("KEY_VALUE", b'{"key": "", "value": ""}', 0, KINDS)]
    decoder = topic.source(topics=other, metadata_columns=()).decoder()
    for batch in topic.source(metadata_columns=()).batches(max_wait_s=0.01):
        with pytest.raises(
            SchemaError, match=rf"(?s){topic.topic} stores keys separately.*valueFormat=raw"
        ):
            list(decoder.decoded([batch.records]))
        break


def test_a_dead_letter_keeps_the_bytes_of_the_key_of_its_original(topic: Topic) -> None:
    read = MessageDecoder(Connection(topic.url), key_bytes=True)
    one = keyshard.Message.for_test(b"v", key="YWJjZA==")
    one = one._replace(topic=topic.topic, key_bytes=b"abcd")

    def back(message: keyshard.Message) -> keyshard.Message:
        dead_letter = DeadLetter(message, "s", DeadLetterKind.PARKED, 1, "why")
        found = parse(message._replace(properties=dead_letter.properties(), key_bytes=None))
        assert isinstance(found, DeadLetter)
        return pickle.loads(pickle.dumps(found.message))

    assert read(back(one)) == {"key": "abcd", "value": "v"}
    with pytest.raises(MalformedMessageError, match=r"text message\.key"):
        read(back(one._replace(key_bytes=None)))


def test_another_process_does_not_take_an_in_memory_cluster_for_one_without_schemas(
    topic: Topic,
) -> None:
    source = topic.source()
    with pytest.raises(UnfitHandlerError, match=r"in-memory cluster of another process"):
        source.run(reads_data, executor="processes", workers=1)


def reads_data(message: keyshard.Message) -> None:
    """A handler that a worker process imports."""
    _ = message.data
