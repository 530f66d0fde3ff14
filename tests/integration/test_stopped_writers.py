"""Writers and brokers that are stopped (SIGSTOP) inside ``write_batch``, while others go on.

Each row is stored once, and in order per key, even if the stopped one does more later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.core.releases import release_of
from keyshard.errors import BrokerUnavailableError, NotRunningError, ProducerFencedError
from keyshard.publishing.batch_writer import LEAVE_S
from tests.chaos.cluster import Cluster
from tests.helpers import wait_until
from tests.support.deadlines import DeadlineError, deadline, in_time
from tests.support.tested_pulsar import PULSAR
from tests.support.writer_process import (
    BATCH,
    ENDS_S,
    MIDDLE,
    PARTITIONS,
    PENDING_BYTES,
    WROTE,
    Batch,
    Moment,
    Writer,
    check_once,
    expected_rows,
    stored_rows,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

NEXT = Batch(4, rows=3_000)
LATE = 3_990
"""Confirmed entries of it, when a writer stops after its producers have got all entries."""
FENCED = ["failed", ProducerFencedError.code, "False"]
MOMENTS: tuple[tuple[Moment, int], ...] = (
    ("opened", 1),
    ("sending", 1),
    ("sending", 500),
    ("confirmed", 1),
    ("confirmed", MIDDLE),
    ("confirmed", LATE),
    ("probing", 1),
)
"""Where a writer stops, and how many entries it has sent, or got confirmed, until then."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker that soon gives up clients that do not answer."""
    settings = {
        "keepAliveIntervalSeconds": "2",
        # Another client asks for the name of a producer: its own client has so long to answer.
        "connectionLivenessCheckTimeoutMillis": "1000",
        "defaultRetentionTimeInMinutes": "-1",
        "defaultRetentionSizeInMB": "-1",
    }
    with Cluster(tmp_path_factory.mktemp("broker"), settings) as started:
        yield started


@pytest.fixture
def topic(cluster: Cluster, topic_name: str) -> str:
    path = f"/admin/v2/persistent/public/default/{topic_name}/partitions"
    httpx.put(cluster.admin_url + path, json=PARTITIONS, timeout=deadline(20)).raise_for_status()
    return f"persistent://public/default/{topic_name}"


def write_a_part(cluster: Cluster, topic: str) -> None:
    """Let an attempt die that has stored a part of the batch."""
    with Writer(cluster.direct_url, topic, BATCH, moment="confirmed", count=MIDDLE) as earlier:
        earlier.wait_until_stopped()


@pytest.mark.parametrize("next_batch", [False, True], ids=["same batch", "next batch"])
@pytest.mark.parametrize(("moment", "count"), MOMENTS)
def test_a_writer_that_wakes_after_others_have_finished_its_batch_stores_nothing(
    cluster: Cluster, topic: str, moment: Moment, count: int, next_batch: bool
) -> None:
    """It ends with the right count if its producers had got all rows before; otherwise by name."""
    url, batches = cluster.direct_url, [BATCH, NEXT] if next_batch else [BATCH]
    if moment == "probing":
        if not release_of(PULSAR).knows_every_id:
            pytest.skip("keyshard reads the end of the topic instead of sending a probe")
        write_a_part(cluster, topic)
    with Writer(url, topic, BATCH, moment=moment, count=count) as first:
        first.wait_until_stopped()
        for batch in batches:
            # The name is free once the broker has given up the stopped writer.
            with Writer(url, topic, batch, entry=7) as second:
                assert second.outcome()[:2] == ["wrote", str(batch.rows)]
        assert stored_rows(url, topic) == expected_rows(*batches)
        assert first.is_stopped()
        first.go_on()
        outcome = first.outcome()
    assert outcome[:3] == ([*WROTE, "0"] if count == LATE else FENCED)
    check_once(cluster.direct_url, topic, *batches)


def test_a_batch_fails_soon_after_its_timeout_while_the_broker_is_stopped(
    cluster: Cluster, topic_name: str
) -> None:
    """Its producers in many topic partitions wait together for the broker, and not for long."""
    path = f"/admin/v2/persistent/public/default/{topic_name}/partitions"
    httpx.put(cluster.admin_url + path, json=20, timeout=deadline(20)).raise_for_status()
    rows = 200_000
    batch = pa.record_batch({
        "value": [b"x" * 100] * rows,
        "__key": [f"k{row % 1_000}" for row in range(rows)],
    })  # fmt: skip
    with KeyShardSink(
        topic_name, sink_id="s", service_url=cluster.direct_url, send_timeout_ms=2_000,
        entry_messages_max=5, pending_bytes_max=PENDING_BYTES,
    ) as sink:  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(sink.write_batch, batch, 0)
            try:
                wait_until(lambda: writing.running() and has_sent(sink))
                cluster.freeze()
                began_s = time.monotonic()
                with pytest.raises(BrokerUnavailableError):
                    writing.result(ENDS_S)
                in_time(began_s + 2 + LEAVE_S + deadline(10), "the failure took longer")
            finally:
                cluster.thaw()
        assert sink.write_batch(batch, 0).already_stored > 0
        assert sink.write_batch(batch, 0).already_stored == rows


