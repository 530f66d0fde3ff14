"""``ray_adapter.write`` on a real Ray and a real broker."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pytest
import ray
from ray.data.datasource import Datasink

import ray_adapter
from keyshard import Connection, KeyShardSink
from keyshard.core.message import Message
from keyshard.errors import (
    ConfigError,
    DeduplicationError,
    MessageTooLargeError,
    TopicNotFoundError,
)
from keyshard.testing.devbroker import DevBroker
from ray_adapter.datasink import DatasetReport
from tests.helpers import wait_until
from tests.support.deadlines import deadline, joined
from tests.support.stored_topic import admin_of, keeping_namespace, messages_of_topic

pytestmark = [
    pytest.mark.usefixtures("quiet_data"),
    pytest.mark.ray,
    pytest.mark.broker,
    pytest.mark.timeout(240),
    # Ray sets its own deprecated options.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]
PARTITIONS = 3


@pytest.fixture(scope="module")
def admin(dev_broker: DevBroker) -> Iterator[httpx.Client]:
    with admin_of(dev_broker) as client:
        yield client


@pytest.fixture
def topic(admin: httpx.Client) -> str:
    """A topic with deduplication that keeps everything."""
    return topic_of(admin, deduplicate=True)


def topic_of(admin: httpx.Client, *, deduplicate: bool) -> str:
    namespace = keeping_namespace(admin, "ray", deduplicate=deduplicate)
    admin.put(f"/persistent/{namespace}/t/partitions", json=PARTITIONS).raise_for_status()
    return f"persistent://{namespace}/t"


def sink_of(dev_broker: DevBroker, topic: str, **options: Any) -> KeyShardSink:
    connection = Connection(dev_broker.service_url, admin_url=dev_broker.admin_url)
    return KeyShardSink(topic, connection=connection, **options)


def by_key(found: list[Message]) -> dict[str | None, list[int]]:
    """Numbers of each key, in their order."""
    numbers: dict[str | None, list[int]] = {}
    for one in found:
        numbers.setdefault(one.key, []).append(int(one.value or b""))
    return numbers


def producers(admin: httpx.Client, topic: str) -> int:
    """Connected producers of all topic partitions."""
    path = topic.replace("://", "/")
    return sum(
        len(admin.get(f"/{path}-partition-{number}/stats").json()["publishers"])
        for number in range(PARTITIONS)
    )


def numbered(rows: int, keys: int, blocks: int) -> ray.data.Dataset:
    """Rows of each key, numbered in their order; all rows of a key are in one block."""

    def block(first: int) -> pa.Table:
        of_block = [f"k{key}" for key in range(first, keys, blocks)]
        values = [str(number) for number in range(rows) for _ in of_block]
        return pa.table({"value": values, "__key": of_block * rows})

    return ray.data.from_arrow([block(first) for first in range(blocks)])


@pytest.fixture
def _task_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_adapter.datasink.TASK_BYTES", 1)


def test_a_dataset_is_stored_once_in_order_per_key(
    dev_broker: DevBroker, topic: str, admin: httpx.Client
) -> None:
    progress: list[DatasetReport] = []
    report = ray_adapter.write(
        numbered(50, 40, 4), sink_of(dev_broker, topic), on_progress=progress.append
    )
    # Another write does not read the topic: a task that runs for the first time has stored nothing.
    ray_adapter.write(numbered(1, 40, 4), sink_of(dev_broker, topic))
    path = f"/{topic.replace('://', '/')}/partitioned-stats"
    assert admin.get(path).json()["msgOutCounter"] == 0
    assert by_key(messages_of_topic(dev_broker.service_url, topic)) == {
        f"k{key}": [*range(50), 0] for key in range(40)
    }
    assert (report.rows, report.already_stored, report.retries) == (2_000, 0, 0)
    assert report.entries == 40
    assert report.bytes > 4_000
    # Counts of tasks may arrive after the last call; the report is complete.
    assert progress
    assert progress[-1].rows <= report.rows
    assert producers(admin, topic) == 0


def named_processes(name: str) -> list[psutil.Process]:
    """Workers of this test's Ray that run a task or an actor with such a name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if line.startswith("ray::") and name in line:
                found.append(process)
    return found


