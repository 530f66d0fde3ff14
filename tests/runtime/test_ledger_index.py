"""A read with an index has the rows of one without, and looks at fewer entries."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import parquet

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, MemoryCluster, Message
from keyshard.core.position import zones
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.split import Split, cut
from keyshard.core.position.zones import NO_LIMITS, Limits, Wanted
from keyshard.errors import ConfigError, KeyShardError
from keyshard.reading import ledger_index, zone_builder
from keyshard.reading.read_report import ReadReport, planned
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits

pytestmark = pytest.mark.usefixtures("reads_in_no_time")

T0 = 1_700_000_000_000
COLUMNS = ("__partition", "__messageId", "__key", "__publishTime", "__eventTime", "value")
Rows = list[Mapping[str, Any]]


class Topic:
    """A topic with ledgers of five entries, and an index.

    Args:
        name: Name of the cluster.
        folder: Folder of the index.
        partitions: Number of partitions.
    """

    def __init__(self, name: str, folder: Path, partitions: int = 1) -> None:
        url = f"memory://{name}"
        self.cluster = MemoryCluster.named(name, entries_per_ledger=5)
        self.topic = self.cluster.create_topic("orders", partitions)
        self.folder = folder
        self.source = KeyShardSource([self.topic], service_url=url, admin_url=url)
        self.number = 0

    @property
    def where(self) -> TopicPartition:
        return self.cluster.partitions(self.topic)[0]

    def publish(self, count: int, **message: Any) -> None:
        """Publish entries, a millisecond apart by both times, with the keys k0, k1, and so on."""
        for _ in range(count):
            given: dict[str, Any] = {"key": f"k{self.number}", "event_ms": T0 + self.number}
            self.cluster.publish(
                self.where,
                Message(b"%d" % self.number, **(given | message)),
                publish_ms=T0 + self.number,
            )
            self.number += 1

    def plan(self, wanted: Wanted = Wanted(), **bounds: Any) -> tuple[Split, ...]:  # noqa: B008
        return plan_read(self.source, ledger_index=str(self.folder), wanted=wanted, **bounds)

    def read(
        self, wanted: Wanted = Wanted(), splits: int = 1, **bounds: Any  # noqa: B008 - immutable
    ) -> tuple[Rows, ReadReport]:  # fmt: skip
        """Read with the index; return the rows, and what was read."""
        found = cut(self.plan(wanted, **bounds), splits)
        reports: list[ReadReport] = []
        rows = self._rows(found, wanted, ledger_index=str(self.folder), report=reports.append)
        return rows, ReadReport(tuple(span for one in reports for span in one.spans))

    def read_all(self, wanted: Wanted = Wanted(), **bounds: Any) -> Rows:  # noqa: B008
        """Read without the index."""
        return self._rows(plan_read(self.source, **bounds), wanted)

    def _rows(self, splits: Any, wanted: Wanted, **options: Any) -> Rows:
        connection = self.source.how_to_connect()
        keys = None if wanted.keys is None else frozenset(wanted.keys)
        batches = read_splits(connection, splits, COLUMNS, keys=keys, **options)
        rows: Rows = [row for batch in batches for row in batch.to_pylist()]
        return [row for row in rows if _within(row["__eventTime"], wanted.events)]

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.parquet"))


def _within(time: Any, limits: Limits) -> bool:
    if limits == NO_LIMITS:
        return True
    (start, end), ms = limits, None if time is None else round(time.timestamp() * 1000)
    return ms is not None and (start is None or ms >= start) and (end is None or ms < end)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out everything that is ruled out, however small."""
    monkeypatch.setattr(zones, "HOLE_BYTES", 0)


@pytest.fixture
def topic(request: pytest.FixtureRequest, tmp_path: Path) -> Topic:
    return Topic(request.node.name, tmp_path / "index")


