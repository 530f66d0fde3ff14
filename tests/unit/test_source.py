"""The public source: a description that connects when it is opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import keyshard
from keyshard import Checkpoint, KeyShardSource, SourceStream
from keyshard.broker.memory import Message
from keyshard.errors import BatchReleasedError, CheckpointError, ConfigError, RuntimeStoppedError
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic


@pytest.fixture
def topic() -> MemoryTopic:
    return MemoryTopic()


@pytest.fixture
def source(topic: MemoryTopic) -> KeyShardSource:
    return topic.source(parallelism=3)


@pytest.fixture
def stream(source: KeyShardSource) -> Iterator[SourceStream]:
    with source.open() as stream:
        yield stream


def publish(topic: MemoryTopic, *numbers: int) -> None:
    messages = [Message(b"%d" % number, key=f"key-{number % 5}") for number in numbers]
    topic.cluster.publish(topic.topic, *messages)


def take(stream: SourceStream, rows: int) -> list[int]:
    """Read and commit batches until this many rows came."""
    found: list[int] = []
    while len(found) < rows:
        batch = stream.next_batch(timeout_s=deadline(10))
        assert batch is not None
        found += [int(value) for part in batch for value in part["value"].to_pylist()]
        stream.commit(batch)
    return found


def test_the_documented_loop_takes_everything_once(
    topic: MemoryTopic, stream: SourceStream
) -> None:
    publish(topic, *range(30))
    assert sorted(take(stream, 30)) == list(range(30))
    assert stream.next_batch(timeout_s=0) is None
    wait_until(lambda: topic.backlog() == 0)
    assert stream.status()["entriesAcknowledged"] == 30


def test_a_batch_is_read_by_partition_as_often_as_needed(
    topic: MemoryTopic, stream: SourceStream
) -> None:
    publish(topic, *range(30))
    wait_until(lambda: stream.status()["rowsReceived"] == 30)
    batch = stream.next_batch(timeout_s=deadline(10))
    assert batch is not None
    assert set(batch.partitions) <= {0, 1, 2}
    by_partition = [
        value
        for partition in batch.partitions
        for part in batch.read(partition)
        for value in part["value"].to_pylist()
    ]
    assert by_partition == [value for part in batch for value in part["value"].to_pylist()]
    assert len(by_partition) == 30


def test_a_batch_is_no_larger_than_asked(topic: MemoryTopic, stream: SourceStream) -> None:
    publish(topic, *range(30))
    wait_until(lambda: stream.status()["rowsReceived"] == 30)
    batch = stream.next_batch(timeout_s=deadline(10), rows_max=4)
    assert batch is not None
    assert sum(part.num_rows for part in batch) == 4


def test_committing_a_batch_commits_those_before_it(
    topic: MemoryTopic, stream: SourceStream
) -> None:
    publish(topic, *range(10))
    wait_until(lambda: stream.status()["rowsReceived"] == 10)
    first = stream.next_batch(timeout_s=deadline(10), rows_max=5)
    second = stream.next_batch(timeout_s=deadline(10))
    assert first is not None
    assert second is not None
    stream.commit(second)
    wait_until(lambda: topic.backlog() == 0)
    with pytest.raises(BatchReleasedError):
        list(first)


def test_opening_with_the_stored_checkpoint_continues_after_it(
    topic: MemoryTopic, source: KeyShardSource
) -> None:
    publish(topic, *range(20))
    with source.open() as stream:
        wait_until(lambda: stream.status()["rowsReceived"] == 20)
        batch = stream.next_batch(timeout_s=deadline(10), rows_max=8)
        assert batch is not None
        stored = [int(v) for part in batch for v in part["value"].to_pylist()]
        checkpoint = batch.checkpoint  # stored with the rows; then the program dies
    with dataclasses.replace(source, parallelism=5).open(checkpoint) as stream:
        rest = take(stream, 20 - len(stored))
        assert stream.next_batch(timeout_s=0) is None
        wait_until(lambda: topic.backlog() == 0)
    assert sorted(stored + rest) == list(range(20))
    assert Checkpoint.from_json(checkpoint).subscription == "keyshard"


def test_an_invalid_checkpoint_is_refused_before_connecting() -> None:
    source = KeyShardSource("t", subscription="s", service_url="pulsar://no.such.host.invalid:1")
    with pytest.raises(CheckpointError):
        source.open("nonsense")


def test_a_closed_stream_is_named(source: KeyShardSource) -> None:
    stream = source.open()
    stream.close()
    stream.close()
    with pytest.raises(RuntimeStoppedError):
        stream.next_batch(timeout_s=0)


def test_leaving_the_block_closes_the_stream_after_an_error_too(source: KeyShardSource) -> None:
    with pytest.raises(ZeroDivisionError), source.open():
        raise ZeroDivisionError
    with dataclasses.replace(source, subscribe_timeout_ms=1).open():
        pass


def test_a_description_connects_to_nothing() -> None:
    source = KeyShardSource("t", subscription="s", service_url="pulsar://no.such.host.invalid:1")
    assert not source.coordinator().started
    assert "subscription='s'" in repr(source)


def test_a_wrong_value_is_refused_when_the_source_is_described() -> None:
    with pytest.raises(ConfigError):
        KeyShardSource("t", subscription="s", parallelism=0)


def test_every_public_name_exists_and_is_documented() -> None:
    for name in keyshard.__all__:
        assert getattr(keyshard, name).__doc__