def has_sent(sink: KeyShardSink) -> bool:
    """Whether entries of a batch are confirmed."""
    try:
        return sink.status()["counters"]["confirmed"] > 0
    except NotRunningError:
        return False


def test_writers_that_stop_in_turn_and_take_the_name_from_one_another_store_each_row_once(
    cluster: Cluster, topic: str
) -> None:
    url = cluster.direct_url
    with (
        Writer(url, topic, BATCH, moment="confirmed", count=MIDDLE) as first,
        Writer(url, topic, BATCH, entry=7, moment="confirmed", count=2 * MIDDLE) as second,
    ):
        first.wait_until_stopped()
        second.wait_until_stopped()
        first.go_on()
        outcomes = [first.outcome()[:3]]
        second.go_on()
        outcomes.append(second.outcome()[:3])
    for outcome in outcomes:
        assert outcome[:2] == WROTE or outcome == FENCED
    check_once(cluster.direct_url, topic, BATCH)


def test_entries_that_the_broker_reads_while_another_asks_for_the_name_are_stored_once(
    cluster: Cluster, topic: str
) -> None:
    """The entries of the stopped writer wait in the sockets of a broker that is stopped, too."""
    with Writer(cluster.direct_url, topic, BATCH, moment="confirmed", count=MIDDLE) as first:
        first.wait_until_stopped()
        try:
            freeze_with_unread_entries(cluster, first)
            with Writer(cluster.direct_url, topic, BATCH, entry=7) as second:
                cluster.thaw()
                assert second.outcome()[:2] == WROTE
        finally:
            cluster.thaw()
        assert stored_rows(cluster.direct_url, topic) == expected_rows(BATCH)
        first.go_on()
        assert first.outcome()[:3] == FENCED
    check_once(cluster.direct_url, topic, BATCH)


@pytest.mark.parametrize("next_batch", [False, True], ids=["same batch", "next batch"])
def test_entries_that_reach_the_broker_after_another_took_the_name_are_not_stored(
    cluster: Cluster, topic: str, next_batch: bool
) -> None:
    """A proxy has the entries of the stopped writer, and holds them back meanwhile."""
    batches = [BATCH, NEXT] if next_batch else [BATCH]
    with Writer(cluster.proxied_url, topic, BATCH, moment="confirmed", count=MIDDLE) as first:
        first.wait_until_stopped()
        cluster.proxy.stall()
        try:
            first.go_on()
            wait_until(lambda: cluster.proxy.holds(b"s-0"))
            first.stop()
            for batch in batches:
                with Writer(cluster.direct_url, topic, batch, entry=7) as second:
                    assert second.outcome()[:2] == ["wrote", str(batch.rows)]
        finally:
            cluster.proxy.resume()
        wait_until(lambda: cluster.proxy.connections == 0)
        assert stored_rows(cluster.direct_url, topic) == expected_rows(*batches)
        first.go_on()
        assert first.outcome()[:3] == FENCED
    check_once(cluster.direct_url, topic, *batches)


@pytest.mark.parametrize("thawed_first", [True, False], ids=["after", "before"])
def test_a_call_during_or_after_a_stop_of_the_broker_completes_the_batch(
    cluster: Cluster, topic: str, thawed_first: bool
) -> None:
    """The broker stops for longer than the timeout of messages, so the first call fails."""
    url = cluster.direct_url
    with Writer(url, topic, BATCH, moment="confirmed", count=MIDDLE, timeout_ms=2_000) as first:
        first.wait_until_stopped()
        cluster.freeze()
        try:
            first.go_on()
            assert first.outcome()[:3] == ["failed", BrokerUnavailableError.code, "True"]
            if thawed_first:
                cluster.thaw()
            with Writer(url, topic, BATCH, entry=7) as second:
                cluster.thaw()
                outcome = second.outcome()
        finally:
            cluster.thaw()
    assert outcome[:2] == WROTE
    assert int(outcome[2]) >= MIDDLE
    check_once(cluster.direct_url, topic, BATCH)


def freeze_with_unread_entries(cluster: Cluster, writer: Writer) -> None:
    """Stop the broker while entries of a stopped writer wait in its sockets; the writer stays so.

    A busy broker may have read all that a writer sends without a confirmation. Then the broker goes
    on until the writer has confirmations to read.
    """
    end_s = time.monotonic() + deadline(30)
    while True:
        cluster.freeze()
        writer.go_on()
        with suppress(DeadlineError):
            wait_until(lambda: unread_bytes(cluster.direct_url) > 100_000, deadline(2))
        writer.stop()
        if unread_bytes(cluster.direct_url) > 100_000:
            return
        in_time(end_s, "no entries wait in the sockets of the broker")
        cluster.thaw()
        wait_until(lambda: unread_bytes(cluster.direct_url, at_clients=True) > 1_000)


def unread_bytes(url: str, *, at_clients: bool = False) -> int:
    """Bytes in the receive queues of a broker's connections, at the broker or at its clients."""
    port = f":{int(url.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    lines += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    side = 2 if at_clients else 1
    return sum(int(one[4].partition(":")[2], 16) for one in fields if one[side].endswith(port))
