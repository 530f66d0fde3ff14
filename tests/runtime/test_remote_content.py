"""Workers that keep content: tasks get it from them, or from the source where they are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyarrow import flight

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.columns.record_batches import COLUMNS
from keyshard.coordinator.batch_reading import read_batch
from keyshard.coordinator.batch_server import BatchServer
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.metadata_columns import METADATA_COLUMNS
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId
from keyshard.errors import BatchReleasedError, DataLossTrimmedError
from keyshard.workers.authentication import with_token
from keyshard.workers.broker import RemoteBroker
from tests.helpers import config, keys_of, received, wait_until
from tests.support.worker_servers import LocalWorker

ALL = tuple(COLUMNS.names)
ROWS = 1_000
KEYS = keys_of(16)


class WorkerSource:
    """A source whose two workers keep content, and the server that its tasks ask."""

    def __init__(self, *, keeps: bool = True, **options: Any) -> None:
        self.keeps = keeps
        self.cluster = MemoryCluster(entries_per_ledger=100)
        self.topic = self.cluster.create_topic("orders", partitions=3)
        self.workers: list[LocalWorker] = []
        source = config(self.topic, metadata_columns=METADATA_COLUMNS, **options)
        self.coordinator = Coordinator(source, self._broker, None)
        self.server: BatchServer
        """Set once the coordinator has started."""
        self.sent = 0

    def _broker(self) -> RemoteBroker:
        def start(_stop: threading.Event) -> LocalWorker:
            self.workers.append(LocalWorker(MemoryBroker(self.cluster), keeps=self.keeps))
            return self.workers[-1]

        return RemoteBroker(MemoryBroker(self.cluster), start, 2, 10.0)

    def publish(self, count: int = ROWS) -> None:
        first, self.sent = self.sent, self.sent + count
        messages = [
            Message(b"%d" % i, key=KEYS[i % 16], properties={"i": str(i)} if i % 3 else {})
            for i in range(first, self.sent)
        ]
        self.cluster.publish(
            self.topic, *messages, batching=Batching.BY_KEY, batch_messages_max=4,
            publish_ms=1_000,
        )  # fmt: skip
        received(self.coordinator, self.sent)

    def cut(self) -> Checkpoint:
        end = self.coordinator.batches.cut()
        assert end is not None
        return end

    def read(self, end: Checkpoint, columns: tuple[str, ...] = ALL) -> dict[int, list[Any]]:
        """Rows of a batch, as tasks read them."""
        return {
            index: [
                row
                for part in read_batch(self.server.ticket(end.batch_id, index, columns))
                for row in part.to_pylist()
            ]
            for index in self.coordinator.batches.plan(end)
        }

    def direct(self, end: Checkpoint) -> list[bool]:
        """Whether tasks are to ask workers, for each partition."""
        batches = self.coordinator.batches
        return [batches.direct(end.batch_id, index, ALL) is not None for index in batches.plan(end)]

    def kept(self) -> int:
        """Answers with content that living workers keep."""
        return sum(len(one.host._kept) for one in self.workers if not one.lost)

    def kill(self, worker: LocalWorker) -> None:
        """End a worker and its connections."""
        worker.host.close()
        worker._server.shutdown()


@pytest.fixture
def at(request: pytest.FixtureRequest) -> Iterator[WorkerSource]:
    source = WorkerSource(**getattr(request, "param", {}))
    source.coordinator.start(None)
    source.server = BatchServer(source.coordinator.batches, "127.0.0.1")
    try:
        yield source
    finally:
        source.coordinator.stop()
        source.server._server.shutdown()


def values(rows: dict[int, list[Any]]) -> list[int]:
    return sorted(int(row["value"]) for part in rows.values() for row in part)


def test_content_goes_from_workers_to_tasks_and_never_to_the_source(at: WorkerSource) -> None:
    at.publish()
    end = at.cut()
    assert all(at.direct(end))
    blocks = [
        block
        for part in at.coordinator.consumers.shared.window.batches[end.batch_id].layout.values()
        for _, block in part
    ]
    assert sum(block.rows for block in blocks) == ROWS
    # Of an entry that came in parts, its keys may be needed.
    here = {name for block in blocks for name in block.content.schema.names}
    assert here <= {"__key", "__orderingKey"}
    rows = at.read(end)
    assert values(rows) == list(range(ROWS))
    for part in rows.values():
        last: dict[str, int] = {}
        for row in part:
            number = int(row["value"])
            assert row["__key"] == KEYS[number % 16]
            assert dict(row["__properties"]) == ({"i": str(number)} if number % 3 else {})
            assert last.get(row["__key"], -1) < number
            last[row["__key"]] = number
    assert at.read(end) == rows


@pytest.mark.parametrize(("at", "known"), [({}, None), ({"keeps": False}, [])], indirect=["at"])
def test_hot_keys_are_unknown_from_the_start_if_workers_keep_them(
    at: WorkerSource, known: list[Any] | None
) -> None:
    """Issue: they were an empty list, as if there were none, until the first message came."""
    assert at.coordinator.consumers.hot_keys(5, 0.01) == known


@pytest.mark.parametrize("columns", [("value",), ("__slot", "__messageId"), ("__key", "__topic")])
def test_columns_come_from_their_workers(at: WorkerSource, columns: tuple[str, ...]) -> None:
    at.publish(200)
    end = at.cut()
    wanted = {
        index: [{name: row[name] for name in columns} for row in part]
        for index, part in at.read(end).items()
    }
    assert at.read(end, columns) == wanted


def test_released_or_known_content_is_dropped(at: WorkerSource) -> None:
    for _ in range(5):
        at.publish(200)
        end = at.cut()
        assert at.kept() > 0
        assert len(values(at.read(end))) == 200
        at.coordinator.batches.release(end)
        with pytest.raises(BatchReleasedError):
            next(read_batch(at.server.ticket(end.batch_id, 0, ALL)))
    wait_until(lambda: at.kept() == 0)


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_of_a_worker_that_died_has_the_same_rows(at: WorkerSource, known: bool) -> None:
    at.publish()
    end = at.cut()
    before = at.read(end)
    victim = at.workers[0]
    at.kill(victim)
    if known:
        wait_until(lambda: victim.lost)
        assert not all(at.direct(end))
    assert at.read(end) == before
    assert not any(at.direct(end))
    at.coordinator.batches.release(end)
    at.publish(200)
    assert values(at.read(at.cut())) == list(range(ROWS, ROWS + 200))


def trim(at: WorkerSource) -> None:
    """Delete all that the topic stores."""
    for where in at.cluster.partitions(at.topic):
        at.cluster.trim(where, EntryId(10**9, 0))


def delete(at: WorkerSource) -> None:
    at.cluster.delete_topic(at.topic)


@pytest.mark.parametrize("loss", [trim, delete])
@pytest.mark.parametrize("at", [{"fail_on_data_loss": False}], indirect=True)
def test_a_partition_that_is_lost_with_its_worker_is_empty_where_loss_is_accepted(
    at: WorkerSource, loss: Callable[[WorkerSource], None]
) -> None:
    at.publish()
    end = at.cut()
    layout = at.coordinator.batches.plan(end)
    entries = sum(len(state.batch) for state in end.partitions.values())
    loss(at)
    for worker in list(at.workers):
        at.kill(worker)
    assert at.read(end) == {index: [] for index in layout}
    assert at.coordinator.status()["entriesLost"] == entries > 0


@pytest.mark.parametrize("loss", [trim, delete])
def test_a_batch_that_is_lost_with_its_worker_is_a_named_loss(
    at: WorkerSource, loss: Callable[[WorkerSource], None]
) -> None:
    """Found by the simulation: a topic that was deleted was said to have a wrong name."""
    at.publish()
    end = at.cut()
    loss(at)
    for worker in list(at.workers):
        at.kill(worker)
    with pytest.raises(DataLossTrimmedError, match="entries of a planned batch"):
        at.read(end)


def test_a_task_that_had_some_rows_continues_behind_them(
    at: WorkerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.columns.record_batches.ROWS_PER_BATCH_MAX", 40)
    at.publish()
    end = at.cut()
    before = at.read(end)
    for index, rows in before.items():
        task = read_batch(at.server.ticket(end.batch_id, index, ALL))
        some = next(task).to_pylist() + next(task).to_pylist()
        for worker in at.workers:
            with worker.host._changed:
                worker.host._kept.clear()  # as after a restart
        assert some + [row for part in task for row in part.to_pylist()] == rows


def test_entries_received_from_a_dead_worker_are_in_a_later_batch(at: WorkerSource) -> None:
    at.publish()
    victim = at.workers[1]
    at.kill(victim)
    wait_until(lambda: victim.lost)
    end = at.cut()
    assert values(at.read(end)) == list(range(ROWS))
    at.coordinator.batches.release(end)
    wait_until(lambda: at.kept() == 0)


def test_entries_that_are_delivered_again_leave_nothing_behind(at: WorkerSource) -> None:
    at.publish()
    for worker in list(at.workers):
        at.kill(worker)
    wait_until(lambda: len(at.workers) == 4)
    wait_until(lambda: at.coordinator.status()["duplicatesDropped"] >= ROWS)
    wait_until(lambda: at.kept() == 0)
    assert values(at.read(at.cut())) == list(range(ROWS))


def test_a_read_of_a_batch_released_after_its_workers_died_is_refused(at: WorkerSource) -> None:
    at.publish(100)
    end = at.cut()
    at.kill(at.workers[0])
    at.kill(at.workers[1])
    at.coordinator.batches.release(end)
    with pytest.raises(BatchReleasedError):
        at.coordinator.batches.read(end.batch_id, 0, ALL)


def answer(endpoint: str, token: str, question: dict[str, Any]) -> Any:
    with flight.connect(endpoint) as client:
        return client.do_get(flight.Ticket(with_token(token, question))).read_all()


@pytest.mark.parametrize(
    "question",
    [
        lambda token: (token, {"runs": [[10**6, 0, 1]], "columns": ["value"]}),
        lambda token: (token, {"runs": [], "columns": ["value"]}),
        lambda token: (token, {"runs": [[1, 0, 1]], "columns": ["nope"]}),
        lambda token: (token, {"runs": "x", "columns": ["value"]}),
        lambda _token: ("guess", {"runs": [[1, 0, 1]], "columns": ["value"]}),
        lambda token: (token, {"seq": 1, "taken": {}, "wait_s": 0, "released": [1]}),
    ],
)
def test_a_reading_role_may_read_and_nothing_else(
    at: WorkerSource, question: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    at.publish(100)
    end, worker = at.cut(), at.workers[0]
    before = at.kept()
    with pytest.raises((OSError, KeyError, ValueError, flight.FlightError)):
        answer(worker.content_endpoint[0], *question(worker.content_endpoint[1]))
    assert at.kept() == before
    assert values(at.read(end)) == list(range(100))
