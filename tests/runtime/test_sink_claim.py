"""A sink id belongs to one query of a topic: another query is refused before its first row."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.broker.memory import Message as StoredMessage
from keyshard.broker.port import PublishOptions
from keyshard.broker.retry import retry_until
from keyshard.core.publishing import key_partition, query_of
from keyshard.errors import ProducerBusyError, SinkIdInUseError
from keyshard.publishing import batch_part, batch_writer
from keyshard.publishing.sink_claim import Claim
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline
from tests.support.sink_rows import batch_of

FIRST, SECOND = (str(uuid.UUID(int=number)) for number in (1, 2))


class Queries(SinkTopic):
    """Queries that write to one topic with the sink id ``s``."""

    def store(
        self, query: str, batch_id: int, keys: range, partition: int = 0, **options: Any
    ) -> None:
        """Run a task of a query; the rows tell it."""
        value = f"{query}:{batch_id}:{partition}".encode()
        rows = batch_of([(f"k{key}", value) for key in keys])
        with self.sink(sink_id=f"s-{query}", **options) as sink:
            sink._write_batch(rows, batch_id, partition, claim=Claim("s", query))

    def of(self, query: str) -> int:
        """Number of stored rows of a query."""
        return sum((one.value or b"").startswith(query.encode()) for one in self.stored())


@pytest.fixture
def world() -> Iterator[Queries]:
    made = Queries(send_timeout_ms=2_000)
    yield made
    made.close()


def keys_of(partition: int) -> range:
    """A key of a topic partition."""
    found = next(key for key in range(100) if key_partition(f"k{key}", 3) == partition)
    return range(found, found + 1)


@pytest.mark.parametrize("partition", [0, 1, 2])
def test_a_second_query_is_refused_before_its_first_row_wherever_the_first_has_rows(
    world: Queries, partition: int
) -> None:
    world.store(FIRST, 0, keys_of(partition))
    for batch_id in (0, 0, 1):
        with pytest.raises(SinkIdInUseError) as raised:
            world.store(SECOND, batch_id, range(20), partition=batch_id)
        for name in (FIRST, SECOND, world.topic, "'s'", "another sink id"):
            assert name in raised.value.message
    assert world.of(SECOND) == 0
    # The first one goes on, in each of its tasks, also when a batch is repeated.
    for task in (0, 1, 2):
        for batch_id in (1, 1, 2):
            world.store(FIRST, batch_id, range(20), partition=task)
    assert world.of(FIRST) == 1 + 3 * 2 * 20


def test_of_two_queries_that_start_at_once_one_stores_rows(world: Queries) -> None:
    refused: list[str] = []
    together = threading.Barrier(6)

    def task(query: str, partition: int) -> None:
        together.wait()
        try:
            # The in-memory broker does not wait for a name.
            retry_until(partial(world.store, query, 0, range(partition, 60, 3), partition), 30)
        except SinkIdInUseError:
            refused.append(query)

    with ThreadPoolExecutor(6) as pool:
        queries = (FIRST, SECOND)
        tasks = [pool.submit(task, one, number) for number in range(3) for one in queries]
        for one in tasks:
            one.result(deadline(60))
    (loser,) = {*refused}
    assert len(refused) == 3
    winner = SECOND if loser == FIRST else FIRST
    assert (world.of(winner), world.of(loser)) == (60, 0)


def test_the_first_row_waits_while_another_writer_looks_for_queries(world: Queries) -> None:
    where = world.cluster.partitions(world.topic)[0]
    with closing(MemoryBroker(world.cluster)) as broker:
        broker.entry_producer(where, PublishOptions("s-claim"))
        with pytest.raises(ProducerBusyError):
            world.store(FIRST, 0, range(20))
        assert world.stored() == []
    world.store(FIRST, 0, range(20))
    assert world.of(FIRST) == 20


def test_the_first_rows_are_stored_before_another_writer_looks_for_queries(
    world: Queries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queries looked, one after the other, before either had stored a row."""
    where = world.cluster.partitions(world.topic)[0]
    free: list[bool] = []
    publish = batch_part.publish

    def observed(*args: Any) -> None:
        publish(*args)
        with closing(MemoryBroker(world.cluster)) as broker:
            try:
                broker.entry_producer(where, PublishOptions("s-claim")).close()
            except ProducerBusyError:
                free.append(False)
            else:
                free.append(True)

    for module in (batch_part, batch_writer):
        monkeypatch.setattr(module, "publish", observed)
    world.store(FIRST, 0, range(20))
    assert free == [False, True, True]
    free.clear()
    world.store(FIRST, 0, range(20), partition=1)  # its query has rows
    assert free == [True, True, True]


def test_a_query_whose_names_are_forgotten_goes_on(world: Queries) -> None:
    """Its rows are near the end; what other producers and other sinks stored does not count."""
    world.store(FIRST, 0, keys_of(1))
    for where in world.cluster.partitions(world.topic):
        world.cluster.forget_producer(where, f"s-{FIRST}-0")
        world.cluster.publish(where, StoredMessage(b"x", key="other"))
    world.store(FIRST, 1, range(20), partition=5)
    assert world.of(FIRST) == 21


def test_queries_without_a_claim_or_with_other_ids_are_not_refused(world: Queries) -> None:
    rows = batch_of([("a", b"1"), ("b", b"2")])
    for name in (f"s-{FIRST}", f"s-{uuid.uuid4().hex}", f"s-s-{FIRST}", "s"):
        world.sink(sink_id=name).write_batch(rows, 0)
    with pytest.raises(SinkIdInUseError):  # the sink id ``s-s`` has the first query
        world.sink(sink_id=f"s-s-{SECOND}")._write_batch(rows, 0, 0, claim=Claim("s-s", SECOND))
    world.store(FIRST, 1, range(3))
    world.store(SECOND, 0, range(3), delivery_guarantee="at-least-once")
    assert world.of(SECOND) == 3


@pytest.mark.parametrize(
    ("producer", "query"),
    [
        (f"s-{FIRST}-0", FIRST),
        (f"s-{FIRST}-117", FIRST),
        (f"s-{FIRST}", None),
        (f"s-s-{FIRST}-0", None),
        (f"t-{FIRST}-0", None),
        (f"s-{uuid.UUID(FIRST).hex}-0", None),
        ("s-0", None),
        ("s-claim", None),
    ],
)
def test_names_of_producers_tell_the_query(producer: str, query: str | None) -> None:
    assert query_of(producer, "s") == query
