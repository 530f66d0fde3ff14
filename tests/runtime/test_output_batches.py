"""Batches whose rows are published when they are acknowledged."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.window.window import Window
from keyshard.errors import (
    BrokerUnavailableError,
    CheckpointError,
    ConfigError,
    KeyShardError,
    MessageTooLargeError,
    RuntimeStoppedError,
)
from keyshard.handlers.batches import Batch
from keyshard.handlers.checkpoint_store import CheckpointStore
from keyshard.handlers.output_log import OutputLog
from tests.support.copied_topic import Copied

pytestmark = pytest.mark.simulated(seeds=1)


@pytest.fixture
def once(copied: Copied) -> Copied:
    copied.cluster.deduplicate(copied.out)
    return copied


def batches(copied: Copied, sink: KeyShardSink, **options: Any) -> Generator[Batch, None, None]:
    return copied.source().batches(50, 0.05, sink=sink, **options)


def copy(records: pa.RecordBatch) -> pa.RecordBatch:
    return records.select(["value", "__key"])


def copy_until(copied: Copied, checkpoint: Path, count: int) -> None:
    """Copy batches until so many rows are stored."""
    run = batches(copied, copied.sink, checkpoint=checkpoint)
    while len(copied.stored()) < count:
        batch = next(run)
        batch.write(copy(batch.records))
        batch.ack()
    run.close()


def once_each(keys: int, per_key: int) -> dict[str | None, list[bytes | None]]:
    return {f"key-{k}": [b"%d" % n for n in range(per_key)] for k in range(keys)}


@pytest.mark.parametrize("checkpointed", [True, False])
def test_written_rows_are_published_and_then_the_batch_is_acknowledged(
    once: Copied, tmp_path: Path, checkpointed: bool
) -> None:
    count = once.publish(keys=5, per_key=40)
    checkpoint = tmp_path / "checkpoint.json" if checkpointed else None
    source = once.source()
    run = source.batches(50, 0.05, sink=once.sink, checkpoint=checkpoint)
    for batch in run:
        half = batch.records.num_rows // 2
        batch.write(copy(batch.records.slice(0, half)))
        batch.write(pa.Table.from_batches([copy(batch.records.slice(half))]))
        rows = len(once.stored())
        batch.ack()
        assert len(once.stored()) == rows + batch.records.num_rows
        if len(once.stored()) == count:
            break
    counters = source.status()["counters"]
    assert counters["outputsPublished"] == counters["outputsConfirmed"] == count
    run.close()
    assert once.backlog() == 0
    assert once.by_key() == once_each(5, 40)


@pytest.mark.parametrize("step", ["before save", "after save", "before publish", "after publish"])
def test_a_program_that_ends_at_any_step_is_continued_without_loss_or_duplicate(
    once: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    count = once.publish(keys=5, per_key=40)
    path = tmp_path / "checkpoint.json"
    owner: Any = CheckpointStore if "save" in step else OutputLog
    name = "save" if "save" in step else "publish"
    original = getattr(owner, name)
    left = [3]

    def ends(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return original(self, *args)
        if "after" in step:
            original(self, *args)
        raise KeyShardError(step)

    monkeypatch.setattr(owner, name, ends)
    with pytest.raises(KeyShardError, match=step):
        copy_until(once, path, count)
    monkeypatch.setattr(owner, name, original)
    copy_until(once, path, count)
    assert once.by_key() == once_each(5, 40)


def test_an_ack_whose_rows_are_not_confirmed_may_be_repeated(once: Copied, tmp_path: Path) -> None:
    once.publish(keys=2, per_key=5)
    sink = replace(once.sink, send_timeout_ms=200)
    run = batches(once, sink, checkpoint=tmp_path / "checkpoint.json")
    batch = next(run)
    batch.write(copy(batch.records))
    once.hold()
    with pytest.raises(BrokerUnavailableError):
        batch.ack()
    assert once.backlog() == 10
    once.release()
    batch.ack()
    batch.ack()
    run.close()
    assert once.backlog() == 0
    assert once.by_key() == once_each(2, 5)


def test_rows_go_to_the_topics_that_they_name(once: Copied, tmp_path: Path) -> None:
    other = once.cluster.create_topic("other", 0)
    once.cluster.deduplicate(other)
    once.publish(keys=1, per_key=2)
    run = batches(once, once.sink, checkpoint=tmp_path / "checkpoint.json")
    batch = next(run)
    names = pa.array([once.out, "other"])
    batch.write(copy(batch.records).append_column("__topic", names))
    batch.ack()
    run.close()
    assert once.by_key() == {"key-0": [b"0"]}
    assert once.by_key(other) == {"key-0": [b"1"]}


def test_wrong_rows_are_refused_when_they_are_written(
    once: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=1, per_key=2)
    run = batches(once, once.sink, checkpoint=tmp_path / "checkpoint.json")
    batch = next(run)
    with pytest.raises(ConfigError, match="__kay"):
        batch.write(pa.record_batch({"value": [b"x"], "__kay": ["k"]}))
    with pytest.raises(MessageTooLargeError):
        batch.write(pa.record_batch({"value": [b"x" * 6_000_000]}))
    with monkeypatch.context() as patch:
        patch.setattr("keyshard.handlers.batches.WRITTEN_BYTES_MAX", 1)
        with pytest.raises(ConfigError, match="max_rows"):
            batch.write(copy(batch.records))
    batch.ack()
    with pytest.raises(ConfigError, match="acknowledged"):
        batch.write(copy(batch.records))
    run.close()
    assert once.stored() == []


def test_writing_needs_a_sink_and_a_checkpoint_a_sink_id(once: Copied, tmp_path: Path) -> None:
    once.publish(keys=1, per_key=2)
    run = once.source().batches(50, 0.05)
    with pytest.raises(ConfigError, match="sink"):
        next(run).write(pa.record_batch({"value": [b"x"]}))
    run.close()
    nameless = KeyShardSink(once.out, service_url=once.url)
    with pytest.raises(ConfigError, match="sink_id"):
        batches(once, nameless, checkpoint=tmp_path / "checkpoint.json")


def test_a_checkpoint_that_cannot_be_stored_publishes_nothing(
    once: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=1, per_key=2)
    run = batches(once, once.sink, checkpoint=tmp_path / "checkpoint.json")
    batch = next(run)
    batch.write(copy(batch.records))

    def fails(*_: object) -> int:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", fails)
        with pytest.raises(CheckpointError):
            batch.ack()
    assert once.stored() == []
    assert once.backlog() == 2
    batch.ack()
    run.close()
    assert once.by_key() == once_each(1, 2)
    assert once.backlog() == 0


def test_an_ack_after_the_end_leaves_the_checkpoint_alone(once: Copied, tmp_path: Path) -> None:
    once.publish(keys=2, per_key=5)
    path = tmp_path / "checkpoint.json"
    run = batches(once, replace(once.sink, send_timeout_ms=200), checkpoint=path)
    batch = next(run)
    batch.write(copy(batch.records))
    once.hold()
    with pytest.raises(BrokerUnavailableError):
        batch.ack()
    run.close()
    path.write_text("that of the next source")
    with pytest.raises(RuntimeStoppedError, match="the next start publishes them"):
        batch.ack()
    assert path.read_text() == "that of the next source"


def test_a_start_that_fails_after_it_published_ends_with_its_own_error(
    once: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once.publish(keys=2, per_key=5)
    path = tmp_path / "checkpoint.json"
    run = batches(once, replace(once.sink, send_timeout_ms=200), checkpoint=path)
    batch = next(run)
    batch.write(copy(batch.records))
    once.hold()
    with pytest.raises(BrokerUnavailableError):
        batch.ack()
    run.close()
    once.release()

    def fails(*_: Any, **__: Any) -> None:
        raise BrokerUnavailableError("no broker")

    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, "start", fails)
        with pytest.raises(BrokerUnavailableError, match="no broker"):
            next(batches(once, once.sink, checkpoint=path))
    copy_until(once, path, 10)
    assert once.by_key() == once_each(2, 5)


def test_rows_of_entries_without_room_in_the_checkpoint_are_stored_once(
    once: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = once.publish(keys=5, per_key=40)
    path = tmp_path / "checkpoint.json"
    original = Window.plan_completed

    def no_room(self: Window, completed: Any, *, limited: bool) -> Any:
        left = {where: list(ids)[-1:] for where, ids in completed.items()}
        rest = {where: list(ids)[:-1] for where, ids in completed.items()}
        return original(self, rest, limited=limited) | left

    monkeypatch.setattr(Window, "plan_completed", no_room)
    run = batches(once, once.sink, checkpoint=path)
    batch = next(run)
    batch.write(copy(batch.records))
    batch.ack()
    killed = path.read_text()
    monkeypatch.undo()
    run.close()
    path.write_text(killed)
    copy_until(once, path, count)
    assert once.by_key() == once_each(5, 40)


def test_rows_are_not_published_without_the_encoding_that_the_sink_names(once: Copied) -> None:
    with pytest.raises(ConfigError, match="value_format 'avro'"):
        next(batches(once, replace(once.sink, value_format="avro")))
