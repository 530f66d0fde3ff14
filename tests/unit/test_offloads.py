"""Offloaded ledgers: what Pulsar's own offloaders wrote, files of other formats, and plans."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fsspec.implementations.local import LocalFileSystem

from keyshard import Connection, KeyShardSource
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.failures import Failures
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import ReadOptions
from keyshard.config.segments import Segments
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import Edge
from keyshard.core.position.replicas import (
    OFFLOADED,
    UNKNOWN,
    LedgerReplicas,
    OffloadedLedger,
    Placement,
)
from keyshard.core.position.split import Split
from keyshard.errors import AdminError, AuthorizationError, ConfigError
from keyshard.offloads import map_file as map_file_module
from keyshard.offloads import offload_reader
from keyshard.offloads.blocks import Blocks
from keyshard.offloads.layout import LayoutError
from keyshard.offloads.map_file import MapFile, folder_of
from keyshard.offloads.offload_reader import OffloadNotReadError, OffloadReader, Offloads
from keyshard.reading.split_planner import NOT_OFFLOADED, plan_read, stretches
from spark_adapter.option_parsing import parse_bounded
from tests.support.offload_files import MARK, WAYS, Way, map_file, objects, offloaded, write_offload

SAMPLES = json.loads(
    (Path(__file__).parents[1] / "support" / "offloaded_samples.json").read_text("utf-8")
)
"""Ledgers of three entries that the offloaders of Pulsar 4.0.8 wrote, base64."""
WHERE = TopicPartition("persistent://public/default/t")
LEDGER, UUID = 7, "69159350-21b1-4a0d-8ae6-19cb86fe9cd1"


def sample(way: Way) -> tuple[bytes, bytes]:
    found = SAMPLES[way]
    return base64.b64decode(found["data"]), base64.b64decode(found["index"])


def opened(way: Way, data: bytes, index: bytes, size_bytes: int = 120) -> Blocks | MapFile:
    ledger = OffloadedLedger(LEDGER, 2, size_bytes, UUID)
    if way == "objects":
        return Blocks("data", index, ledger)
    return MapFile("data", len(data), lambda start, end: data[start:end], index, ledger)


@pytest.mark.parametrize("way", WAYS)
def test_offloads_written_by_pulsar_are_read(way: Way) -> None:
    data, index = sample(way)
    layout = opened(way, data, index)
    offset, _ = layout.place_of(0)
    found = layout.parsed(data[offset:], offset)
    assert [number for number, _ in found.entries] == [0, 1, 2]
    assert [content[-2:] for _, content in found.entries] == [b"v0", b"v1", b"v2"]
    assert found.offset == layout.size == len(data)


@pytest.mark.parametrize("way", WAYS)
def test_the_files_of_the_other_tests_are_those_of_the_offloaders(way: Way) -> None:
    """Files of compressed records differ by the compressor, so only their entries are compared."""
    data, index = sample(way)
    layout = opened(way, data, index)
    offset, _ = layout.place_of(0)
    entries = [content for _, content in layout.parsed(data[offset:], offset).entries]
    if isinstance(layout, Blocks):
        size = struct.unpack_from(">i", index, 28)[0]
        assert objects(entries, index[32 : 32 + size], 5 * 1024 * 1024) == (data, index)
        return
    records = layout.parsed(data[offset:], offset, with_metadata=True).entries
    written, _ = map_file(way, records, 1_000_000, 128)
    if way == "NONE":
        mark = data[offset - len(MARK) : offset]
        assert written == data.replace(mark, MARK)
    else:
        again = opened(way, written, index)
        assert isinstance(again, MapFile)
        assert again.parsed(written[offset:], offset, with_metadata=True).entries == records


def test_names_of_topics_are_encoded_as_in_java() -> None:
    named = TopicPartition("persistent://public/default/orders:~*é+1", 3)
    assert folder_of("/root", named, UUID, LEDGER) == (
        f"/root/public/default/persistent/orders%3A%7E*%C3%A9%2B1-partition-3/{LEDGER}-{UUID}"
    )


def header(**changed: bytes) -> Callable[[bytes], bytes]:
    def of(data: bytes) -> bytes:
        for old, new in changed.items():
            assert old.encode() in data
            data = data.replace(old.encode(), new)
        return data

    return of


@pytest.mark.parametrize(
    ("way", "harm", "says"),
    [
        ("objects", lambda index: b"\x3d\x1f\xb0\xbc" + index[4:], "3d1fb0bc, so it is of another"),
        ("objects", lambda index: index[:20], "has only 20 bytes"),
        ("objects", lambda index: index + b"\0", "says that it has"),
        ("BLOCK", lambda data: b"SEQ\x05" + data[4:], "so it is of another format"),
        ("BLOCK", header(DefaultCodec=b"SnappyCodec."), "SnappyCodec"),
        ("RECORD", header(BytesWritable=b"OtherWritable"), "OtherWritable"),
        ("NONE", lambda data: data[:30], "header ends too early"),
    ],
)
def test_a_file_of_another_format_is_named(
    way: Way, harm: Callable[[bytes], bytes], says: str
) -> None:
    data, index = sample(way)
    if way == "objects":
        index = harm(index)
    else:
        data = harm(data)
    with pytest.raises(LayoutError, match=says):
        opened(way, data, index)


@pytest.mark.parametrize("way", WAYS)
def test_the_files_of_another_ledger_are_not_read(way: Way) -> None:
    with pytest.raises(LayoutError, match="the ledger is closed with last entry 2 and 121"):
        opened(way, *sample(way), size_bytes=121)


@pytest.mark.parametrize("way", WAYS)
def test_an_index_that_is_too_large_is_not_fetched(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_offload(way, tmp_path, WHERE, UUID, LEDGER, [b"a"])
    monkeypatch.setattr(offload_reader, "INDEX_BYTES_MAX", 20)
    ledger = OffloadedLedger(LEDGER, 0, 1, UUID)
    with pytest.raises(OffloadNotReadError, match="bytes, more than 20"):
        OffloadReader(Offloads(str(tmp_path)), WHERE, ledger, (0, 0), 1_000).read()


def test_a_ledger_that_is_not_in_the_store_is_named(tmp_path: Path) -> None:
    ledger = OffloadedLedger(LEDGER, 0, 1, UUID)
    with pytest.raises(OffloadNotReadError, match="its offload is not at"):
        OffloadReader(Offloads(str(tmp_path)), WHERE, ledger, (0, 0), 1_000).read()


@pytest.mark.parametrize("way", ["objects", "RECORD", "NONE"])
def test_a_damaged_number_does_not_make_an_entry_another_one(way: Way, tmp_path: Path) -> None:
    """The index has the number of the first entry of each block or run of records."""
    entries = [b"entry %d" % number for number in range(8)]
    data, _ = write_offload(way, tmp_path, WHERE, UUID, LEDGER, entries, interval=4)
    content = data.read_bytes()
    first = struct.pack(">iq", len(entries[0]), 0) if way == "objects" else struct.pack(">iq", 8, 0)
    assert content.count(first) == 1
    data.write_bytes(content.replace(first, first[:-1] + b"\1"))
    reader = OffloadReader(
        Offloads(str(tmp_path)), WHERE, offloaded(UUID, LEDGER, entries), (1, 1), 1_000
    )
    with pytest.raises(OffloadNotReadError, match="entry 1 stands where another one belongs"):
        reader.read()


def test_offloaded_ledgers_of_a_plan_are_read_by_the_broker_if_no_store_is_given() -> None:
    ledgers: dict[int, Placement] = {3: OffloadedLedger(3, 5, 60, UUID), 4: REPLICAS}
    with closing(Bookies({})) as bookies:
        reads = StorageReads(Silent(), ledgers, bookies)
    assert reads.left == {3: "no store of offloads is given"}
    assert list(reads.stored) == [4]


def test_credentials_of_a_store_are_not_shown() -> None:
    segments = Segments("auto", offloads="s3://AKIAKEY:topsecretpw@bucket")
    read = parse_bounded({
        "topic": "t", "admin.url": "http://a:1", "offloads": segments.offloads or "",
        "ledgerIndex": "s3://AKIAKEY:topsecretpw@bucket",
    })  # fmt: skip
    assert "topsecretpw" not in f"{segments!r} {read!r}"
    assert "offloads='s3://" in repr(segments)


@pytest.mark.parametrize("left", [0, 100, 250])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_shrinks_while_it_is_read_is_named(
    way: Way, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_file_module, "HEAD_BYTES", 200)
    entries = [bytes(range(256)) * 8, b"b"]
    data, _ = write_offload(way, tmp_path, WHERE, UUID, LEDGER, entries)
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:left])
    info = LocalFileSystem.info

    def stale(self: Any, path: str, **how: Any) -> Any:
        found = info(self, path, **how)
        return found if path != str(data) else found | {"size": size}

    monkeypatch.setattr(LocalFileSystem, "info", stale)
    reader = OffloadReader(
        Offloads(str(tmp_path)), WHERE, offloaded(UUID, LEDGER, entries), (0, 1), 1_000
    )
    with pytest.raises(OffloadNotReadError, match=r"ends|begins with b''"):
        reader.read()


class Silent:
    """A broker whose Readers return nothing."""

    def __init__(self) -> None:
        self.begun: list[EntryId] = []

    def reader(self, *asked: Any) -> Any:
        self.begun.append(asked[1])
        return self

    def read(self, _: int) -> list[EntryBlock]:
        return []

    def at_end(self) -> bool:
        return True

    stayed_connected = at_end

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("error", "requests"),
    [(TimeoutError, 1), (OSError, 1), (FileNotFoundError, 6), (PermissionError, 3)],
)
def test_a_store_that_fails_is_not_asked_for_each_ledger(
    error: type[Exception], requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def info(_: object, path: str) -> None:
        asked.append(path)
        raise error("no answer")

    monkeypatch.setattr(LocalFileSystem, "info", info)
    ledgers: dict[int, Placement] = {one: OffloadedLedger(one, 5, 60, UUID) for one in (1, 2, 3)}
    failures, broker = Failures(), Silent()
    with closing(Bookies({})) as bookies:
        for _ in range(2):
            reads = StorageReads(
                broker, ledgers, bookies, failures=failures, offloads=Offloads(str(tmp_path))
            )
            reader = reads.reader(WHERE, EntryId(1, 0), ReadOptions(10, last=EntryId(3, 5)))
            for _ in range(20):
                assert reader.read(0) == []
            assert sorted(reads.left) == [1, 2, 3]
    assert len(asked) == requests
    assert set(broker.begun) <= {EntryId(one, 0) for one in (1, 2, 3)}


# -- Plans ----------------------------------------------------------------------------------------

REPLICAS = LedgerReplicas(4, 5, 1, "CRC32C", ((0, ("b:1",)),))


class Offloading(MemoryAdmin):
    """A cluster with an offloaded ledger, one on bookies, and the open one."""

    refuses = False

    def ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        found = self.placed_ledgers(topic_partition)
        return found and tuple(replace(one, placement=UNKNOWN) for one in found)

    def placed_ledgers(self, topic_partition: TopicPartition) -> tuple[Ledger, ...] | None:
        assert topic_partition == WHERE
        placed: list[Placement] = [OFFLOADED, REPLICAS, "it is not closed"]
        return tuple(Ledger(3 + at, 6, 60, one) for at, one in enumerate(placed))

    def offloads(self, topic_partition: TopicPartition) -> Mapping[int, str] | None:
        if self.refuses:
            raise AuthorizationError(f"{topic_partition} is refused.")
        return {3: UUID}


def placements(segments: Segments, *, refuses: bool = False) -> list[Placement]:
    cluster = MemoryCluster()
    cluster.create_topic("t")
    admin = Offloading(cluster)
    admin.refuses = refuses
    start, end = {WHERE: Edge.EARLIEST}, {WHERE: Edge.LATEST}
    (split,) = stretches(admin, start, end, 5.0, segments=segments)
    assert isinstance(split, Split)
    return [span.placement for span in split.spans]


def test_a_plan_says_which_ledgers_are_read_from_the_store() -> None:
    stored = OffloadedLedger(3, 5, 60, UUID)
    by_broker = "it is not closed"
    assert placements(Segments()) == [UNKNOWN] * 3
    assert placements(Segments("auto")) == [OFFLOADED, REPLICAS, by_broker]
    assert placements(Segments("auto", offloads="/a")) == [stored, REPLICAS, by_broker]
    assert placements(Segments(offloads="/a")) == [stored, NOT_OFFLOADED, by_broker]


def test_a_role_that_may_not_ask_for_offloads_reads_them_by_the_broker() -> None:
    why = "its offload is refused: persistent://public/default/t is refused."
    found = placements(Segments("auto", offloads="/a"), refuses=True)
    assert found == [why, REPLICAS, "it is not closed"]


def answered(info: Any) -> Mapping[int, str] | None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=info))
    with pytest.MonkeyPatch.context() as patch:
        client = httpx.Client
        patch.setattr(httpx, "Client", lambda **how: client(**how | {"transport": transport}))
        with closing(PulsarAdmin(Connection(admin_url="https://a:8443"))) as admin:
            return admin.offloads(WHERE)


def test_offloads_that_are_complete_are_taken_from_the_broker() -> None:
    one = {"ledgerId": 3, "isOffloaded": True, "offloadedContextUuid": UUID.upper()}
    begun = {"ledgerId": 4, "isOffloaded": False, "offloadedContextUuid": UUID}
    assert answered({"ledgers": [one, begun, {"ledgerId": 5}]}) == {3: UUID}
    for other in (
        {**one, "offloadedContextUuid": "../../etc"},
        {"ledgerId": 3, "isOffloaded": True},
    ):
        with pytest.raises(AdminError, match="cannot be understood"):
            answered({"ledgers": [other]})


@pytest.mark.parametrize("given", [7, "", "a" * 5_000])
def test_an_option_that_is_no_folder_is_refused_at_once(given: Any) -> None:
    with pytest.raises(ConfigError, match="offloads"):
        Segments(offloads=given)


def test_a_store_of_an_unknown_kind_is_refused_by_the_plan() -> None:
    source = KeyShardSource("t", service_url="pulsar://a:1", admin_url="http://a:2")
    with pytest.raises(ConfigError, match="offloads is 'nothing://b'"):
        plan_read(source, segments=Segments(offloads="nothing://b"))