def stored_entries(admin: httpx.Client, topic: str) -> int:
    path = f"/{topic.replace('://', '/')}/partitioned-stats"
    found = admin.get(path).json()["msgInCounter"]
    assert isinstance(found, int)
    return found


@pytest.mark.usefixtures("_task_of_each_block")
def test_killed_tasks_store_every_row_once_in_order_per_key(
    dev_broker: DevBroker, topic: str, admin: httpx.Client, tmp_path: Path
) -> None:
    """The code that makes the rows is not run again, so it need not be deterministic."""
    rows, keys, kills, blocks = 200, 80, 4, 8
    made = tmp_path / "made"

    def mark(table: pa.Table) -> pa.Table:
        with made.open("a") as file:
            file.write("block\n")
        secrets = [random.randbytes(400) for _ in range(table.num_rows)]
        return table.append_column("__properties", pa.array(
            [[("secret", secret.hex())] for secret in secrets], pa.map_(pa.string(), pa.string())
        ))  # fmt: skip

    dataset = numbered(rows, keys, blocks).map_batches(
        mark, batch_size=None, batch_format="pyarrow"
    )
    reports: list[DatasetReport] = []

    def write() -> None:
        sink = sink_of(dev_broker, topic, entry_messages_max=1, pending_bytes_max=2**20)
        reports.append(ray_adapter.write(dataset, sink, concurrency=3))

    writing = threading.Thread(target=write)
    writing.start()
    killed = 0
    for number in range(1, kills + 1):
        wait_until(
            lambda number=number: (
                stored_entries(admin, topic) > number * rows * keys // (kills + 2)  # type: ignore[misc]
                or not writing.is_alive()
            ),
            deadline(90),
        )
        for process in named_processes("Write")[:2]:
            process.kill()
            killed += 1
    joined(writing, deadline(120))
    assert killed >= kills
    found = messages_of_topic(dev_broker.service_url, topic)
    assert by_key(found) == {f"k{key}": list(range(rows)) for key in range(keys)}
    assert made.read_text().count("block") == blocks
    assert len({one.properties["secret"] for one in found}) == len(found)
    assert reports[0].rows == rows * keys
    assert reports[0].already_stored > 0
    assert producers(admin, topic) == 0


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (
            {"valeu": ["1"]},
            r"Column valeu is not a column of a message\.\nRemedy: Did you mean value\?",
        ),
        ({"__key": ["k"]}, "Column value is missing"),
        ({"value": [1]}, "Column value has the type int64"),
        ({"value": ["1"], "__key": [b"k"]}, "Column __key has the type"),
        ({"value": ["1"], "__properties": [{"a": 1}]}, "Column __properties has the type"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_the_first_row(
    dev_broker: DevBroker, topic: str, columns: dict[str, list[Any]], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ray_adapter.write(ray.data.from_arrow(pa.table(columns)), sink_of(dev_broker, topic))
    assert messages_of_topic(dev_broker.service_url, topic) == []


def test_a_topic_without_deduplication_is_refused_before_the_first_row(
    dev_broker: DevBroker, admin: httpx.Client
) -> None:
    topic = topic_of(admin, deduplicate=False)
    with pytest.raises(DeduplicationError, match="set-deduplication public/ray-"):
        ray_adapter.write(numbered(5, 5, 1), sink_of(dev_broker, topic))
    assert messages_of_topic(dev_broker.service_url, topic) == []
    # Without the admin interface, only the first stored entry shows that deduplication is off.
    with pytest.raises(DeduplicationError, match="set-deduplication public/ray-"):
        ray_adapter.write(
            numbered(5, 5, 1), KeyShardSink(topic, service_url=dev_broker.service_url)
        )
    entries = {
        (one.partition, one.message_id[:2])
        for one in messages_of_topic(dev_broker.service_url, topic)
    }
    assert len(entries) <= PARTITIONS


def test_a_missing_topic_is_refused_before_the_first_row(
    dev_broker: DevBroker, admin: httpx.Client, topic: str
) -> None:
    namespace = topic.removeprefix("persistent://").removesuffix("/t")
    off = {"allowAutoTopicCreation": False}
    admin.post(f"/namespaces/{namespace}/autoTopicCreation", json=off).raise_for_status()
    with pytest.raises(TopicNotFoundError):
        ray_adapter.write(numbered(5, 5, 1), sink_of(dev_broker, f"{namespace}/missing"))


def test_arguments_that_do_not_fit_are_refused(dev_broker: DevBroker, topic: str) -> None:
    rows, sink = numbered(5, 5, 1), sink_of(dev_broker, topic)
    write: Any = ray_adapter.write
    for arguments, options, complaint in (
        (([], sink), {}, "dataset is"),
        ((rows, topic), {}, "sink is"),
        ((rows, KeyShardSink("t", service_url="memory://x")), {}, "in-memory cluster"),
        ((rows, sink_of(dev_broker, topic, sink_id="s" * 190)), {}, "sink_id has 190 characters"),
        ((rows, sink), {"concurrency": 0}, "concurrency is 0"),
        ((rows, sink), {"on_progress": 1}, "on_progress is 1"),
        ((rows, sink), {"order_by": "sec"}, "order_by names sec"),
        ((rows, sink), {"order_by": [None]}, r"order_by is \[None\]"),
        ((rows, sink), {"order_by": ""}, "order_by is ''"),
        ((rows, sink), {"ray_remote_args": "x"}, "ray_remote_args is 'x'"),
        ((rows.map(lambda row: row | {"tags": [1]}), sink), {"order_by": "tags"}, "has no order"),
        ((rows.union(ray.data.from_items([{"value": 1, "__key": "k"}])), sink), {}, "int64"),
        ((rows, sink), {"orderby": "seq"}, "order_by"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            write(*arguments, **options)
    assert messages_of_topic(dev_broker.service_url, topic) == []


def test_a_ray_version_that_may_compute_rows_again_is_refused(
    dev_broker: DevBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Datasink, "min_bytes_per_write")
    with pytest.raises(ConfigError, match=r"Install Ray 2\.60 or newer"):
        ray_adapter.write(numbered(5, 5, 1), sink_of(dev_broker, topic))


def test_a_progress_callback_that_raises_does_not_end_a_write(
    dev_broker: DevBroker, topic: str
) -> None:
    def raises(report: DatasetReport) -> None:
        raise ValueError

    report = ray_adapter.write(numbered(5, 5, 1), sink_of(dev_broker, topic), on_progress=raises)
    assert report.rows == 25


def test_all_columns_arrive_and_order_by_orders_the_rows(dev_broker: DevBroker, topic: str) -> None:
    time = datetime(2026, 11, 24, 8, tzinfo=timezone.utc)
    rows = ray.data.from_arrow(pa.Table.from_pylist(
        [
            {"value": str(number).encode(), "__key": "k", "seq": -number, "__orderingKey": "o",
             "__properties": {"a": str(number)} if number % 2 else {"b": "x"}, "__eventTime": time}
            for number in range(20)
        ]
    ))  # fmt: skip
    ray_adapter.write(rows, sink_of(dev_broker, topic), order_by="seq")
    found = messages_of_topic(dev_broker.service_url, topic)
    assert [int(one.value or b"") for one in found] == list(range(19, -1, -1))
    assert {(one.key, one.ordering_key) for one in found} == {("k", "o")}
    assert dict(found[0].properties) == {"a": "19"}
    assert dict(found[1].properties) == {"b": "x"}
    assert found[0].event_time == time


def test_blocks_of_text_and_of_bytes_are_written_together(
    dev_broker: DevBroker, topic: str
) -> None:
    blocks = [
        pa.table({"value": pa.array([b"1"], kind), "__key": pa.array(["k"], text)})
        for kind, text in (
            (pa.string(), pa.large_string()),
            (pa.binary(), pa.string()),
            (pa.large_binary(), pa.string()),
        )
    ]
    ray_adapter.write(ray.data.from_arrow(blocks), sink_of(dev_broker, topic))
    found = messages_of_topic(dev_broker.service_url, topic)
    assert [(one.key, one.value) for one in found] == [("k", b"1")] * 3


def test_rows_go_to_the_topics_that_they_name(
    dev_broker: DevBroker, topic: str, admin: httpx.Client
) -> None:
    other = topic.removesuffix("/t") + "/other"
    path = f"/persistent/{other.removeprefix('persistent://')}"
    admin.put(path).raise_for_status()
    rows = pa.table({"value": ["0", "0", "1"], "__key": ["a", "b", "a"]})
    named = rows.append_column("__topic", pa.array([topic, other, topic]))
    ray_adapter.write(ray.data.from_arrow(named), sink_of(dev_broker, f"{topic}-unused"))
    assert by_key(messages_of_topic(dev_broker.service_url, topic)) == {"a": [0, 1]}
    assert by_key(messages_of_topic(dev_broker.service_url, other)) == {"b": [0]}
    unnamed = rows.append_column("__topic", pa.array([topic, None, topic]))
    with pytest.raises(ConfigError, match="Column __topic is null in 1 of 3 rows"):
        ray_adapter.write(ray.data.from_arrow(unnamed), sink_of(dev_broker, topic))
    assert by_key(messages_of_topic(dev_broker.service_url, topic)) == {"a": [0, 1]}


def test_a_failed_task_ends_the_write_with_its_error_and_leaves_no_producer(
    dev_broker: DevBroker, topic: str, admin: httpx.Client
) -> None:
    values = [b"1", os.urandom(6_000_000)]
    rows = ray.data.from_arrow(pa.table({"value": values, "__key": ["k", "big"]}))
    with pytest.raises(MessageTooLargeError):
        ray_adapter.write(rows, sink_of(dev_broker, topic))
    assert messages_of_topic(dev_broker.service_url, topic) == []
    assert producers(admin, topic) == 0


@pytest.mark.usefixtures("_task_of_each_block")
def test_a_write_with_a_failed_task_leaves_no_producer_of_the_others(
    dev_broker: DevBroker, topic: str, admin: httpx.Client
) -> None:
    many = numbered(5_000, 4, 3)
    big = pa.table({"value": [str(1), os.urandom(6_000_000).hex()], "__key": ["k", "big"]})
    dataset = many.union(ray.data.from_arrow(big))
    sink = sink_of(dev_broker, topic, entry_messages_max=1, pending_bytes_max=2**20)
    with pytest.raises(MessageTooLargeError):
        ray_adapter.write(dataset, sink, concurrency=4)
    wait_until(lambda: producers(admin, topic) == 0)


DRIVER = """
import sys
import pyarrow as pa
import ray
import ray_adapter
from keyshard import KeyShardSink

address, url, topic = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
rows = pa.table({"value": ["x"] * 200_000, "__key": ["k"] * 200_000})
sink = KeyShardSink(topic, service_url=url, entry_messages_max=1, pending_bytes_max=2**20)
ray_adapter.write(ray.data.from_arrow(rows), sink)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_cancelled_write_leaves_no_producer(
    dev_broker: DevBroker, topic: str, admin: httpx.Client, end: signal.Signals
) -> None:
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, dev_broker.service_url, topic],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as driver:  # fmt: skip
        wait_until(
            lambda: stored_entries(admin, topic) > 100 or driver.poll() is not None, deadline(90)
        )
        assert driver.poll() is None
        assert producers(admin, topic) == 1
        driver.send_signal(end)
        assert driver.wait(deadline(60)) != 0
    wait_until(lambda: producers(admin, topic) == 0)
    assert stored_entries(admin, topic) < 200_000
