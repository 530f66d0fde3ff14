"""Reads of ledgers that Pulsar's own offloaders wrote to an object store and to a file system."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pulsar
import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.bookkeeper import failures as failures_module
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import Failures
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.connect import connect_admin
from keyshard.broker.port import Reader
from keyshard.config.segments import Segments
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.replicas import OffloadedLedger
from keyshard.core.position.split import Split, cut
from keyshard.errors import BookieReadError, DataLossTrimmedError
from keyshard.offloads.offload_reader import Offloads
from keyshard.reading.read_report import ReadReport, planned
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_split, read_splits
from keyshard.testing.devbroker import DevBroker
from tests.support.offloaders import BUCKET, STORES, Stores, offloading_broker

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

LEDGER_ENTRIES = 200
COLUMNS = ["value", "__key", "__messageId", "__publishTime", "__properties", "__partition"]
LOCAL = "orders:~*é+1"
"""Name of the topics; offloaders encode it."""


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test remembers the failures of another one."""
    monkeypatch.setattr(failures_module, "OF_PROCESS", Failures())


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("offloads")
    with offloading_broker(folder, ledger_entries=LEDGER_ENTRIES) as found:
        for name in STORES:
            publish(found.broker, f"persistent://public/{name}/{LOCAL}")
            found.offload(TopicPartition(f"persistent://public/{name}/{LOCAL}"))
        yield found


def source_of(stores: Stores, store: str, local: str = LOCAL) -> KeyShardSource:
    return KeyShardSource(
        f"persistent://public/{store}/{local}",
        service_url=stores.broker.service_url, admin_url=stores.broker.admin_url,
    )  # fmt: skip


