"""Batches of a source: complete rows, and acknowledgements when something fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from keyshard.broker.memory import Message as Stored
from keyshard.errors import CheckpointError, CheckpointInUseError, KeyShardError, NotRunningError
from keyshard.handlers import batches as module
from keyshard.handlers.batches import Batch
from keyshard.handlers.checkpoint_store import CheckpointStore
from tests.helpers import DEADLINE_S, wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import HandledTopic


def test_a_batch_is_cut_by_bytes_too(orders: HandledTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES_MAX", 100_000)
    orders.cluster.publish(
        orders.topic, *[Stored(b"%04d" % n + bytes(30_000), key=f"k{n % 5}") for n in range(40)]
    )
    source = orders.source()
    seen: list[bytes] = []
    for batch in source.batches(max_wait_s=0.1):
        values = [value[:4] for value in batch.records["value"].to_pylist()]
        assert len(values) <= 3
        seen += values
        batch.ack()
        if len(seen) == 40:
            source.stop()
    assert sorted(seen) == [b"%04d" % n for n in range(40)]
    assert orders.backlog() == 0


def test_rows_that_arrow_keeps_in_several_chunks_are_never_left_out(
    orders: HandledTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when a column has more than 2 GiB: combining leaves several chunks.
    monkeypatch.setattr(module, "pa", Chunky)
    count = orders.publish(keys=5, per_key=4)
    batches = orders.source().batches(max_rows=count, max_wait_s=5.0)
    with pytest.raises(KeyShardError, match=rf"{count} rows.*one record batch"):
        next(batches).ack()
    assert orders.backlog() == count


class Chunky:
    """Arrow with tables that are too large for one chunk."""

    class Table:
        def __init__(self, batches: list[pa.RecordBatch]) -> None:
            (whole,) = batches
            self.nbytes = 3 * 2**30
            self._parts = [whole.slice(0, 3), whole.slice(3)]

        @classmethod
        def from_batches(cls, batches: Iterator[pa.RecordBatch]) -> Chunky.Table:
            return cls(list(batches))

        def combine_chunks(self) -> Chunky.Table:
            return self

        def to_batches(self) -> list[pa.RecordBatch]:
            return self._parts


def test_a_checkpoint_that_could_not_be_stored_is_stored_by_the_next_ack(
    orders: HandledTopic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.publish(keys=5, per_key=6)
    source = orders.source()
    failing = True

    def sync(_: int) -> None:
        if failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", sync)
    batches: list[Batch] = []
    for batch in source.batches(max_rows=10, max_wait_s=0.1, checkpoint=f"{tmp_path}/c.json"):
        batches.append(batch)
        if len(batches) < 3:
            for _ in range(2):
                with pytest.raises(CheckpointError, match="No space"):
                    batch.ack()
            assert orders.backlog() == 30
            continue
        failing = False
        batch.ack()
        for one in batches:
            one.ack()
        wait_until(lambda: orders.backlog() == 0)
        source.stop()


def test_two_threads_may_acknowledge_the_same_batch(orders: HandledTopic) -> None:
    orders.publish(keys=5, per_key=20)
    source = orders.source()
    errors: list[BaseException] = []
    rows = 0

    def ack(batch: Batch, together: threading.Barrier) -> None:
        together.wait(DEADLINE_S)
        try:
            batch.ack()
        except BaseException as exc:  # noqa: BLE001 - the test reports it
            errors.append(exc)

    for batch in source.batches(max_rows=5, max_wait_s=0.1):
        together = threading.Barrier(4)
        threads = [threading.Thread(target=ack, args=(batch, together)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows += batch.records.num_rows
        if rows == 100:
            source.stop()
    assert not errors
    assert orders.backlog() == 0


@dataclass
class SlowDisk:
    """A disk whose writes wait until the test releases them."""

    writing: threading.Event = field(default_factory=threading.Event)
    free: threading.Event = field(default_factory=threading.Event)

    def sync(self, _: int) -> None:
        self.writing.set()
        assert self.free.wait(deadline(30))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr("os.fsync", disk.sync)
    yield disk
    disk.free.set()


def test_the_source_waits_for_an_ack_in_progress_before_it_ends(
    orders: HandledTopic, tmp_path: Path, disk: SlowDisk
) -> None:
    """Otherwise the ack replaces a newer checkpoint, or returns and has acknowledged nothing."""
    orders.publish(keys=5, per_key=4)
    checkpoint = tmp_path / "c.json"
    source = orders.source()
    batches = source.batches(max_rows=20, max_wait_s=5.0, checkpoint=checkpoint)
    acking = threading.Thread(target=next(batches).ack)
    acking.start()
    assert disk.writing.wait(deadline(30))
    source.stop()
    ending = threading.Thread(target=lambda: list(batches))
    ending.start()
    ending.join(1.0)
    assert ending.is_alive(), "the source ended while an ack wrote its checkpoint"
    with pytest.raises(CheckpointInUseError):
        next(orders.source().batches(checkpoint=checkpoint))
    disk.free.set()
    for thread in (acking, ending):
        thread.join(deadline(30))
        assert not thread.is_alive()
    assert orders.backlog() == 0


def test_a_hanging_ack_keeps_its_checkpoint_in_use_and_does_not_prevent_the_end(
    orders: HandledTopic, tmp_path: Path, disk: SlowDisk
) -> None:
    orders.publish(keys=5, per_key=4)
    checkpoint = tmp_path / "c.json"
    source = orders.source(operation_timeout_ms=1_000)
    batches = source.batches(max_rows=20, max_wait_s=5.0, checkpoint=checkpoint)
    acking = threading.Thread(target=next(batches).ack)
    acking.start()
    assert disk.writing.wait(deadline(30))
    source.stop()
    assert list(batches) == []
    assert orders.backlog() == 20
    with pytest.raises(CheckpointInUseError):
        next(orders.source().batches(checkpoint=checkpoint))
    disk.free.set()
    acking.join(deadline(30))
    assert not acking.is_alive()
    with closing(CheckpointStore(checkpoint)) as store:
        assert store.open() is not None


def test_a_source_of_batches_refuses_to_unpark(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()
    for batch in source.batches(max_wait_s=0.1):
        with pytest.raises(NotRunningError, match=r"Parked keys exist only with run\(\)"):
            source.unpark("key-0")
        batch.ack()
        source.stop()
