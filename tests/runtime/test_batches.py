"""Batches of a source: every row of what is acknowledged, and acknowledging when things fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from handler_place import Place
from helpers import wait_until
from keyshard.broker.memory import Message as Stored
from keyshard.errors import CheckpointError, CheckpointInUseError, KeyShardError, NotRunningError
from keyshard.handlers import batches as module
from keyshard.handlers.batches import Batch
from keyshard.handlers.checkpoint_store import CheckpointStore


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


def test_a_batch_is_cut_by_bytes_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES_MAX", 100_000)
    place.cluster.publish(
        place.topic, *[Stored(b"%04d" % n + bytes(30_000), key=f"k{n % 5}") for n in range(40)]
    )
    source = place.source()
    seen: list[bytes] = []
    for batch in source.batches(max_wait_s=0.1):
        values = [value[:4] for value in batch.records["value"].to_pylist()]
        assert len(values) <= 3
        seen += values
        batch.ack()
        if len(seen) == 40:
            source.stop()
    assert sorted(seen) == [b"%04d" % n for n in range(40)]
    assert place.backlog() == 0


def test_rows_that_arrow_keeps_in_several_chunks_are_never_left_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when a column has more than 2 GiB: combining leaves several chunks.
    monkeypatch.setattr(module, "pa", Chunky)
    count = place.publish(keys=5, per_key=4)
    batches = place.source().batches(max_rows=count, max_wait_s=5.0)
    with pytest.raises(KeyShardError, match=rf"{count} rows.*one record batch"):
        next(batches).ack()
    assert place.backlog() == count


class Chunky:
    """Arrow whose tables are too large for one chunk."""

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
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.publish(keys=5, per_key=6)
    source = place.source()
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
            assert place.backlog() == 30
            continue
        failing = False
        batch.ack()
        for one in batches:
            one.ack()
        wait_until(lambda: place.backlog() == 0)
        source.stop()


def test_two_threads_may_acknowledge_the_same_batch(place: Place) -> None:
    place.publish(keys=5, per_key=20)
    source = place.source()
    errors: list[BaseException] = []
    rows = 0

    def ack(batch: Batch, together: threading.Barrier) -> None:
        together.wait(10)
        try:
            batch.ack()
        except BaseException as exc:  # noqa: BLE001 - told to the test
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
    assert place.backlog() == 0


@dataclass
class SlowDisk:
    """What is written to it waits until somebody lets it."""

    writing: threading.Event = field(default_factory=threading.Event)
    free: threading.Event = field(default_factory=threading.Event)

    def sync(self, _: int) -> None:
        self.writing.set()
        assert self.free.wait(30)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk()
    monkeypatch.setattr("os.fsync", disk.sync)
    yield disk
    disk.free.set()


def test_the_source_ends_when_an_ack_in_progress_has(
    place: Place, tmp_path: Path, disk: SlowDisk
) -> None:
    """Else its checkpoint replaces a newer one, or it returns and nothing is acknowledged."""
    place.publish(keys=5, per_key=4)
    checkpoint = tmp_path / "c.json"
    source = place.source()
    batches = source.batches(max_rows=20, max_wait_s=5.0, checkpoint=checkpoint)
    acking = threading.Thread(target=next(batches).ack)
    acking.start()
    assert disk.writing.wait(30)
    source.stop()
    ending = threading.Thread(target=lambda: list(batches))
    ending.start()
    ending.join(1.0)
    assert ending.is_alive(), "the source ended while an ack wrote its checkpoint"
    with pytest.raises(CheckpointInUseError):
        next(place.source().batches(checkpoint=checkpoint))
    disk.free.set()
    for thread in (acking, ending):
        thread.join(30)
        assert not thread.is_alive()
    assert place.backlog() == 0


def test_an_ack_that_hangs_keeps_its_checkpoint_and_not_the_end(
    place: Place, tmp_path: Path, disk: SlowDisk
) -> None:
    place.publish(keys=5, per_key=4)
    checkpoint = tmp_path / "c.json"
    source = place.source(operation_timeout_ms=1_000)
    batches = source.batches(max_rows=20, max_wait_s=5.0, checkpoint=checkpoint)
    acking = threading.Thread(target=next(batches).ack)
    acking.start()
    assert disk.writing.wait(30)
    source.stop()
    assert list(batches) == []
    assert place.backlog() == 20
    with pytest.raises(CheckpointInUseError):
        next(place.source().batches(checkpoint=checkpoint))
    disk.free.set()
    acking.join(30)
    assert not acking.is_alive()
    with closing(CheckpointStore(checkpoint)) as store:
        assert store.open() is not None


def test_nothing_can_be_unparked_of_batches(place: Place) -> None:
    place.publish(keys=1, per_key=1)
    source = place.source()
    for batch in source.batches(max_wait_s=0.1):
        with pytest.raises(NotRunningError, match=r"batches\(\) parks no keys"):
            source.unpark("key-0")
        batch.ack()
        source.stop()
