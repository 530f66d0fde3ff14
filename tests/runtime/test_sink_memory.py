"""Memory that a sink adds, in counted bytes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink, MessageId
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.entry_producer import MemoryEntryProducer
from keyshard.columns.outgoing import Outgoing
from keyshard.errors import BrokerUnavailableError
from keyshard.publishing.batch_part import PIECE_BYTES

MIB = 1024 * 1024
VALUE = b"x" * 10_000
PARTITIONS = 3


@contextmanager
def sink_of(**options: Any) -> Iterator[tuple[MemoryCluster, KeyShardSink]]:
    name = f"sink-{uuid.uuid4().hex}"
    cluster = MemoryCluster.named(name)
    topic = cluster.create_topic("out", PARTITIONS)
    cluster.deduplicate(topic)
    sink = KeyShardSink(topic, sink_id="s", service_url=f"memory://{name}", **options)
    with suppress(BrokerUnavailableError), sink:
        yield cluster, sink


def test_a_batch_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2_400
    keys = [f"k{number % 100}" for number in range(count)]
    columns = pa.record_batch({"value": pa.array([VALUE] * count), "__key": keys})
    added: list[int] = []
    publish_all = MemoryEntryProducer.publish_all

    def watched(
        self: MemoryEntryProducer, rows: Outgoing, ends: Sequence[int], sequence_id: int
    ) -> Any:
        added.append(pa.total_allocated_bytes() - before)
        return publish_all(self, rows, ends, sequence_id)

    monkeypatch.setattr(MemoryEntryProducer, "publish_all", watched)
    with sink_of() as (_, sink):
        before = pa.total_allocated_bytes()
        assert sink.write_batch(columns, 0).rows == count
    assert len(added) > PARTITIONS
    assert max(added) < 2 * PIECE_BYTES < columns.nbytes / 4


def test_collected_messages_count_as_pending() -> None:
    options = {"pending_bytes_max": PARTITIONS * MIB, "send_timeout_ms": 1_000, "linger_ms": 10_000}
    with sink_of(**options) as (cluster, sink):
        sink.send(b"first", key="k")
        sink.flush()
        for client in list(cluster._clients):
            client.drop()
        sent: list[Future[MessageId]] = []
        failed_at: list[int] = []
        # With one key, all go to one topic partition, which has its share of the limit.
        while not failed_at and len(sent) < 1_000:
            sent.append(sink.send(VALUE, key="k"))
            if any(one.done() for one in sent):
                failed_at.append(len(sent))
        assert failed_at, "send never waits"
        assert MIB / 2 < len(sent) * len(VALUE) <= MIB