def test_the_second_read_looks_only_at_the_zones_of_its_times_keys_and_event_times(
    topic: Topic,
) -> None:
    topic.publish(33)
    assert len(topic.read()[0]) == 33, "makes the index"
    for wanted, bounds in (
        (Wanted(), {"start": T0 + 12, "end": T0 + 13}),
        (Wanted(keys={"k12"}), {}),
        (Wanted(events=(T0 + 12, T0 + 13)), {}),
    ):
        rows, report = topic.read(wanted, **bounds)
        assert [row["value"] for row in rows] == [b"12"]
        # The ledger of the entry, and the one that is being written.
        assert (report.by_broker, report.skipped) == (5 + 3, 25)
    report = planned(topic.plan(Wanted(keys={"no such key"})))
    assert (report.by_broker, report.skipped) == (3, 30)
    assert "5 entries ruled out by the index" in str(report)


def test_a_small_hole_is_read_and_ends_are_left_out(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To begin another part costs more than to read a little."""
    topic.publish(33)
    topic.read()
    size = sum(one.size_bytes for one in topic.plan()) // 33 * 5
    wanted = Wanted(keys={"k7", "k17", "k30"})
    for hole_bytes, parts in ((0, 3), (size // 2, 3), (10 * size, 1)):
        monkeypatch.setattr(zones, "HOLE_BYTES", hole_bytes)
        found = topic.plan(wanted)
        assert len(found) == parts
        assert found[0].skipped[0].ledger < found[0].first.ledger
        rows, report = topic.read(wanted)
        assert (rows, report.skipped) == (topic.read_all(wanted), 20 if parts > 1 else 5)


def test_only_entries_without_a_zone_are_added(topic: Topic) -> None:
    topic.publish(12)
    topic.read(splits=4)
    before = topic.files
    topic.read(splits=3)
    assert topic.files == before
    topic.publish(5)
    topic.read()
    assert len(topic.files) == len(before) + 1


def test_a_read_that_leaves_out_rows_makes_the_same_index(topic: Topic) -> None:
    topic.publish(11)
    rows, _ = topic.read(Wanted(keys={"k1"}), start=T0 + 5)
    assert rows == []
    zones = [row for file in topic.files for row in parquet.read_table(file).to_pylist()]
    assert [(one["first"], one["end"], one["rows"]) for one in zones] == [(0, 5, 5)] * 2
    assert topic.read(Wanted(keys={"k1"}))[0] == topic.read_all(Wanted(keys={"k1"}))


def test_a_zone_with_entries_that_readers_do_not_return_is_not_kept(topic: Topic) -> None:
    topic.publish(6)
    topic.cluster.publish_marker(topic.where)
    topic.publish(10)
    topic.read()
    zones = [row for file in topic.files for row in parquet.read_table(file).to_pylist()]
    assert [one["rows"] for one in zones] == [5, 5], "of three closed ledgers"


@pytest.mark.parametrize("splits", [1, 3])
def test_a_later_read_makes_no_zone_again(
    topic: Topic, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zone_builder, "BYTES", 1)
    topic.publish(2)
    topic.cluster.publish_marker(topic.where)
    topic.publish(13)
    topic.read(splits=splits)
    before = topic.files
    for _ in range(3):
        rows, _ = topic.read(splits=splits)
        assert len(rows) == 15
    assert topic.files == before, "only the marker lacks a zone"
    zones = [row for file in topic.files for row in parquet.read_table(file).to_pylist()]
    assert len({(one["ledger"], one["first"]) for one in zones}) == len(zones) == 14


def test_zones_of_a_topic_that_was_created_again_are_dropped(topic: Topic) -> None:
    topic.publish(11)
    topic.read()
    (old,) = topic.files
    topic.cluster.delete_topic(topic.topic)
    topic.cluster.create_topic("orders", 1)
    topic.publish(11, key="other")
    rows, report = topic.read(Wanted(keys={"other"}))
    assert (len(rows), report.skipped) == (11, 0)
    assert old not in topic.files
    (new,) = topic.files
    table = parquet.read_table(new)
    other = {**(table.schema.metadata or {}), b"created": b"at another time"}
    parquet.write_table(table.replace_schema_metadata(other), new)
    assert topic.read(Wanted(keys={"none"}))[1].skipped == 0
    assert new not in topic.files


def test_zones_of_ledgers_with_another_size_or_that_are_gone_are_dropped(topic: Topic) -> None:
    topic.publish(16)
    topic.read()
    (path,) = topic.files
    table = parquet.read_table(path)
    sizes = table["ledger_bytes"].to_pylist()
    forged = table.set_column(
        table.schema.get_field_index("ledger_bytes"), table.schema.field("ledger_bytes"),
        [[sizes[0], sizes[1] + 1, *sizes[2:]]],
    )  # fmt: skip
    parquet.write_table(forged, path)
    rows, report = topic.read(Wanted(keys={"k3"}))
    assert (len(rows), report.skipped) == (1, 5), "the forged zone rules out nothing"
    topic.cluster.trim(topic.where, EntryId(10**6, 0))
    topic.publish(1)
    topic.read(Wanted(keys={"k3"}))
    assert topic.files == []


def test_a_damaged_file_is_removed_and_one_of_another_version_is_left(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    topic.publish(11)
    topic.read()
    (path,) = topic.files
    content = path.read_bytes()
    later = parquet.read_table(path)
    path.write_bytes(content[:-9])
    assert len(topic.read(Wanted(keys={"k3"}))[0]) == 1
    assert "is damaged" in caplog.text
    (new,) = topic.files
    assert new != path
    metadata = {**(later.schema.metadata or {}), b"version": b"2"}
    parquet.write_table(later.replace_schema_metadata(metadata), path)
    caplog.clear()
    assert topic.read(Wanted(keys={"k3"}))[1].skipped == 5
    assert "of another version" in caplog.text
    assert path in topic.files


@pytest.mark.parametrize("column", ["keys", "event_min", "event_max", "first", "end"])
def test_no_damage_of_a_file_fails_a_read_or_loses_rows(column: str, topic: Topic) -> None:
    topic.publish(23)
    topic.read()
    (path,) = topic.files
    content, file = path.read_bytes(), parquet.ParquetFile(path)
    place = file.metadata.row_group(0).column(file.schema_arrow.get_field_index(column))
    start = place.dictionary_page_offset or place.data_page_offset
    wanted = Wanted(keys={"k3", "k12"}) if column == "keys" else Wanted(events=(T0 + 2, T0 + 14))
    expected = topic.read_all(wanted)
    for offset in range(start, start + place.total_compressed_size):
        for file_left in topic.files:
            file_left.unlink()
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        assert topic.read(wanted)[0] == expected, offset


def test_a_page_that_cannot_be_decoded_is_removed(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    topic.publish(11)
    topic.read()
    (path,) = topic.files
    damaged = bytearray(path.read_bytes())
    damaged[4] ^= 1
    path.write_bytes(damaged)
    assert topic.read(Wanted(keys={"k3"}))[1].skipped == 0
    assert "is damaged" in caplog.text
    assert path not in topic.files
    assert topic.read(Wanted(keys={"k3"}))[1].skipped == 5


def test_keys_that_are_no_bitmap_rule_out_nothing(topic: Topic) -> None:
    topic.publish(11)
    topic.read()
    (path,) = topic.files
    table = parquet.read_table(path)
    at = table.schema.get_field_index("keys")
    parquet.write_table(table.set_column(at, table.schema.field(at), [[b"?", b""]]), path)
    assert [row["value"] for row in topic.read(Wanted(keys={"k3"}))[0]] == [b"3"]


def test_the_name_of_the_folder_is_no_pattern(topic: Topic) -> None:
    topic.folder = topic.folder / "a[1]*"
    topic.publish(11)
    topic.read()
    assert topic.read(Wanted(keys={"k3"}))[1].skipped == 5


def test_a_folder_that_is_only_readable_is_used(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_index, "SMALL_MAX", 1)
    monkeypatch.setattr(ledger_index, "FETCHED_TOGETHER", 2)
    for _ in range(6):
        topic.publish(5)
        with monkeypatch.context() as unjoined:
            unjoined.setattr(ledger_index, "SMALL_MAX", 9)
            topic.read()
    topic.files[0].write_bytes(b"")
    before = topic.files

    def refuse(*_args: object, **_options: object) -> None:
        raise PermissionError("read-only")

    for name in ("pipe_file", "rm_file", "mv"):
        monkeypatch.setattr(LocalFileSystem, name, refuse)
    assert topic.read(Wanted(keys={"k12"}))[1].skipped == 15
    assert topic.files == before
    assert "cannot be removed: read-only" in caplog.text
    assert "cannot be joined: read-only" in caplog.text


def test_credentials_of_the_url_are_not_shown(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://ann:hidden-key@{topic.folder.name}-of-credentials"
    files, root = fsspec.core.url_to_fs(url)
    topic.publish(11)
    read = {"ledger_index": url}
    topic._rows(plan_read(topic.source, **read), Wanted(), **read)  # type: ignore[arg-type]
    for path in files.find(root):
        files.pipe_file(path, b"damaged")
    plan_read(topic.source, **read)  # type: ignore[arg-type]
    assert "is damaged" in caplog.text
    assert "hidden-key" not in caplog.text


def test_without_access_to_the_index_everything_is_read_with_a_warning(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    topic.publish(11)
    topic.folder.write_text("no folder")
    rows, report = topic.read(Wanted(keys={"k3"}))
    assert (len(rows), report.skipped) == (1, 0)
    assert "cannot be written to the index" in caplog.text


def test_a_url_of_no_file_system_is_refused(topic: Topic) -> None:
    for given in ("nofs://bucket/index", "", 5):
        with pytest.raises(ConfigError, match=r"(?s)ledger_index is .*fsspec URL of a folder"):
            plan_read(topic.source, ledger_index=given)  # type: ignore[arg-type]


def test_many_small_files_are_joined(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_index, "SMALL_MAX", 3)
    monkeypatch.setattr(ledger_index, "FETCHED_TOGETHER", 4)
    for _ in range(6):
        topic.publish(5)
        topic.read()
    before = len(topic.files)
    assert before == 2, "a plan joined four, and one came later"
    monkeypatch.setattr(ledger_index, "SMALL_MAX", 1)
    for number, skipped in ((3, 20), (17, 20), (28, 25)):
        wanted = Wanted(keys={f"k{number}"})
        rows, report = topic.read(wanted)
        assert (rows, report.skipped) == (topic.read_all(wanted), skipped)
    assert len(topic.files) == 1
    monkeypatch.setattr(ledger_index, "SMALL_BYTES", 10)
    assert topic.read(Wanted(keys={"k3"}))[1].skipped == 20, "a large file is read in place"


@pytest.mark.parametrize("seed", range(30))
def test_the_rows_are_those_of_a_read_without_an_index(
    seed: int, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random messages, ledgers and reads; what may be left out is chosen at random, too."""
    chance = random.Random(seed)
    monkeypatch.setattr(zone_builder, "BYTES", chance.choice([1, 60, 300, 10**6]))
    skipped = 0

    def some_time() -> int:
        return T0 + chance.randint(0, 40)

    def limits() -> Limits:
        return (
            chance.choice([None, some_time()]), chance.choice([None, some_time()]),
        ) if chance.random() < 0.5 else NO_LIMITS  # fmt: skip

    for _ in range(60):
        step = chance.random()
        if step < 0.7:
            messages = [
                Message(
                    b"%d" % chance.randint(0, 99),
                    key=chance.choice([None, f"k{chance.randint(0, 9)}"]),
                    event_ms=chance.choice([0, some_time()]),
                )
                for _ in range(chance.choice([1, 1, 3]))
            ]
            time_ms = chance.choice([some_time(), T0 + topic.number // 2])
            batching = chance.choice(list(Batching)) if len(messages) > 1 else Batching.NONE
            topic.cluster.publish(topic.where, *messages, batching=batching, publish_ms=time_ms)
            topic.number += 1
        elif step < 0.78:
            topic.cluster.roll_ledger(topic.where)
        elif step < 0.8:
            topic.cluster.publish_marker(topic.where)
        else:
            keys = {f"k{chance.randint(0, 12)}"} if chance.random() < 0.5 else None
            wanted, bounds = Wanted(events=limits(), keys=keys), {}
            if chance.random() < 0.5:
                start, end = sorted((some_time(), some_time()))
                bounds = {"start": start, "end": end}
            try:
                expected = topic.read_all(wanted, **bounds)
            except KeyShardError as exc:
                with pytest.raises(type(exc)):
                    topic.read(wanted, **bounds)
                continue
            rows, report = topic.read(wanted, chance.randint(1, 5), **bounds)
            assert rows == expected
            skipped += report.skipped
    assert skipped, "the index is of use"