def publish(broker: DevBroker, topic: str) -> None:
    """Publish ledgers of small, large, compressed and batched entries; the last one stays open."""
    drawn = random.Random(topic)
    client = pulsar.Client(
        broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    try:
        large = client.create_producer(topic, batching_enabled=False)
        batched = client.create_producer(
            topic, compression_type=pulsar.CompressionType.LZ4, batching_max_publish_delay_ms=1
        )
        for number in range(3 * LEDGER_ENTRIES + 40):
            size = 90_000 if number < 80 else drawn.choice([0, 1, 20, 3_000])
            value = f"{number}:".encode() + drawn.randbytes(size)
            large.send(value, partition_key=f"k{number % 7}", properties={"n": str(number)})
            if number % 10 == 0:
                for each in range(20):
                    batched.send_async(b"b%d:%d" % (number, each), None, partition_key=f"b{each}")
                batched.flush()
    finally:
        client.close()


def read(
    source: KeyShardSource, segments: Segments | None, parts: int = 1, **how: Any
) -> tuple[pa.Table, list[ReadReport]]:
    reports: list[ReadReport] = []
    batches = read_splits(
        source.how_to_connect(), cut(plan_read(source, segments=segments), parts), COLUMNS,
        segments=segments, report=reports.append, **how,
    )  # fmt: skip
    return pa.Table.from_batches(list(batches)).combine_chunks(), reports


def offloaded(split: Split) -> Split:
    """Return the part of a plan that is read from the store."""
    found = split.only(one for one in split.spans if isinstance(one.placement, OffloadedLedger))
    assert len(found.spans) >= 3
    return found


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("store", STORES)
def test_the_rows_are_those_of_the_broker(stores: Stores, store: str, parts: int) -> None:
    source = source_of(stores, store)
    wanted, _ = read(source, None)
    assert wanted.num_rows > 3 * LEDGER_ENTRIES
    segments = Segments(offloads=stores.urls[store])
    found, reports = read(source, segments, parts)
    assert found.equals(wanted)
    (plan,) = plan_read(source, segments=segments)
    entries = offloaded(plan).entries
    assert sum(one.by_offloads for one in reports) == entries == planned([plan]).by_offloads
    assert sum(one.by_bookies for one in reports) == 0
    assert {why for one in reports for why in one.reasons} == {"it is not closed"}


class NoBroker:
    """Opens no Reader."""

    def reader(self, *_: object) -> Reader:
        raise AssertionError("the broker was asked")


@pytest.mark.parametrize("store", STORES)
def test_offloaded_ledgers_are_read_without_the_broker(stores: Stores, store: str) -> None:
    source = source_of(stores, store)
    (plan,) = plan_read(source, segments=Segments("auto", offloads=stores.urls[store]))
    plan = offloaded(plan)
    wanted = pa.Table.from_batches(list(read_splits(source.how_to_connect(), [plan], COLUMNS)))
    placed = {span.ledger: span.placement for span in plan.spans}
    with closing(connect_admin(source.how_to_connect())) as admin, closing(Bookies({})) as bookies:
        reads = StorageReads(NoBroker(), placed, bookies, offloads=Offloads(stores.urls[store]))
        found = pa.Table.from_batches(list(read_split(reads, admin, plan, COLUMNS, 30.0)))
    assert found.equals(wanted)


def test_without_their_store_offloaded_ledgers_are_read_by_the_broker(stores: Stores) -> None:
    source = source_of(stores, "s3")
    found, (report,) = read(source, Segments("auto", stores.broker.bookies_map))
    assert found.equals(read(source, None)[0])
    assert report.by_offloads == 0 < report.reasons["it is offloaded"]


def first_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for at in range(40, len(content), 97):
        content[at] ^= 0x10
    path.write_bytes(content)


def no_bytes(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [first_bytes, other_bytes, no_bytes, Path.unlink])
@pytest.mark.parametrize("file", ["data", "index"])
@pytest.mark.parametrize("store", ["blocks", "records", "plain", "s3"])
def test_a_damaged_offload_is_left_to_the_broker_or_named(
    stores: Stores, store: str, file: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    """The broker reads the undamaged original."""
    url = copied(stores, store, tmp_path / "copy")
    source = source_of(stores, store)
    (plan,) = plan_read(source, segments=Segments(offloads=url))
    plan = offloaded(plan)
    harmed = plan.spans[1]
    assert isinstance(harmed.placement, OffloadedLedger)
    uuid = harmed.placement.uuid
    for path in Path(url).rglob(f"*{uuid}*"):
        if path.is_dir():
            harm(path / file)
        elif path.name.endswith("-index") == (file == "index"):
            harm(path)
    wanted = pa.Table.from_batches(list(read_splits(source.how_to_connect(), [plan], COLUMNS)))
    reports: list[ReadReport] = []
    batches = read_splits(
        source.how_to_connect(), [plan], COLUMNS, segments=Segments("auto", offloads=url),
        report=reports.append,
    )  # fmt: skip
    assert pa.Table.from_batches(list(batches)).equals(wanted)
    (report,) = reports
    assert 0 < report.by_broker <= harmed.entries
    required = Segments("bookies", offloads=url)
    named = rf"entry {harmed.ledger}:\d+ of .*(is not at|cannot be understood|failed|cannot be dec)"
    with pytest.raises(BookieReadError, match=named):
        list(read_splits(source.how_to_connect(), [plan], COLUMNS, segments=required))


def copied(stores: Stores, store: str, into: Path) -> str:
    """Copy a store to a folder."""
    if store != "s3":
        shutil.copytree(stores.urls[store], into)
        return str(into)
    files: Any = Offloads(stores.urls["s3"])._files
    into.mkdir()
    for path in files.find(BUCKET):
        (into / path.rpartition("/")[2]).write_bytes(files.cat_file(path))
    return str(into)


def test_a_wrong_store_is_not_remembered_for_the_right_one(stores: Stores, tmp_path: Path) -> None:
    source = source_of(stores, "blocks")
    wrong, right = (Segments(offloads=one) for one in (str(tmp_path), stores.urls["blocks"]))
    (report,) = read(source, wrong)[1]
    assert report.by_offloads == 0 < report.reasons[f"its offload is not at {tmp_path}"]
    (report,) = read(source, right)[1]
    assert set(report.reasons) == {"it is not closed"}


def test_a_read_may_begin_and_end_inside_an_offloaded_ledger(stores: Stores) -> None:
    source = source_of(stores, "s3")
    segments = Segments(offloads=stores.urls["s3"])
    wanted, _ = read(source, None)
    ids = wanted["__messageId"].to_pylist()
    for first, end in ((0, 1), (70, 300), (ids.index(ids[500]), 640)):
        plan = plan_read(source, ids[first], ids[end], segments=segments)
        batches = read_splits(source.how_to_connect(), plan, COLUMNS, segments=segments)
        assert pa.Table.from_batches(list(batches)).equals(wanted.slice(first, end - first))


def test_a_deleted_offload_is_a_named_loss(stores: Stores) -> None:
    topic = "deleted"
    publish(stores.broker, f"persistent://public/s3/{topic}")
    stores.offload(TopicPartition(f"persistent://public/s3/{topic}"))
    source = source_of(stores, "s3", topic)
    segments = Segments(offloads=stores.urls["s3"])
    plan = plan_read(source, segments=segments)
    stores.admin.delete(f"/persistent/public/s3/{topic}", params={"force": "true"})
    with pytest.raises(DataLossTrimmedError, match="are no longer stored"):
        list(read_splits(source.how_to_connect(), plan, COLUMNS, segments=segments))
