"""A broker that stores each entry on one bookie, so that a frozen bookie makes its writes fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.process import LogWatch
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.tested_pulsar import PULSAR

_LOST = re.compile(rb"Failed to persist msg in store")
"""Log line of a broker that has lost entries: no bookie has taken them, and no new ledger could be
made for them either."""


@contextmanager
def cluster_of(bookies: int, write_s: int, **settings: str) -> Iterator[DevCluster]:
    """Start a broker.

    Args:
        bookies: Number of bookies.
        write_s: Time after which the broker gives up a write to a bookie, seconds.
        settings: More settings of the broker.
    """
    settings |= {
        "managedLedgerDefaultEnsembleSize": "1",
        "managedLedgerDefaultWriteQuorum": "1",
        "bookkeeperClientTimeoutInSeconds": str(write_s),
    }
    with DevCluster(1, bookies, PULSAR, settings=settings) as started:
        yield started


def revived(cluster: DevCluster) -> DevCluster:
    """Return the cluster when its bookie runs, whatever a test before has done to it."""
    if cluster.bookies[0].has_shut_down:
        cluster.bookies[0].kill()
    cluster.start()
    return cluster


def log_from_now(cluster: DevCluster) -> LogWatch:
    """Watch what the broker logs from now on."""
    log = cluster.brokers[0].log_path
    return LogWatch(log, log.stat().st_size)


@contextmanager
def frozen_bookie(cluster: DevCluster) -> Iterator[LogWatch]:
    """Freeze the first bookie for the block. Yield what the broker has logged since then."""
    watch = log_from_now(cluster)
    cluster.bookies[0].freeze()
    try:
        yield watch
    finally:
        cluster.bookies[0].resume()


def has_lost(watch: LogWatch) -> bool:
    """Whether the broker has lost entries, and ended the producers of the topic partition."""
    return watch.has(_LOST)


def wait_for_loss(watch: LogWatch, write_s: int) -> None:
    """Wait for :func:`has_lost`, in a broker with these ``write_s`` of :func:`cluster_of`."""
    wait_until(lambda: has_lost(watch), 3 * write_s + deadline(30))
