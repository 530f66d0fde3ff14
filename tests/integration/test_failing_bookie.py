"""Bookies that fail inside ``write_batch``, so that the broker cannot store what it has accepted.

It then closes the ledger, and forgets the ids of the rows that it has lost. Each row is stored
once, and in order per key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from keyshard.core.releases import release_of
from keyshard.testing.devbroker import DevCluster
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.lone_bookie import (
    cluster_of,
    frozen_bookie,
    has_lost,
    log_from_now,
    revived,
    wait_for_loss,
)
from tests.support.tested_pulsar import PULSAR
from tests.support.writer_process import (
    BATCH,
    MIDDLE,
    PARTITIONS,
    WROTE,
    Batch,
    Writer,
    check_once,
)

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

NEXT = Batch(4, rows=20_000)
WAITING = 100
"""Entries that wait for bookies, when a writer has sent enough of them."""
WRITE_S = math.ceil(deadline(3))
"""Time after which the broker gives up a write to a bookie, seconds."""
ENDS_S = deadline(60)

since_5_0 = pytest.mark.skipif(
    not release_of(PULSAR).knows_every_id,
    reason="before 5.0, keyshard reads the end of the topic first, which the bookie must serve",
)


KEPT = {
    "brokerDeduplicationEnabled": "true",
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
}
"""Settings of the broker: it deduplicates, and keeps what nobody has subscribed to."""


@pytest.fixture(scope="module")
def started() -> Iterator[DevCluster]:
    with cluster_of(1, WRITE_S, **KEPT) as one:
        yield one


@pytest.fixture
def cluster(started: DevCluster) -> DevCluster:
    """A broker and a bookie that run, whatever the test before did."""
    return revived(started)


def made(cluster: DevCluster, topic_name: str) -> str:
    path = f"/admin/v2/persistent/public/default/{topic_name}/partitions"
    cluster.ask("PUT", path, timeout_s=ENDS_S, json=PARTITIONS)
    return f"persistent://public/default/{topic_name}"


@pytest.fixture
def topic(cluster: DevCluster, topic_name: str) -> str:
    return made(cluster, topic_name)


def waiting_entries(cluster: DevCluster, topic: str) -> int:
    """Entries that wait for a bookie."""
    path = f"/admin/v2/{topic.replace('://', '/')}-partition-%d/internalStats"
    found = [cluster.ask("GET", path % number).json() for number in range(PARTITIONS)]
    return sum(int(one["pendingAddEntriesCount"]) for one in found)


def test_rows_whose_write_fails_are_stored_once_within_the_call(
    cluster: DevCluster, topic: str
) -> None:
    """The bookie stores them late, behind the end that the broker has given to the ledger."""
    with Writer(cluster.service_url, topic, BATCH, moment="confirmed", count=MIDDLE) as one:
        one.wait_until_stopped()
        with frozen_bookie(cluster) as watch:
            one.go_on()
            wait_for_loss(watch, WRITE_S)
        assert one.outcome() == [*WROTE, "0"]
    check_once(cluster.service_url, topic, BATCH)


def write_what_was_lost(cluster: DevCluster, topic: str) -> list[str]:
    """Repeat the call of a dead attempt whose rows the broker loses meanwhile; return the outcome.

    When the second attempt starts, the broker still knows those rows.
    """
    url = cluster.service_url
    with Writer(url, topic, BATCH, moment="confirmed", count=MIDDLE) as first:
        first.wait_until_stopped()
        with frozen_bookie(cluster) as watch:
            first.go_on()
            wait_until(lambda: waiting_entries(cluster, topic) > WAITING, WRITE_S)
            first.kill()
            timeout_ms = int(1000 * (2 * WRITE_S + deadline(10)))
            with Writer(
                url, topic, BATCH, entry=7, moment="probing", timeout_ms=timeout_ms
            ) as second:
                second.wait_until_stopped()
                assert not has_lost(watch), "the broker still knows the rows"
                second.go_on()
                wait_for_loss(watch, WRITE_S)
                cluster.bookies[0].resume()
                return second.outcome()


@since_5_0
def test_rows_of_an_earlier_attempt_that_a_failed_write_lost_are_stored_within_the_call(
    cluster: DevCluster, topic: str
) -> None:
    """The call begins again: only then does it look which rows are stored."""
    assert write_what_was_lost(cluster, topic)[:2] == WROTE
    check_once(cluster.service_url, topic, BATCH)


def test_rows_that_a_bookie_stores_after_the_broker_has_died_are_stored_once(
    cluster: DevCluster, topic: str
) -> None:
    """The broker that starts next may find rows behind the last one that it had confirmed."""
    url = cluster.service_url
    with Writer(url, topic, BATCH, moment="confirmed", count=MIDDLE) as first:
        first.wait_until_stopped()
        with frozen_bookie(cluster):
            first.go_on()
            wait_until(lambda: waiting_entries(cluster, topic) > WAITING, WRITE_S)
            first.stop()
            cluster.brokers[0].kill()
        cluster.start()
        with Writer(url, topic, BATCH, entry=7) as second:
            outcome = second.outcome()
        first.kill()
    assert outcome[:2] == WROTE
    assert int(outcome[2]) >= 5 * MIDDLE
    check_once(cluster.service_url, topic, BATCH)


@since_5_0
def test_rows_are_stored_once_when_the_bookie_dies_and_comes_back(
    cluster: DevCluster, topic: str
) -> None:
    with Writer(cluster.service_url, topic, BATCH, moment="confirmed", count=MIDDLE) as one:
        one.wait_until_stopped()
        watch = log_from_now(cluster)
        cluster.bookies[0].kill()
        one.go_on()
        wait_for_loss(watch, WRITE_S)
        cluster.bookies[0].start()
        assert one.outcome() == [*WROTE, "0"]
    check_once(cluster.service_url, topic, BATCH)


def test_rows_are_stored_once_while_one_bookie_dies_after_the_other(topic_name: str) -> None:
    """Rows that were on their way to the dead bookie are written to the other one."""
    with cluster_of(2, WRITE_S, **KEPT) as cluster:
        topic = made(cluster, topic_name)
        for batch, bookie in zip((BATCH, NEXT), cluster.bookies, strict=True):
            with Writer(cluster.service_url, topic, batch, moment="confirmed", count=MIDDLE) as one:
                one.wait_until_stopped()
                bookie.kill()
                one.go_on()
                assert one.outcome() == [*WROTE, "0"]
            bookie.start()
        check_once(cluster.service_url, topic, BATCH, NEXT)
