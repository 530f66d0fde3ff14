"""A sink on a real broker: exactly once through moves and kills, and as other clients see it."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.broker.port import Compression, PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.message import Message
from keyshard.testing.devbroker import DevBroker
from tests.helpers import wait_until
from tests.support.deadlines import deadline, joined
from tests.support.java_client import JavaClient
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic

pytestmark = pytest.mark.broker
PARTITIONS = 3
COMPRESSIONS: tuple[Compression, ...] = ("none", "lz4", "zlib", "zstd", "snappy")
WRITER = """
import sys
import pyarrow as pa
from keyshard import KeyShardSink

url, topic, rows, keys, entry = sys.argv[1:]
rows = range(int(rows))
batch = pa.record_batch({
    "value": [b"%d" % row for row in rows],
    "__key": [f"k{row % int(keys)}" for row in rows],
})
with KeyShardSink(topic, sink_id="s", service_url=url, entry_messages_max=int(entry)) as sink:
    print("begins", flush=True)
    print("wrote", sink.write_batch(batch, 3).already_stored, flush=True)
"""


@pytest.fixture(scope="module")
def admin(dev_broker: DevBroker) -> Iterator[httpx.Client]:
    with admin_of(dev_broker) as client:
        yield client


@pytest.fixture(scope="module")
def namespace(admin: httpx.Client) -> str:
    """A namespace with deduplication that keeps everything."""
    return keeping_namespace(admin, "sink")


@pytest.fixture
def topic(admin: httpx.Client, namespace: str) -> str:
    name = f"{namespace}/{uuid.uuid4().hex}"
    admin.put(f"/persistent/{name}/partitions", json=PARTITIONS).raise_for_status()
    return f"persistent://{name}"


def stored(dev_broker: DevBroker, topic: str) -> list[Message]:
    """All messages, by topic partition and in their order."""
    return messages_of_topic(dev_broker.service_url, topic)


def check_once(found: list[Message], rows: int, keys: int) -> None:
    """Every row is stored once, in order per key."""
    by_key: dict[str | None, list[int]] = {}
    for one in found:
        by_key.setdefault(one.key, []).append(int(one.value or b""))
    assert by_key == {f"k{key}": list(range(key, rows, keys)) for key in range(keys)}


def batch_of(rows: int, keys: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": [b"%d" % row for row in range(rows)],
            "__key": [f"k{row % keys}" for row in range(rows)],
        }
    )


def test_a_batch_is_stored_once_while_its_topic_moves(
    dev_broker: DevBroker, topic: str, admin: httpx.Client
) -> None:
    batch = batch_of(20_000, 50)
    ended = threading.Event()

    def unload() -> None:
        draw = random.Random(0)
        while not ended.wait(0.05):
            path = f"/{topic.replace('://', '/')}-partition-{draw.randrange(PARTITIONS)}/unload"
            admin.put(path).raise_for_status()

    moving = threading.Thread(target=unload)
    moving.start()
    try:
        with KeyShardSink(
            topic, sink_id="s", service_url=dev_broker.service_url, entry_messages_max=5
        ) as sink:
            report = sink.write_batch(batch, 0)
            assert (report.rows, report.entries, report.already_stored) == (20_000, 4_000, 0)
    finally:
        ended.set()
        joined(moving, deadline(30))
    with KeyShardSink(topic, sink_id="s", service_url=dev_broker.service_url) as sink:
        assert sink.write_batch(batch, 0).already_stored == 20_000
    check_once(stored(dev_broker, topic), 20_000, 50)


def test_processes_that_are_killed_store_a_batch_once(dev_broker: DevBroker, topic: str) -> None:
    draw = random.Random(1)
    rows, keys, kills, before = 30_000, 100, 0, 0
    for _ in range(30):
        size = draw.choice([1, 3, 7, 50])
        arguments = [dev_broker.service_url, topic, str(rows), str(keys), str(size)]
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process, process.stdout:
            assert process.stdout.readline() == "begins\n"
            if kills < 5 or not before:
                # A busy machine needs longer until the first rows are stored.
                time.sleep(draw.uniform(0.05, 0.6) * (1 + kills // 5))
                process.kill()
                kills += 1
            else:
                wrote, known = process.stdout.readline().split()
                assert (wrote, int(known) > 0) == ("wrote", True)
                assert process.wait(deadline(60)) == 0
                break
        if kills >= 5:
            before = len(stored(dev_broker, topic))
    assert kills >= 5
    check_once(stored(dev_broker, topic), rows, keys)


def test_every_compression_stores_less_and_is_read_back(
    dev_broker: DevBroker, admin: httpx.Client, namespace: str, tmp_path: Path
) -> None:
    rows, keys = batch_of(300, 3), 3
    padded = rows.set_column(
        0, "value", pa.array([value.as_py() + b" " * 200 for value in rows["value"]])
    )
    size = sum(len(value.as_py()) for value in padded["value"])
    java = JavaClient(dev_broker.service_url, tmp_path / "java.log")
    try:
        for compression in COMPRESSIONS:
            name = f"{namespace}/{uuid.uuid4().hex}"
            with KeyShardSink(
                f"persistent://{name}", sink_id="s", service_url=dev_broker.service_url,
                compression=compression,
            ) as sink:  # fmt: skip
                report = sink.write_batch(padded, 0)
            assert report.entries == keys, "each entry is large enough to be compressed"
            kept = admin.get(f"/persistent/{name}/stats").raise_for_status().json()["storageSize"]
            assert kept > size if compression == "none" else kept < size / 4, compression
            found = stored(dev_broker, f"persistent://{name}")
            check_once(found, 300, keys)
            reader = (
                java.client.newReader(java.api.Schema.BYTES)
                .topic(f"persistent://{name}")
                .startMessageId(java.api.MessageId.earliest)
                .create()
            )
            for one in found:
                got = reader.readNext(20, java.seconds)
                assert (bytes(got.getData()), got.getKey()) == (one.value, one.key)
            reader.close()
    finally:
        java.close()


def test_single_messages_are_stored_in_order_per_key(dev_broker: DevBroker, topic: str) -> None:
    with KeyShardSink(topic, service_url=dev_broker.service_url) as sink:
        sent = [sink.send(b"%d" % row, key=f"k{row % 10}") for row in range(5_000)]
    found = stored(dev_broker, topic)
    check_once(found, 5_000, 10)
    ids = {int(one.value or b""): one.message_id for one in found}
    assert [one.result(0) for one in sent] == [ids[row] for row in range(5_000)]


def test_the_java_client_reads_every_field_from_the_partition_that_it_would_choose(
    dev_broker: DevBroker, topic: str, tmp_path: Path
) -> None:
    keys = ["", "a", "polygenelubricants", "ключ", "\U0001f511", "x" * 300]
    rows = [(key, number) for number in range(3) for key in keys]
    times = [1_700_000_000_000 + number for _, number in rows]
    batch = pa.record_batch(
        {
            "value": [None if number == 2 else b"%d" % number for _, number in rows],
            "__key": [key for key, _ in rows],
            "__orderingKey": [f"o-{key}"[:20] for key, _ in rows],
            "__eventTime": pa.array(times, pa.timestamp("ms", "UTC")),
            "__properties": pa.array(
                [[("n", str(number))] for _, number in rows], pa.map_(pa.string(), pa.string())
            ),
        }
    )
    java = JavaClient(dev_broker.service_url, tmp_path / "java.log")
    try:
        with KeyShardSink(
            topic, sink_id="s", service_url=dev_broker.service_url, entry_messages_max=2
        ) as sink:
            sink.write_batch(batch, 0)
        sent_by_java = java.client.newProducer(java.api.Schema.BYTES).topic(topic).create()
        for key in keys:
            sent_by_java.newMessage().key(key).value(b"java").send()
        found: dict[str, list[tuple[bytes | None, str, int, str, int]]] = {}
        places: dict[str, set[str]] = {}
        reader = (
            java.client.newReader(java.api.Schema.BYTES)
            .topic(topic)
            .startMessageId(java.api.MessageId.earliest)
            .create()
        )
        for _ in range(len(rows) + len(keys)):
            got = reader.readNext(20, java.seconds)
            key = got.getKey()
            places.setdefault(key, set()).add(got.getTopicName())
            value = got.getData()
            if value is not None and bytes(value) == b"java":
                continue
            found.setdefault(key, []).append(
                (
                    None if got.size() == 0 else bytes(value),
                    bytes(got.getOrderingKey()).decode(),
                    got.getEventTime(),
                    got.getProperty("n"),
                    got.getSequenceId(),
                )
            )
        reader.close()
    finally:
        java.close()
    for key in keys:
        assert len(places[key]) == 1, "both clients choose the same topic partition"
        for number, got in enumerate(found[key]):
            value = None if number == 2 else b"%d" % number
            assert got[:4] == (value, f"o-{key}"[:20], 1_700_000_000_000 + number, str(number))
    sequence_ids = {key: [got[4] for got in found[key]] for key in keys}
    assert all(sorted(ids) == ids for ids in sequence_ids.values())


@pytest.mark.parametrize("batch_id", [0, 3])
def test_rows_of_names_that_the_broker_has_forgotten_are_found(
    dev_broker: DevBroker, topic: str, admin: httpx.Client, namespace: str, batch_id: int
) -> None:
    """Deduplication that is disabled and enabled again forgets all names."""
    url = dev_broker.service_url
    rows, keys = 2_000, 20
    batch = batch_of(rows, keys)
    with KeyShardSink(topic, sink_id="s", service_url=url, entry_messages_max=7) as sink:
        if batch_id:
            sink.write_batch(batch.slice(0, keys), batch_id - 1)
        sink.write_batch(batch, batch_id)
    path = f"/namespaces/{namespace}/deduplication"
    with closing(WireBroker(Connection(url))) as broker:

        def forgotten() -> bool:
            for enabled in (False, True):
                admin.post(path, json=enabled).raise_for_status()
                admin.put(f"/persistent/{topic.partition('://')[2]}/unload").raise_for_status()
            known = []
            for where in broker.partitions(topic):
                with closing(broker.entry_producer(where, PublishOptions("s-0"))) as producer:
                    known.append(producer.last_sequence_id)
            return known == [-1] * PARTITIONS

        # A broker learns late of a policy.
        wait_until(forgotten)
        for where in broker.partitions(topic):
            # Others have written since.
            other = broker.entry_producer(where, PublishOptions())
            for number in range(50):
                other.publish([OutgoingMessage(b"other", "other")], number)
            other.flush()
    with KeyShardSink(topic, sink_id="s", service_url=url) as sink:
        assert sink.write_batch(batch, batch_id).already_stored == rows
        sink.write_batch(batch.slice(0, 1_000), batch_id + 1)
    found = [one for one in stored(dev_broker, topic) if one.key != "other"]
    expected = rows + 1_000 + (keys if batch_id else 0)
    assert len(found) == expected
