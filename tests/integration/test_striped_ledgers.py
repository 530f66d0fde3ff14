"""Reads of ledgers that are striped over bookies, or whose bookies were replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from keyshard import KeyShardSource
from keyshard.bookkeeper import bookies as bookies_module
from keyshard.bookkeeper.protocol import batch_request
from keyshard.config.segments import Segments
from keyshard.core.position.replicas import LedgerReplicas
from keyshard.core.position.split import Split, cut
from keyshard.reading.read_report import ReadReport, SpansByStart
from keyshard.reading.split_planner import plan_read
from keyshard.reading.split_reader import read_splits
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.members import Bookie
from keyshard.testing.verify.workloads import Workload, produce
from tests.support.tested_pulsar import PULSAR

pytestmark = [
    pytest.mark.broker,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("patient_bookies"),
]

LOAD = Workload(6_000, keys=100, entry_messages=3)
FIRST = replace(LOAD, messages=60)
COLUMNS = ["value", "__key", "__messageId", "__publishTime", "__topic", "__partition"]
REQUIRED = Segments("bookies")
QUORUM = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    """Three bookies for an ensemble, and one that replaces another at its first failed write."""
    settings = {"bookkeeper_delayEnsembleChange": "false"}
    with DevCluster(1, 4, PULSAR, settings=settings) as started:
        yield started


@pytest.fixture(scope="module", params=[3, 2], ids=["striped", "whole"])
def ensemble(request: pytest.FixtureRequest) -> int:
    """Bookies of an ensemble. Of two, each stores all entries; three are striped."""
    size: int = request.param
    return size


@pytest.fixture(scope="module")
def source(cluster: DevCluster, ensemble: int) -> KeyShardSource:
    """A ledger with one ensemble, one with three, and an open one."""
    namespace = f"/admin/v2/namespaces/public/of-{ensemble}"
    cluster.ask("PUT", namespace)
    kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    cluster.ask("POST", f"{namespace}/retention", json=kept)
    stored = {
        "bookkeeperEnsemble": ensemble,
        "bookkeeperWriteQuorum": QUORUM,
        "bookkeeperAckQuorum": QUORUM,
        "managedLedgerMaxMarkDeleteRate": 0,
    }
    cluster.ask("POST", f"{namespace}/persistence", json=stored)
    topic = f"persistent://public/of-{ensemble}/orders"
    path = f"/admin/v2/{topic.replace('://', '/')}"
    cluster.ask("PUT", f"{path}/partitions", json=1)
    produce(LOAD, cluster.service_url, topic)
    cluster.ask("PUT", f"{path}-partition-0/unload")
    for place in range(2):
        lose_a_bookie_while_it_is_written_to(cluster, topic, place)
    cluster.ask("PUT", f"{path}-partition-0/unload")
    produce(LOAD, cluster.service_url, topic)
    return KeyShardSource(topic, service_url=cluster.service_url, admin_url=cluster.admin_url)


def lose_a_bookie_while_it_is_written_to(cluster: DevCluster, topic: str, place: int) -> None:
    """Publish, kill a bookie of the open ledger halfway, and start it again at the end."""
    produce(FIRST, cluster.service_url, topic)
    ensembles = open_ensembles(cluster, topic)
    name = ensembles.rpartition("=[")[2].strip("]").split(", ")[place]
    failing = bookie_of(cluster, name)
    sent = 0

    def sending(more: int) -> None:
        nonlocal sent
        sent += more
        if sent >= LOAD.messages // 2 and failing.is_running():
            failing.kill()

    produce(LOAD, cluster.service_url, topic, sending)
    assert not failing.is_running(), "it was killed before the last message was sent"
    assert open_ensembles(cluster, topic).count("=[") == ensembles.count("=[") + 1
    failing.start()


def open_ensembles(cluster: DevCluster, topic: str) -> str:
    """Return the text of the ensembles of the open ledger, such as ``0=[a:1, b:2, c:3]``."""
    path = f"/admin/v2/{topic.replace('://', '/')}-partition-0/internalStats"
    stats = cluster.ask("GET", path, params={"metadata": "true"}).json()
    text: str = stats["ledgers"][-1]["metadata"]
    assert "state=OPEN" in text
    return text.partition("ensembles={")[2].partition("}")[0]


def bookie_of(cluster: DevCluster, name: str) -> Bookie:
    return next(one for one in cluster.bookies if name.endswith(f":{one.port}"))


@pytest.fixture(scope="module")
def plan(source: KeyShardSource) -> Split:
    """The read; planned before a bookie fails, because a broker may wait for that."""
    (split,) = plan_read(source, segments=REQUIRED)
    return split


@pytest.fixture(scope="module")
def by_broker(source: KeyShardSource) -> pa.Table:
    batches = read_splits(source.how_to_connect(), plan_read(source), COLUMNS)
    table = pa.Table.from_batches(list(batches))
    assert table.num_rows == 4 * LOAD.messages + 2 * FIRST.messages
    return table


def closed_ledgers(plan: Split) -> list[LedgerReplicas]:
    found = [one.placement for one in plan.spans]
    return [one for one in found if isinstance(one, LedgerReplicas)]


def rows(source: KeyShardSource, plan: Split, splits: int) -> tuple[pa.Table, ReadReport]:
    """Return the rows of a read that must have all closed ledgers from bookies."""
    spans: SpansByStart = {}

    def note(report: ReadReport) -> None:
        spans.update(report.by_start())

    parts = cut([plan], splits)
    assert len(parts) == splits
    batches = read_splits(source.how_to_connect(), parts, COLUMNS, segments=REQUIRED, report=note)
    table = pa.Table.from_batches(list(batches))
    return table, ReadReport.of(spans)


def test_the_ledgers_are_placed_as_asked_and_one_has_three_ensembles(
    plan: Split, ensemble: int
) -> None:
    placed, changed = closed_ledgers(plan)
    assert [len(one.ensembles) for one in (placed, changed)] == [1, 3]
    for ledger in (placed, changed):
        assert ledger.write_quorum == QUORUM
        assert {len(names) for _, names in ledger.ensembles} == {ensemble}
    firsts = [first for first, _ in changed.ensembles]
    assert 0 < firsts[1] < firsts[2] < changed.last
    assert len({names for _, names in changed.ensembles}) == 3


@pytest.mark.parametrize("splits", [1, 7])
def test_the_rows_are_those_of_the_broker(
    source: KeyShardSource, plan: Split, by_broker: pa.Table, splits: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG, "keyshard.bookkeeper")
    found, report = rows(source, plan, splits)
    assert found.equals(by_broker)
    assert report.by_bookies == sum(one.last + 1 for one in closed_ledgers(plan))
    assert set(report.reasons) == {"it is not closed"}
    refused = [one for one in caplog.messages if "gave no entry" in one or "not read from" in one]
    assert not refused, "each entry is requested of a bookie that has it"


def test_batch_reads_have_only_entries_that_follow_each_other_on_a_bookie(
    source: KeyShardSource, plan: Split, ensemble: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of striped ledgers, a bookie has at most as many in a row as the write quorum."""
    counts = [1]

    def noting(ledger: int, first: int, count: int) -> bytes:
        counts.append(count)
        return batch_request(ledger, first, count)

    monkeypatch.setattr(bookies_module, "batch_request", noting)
    rows(source, plan, 1)
    assert (max(counts) > QUORUM) == (ensemble == QUORUM)


@pytest.mark.parametrize("place", [0, -1], ids=["replaced", "kept"])
def test_one_bookie_may_be_stopped(
    cluster: DevCluster, source: KeyShardSource, plan: Split, by_broker: pa.Table, place: int
) -> None:
    _, changed = closed_ledgers(plan)
    failing = bookie_of(cluster, changed.ensembles[0][1][place])
    failing.kill()
    try:
        for splits in (1, 5):
            found, report = rows(source, plan, splits)
            assert found.equals(by_broker)
            assert report.by_bookies == sum(one.last + 1 for one in closed_ledgers(plan))
    finally:
        failing.start()
