"""The embedded source on a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from keyshard import KeyShardSource, SourceStream
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import MisroutedError, TopicNotFoundError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)
from tests.support.deadlines import deadline
from tests.support.observed import backlog

pytestmark = pytest.mark.broker

SUBSCRIPTION = "embedded"
PARTITIONS = 3
WAIT_S = deadline(30)


def source(broker: DevBroker, topic: str, **settings: object) -> KeyShardSource:
    return KeyShardSource(
        topic,
        subscription=SUBSCRIPTION,
        service_url=broker.service_url,
        admin_url=broker.admin_url,
        starting_position="earliest",
        **settings,  # type: ignore[arg-type]
    )


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str) -> str:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    return topic_name


def rows(stream: SourceStream, count: int) -> Iterator[tuple[str, int]]:
    """Key and sequence number of ``count`` rows, committed batch by batch."""
    while count > 0:
        batch = stream.next_batch(WAIT_S)
        assert batch is not None, f"{count} rows are missing"
        for part in batch:
            count -= part.num_rows
            yield from map(parse_value, part.column("value").to_pylist())
        stream.commit(batch)


def test_every_row_comes_once_and_in_order_per_key(dev_broker: DevBroker, topic: str) -> None:
    load = Workload(3_000, keys=50, entry_messages=3)
    sent = produce(load, dev_broker.service_url, topic)
    seen: dict[str, list[int]] = {}
    with source(dev_broker, topic).open() as stream:
        for key, sequence in rows(stream, load.messages):
            seen.setdefault(key, []).append(sequence)
    assert seen == {key: list(range(count)) for key, count in sent.per_key.items()}
    assert backlog(dev_broker, topic, SUBSCRIPTION, PARTITIONS) == 0


def test_default_batching_is_noticed_and_ends_the_source_if_configured(
    dev_broker: DevBroker, topic: str
) -> None:
    load = Workload(500, keys=50, batching="default")
    produce(load, dev_broker.service_url, topic)
    with (
        source(dev_broker, topic, on_misrouted="fail").open() as stream,
        pytest.raises(MisroutedError, match="uses default batching"),
    ):
        list(rows(stream, load.messages))
    before = backlog(dev_broker, topic, SUBSCRIPTION, PARTITIONS)
    assert before > 0, "nothing may be acknowledged"
    with source(dev_broker, topic).open() as stream:
        assert len(list(rows(stream, load.messages))) == load.messages
        assert stream.status()["misrouted"] > 0


def test_payload_of_a_batch_is_limited(dev_broker: DevBroker, topic: str) -> None:
    load = Workload(600, keys=20, size_bytes=100, entry_messages=3)
    produce(load, dev_broker.service_url, topic)
    left = 600
    with source(dev_broker, topic, batch_bytes_max=6_000).open() as stream:
        while left:
            batch = stream.next_batch(WAIT_S)
            assert batch is not None
            sizes = [len(value) for part in batch for value in part.column("value").to_pylist()]
            # A partition or range that was left out before adds one entry beyond the limit.
            assert sum(sizes) <= 6_000 + 100 * (10 + PARTITIONS) * load.run_messages
            left -= len(sizes)
            stream.commit(batch)


def test_a_missing_topic_is_refused_and_not_created(dev_broker: DevBroker, topic_name: str) -> None:
    with pytest.raises(TopicNotFoundError, match=topic_name):
        source(dev_broker, topic_name).open()
    with closing(PulsarAdmin(dev_broker.connection)) as admin:
        assert admin.partition_count(full_topic_name(topic_name)) is None
