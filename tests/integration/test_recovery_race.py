"""Recoveries that leave a broker with too few ids (apache/pulsar#25953, before Pulsar 5.0).

The broker is not modified, so it is a matter of chance how often that happens. It does not change
the promise: each row is stored once.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.broker.port import PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.core.publishing import batch_of, row_of
from keyshard.errors import DeduplicationError
from keyshard.testing.devbroker import DevBroker
from tests.support.deadlines import deadline
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic
from tests.support.tested_pulsar import PULSAR

LOADS = int(os.environ.get("KEYSHARD_RECOVERY_LOADS", "0"))
"""How often the topic is loaded. The test is on demand."""
pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(not LOADS, reason="takes minutes; set KEYSHARD_RECOVERY_LOADS=60"),
    pytest.mark.timeout(3_600),
]
ROWS = 730


@contextmanager
def busy_machine() -> Iterator[None]:
    """Keep a core busy, so that the two recoveries do not always finish in their order."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            sum(range(10_000))

    thread = threading.Thread(target=spin, name="spin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_repeated_batch_is_stored_once_after_an_incomplete_recovery() -> None:
    settings = {"brokerDeduplicationEnabled": "true", "topicLevelPoliciesEnabled": "true"}
    with (
        DevBroker(PULSAR, settings=settings) as broker,
        closing(admin_of(broker)) as admin,
        closing(WireBroker(Connection(broker.service_url))) as client,
        busy_machine(),
    ):
        namespace = keeping_namespace(admin, "race")
        topic = f"persistent://{namespace}/t"
        path = f"/persistent/{namespace}/t"
        admin.put(path).raise_for_status()
        # A policy of the topic itself, of any kind, lets two recoveries run.
        admin.post(f"{path}/maxConsumers", json=100).raise_for_status()
        too_few = 0
        for batch in range(LOADS):
            values = [b"%d:%d" % (batch, row) for row in range(ROWS)]
            rows = pa.record_batch({"value": values, "__key": ["k"] * ROWS})
            with KeyShardSink(
                topic, sink_id="s", service_url=broker.service_url, entry_messages_max=1
            ) as sink:
                sink.write_batch(rows, batch)
                admin.put(f"{path}/unload", timeout=deadline(60)).raise_for_status()
                too_few += not knows_all(client, TopicPartition(topic), batch)
                repeat(sink, rows, batch)
        print(f"\n{PULSAR}: the broker knew too few rows after {too_few} of {LOADS} loads")
        found = Counter(one.value for one in messages_of_topic(broker.service_url, topic))
    assert sum(found.values()) == len(found) == LOADS * ROWS


def knows_all(client: WireBroker, where: TopicPartition, batch: int) -> bool:
    """Whether the broker knows the last row of a batch."""
    with closing(client.entry_producer(where, PublishOptions("s-0"))) as producer:
        last = producer.last_sequence_id
    return (batch_of(last), row_of(last)) == (batch, ROWS - 1)


def repeat(sink: KeyShardSink, rows: pa.RecordBatch, batch: int) -> None:
    """Write a batch again; a broker that is not sure of a name refuses at first."""
    with suppress(DeduplicationError):
        sink.write_batch(rows, batch)
        return
    sink.write_batch(rows, batch)
