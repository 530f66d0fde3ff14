"""A real broker behind a proxy that cuts the connection at steps of a Reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pulsar
import pytest

from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Broker
from keyshard.config.connection import Connection
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.split import cut, stretch
from keyshard.errors import DataLossTrimmedError
from keyshard.reading.replay import replay
from keyshard.reading.split_reader import read_split
from tests.chaos.cluster import TOPIC, Cluster
from tests.support.faulty_broker import after, faulty, giving

pytestmark = [pytest.mark.broker]

ENTRIES = 2_500
STEPS = range(8)
"""Steps of the Readers at which the connection is cut, run after run."""
CUT_AFTER_S = (0.0, 0.01)
"""At once, so before the next call begins; or while it is under way."""


def disconnecting(cluster: Cluster, cut_at: int, after_s: float) -> tuple[Broker, list[int]]:
    """A client whose connection is cut at one step of its Readers, and the steps until now."""
    steps: list[int] = []

    def step() -> None:
        if len(steps) == cut_at:
            if after_s:
                threading.Timer(after_s, cluster.proxy.cut).start()
            else:
                cluster.proxy.cut()
        steps.append(len(steps))

    fault = after(step)
    made = connect(Connection(cluster.proxied_url, operation_timeout_ms=10_000))
    return faulty(made, reader=giving(read=fault, at_end=fault, stayed_connected=fault)), steps


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(Path(tmp_path_factory.mktemp("cut"))) as started:
        yield started


@pytest.fixture(scope="module")
def entries(cluster: Cluster) -> list[EntryId]:
    """The entries of the first topic partition."""
    client = pulsar.Client(
        cluster.direct_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    producer = client.create_producer(WHERE.name, batching_enabled=False, block_if_queue_full=True)
    for _ in range(ENTRIES - 1):
        producer.send_async(b"v", lambda *_: None, partition_key="k")
    last = producer.send(b"v", partition_key="k")
    client.close()
    assert last.entry_id() == ENTRIES - 1
    return [EntryId(last.ledger_id(), number) for number in range(ENTRIES)]


WHERE = TopicPartition(TOPIC, 0)


def cut_at_each_step(cluster: Cluster, look: Callable[[Broker], None]) -> None:
    for after_s in CUT_AFTER_S:
        for step in STEPS:
            broker, steps = disconnecting(cluster, step, after_s)
            try:
                look(broker)
            finally:
                broker.close()
            assert len(steps) >= 2, "nothing was cut"


def test_a_replay_gives_its_whole_batch(cluster: Cluster, entries: list[EntryId]) -> None:
    """The reported case: the last entries of the topic were called lost."""
    wanted = EntrySet.of([*entries[:1_200:2], *entries[-10:]])
    beyond = EntryId(entries[-1].ledger, ENTRIES + 5)

    def look(broker: Broker) -> None:
        blocks = replay(broker, end_of(wanted), 60, fail_on_data_loss=False)[WHERE]
        assert EntrySet.of(one.id for one in blocks) == wanted
        with pytest.raises(DataLossTrimmedError) as caught:
            replay(broker, end_of(EntrySet.of([entries[-1], beyond])), 60)
        assert caught.value.facts["missing"] == str(EntrySet.of([beyond]))

    cut_at_each_step(cluster, look)


def end_of(batch: EntrySet) -> Checkpoint:
    state = PartitionCheckpoint(None, batch, batch, {}, 10**15)
    return Checkpoint("standalone", "cut", 4, {WHERE: state})


def test_a_split_is_read_exactly(cluster: Cluster, entries: list[EntryId]) -> None:
    admin = connect_admin(Connection(cluster.proxied_url, cluster.admin_url))
    ledgers = admin.ledgers(WHERE)
    assert ledgers is not None
    split = cut([stretch(WHERE, ledgers)], 2)[1]

    def look(broker: Broker) -> None:
        batches = read_split(broker, admin, split, ["__messageId"], 60)
        found = [name for batch in batches for name in batch.column(0).to_pylist()]
        assert found == [f"{ledger}:{entry}:0" for ledger, entry in entries[ENTRIES // 2 :]]

    try:
        cut_at_each_step(cluster, look)
    finally:
        admin.close()
