"""Batches that are staged before they are published: the first manifest decides."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyshard import KeyShardSink
from keyshard.errors import (
    ConfigError,
    MessageTooLargeError,
    ProducerFencedError,
    StagingError,
)
from keyshard.publishing.staging import StagedBatch, StagedFile, Staging
from spark_adapter.stream_writer import KeyShardStreamWriter
from spark_adapter.topic_writer import KeyShardBatchWriter, TopicWrite
from tests.runtime.test_topic_write import Target, target, task

__all__ = ["target", "task"]


def rows(*values: str) -> pa.Table:
    """Rows of one key."""
    return pa.table({"value": [one.encode() for one in values], "__key": ["a"] * len(values)})


@pytest.fixture(params=["file", "memory"])
def staging(request: pytest.FixtureRequest, tmp_path: Path) -> Staging:
    """An empty folder on a disk, and one of a file system without links."""
    url = str(tmp_path) if request.param == "file" else f"memory://staging-{uuid.uuid4().hex}"
    return Staging(url)


def test_the_first_manifest_decides_the_published_batch(staging: Staging) -> None:
    first = StagedBatch(staging, "sink/query", 4)
    files = [first.stage(rows("3"), 1), first.stage(rows("1", "2"), 0)]
    again = StagedBatch(staging, "sink/query", 4)
    other = [again.stage(rows("9", "1", "2", "3"), 0)]
    decided = first.decide(files)
    assert [(one.partition, one.rows) for one in decided] == [(0, 2), (1, 1)]
    assert again.decide(other) == decided
    assert again.decide([]) == decided
    assert [again.read(one) for one in decided] == [rows("1", "2"), rows("3")]


def test_two_owners_and_two_batches_decide_apart(staging: Staging) -> None:
    batches = [StagedBatch(staging, owner, number) for owner in ("a", "b") for number in (0, 1)]
    for at, batch in enumerate(batches):
        file = batch.stage(rows(str(at)), 0)
        assert batch.decide([file]) == [file]
    assert [batch.is_done() for batch in batches] == [False] * 4


def test_a_finished_batch_keeps_its_mark_and_no_rows(staging: Staging) -> None:
    for number in range(3):
        batch = StagedBatch(staging, "a", number)
        batch.decide([batch.stage(rows("1"), 0)])
        batch.stage(rows("2"), 0)
        batch.finish()
    staging.files.invalidate_cache()
    left = [path.rpartition("/")[2] for path in staging.files.find(staging.root)]
    assert sorted(left) == ["done", "manifest.json"]
    batch = StagedBatch(staging, "a", 2)
    (known,) = batch.decide([batch.stage(rows("3"), 0)])
    assert (batch.is_done(), known.rows) == (True, 1)


def test_an_older_batch_is_refused(staging: Staging) -> None:
    StagedBatch(staging, "a", 5).stage(rows("1"), 0)
    with pytest.raises(ProducerFencedError, match="batch 4 of 'a' is older than batch 5"):
        StagedBatch(staging, "a", 4).decide([])


def test_a_manifest_that_appears_meanwhile_is_followed(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (StagedBatch(staging, "a", 0) for _ in range(2))
    mine, theirs = (one.stage(rows(str(at)), 0) for at, one in enumerate((first, second)))
    decided = second.decide([theirs])
    real, looks = staging.files.exists, iter([False])
    with monkeypatch.context() as patch:
        patch.setattr(staging.files, "exists", lambda path: next(looks, real(path)))
        assert first.decide([mine]) == decided == [theirs]


def test_rows_that_are_missing_or_damaged_are_named(staging: Staging) -> None:
    batch = StagedBatch(staging, "a", 0)
    file = batch.stage(rows("1", "2"), 3)
    with pytest.raises(StagingError, match="has 2 rows, but its manifest has 5"):
        batch.read(StagedFile(3, file.name, 5))
    path = next(one for one in staging.files.find(staging.root) if one.endswith(file.name))
    staging.files.pipe_file(path, staging.files.cat_file(path)[:100])
    with pytest.raises(StagingError, match=r"File task-3-.* of batch 0 of 'a' cannot be read"):
        batch.read(file)
    staging.files.rm_file(path)
    with pytest.raises(StagingError, match=r"File task-3-.* of batch 0 of 'a' cannot be read"):
        batch.read(file)


def test_a_folder_that_cannot_be_written_is_named(staging: Staging, tmp_path: Path) -> None:
    staging.check()
    assert staging.files.find(staging.root) == []
    with pytest.raises(StagingError, match=r"does not exist\.\nRemedy: Create it"):
        Staging(str(tmp_path / "missing")).check()
    with pytest.raises(ConfigError, match="staging is 'nothing://x'"):
        Staging("nothing://x")
    (tmp_path / "full").write_bytes(b"")
    with pytest.raises(StagingError, match="cannot be written"):
        StagedBatch(Staging(str(tmp_path / "full")), "a", 0).stage(rows("1"), 0)


@pytest.fixture
def staged(target: Target, tmp_path: Path) -> TopicWrite:
    """A write that stages."""
    return TopicWrite(target.write.options._replace(staging=str(tmp_path)))


def run(write: TopicWrite, task: Any, *parts: pa.Table, batch: int = 7) -> list[Any]:
    """Run the tasks of a batch, one for each part; return their messages."""
    task._localProperties["streaming.sql.batchId"] = str(batch)
    found = []
    for partition, part in enumerate(parts):
        task._partitionId = partition
        found.append(KeyShardStreamWriter(write).write(iter(part.to_batches())))
    return found


def test_a_repeated_batch_is_stored_as_it_was_first_staged(
    target: Target, staged: TopicWrite, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = KeyShardStreamWriter(staged)
    stop_at: Iterator[int]
    real = KeyShardSink._write_batch

    def dying(sink: KeyShardSink, *args: Any, **named: Any) -> Any:
        if next(stop_at) == 0:
            raise InterruptedError("the driver dies")
        return real(sink, *args, **named)

    # It dies before the first row, then after the first file, then not.
    for attempt, steps in enumerate(([0], [1, 0], [1, 1])):
        other = [str(attempt * 10 + number) for number in range(5)]
        messages = run(staged, task, rows(*other[: 3 - attempt]), rows(*other[3 - attempt :]))
        stop_at = iter(steps)
        with monkeypatch.context() as patch:
            patch.setattr(KeyShardSink, "_write_batch", dying)
            if attempt < 2:
                with pytest.raises(InterruptedError):
                    writer.commit(messages, 7)
            else:
                writer.commit(messages, 7)
    # The mark of Spark was lost: the batch comes once more.
    writer.commit(run(staged, task, rows("99"), rows()), 7)
    assert target.values() == [b"0", b"1", b"2", b"3", b"4"]
    writer.commit(run(staged, task, rows("5"), rows(), batch=8), 8)
    assert target.values()[5:] == [b"5"]


@pytest.mark.parametrize("large", [0, 1])
def test_a_row_that_the_broker_would_refuse_is_not_staged(
    target: Target, staged: TopicWrite, task: Any, large: int
) -> None:
    """It stood in the manifest, so every repetition of the batch failed."""
    parts = [rows("1", "2"), rows("3", "4")]
    values = [b"1", b"x" * (target.message_bytes_max + 1)]
    refused = [*parts]
    refused[large] = pa.table({"value": values, "__key": ["a", "a"]})
    with pytest.raises(MessageTooLargeError, match="key 'a'"):
        run(staged, task, *refused)
    KeyShardStreamWriter(staged).commit(run(staged, task, *parts), 7)
    assert target.values() == [b"1", b"2", b"3", b"4"]


def test_rows_that_are_computed_again_are_not_checked_once_others_are_decided(
    target: Target, staged: TopicWrite, task: Any
) -> None:
    """The commit of the batch failed, and its rows are other ones now, which no broker takes."""
    writer = KeyShardStreamWriter(staged)
    writer.commit(run(staged, task, rows("1")), 7)
    large = pa.table({"value": [b"x" * (target.message_bytes_max + 1)], "__key": ["a"]})
    writer.commit(run(staged, task, large), 7)
    assert target.values() == [b"1"]


def test_a_batch_without_rows_stays_empty_when_it_is_repeated(
    target: Target, staged: TopicWrite, task: Any
) -> None:
    writer = KeyShardStreamWriter(staged)
    for part in (rows(), rows("1")):
        writer.commit(run(staged, task, part), 7)
    assert target.values() == []


def test_with_staging_adaptive_execution_is_allowed(
    target: Target, staged: TopicWrite, task: Any
) -> None:
    del task._localProperties["spark.sql.adaptive.streaming.stateless.enabled"]
    KeyShardStreamWriter(staged).commit(run(staged, task, rows("1")), 7)
    with pytest.raises(ConfigError, match="Adaptive execution"):
        run(target.write, task, rows("1"))
    assert target.values() == [b"1"]


def test_a_batch_write_publishes_the_attempts_that_succeeded_and_leaves_nothing(
    target: Target, staged: TopicWrite, task: Any, tmp_path: Path
) -> None:
    task._partitionId = 0
    writer = KeyShardBatchWriter(staged)
    _lost, message = (writer.write(iter(rows(one).to_batches())) for one in ("1", "2"))
    assert target.values() == []
    writer.commit([message, None])
    assert target.values() == [b"2"]
    other = KeyShardBatchWriter(staged)
    other.abort([other.write(iter(rows("3").to_batches()))])
    assert (target.values(), list(tmp_path.iterdir())) == ([b"2"], [])
