"""The parquet query with a look at the disk before every acknowledgement.

Run as a process by test_ack_point.py. The stream process notes, as JSON lines in the file that
KEYSHARD_TEST_NOTES names, how many entries are about to be acknowledged, and how many of them are
in no batch that Spark's commit log names at that moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spark_adapter
from examples import parquet_query
from keyshard import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from spark_adapter import data_source
from spark_adapter.option_parsing import parse_options
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.task_rows import Rows


def uncommitted(directory: Path, topic_partition: TopicPartition, entries: EntrySet) -> EntrySet:
    """Those of the entries that are in no batch which Spark's commit log names at this moment."""
    for path in (directory / "commits").glob("[0-9]*"):
        planned = (directory / "offsets" / path.name).read_text().splitlines()[-1]
        state = Checkpoint.from_json(planned).partitions.get(topic_partition)
        if state is not None:
            entries -= state.batch
    return entries


class WatchedReader(KeyShardStreamReader):
    """Notes what is on disk before entries are handed over to be acknowledged."""

    def _start(self, offset: dict[str, Any], *, planned: bool = False) -> Any:
        runtime = super()._start(offset, planned=planned)
        notes = Path(os.environ["KEYSHARD_TEST_NOTES"])
        acknowledger = runtime.coordinator.consumers.acknowledger
        submit = acknowledger.submit

        def noted(topic_partition: TopicPartition, entries: Sequence[EntryId]) -> None:
            early = uncommitted(notes.parent / "checkpoint", topic_partition, EntrySet.of(entries))
            with notes.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"entries": len(entries), "early": len(early)}) + "\n")
            submit(topic_partition, entries)

        acknowledger.submit = noted  # type: ignore[method-assign]
        return runtime


class WatchedSource(spark_adapter.KeyShardDataSource):
    """The data source with the watched reader."""

    def streamReader(self, schema: Any) -> WatchedReader:  # noqa: N802 - Spark's name
        return WatchedReader(parse_options(self.options), Rows(schema.fieldNames()))


if __name__ == "__main__":
    data_source.KeyShardDataSource = WatchedSource  # type: ignore[misc]
    # Spark knows the format without it, and the session would keep the source of the package.
    spark_adapter._is_known = lambda *_: False
    parquet_query.main()
