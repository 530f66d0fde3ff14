"""Reads of closed ledgers from three bookies, which are killed, frozen or have bad bytes."""

from __future__ import annotations

import logging
import os
import re
import signal
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper import protocol
from keyshard.bookkeeper.bookies import Bookies
from keyshard.bookkeeper.ledger_reader import EntryNotReadError, LedgerReader
from keyshard.bookkeeper.protocol import right_at, split_batch
from keyshard.bookkeeper.reader import StorageReads
from keyshard.broker.admin.http import AdminHttp
from keyshard.broker.auth.tls import of_bookies
from keyshard.broker.connect import connect_admin
from keyshard.broker.port import Reader
from keyshard.config.segments import Segments
from keyshard.core.position.replicas import LedgerReplicas, Placement
from keyshard.core.position.split import Split, cut
from keyshard.errors import BookieReadError, DataLossTrimmedError
from keyshard.reading.read_report import ReadReport
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_split, read_splits
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.members import Bookie
from keyshard.testing.devbroker.security import Authority
from keyshard.testing.verify.workloads import Workload, produce
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.dropped_ledgers import is_dropped
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("patient_bookies"),
]

LOAD = Workload(6_000, keys=100, entry_messages=3)
LEDGERS = 3
COLUMNS = ["value", "__key", "__messageId", "__publishTime", "__topic", "__partition"]
AUTO, REQUIRED = Segments("auto"), Segments("bookies")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[DevCluster]:
    """Two bookies offer TLS, and the second of them asks for a client certificate."""
    cluster = DevCluster(1, 3, PULSAR)
    for bookie in cluster.bookies:
        bookie.settings["gcWaitTime"] = "500"
    open_to_all, asking, _ = cluster.bookies
    open_to_all.settings |= tls_settings(authority, "OpenSSL", asks=False)
    asking.settings |= tls_settings(authority, "JDK", asks=True)
    with cluster as started:
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        started.ask("POST", "/admin/v2/namespaces/public/default/retention", json=kept)
        yield started


@pytest.fixture(scope="module")
def source(cluster: DevCluster) -> KeyShardSource:
    """A topic of closed ledgers, each on two of the bookies, and an open one."""
    return published(cluster, "persistent://public/default/segments")


def published(cluster: DevCluster, topic: str) -> KeyShardSource:
    path = topic.replace("://", "/")
    cluster.ask("PUT", f"/admin/v2/{path}/partitions", json=1)
    for _ in range(LEDGERS):
        produce(LOAD, cluster.service_url, topic)
        cluster.ask("PUT", f"/admin/v2/{path}-partition-0/unload")
    produce(LOAD, cluster.service_url, topic)
    return KeyShardSource(topic, service_url=cluster.service_url, admin_url=cluster.admin_url)


def tls_settings(authority: Authority, provider: str, *, asks: bool) -> dict[str, str]:
    certificate, key = authority.certificate("bookie")
    return {
        "tlsProvider": provider,
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": str(key),
        "tlsCertificatePath": str(certificate),
        "tlsTrustStoreType": "PEM",
        "tlsTrustStore": str(authority.path),
        "tlsClientAuthentication": str(asks).lower(),
    }


def over_tls(
    authority: Authority, name: str = "", unit: str = "", ca: Path | None = None
) -> Segments:
    """Read over TLS, with the certificate of a client if it has a name."""
    pair = authority.certificate(name, unit) if name else (None, None)
    return Segments("auto", {}, ca or authority.path, *pair)


def rows(source: KeyShardSource, segments: Segments | None = None) -> pa.Table:
    connection = source.how_to_connect()
    batches = read_splits(
        connection, plan_read(source, segments=segments), COLUMNS, segments=segments
    )
    return pa.Table.from_batches(list(batches))


@pytest.fixture(scope="module")
def closed(source: KeyShardSource) -> Split:
    """The closed ledgers; planned before a bookie fails, because a broker may wait for that."""
    (split,) = plan_read(source, segments=AUTO)
    return replace(split, spans=split.spans[:LEDGERS], end_index=None)


