"""Workers host whole segments of a scalable topic, whose entries have keys of several ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.coordinator.batch_reading import read_batch
from keyshard.coordinator.batch_server import BatchServer
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.workers.broker import RemoteBroker
from tests.helpers import received, started, wait_until
from tests.support.memory_scalable_topic import ScalableTopic, source_of
from tests.support.worker_servers import LocalWorker


class Workers:
    """Workers of one source, and those that replaced them."""

    def __init__(self, topic: ScalableTopic, count: int, *, keeps: bool) -> None:
        self._topic, self._count, self._keeps = topic, count, keeps
        self.started: list[LocalWorker] = []
        self.coordinator: Coordinator
        self.server: BatchServer

    def _connect(self) -> RemoteBroker:
        cluster = self._topic.cluster

        def start(_stop: threading.Event) -> LocalWorker:
            self.started.append(LocalWorker(MemoryBroker(cluster), keeps=self._keeps))
            return self.started[-1]

        return RemoteBroker(MemoryBroker(cluster), start, self._count, 10.0)

    @contextmanager
    def running(self, checkpoint: Checkpoint | None = None) -> Iterator[None]:
        admin = MemoryAdmin(self._topic.cluster)
        self.coordinator = Coordinator(source_of(batch_tasks=4), self._connect, admin)
        with started(self.coordinator, checkpoint):
            self.server = BatchServer(self.coordinator.batches, "127.0.0.1")
            try:
                yield
            finally:
                self.server._server.shutdown()

    def kill(self, worker: LocalWorker) -> None:
        worker.host.close()
        worker._server.shutdown()
        wait_until(lambda: worker.lost)

    @property
    def living(self) -> list[LocalWorker]:
        return [one for one in self.started if not one.lost]

    @property
    def consumers(self) -> list[int]:
        """Number of consumers of each worker."""
        return [one["consumers"] for one in self.coordinator.status()["sourceWorkers"]]

    def cut(self) -> Checkpoint:
        end = self.coordinator.batches.cut()
        assert end is not None
        return end

    def rows(self, end: Checkpoint) -> dict[int, list[Any]]:
        """Rows of a batch, as tasks read them."""
        columns = ("value", "__key", "__topic", "__messageId", "__slot")
        return {
            index: [
                row
                for part in read_batch(self.server.ticket(end.batch_id, index, columns))
                for row in part.to_pylist()
            ]
            for index in self.coordinator.batches.plan(end)
        }

    def drain(self) -> None:
        while len(self._topic.got) < self._topic.sent:
            if (end := self.coordinator.batches.cut()) is not None:
                self._topic.take(self.rows(end))
                self.coordinator.batches.release(end)


@pytest.fixture(params=[True, False], ids=["kept", "sent"])
def keeps(request: pytest.FixtureRequest) -> bool:
    """Whether workers keep the content, as on executors of Spark, or send it."""
    return bool(request.param)


def test_workers_share_the_segments_of_a_topic(keeps: bool) -> None:
    topic = ScalableTopic(4)
    workers = Workers(topic, 2, keeps=keeps)
    with workers.running():
        assert workers.consumers == [2, 2]
        topic.split(0)
        topic.split(1)
        wait_until(lambda: workers.consumers == [4, 4])


def test_entries_of_several_ranges_are_divided_wherever_their_content_is(keeps: bool) -> None:
    topic = ScalableTopic(2)
    workers = Workers(topic, 2, keeps=keeps)
    with workers.running():
        topic.publish_mixed(400)
        received(workers.coordinator, 400)
        end = workers.cut()
        rows = workers.rows(end)
        assert len(rows) > 1
        keys = [{row["__key"] for row in part} for part in rows.values()]
        assert sum(map(len, keys)) == len(set().union(*keys)), "a key is in one partition"
        batches = workers.coordinator.batches
        columns = ("value",)
        direct = [batches.direct(end.batch_id, index, columns) is not None for index in rows]
        assert direct == [keeps] * len(rows)
        workers.kill(workers.started[0])
        assert workers.rows(end) == rows
        topic.take(rows)
        batches.release(end)
        topic.publish_mixed(100)
        workers.drain()
        topic.check()


def test_keys_keep_their_order_from_parents_to_children_if_workers_die(keeps: bool) -> None:
    topic = ScalableTopic(2)
    workers = Workers(topic, 2, keeps=keeps)
    with workers.running():
        for number in range(3):
            topic.publish(200)
            topic.split(2 * number)
            topic.publish_mixed(200)
            wait_until(lambda: workers.living)
            workers.kill(workers.living[0])
            topic.publish(100)
        workers.drain()
        topic.check()


def test_a_restart_with_other_workers_goes_on_from_the_checkpoint(keeps: bool) -> None:
    topic = ScalableTopic(3)
    checkpoint = None
    for count in (2, 3, 1):
        workers = Workers(topic, count, keeps=keeps)
        with workers.running(checkpoint):
            topic.publish_mixed(100)
            received(workers.coordinator, 100)
            checkpoint = workers.cut()
            topic.take(workers.rows(checkpoint))
            workers.coordinator.batches.release(checkpoint)
        topic.split(max(topic.cluster.scalable.graph("topic://public/default/orders").segments))
    topic.check()
