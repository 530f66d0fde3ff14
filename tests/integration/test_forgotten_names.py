"""Producer names that a broker forgets, by its time and by its number: each row is stored once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing

import httpx
import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.messages import messages_of
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import NOTHING, batch_of, row_of
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

pytestmark = pytest.mark.broker
NAMES_MAX = 10
"""Names that the broker keeps for a topic partition."""
FORGOTTEN_S = 125
"""Time within which a broker forgets a name that is unused for a minute, seconds."""
LONG = "KEYSHARD_FORGET_BY_TIME"
"""Environment variable that admits the test that waits for more than a minute."""
BATCH = pa.record_batch(
    {
        "value": [b"%d" % row for row in range(20)],
        "__key": [f"k{row % 4}" for row in range(20)],
    }
)


@pytest.fixture(scope="module")
def broker() -> Iterator[DevBroker]:
    settings = {
        "brokerDeduplicationEnabled": "true",
        "brokerDeduplicationMaxNumberOfProducers": str(NAMES_MAX),
        "brokerDeduplicationEntriesInterval": "5",
        "brokerDeduplicationSnapshotIntervalSeconds": "1",
        "brokerDeduplicationSnapshotFrequencyInSeconds": "1",
        "brokerDeduplicationProducerInactivityTimeoutMinutes": "1",
        "defaultRetentionTimeInMinutes": "-1",
        "defaultRetentionSizeInMB": "-1",
    }
    with DevBroker(PULSAR, settings=settings) as made:
        yield made


@pytest.fixture
def topic(broker: DevBroker, topic_name: str) -> str:
    httpx.put(
        f"{broker.admin_url}/admin/v2/persistent/public/default/{topic_name}", timeout=deadline(20)
    )
    return f"persistent://public/default/{topic_name}"


def known(broker: DevBroker, topic: str, names: list[str]) -> list[int]:
    """The last sequence id that the broker knows of each name."""
    found = []
    with closing(WireBroker(Connection(broker.service_url))) as opened:
        for name in names:
            options = PublishOptions(name)
            with closing(opened.entry_producer(TopicPartition(topic), options)) as producer:
                found.append(producer.last_sequence_id)
    return found


def stored(broker: DevBroker, topic: str) -> dict[str | None, list[bytes | None]]:
    """Values by key and in their order."""
    found: dict[str | None, list[bytes | None]] = {}
    with closing(WireBroker(Connection(broker.service_url))) as opened:
        reader = opened.reader(TopicPartition(topic), EntryId(0, 0))
        end_s = time.monotonic() + deadline(30)
        while not reader.at_end():
            in_time(end_s, "the reader did not reach the end")
            for block in reader.read(100):
                for one in messages_of(TopicPartition(topic), block):
                    found.setdefault(one.key, []).append(one.value)
    return found


def by_key(batch: pa.RecordBatch, times: int = 1) -> dict[str | None, list[bytes | None]]:
    found: dict[str | None, list[bytes | None]] = {}
    for _ in range(times):
        for one in batch.to_pylist():
            found.setdefault(one["__key"], []).append(one["value"])
    return found


def write(broker: DevBroker, topic: str, partition: int = 0, batch_id: int = 1) -> int:
    """Write the batch, and return the rows that an earlier attempt had stored."""
    with KeyShardSink(topic, sink_id="s", service_url=broker.service_url) as sink:
        return sink.write_batch(BATCH, batch_id, partition).already_stored


def test_more_names_than_the_broker_keeps_lose_no_row_and_repeat_none(
    broker: DevBroker, topic: str
) -> None:
    """The broker forgets names when it loads the topic again, not when the next name comes."""
    names = [f"s-{partition}" for partition in range(NAMES_MAX + 3)]
    for partition in range(len(names)):
        assert write(broker, topic, partition) == 0
    (last,) = set(known(broker, topic, names))
    assert (batch_of(last), row_of(last)) == (1, len(BATCH) - 1)

    def forgotten() -> bool:
        path = topic.replace("://", "/")
        httpx.put(
            f"{broker.admin_url}/admin/v2/{path}/unload", timeout=deadline(20)
        ).raise_for_status()
        return NOTHING in known(broker, topic, names)

    # A snapshot of the names is taken once a second.
    wait_until(forgotten)
    ids = known(broker, topic, names)
    assert set(ids) == {last, NOTHING}
    for partition in range(len(names)):
        assert write(broker, topic, partition) == len(BATCH)
    assert stored(broker, topic) == by_key(BATCH, len(names))


@pytest.mark.skipif(not os.environ.get(LONG), reason=f"takes two minutes; set {LONG}=1")
def test_a_name_that_is_forgotten_after_its_time_is_found_by_its_rows(
    broker: DevBroker, topic: str
) -> None:
    assert write(broker, topic) == 0
    began_s = time.monotonic()
    # A producer of the name would renew its time, so the broker is asked once.
    wait_until(lambda: time.monotonic() - began_s > FORGOTTEN_S, FORGOTTEN_S + 10)
    assert known(broker, topic, ["s-0"]) == [NOTHING]
    assert write(broker, topic) == len(BATCH)
    assert stored(broker, topic) == by_key(BATCH)
