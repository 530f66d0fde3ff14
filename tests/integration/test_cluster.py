"""A cluster of two brokers and two bookies, and a source while one of them fails."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from keyshard import KeyShardSource, Message
from keyshard.errors import DevBrokerError
from keyshard.testing.devbroker import DevCluster
from keyshard.testing.devbroker.members import ClusterBroker
from keyshard.testing.verify.workloads import Workload, produce
from tests.helpers import listening, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import Run
from tests.support.tested_pulsar import PULSAR

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

PARTITIONS = 4
START_S = deadline(20)
"""Longest start with a host in the URL that takes connections and never answers, seconds."""
GOES_ON_S = deadline(20)
"""Longest time until a broker delivers new messages while the other one fails."""
END_S = deadline(90)
LOOPBACK = "0100007F"
LOAD = Workload(4_000, keys=100, entry_messages=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(2, 2, PULSAR) as started:
        yield started


@pytest.fixture
def topic(cluster: DevCluster, topic_name: str) -> str:
    """A topic with a partition on each broker."""
    with suppress(DevBrokerError):
        cluster.start()
    # A broker that was frozen by the test before has lost its session: it may end only now.
    cluster.start()
    path = f"/admin/v2/persistent/public/default/{topic_name}/partitions"
    cluster.ask("PUT", path, timeout_s=END_S, json=PARTITIONS)
    full = f"persistent://public/default/{topic_name}"
    for number in range(PARTITIONS):
        cluster.move(f"{full}-partition-{number}", cluster.brokers[number % 2])
    return full


class CountingRun(Run):
    """Handlers in a thread that count their messages."""

    end_s = deadline(60)

    def __init__(self, cluster: DevCluster, topic: str) -> None:
        self.seen: Counter[tuple[str | None, bytes | None]] = Counter()
        self.partitions: Counter[int] = Counter()
        source = KeyShardSource(
            topic,
            subscription="cluster",
            service_url=cluster.service_url,
            parallelism=8,
            starting_position="earliest",
        )
        super().__init__(source, self._handle, {})

    def _handle(self, message: Message) -> None:
        self.seen[message.key, message.value] += 1
        self.partitions[message.partition] += 1

    def __enter__(self) -> CountingRun:
        super().__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        assert self.error is None, repr(self.error)


def test_every_process_listens_on_loopback_only(cluster: DevCluster) -> None:
    for member in cluster.members:
        assert member.pid is not None
        found = listening(member.pid)
        assert {address for address, _ in found} == {LOOPBACK}, member
        assert member.port in {port for _, port in found}


def test_a_bundle_moves_and_splits(cluster: DevCluster, topic: str) -> None:
    partition = f"{topic}-partition-0"
    before = cluster.bundle(partition)
    cluster.move(partition, cluster.brokers[1])
    assert cluster.owner(partition) is cluster.brokers[1]
    cluster.split(partition)
    assert cluster.bundle(partition) != before


@pytest.mark.parametrize("first", [0, 1], ids=["first host", "second host"])
def test_a_source_starts_beside_a_frozen_broker(
    cluster: DevCluster, topic: str, first: int
) -> None:
    """The URL names both; the frozen one takes connections and answers nothing."""
    frozen, healthy = cluster.brokers[first], cluster.brokers[1 - first]
    for number in range(PARTITIONS):
        cluster.move(f"{topic}-partition-{number}", healthy)
    produce(LOAD, healthy.service_url, topic)
    with frozen_for_a_while(frozen):
        began = time.monotonic()
        with CountingRun(cluster, topic) as run:
            wait_until(lambda: sum(run.seen.values()) > 0 or run.error, START_S)
            took = time.monotonic() - began
            wait_until(lambda: len(run.seen) == LOAD.messages or run.error, END_S)
        print(f"first row after {took:.1f} s")


@pytest.mark.parametrize("fault", ["kill", "freeze", "stop"])
def test_topics_of_one_broker_continue_while_the_other_fails(
    cluster: DevCluster, topic: str, fault: str
) -> None:
    produce(LOAD, cluster.service_url, topic)
    with CountingRun(cluster, topic) as run:
        wait_until(lambda: len(run.seen) == LOAD.messages or run.error, END_S)
        failing, healthy = cluster.brokers
        getattr(failing, fault)()
        try:
            before = run.partitions[1]
            produce(LOAD, healthy.service_url, f"{topic}-partition-1")
            wait_until(lambda: run.partitions[1] == before + LOAD.messages or run.error, GOES_ON_S)
        finally:
            failing.resume() if fault == "freeze" else failing.start()
        produce(LOAD, cluster.service_url, topic)
        wait_until(lambda: sum(run.seen.values()) >= 3 * LOAD.messages or run.error, END_S)
    assert set(run.seen.values()) == {3}


@contextmanager
def frozen_for_a_while(broker: ClusterBroker) -> Iterator[None]:
    broker.freeze()
    try:
        yield
    finally:
        broker.resume()