def ledgers_of(closed: Split, bookie: Bookie) -> set[int]:
    """Closed ledgers that have replicas on a bookie."""
    name = f"127.0.0.1:{bookie.port}"
    placed = [one.placement for one in closed.spans]
    replicas = [one for one in placed if isinstance(one, LedgerReplicas)]
    assert len(replicas) == LEDGERS
    return {one.ledger for one in replicas if name in one.bookies_of(0)}


@pytest.fixture(scope="module")
def by_broker(source: KeyShardSource) -> pa.Table:
    table = rows(source)
    assert table.num_rows == (LEDGERS + 1) * LOAD.messages
    return table


@pytest.mark.parametrize("segments", [AUTO, REQUIRED])
def test_the_rows_are_those_of_the_broker(
    source: KeyShardSource, by_broker: pa.Table, segments: Segments
) -> None:
    assert rows(source, segments).equals(by_broker)


def test_bookies_that_know_no_batch_reads_are_read_entry_by_entry_and_named(
    source: KeyShardSource, closed: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_BATCH_HEADER", 2 << 24 | 99 << 16)
    reports: list[ReadReport] = []
    batches = read_splits(
        source.how_to_connect(), [closed], COLUMNS, segments=AUTO, report=reports.append
    )
    assert sum(one.num_rows for one in batches) == LEDGERS * LOAD.messages
    (report,) = reports
    names = {name for one in closed.spans for name in placed_on(one.placement)}
    assert set(report.one_by_one) == names
    assert report.by_broker == 0


def placed_on(placement: Placement) -> tuple[str, ...]:
    assert isinstance(placement, LedgerReplicas)
    return placement.bookies_of(0)


def placements(split: Split) -> dict[int, Placement]:
    return {span.ledger: span.placement for span in split.spans}


class NoBroker:
    """Opens no Reader."""

    def reader(self, *_: object) -> Reader:
        raise AssertionError("the broker was asked")


def test_closed_ledgers_are_read_without_the_broker(
    source: KeyShardSource, closed: Split, by_broker: pa.Table
) -> None:
    with closing(connect_admin(source.how_to_connect())) as admin, closing(Bookies({})) as bookies:
        reads = StorageReads(NoBroker(), placements(closed), bookies)
        found = pa.Table.from_batches(list(read_split(reads, admin, closed, COLUMNS, 30.0)))
    assert found.equals(by_broker.slice(0, LEDGERS * LOAD.messages))


def test_a_read_from_bookies_sends_as_many_admin_requests_as_one_by_the_broker(
    source: KeyShardSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    request = AdminHttp.request

    def noting(self: AdminHttp, method: str, path: str, **content: Any) -> Any:
        sent.append(path)
        return request(self, method, path, **content)

    monkeypatch.setattr(AdminHttp, "request", noting)

    def requests_of(segments: Segments | None) -> int:
        sent.clear()
        for split in cut(plan_read(source, segments=segments), 5):
            deque(read_splits(source.how_to_connect(), [split], COLUMNS, segments=segments))
        return len(sent)

    assert requests_of(AUTO) == requests_of(None)


def test_a_stale_plan_is_read_from_the_replicas_that_are_left_or_by_the_broker(
    source: KeyShardSource, closed: Split, by_broker: pa.Table, caplog: pytest.LogCaptureFixture
) -> None:
    """Bookies were replaced after the read was planned."""
    caplog.set_level(logging.INFO, "keyshard")
    wanted = by_broker.slice(0, LEDGERS * LOAD.messages)
    for gone in (1, 2):
        spans = []
        for span in closed.spans:
            assert isinstance(span.placement, LedgerReplicas)
            ((first, names),) = span.placement.ensembles
            names = (*["127.0.0.1:1"] * gone, *names[gone:])
            spans.append(replace(span, placement=replace(
                span.placement, ensembles=((first, names),)
            )))  # fmt: skip
        stale = replace(closed, spans=tuple(spans))
        batches = read_splits(source.how_to_connect(), [stale], COLUMNS, segments=AUTO)
        assert pa.Table.from_batches(list(batches)).equals(wanted)
        found = [one for one in caplog.messages if "was read by ledger" in one]
        assert ("the broker, because" in found[-1]) == (gone == 2)
    with pytest.raises(BookieReadError, match="plan it again"):
        list(read_splits(source.how_to_connect(), [stale], COLUMNS, segments=REQUIRED))


def test_without_bookies_the_broker_is_asked_or_the_entry_is_named(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table
) -> None:
    away = {f"127.0.0.1:{bookie.port}": "127.0.0.1:1" for bookie in cluster.bookies}
    assert rows(source, Segments("auto", away)).equals(by_broker)
    entry = re.escape(f"entry {closed.first.ledger}:{closed.first.entry} of")
    with pytest.raises(BookieReadError, match=f"{entry}.*cannot be reached"):
        rows(source, Segments("bookies", away))


def test_a_ledger_that_is_deleted_while_it_is_read_is_a_named_loss(cluster: DevCluster) -> None:
    """Bookies drop it when they collect garbage. If the loss is accepted, the rest is read."""
    cluster.ask("PUT", "/admin/v2/namespaces/public/trimmed")  # without retention
    topic = "persistent://public/trimmed/deleted"
    source = published(cluster, topic)
    (split,) = plan_read(source, segments=AUTO)
    wanted = rows(source)
    begun = []
    for segments, strict in product((AUTO, REQUIRED), (True, False)):
        batches = read_splits(
            source.how_to_connect(), [split], COLUMNS, segments=segments, fail_on_data_loss=strict
        )
        begun.append((strict, next(batches), batches))
    path = topic.replace("://", "/")
    cluster.ask("DELETE", f"/admin/v2/{path}-partition-0/truncate")
    wait_until(
        lambda: all(is_dropped(one.placement) for one in split.spans[:LEDGERS]), deadline(60)
    )
    for strict, first, rest in begun:
        if strict:
            with pytest.raises(DataLossTrimmedError, match="no longer stored"):
                deque(rest)
            continue
        found = pa.Table.from_batches([first, *rest])
        before = found.num_rows - LOAD.messages
        assert first.num_rows <= before < LEDGERS * LOAD.messages
        left = [wanted.slice(0, before), wanted.slice(LEDGERS * LOAD.messages)]
        assert found.equals(pa.concat_tables(left))


@pytest.mark.parametrize("way", ["batches", "entries"])
def test_reads_leave_ledgers_as_they_are_also_the_one_that_is_being_written(
    cluster: DevCluster, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fenced ledger refuses the next entry, so the broker would close it and open another one."""
    if way == "entries":
        monkeypatch.setattr(protocol, "_BATCH_HEADER", 2 << 24 | 99 << 16)
    topic = f"persistent://public/default/unchanged-{way}"
    source = published(cluster, topic)
    before = metadata(cluster, topic)
    assert ["state=OPEN" in text for text in before.values()] == [False] * LEDGERS + [True]
    for segments in (AUTO, REQUIRED):
        assert rows(source, segments).num_rows == (LEDGERS + 1) * LOAD.messages
    opened = read_as_if_closed(source, before)
    produce(LOAD, cluster.service_url, topic)
    assert rows(source).num_rows == (LEDGERS + 2) * LOAD.messages
    assert metadata(cluster, topic) == before
    assert read_as_if_closed(source, before) == 2 * opened


def metadata(cluster: DevCluster, topic: str) -> dict[int, str]:
    """Return what the metadata store has of each ledger: state, last entry, bookies and more."""
    path = f"/admin/v2/{topic.replace('://', '/')}-partition-0/internalStats"
    stats = cluster.ask("GET", path, params={"metadata": "true"}).json()
    return {int(one["ledgerId"]): one["metadata"] for one in stats["ledgers"]}


def read_as_if_closed(source: KeyShardSource, texts: dict[int, str]) -> int:
    """Read the open ledger from its bookies; return the number of its entries.

    No plan does that, but a ledger in a plan may be another one after a cluster was set up anew.
    """
    (split,) = plan_read(source, segments=AUTO)
    open_span = split.spans[-1]
    assert open_span.placement == "it is not closed"
    names = re.findall(r"127\.0\.0\.1:\d+", texts[open_span.ledger].partition("ensembles=")[2])
    closed = split.spans[0].placement
    assert isinstance(closed, LedgerReplicas)
    placed = replace(
        closed, ledger=open_span.ledger, last=open_span.end - 1, ensembles=((0, tuple(names)),)
    )
    with closing(Bookies({})) as bookies:
        reader = LedgerReader(placed, 0, placed.last, bookies, 1 << 20)
        entries = 0
        while not reader.done:
            entries += len(reader.read())
    assert entries == open_span.entries
    return entries


def test_bytes_that_changed_on_the_disk_of_a_bookie_are_read_from_another_one(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Batch reads return them among right entries. BookKeeper's client waited without end there
    (apache/bookkeeper#4789)."""
    failing = max(cluster.bookies, key=lambda one: len(ledgers_of(closed, one)))
    wanted = by_broker.slice(0, LEDGERS * LOAD.messages)
    with changed_bytes(failing), noting_batches() as batches:
        for required in (False, True):
            with closing(connect_admin(source.how_to_connect())) as admin, closing(
                Bookies({})
            ) as bookies:  # fmt: skip
                reads = StorageReads(NoBroker(), placements(closed), bookies, required=required)
                found = pa.Table.from_batches(list(read_split(reads, admin, closed, COLUMNS, 30.0)))
            assert found.equals(wanted)
    assert sum("wrong digest" in one for one in caplog.messages) > 0
    assert any(len(set(map(is_right, batch))) == 2 for batch in batches)


@contextmanager
def noting_batches() -> Iterator[list[list[bytes]]]:
    """Yield the entries of each answer to a batch read, until the end of the block."""
    batches: list[list[bytes]] = []

    def noting(frame: bytes, ledger: int, first: int, end: int) -> tuple[int, list[bytes]]:
        code, responses = split_batch(frame, ledger, first, end)
        batches.append(responses)
        return code, responses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bookies_module, "split_batch", noting)
        yield batches


def is_right(response: bytes) -> bool:
    return right_at(response, struct.unpack_from(">q", response, 8)[0]) is not None


@contextmanager
def changed_bytes(bookie: Bookie) -> Iterator[None]:
    """Change bytes in the entry logs of a bookie, until the end of the block.

    It does not notice: its journal, from which it would write them again, is gone. Changed logs
    would disturb later tests, also because the bookie cannot collect garbage from them.
    """
    stop(bookie)
    data = bookie.folder / "data"
    for journal in (*data.rglob("*.txn"), *data.rglob("lastMark")):
        journal.unlink()
    stored = {log: log.read_bytes() for log in data.glob("ledgers/current/*.log")}
    changes = 0
    for log, right in stored.items():
        wrong = bytearray(right)
        for at in range(4_096, len(wrong) - 4_096, 5_000):
            changes += wrong[at] != 0
            wrong[at] ^= 1
        log.write_bytes(wrong)
    assert changes > 100
    bookie.start()
    try:
        yield
    finally:
        stop(bookie)
        for log, right in stored.items():
            log.write_bytes(right)
        bookie.start()


def stop(bookie: Bookie) -> None:
    """Let a bookie write all that it has to its entry logs, and end."""
    assert bookie.pid is not None
    os.killpg(bookie.pid, signal.SIGTERM)
    wait_until(lambda: not bookie.is_running(), deadline(60))


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_other_replicas_are_read_when_a_bookie_fails(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table, fault: str
) -> None:
    wanted = by_broker.slice(0, LEDGERS * LOAD.messages)
    failing = max(cluster.bookies, key=lambda one: len(ledgers_of(closed, one)))
    assert ledgers_of(closed, failing)
    getattr(failing, fault)()
    try:
        for segments in (AUTO, REQUIRED):
            batches = read_splits(source.how_to_connect(), [closed], COLUMNS, segments=segments)
            assert pa.Table.from_batches(list(batches)).equals(wanted)
    finally:
        failing.resume() if fault == "freeze" else failing.start()


# -- TLS ------------------------------------------------------------------------------------------


def test_the_rows_that_come_over_tls_are_those_of_the_broker(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table,
    authority: Authority,
) -> None:  # fmt: skip
    segments = replace(over_tls(authority, "client"), source="bookies")
    reports: list[ReadReport] = []
    batches = read_splits(
        source.how_to_connect(), [closed], COLUMNS, segments=segments, report=reports.append
    )
    found = pa.Table.from_batches(list(batches))
    assert found.equals(by_broker.slice(0, LEDGERS * LOAD.messages))
    (report,) = reports
    assert (report.by_bookies, report.by_broker) == (closed.entries, 0)
    logs = [bookie.log_path for bookie in cluster.bookies[:2]]
    for bookie in cluster.bookies[:2]:
        assert said_by(bookie, closed, segments) in ("", "the ledger is missing")
    wait_until(
        lambda: all(b"Session is protected" in log.read_bytes() for log in logs), deadline(60)
    )


def said_by(bookie: Bookie, closed: Split, segments: Segments) -> str:
    """Return why a bookie does not return an entry; empty if it does."""
    name = f"127.0.0.1:{bookie.port}"
    first = closed.spans[0].placement
    assert isinstance(first, LedgerReplicas)
    alone = replace(first, write_quorum=1, ensembles=((0, (name,)),))
    with closing(Bookies({}, tls=of_bookies(segments))) as bookies:
        try:
            LedgerReader(alone, 0, 0, bookies, 1 << 20).read()
        except EntryNotReadError as exc:
            return str(exc).removeprefix(f"{name}: ")
    return ""


def test_a_bookie_whose_tls_does_not_fit_is_named_and_the_broker_reads(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table,
    authority: Authority,
) -> None:  # fmt: skip
    open_to_all, asking, plain = cluster.bookies
    stranger = over_tls(authority, ca=Authority(authority.path.parent / "stranger").path)
    for bookie in (open_to_all, asking):
        assert "presents a certificate that is not trusted" in said_by(bookie, closed, stranger)
    nameless = over_tls(authority)
    assert said_by(open_to_all, closed, nameless) in ("", "the ledger is missing")
    assert "This connection has no certificate" in said_by(asking, closed, nameless)
    assert said_by(plain, closed, nameless) == "it is not set up for TLS"
    for segments in (stranger, nameless):
        assert rows(source, segments).equals(by_broker)


def test_a_bookie_that_admits_only_roles_is_read_with_their_certificate(
    cluster: DevCluster, source: KeyShardSource, closed: Split, by_broker: pa.Table,
    authority: Authority,
) -> None:  # fmt: skip
    """It refuses plain connections, also those of this broker, which reads other replicas."""
    admitting = cluster.bookies[1]
    before = dict(admitting.settings)
    admitting.settings |= {
        "bookieAuthProviderFactoryClass": "org.apache.bookkeeper.tls.BookieAuthZFactory",
        "authorizedRoles": "reader",
    }
    stop(admitting)
    admitting.start()
    try:
        right = over_tls(authority, "reader", "0:reader")
        assert said_by(admitting, closed, right) in ("", "the ledger is missing")
        wrong = over_tls(authority, "client")
        assert "does not admit the client certificate" in said_by(admitting, closed, wrong)
        assert "reads need TLS with a client certificate" in said_by(admitting, closed, AUTO)
        for segments in (right, wrong, AUTO):
            assert rows(source, segments).equals(by_broker)
    finally:
        stop(admitting)
        admitting.settings.clear()
        admitting.settings |= before
        admitting.start()
