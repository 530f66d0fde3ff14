"""Structured values on a real broker: for a handler in a process, and as columns of batches."""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pulsar
import pyarrow as pa
import pytest
from pulsar.schema import AvroSchema, Long, Record, String
from pyarrow import compute

from keyshard import Connection, KeyShardSource
from keyshard.broker.schemas import schema_of
from keyshard.core.position.entry import full_topic_name
from keyshard.errors import BrokerUnavailableError, SchemaError
from keyshard.reading.decoder import writer_of
from keyshard.reading.decoding_plan import check_same, plan_decoding
from keyshard.testing.devbroker import DevBroker
from tests.support.deadlines import deadline, in_time
from tests.support.file_handler import write

pytestmark = pytest.mark.broker


class First(Record):
    _avro_namespace = "shop"
    id = Long()


class Second(Record):
    _avro_namespace = "shop"
    id = Long()
    name = String(required_default=True)


Second.__name__ = "First"
"""The next version of the same record."""


@pytest.fixture
def source(dev_broker: DevBroker) -> KeyShardSource:
    topic = f"schemas-{uuid.uuid4().hex}"
    values: list[tuple[Any, Record]] = [(First, First(id=1)), (Second, Second(id=2, name="né"))]
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with closing(pulsar.Client(dev_broker.service_url, logger=logger)) as client:
        for kind, value in values:
            producer = client.create_producer(topic, schema=AvroSchema(kind))
            producer.send(value, partition_key=f"k{value.id}")
    return KeyShardSource(
        topic,
        subscription="keyshard",
        service_url=dev_broker.service_url,
        starting_position="earliest",
        parallelism=2,
    )


WANTED: list[dict[str, Any]] = [{"id": 1, "name": None}, {"id": 2, "name": "né"}]


def test_a_decoder_and_a_handler_in_a_process_give_the_same(
    source: KeyShardSource, tmp_path: Path
) -> None:
    rows: list[Any] = []
    with source.open() as stream:
        while len(rows) < len(WANTED):
            batch = stream.next_batch(timeout_s=deadline(20))
            assert batch is not None
            for one in source.decoder(["id", "name"]).decoded(batch):
                rows += one.to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == WANTED
    handle = partial(write, str(tmp_path))
    run = threading.Thread(
        target=source.run, args=(handle,), kwargs={"executor": "processes", "workers": 1}
    )
    run.start()
    try:
        files = [tmp_path / f"k{row['id']}.json" for row in WANTED]
        end_s = time.monotonic() + deadline(60)
        while not all(file.exists() for file in files):
            in_time(end_s, "the handler did not see all messages")
            assert run.is_alive(), "the run ended"
            time.sleep(0.02)
    finally:
        source.stop()
        run.join(deadline(60))
    assert [json.loads(file.read_text()) for file in files] == WANTED


def test_a_corrupt_row_among_a_hundred_thousand_is_the_only_one(dev_broker: DevBroker) -> None:
    topic, count, wrong = f"schemas-{uuid.uuid4().hex}", 100_000, 77_777
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    with closing(pulsar.Client(dev_broker.service_url, logger=logger)) as client:
        client.create_producer(topic, schema=AvroSchema(First)).close()
        producer = client.create_producer(
            topic, block_if_queue_full=True, batching_enabled=True, batching_max_messages=1_000
        )
        good = AvroSchema(First).encode(First(id=1))
        for number in range(count):
            producer.send_async(b"\x09" if number == wrong else good, None)
        producer.flush()
    source = KeyShardSource(
        topic, subscription="keyshard",
        service_url=dev_broker.service_url, starting_position="earliest", parallelism=1,
        malformed="PERMISSIVE",
    )  # fmt: skip
    decoder = source.decoder(["id", "_corrupt_record"])
    rows: list[pa.RecordBatch] = []
    with source.open() as stream:
        while sum(one.num_rows for one in rows) < count:
            batch = stream.next_batch(timeout_s=deadline(60))
            assert batch is not None
            rows += decoder.decoded(batch)
            stream.commit(batch)
    table = pa.Table.from_batches(rows)
    assert compute.sum(table.column("id")).as_py() == count - 1
    assert table.filter(compute.is_valid(table.column("_corrupt_record"))).to_pylist() == [
        {"id": None, "_corrupt_record": b"\x09"}
    ]


def test_a_running_query_asks_the_broker_if_the_admin_interface_is_away(
    source: KeyShardSource, dev_broker: DevBroker
) -> None:
    pairs = f"schemas-{uuid.uuid4().hex}"
    url = f"{dev_broker.admin_url}/admin/v2"
    httpx.put(f"{url}/persistent/public/default/{pairs}").raise_for_status()
    properties = {"kv.encoding.type": "INLINE"}
    for part, kind in (("key", "STRING"), ("value", "AVRO")):
        output = {"name": part, "type": kind, "properties": "{}"}
        properties |= {f"{part}.schema.{name}": text for name, text in output.items()}
    record = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}
    definition = json.dumps({"key": "", "value": record})
    body = {"type": "KEY_VALUE", "schema": definition, "properties": properties}
    answer = httpx.post(f"{url}/schemas/public/default/{pairs}/schema", json=body)
    answer.raise_for_status()
    (avro,), of_pairs = source.topics, full_topic_name(pairs)
    there = Connection(dev_broker.service_url, dev_broker.admin_url)
    away = replace(there, admin_url="http://127.0.0.1:1", operation_timeout_ms=5_000)
    plan = replace(plan_decoding(there, [avro, of_pairs]), connection=away)
    check_same(plan)
    first = writer_of(plan, avro, plan.schemas[avro], 0)
    assert first == schema_of(there, avro, 0)
    assert schema_of(away, avro, 9) is None
    with pytest.raises(SchemaError, match="was created again"):
        check_same(replace(plan, schemas={of_pairs: replace(plan.schemas[avro], version=0)}))
    # A wrong URL is reported at the start.
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1"):
        plan_decoding(away, [avro])
