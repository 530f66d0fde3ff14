"""The stream reader of ``format("pulsar")``, which can continue checkpoints of the JVM connector.

Such a checkpoint holds, per topic partition, the last message of the last batch, which is also the
end of an entry. The query starts after it: the entry becomes the floor of a keyshard checkpoint. A
batch that the JVM connector planned and did not commit is read as it was planned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from keyshard import Checkpoint
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.position.read_bounds import Edge, parse_position
from keyshard.core.topic_identity import CLOCK_SKEW_MS
from keyshard.errors import CheckpointError, ConfigError
from keyshard.redaction import shown
from spark_adapter.batch_reader import KeyShardBatchReader, KeyShardSplits
from spark_adapter.error_text import as_spark_error
from spark_adapter.option_parsing import BoundedRead
from spark_adapter.pulsar.values import position_of
from spark_adapter.stream_reader import KeyShardStreamReader

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard import KeyShardSource
    from spark_adapter.task_rows import Rows
    from spark_adapter.watched_process import EndAddress

_log = logging.getLogger(__name__)


class PulsarStreamReader(KeyShardStreamReader):
    """Reads one query; see :class:`KeyShardStreamReader`.

    Args:
        source: The source to consume.
        rows: Columns of the query, and how to make them.
        ended_at: Address at which tasks ask how the stream process ended.
        made_up: Whether the query names no subscription. It then uses the one of its checkpoint,
            and at its first start the generated one of ``source`` (``docs/adr/0031``).
    """

    def __init__(
        self,
        source: KeyShardSource,
        rows: Rows,
        ended_at: EndAddress | None = None,
        *,
        made_up: bool,
    ) -> None:
        super().__init__(source, rows, ended_at)
        self._made_up = made_up

    def __getstate__(self) -> dict[str, Any]:
        # Tasks read a batch of the JVM connector from the source itself.
        return {**super().__getstate__(), "_source": self._source}

    _jvm_start: tuple[Mapping[str, Any], dict[str, Any]] | None = None
    """The JVM connector's offsets with which the query started, and their keyshard checkpoint."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next batch, or ``start`` if there are no rows."""
        own = self._own(start)
        self._take_subscription(own)
        end = super().latestOffset(own, limit)
        return start if end == own else end

    @as_spark_error()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return one partition per hash range; for a batch of the JVM connector, splits."""
        if not _is_jvm(end):
            self._take_subscription(end)
            return super().partitions(start, end)
        if start == end:
            # Spark compares offsets as JSON texts. Python writes spaces, and the JVM connector does
            # not, so Spark plans an empty batch between equal offsets.
            return []
        if not _is_jvm(start):
            raise CheckpointError(
                "The JVM connector planned the first batch of this checkpoint, but never "
                "committed it, and keyshard cannot find its start.",
                "Start the query with a new checkpoint.",
            )
        positions = {name: _behind(name, last) for name, last in end.items()}
        starts = {
            name: _behind(name, start[name]) if name in start else Edge.EARLIEST.value
            for name in end
        }
        return self._reader(starts, positions).partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, in a Python worker. May run several times per batch."""
        if isinstance(partition, KeyShardSplits):
            return self._reader({}, {}).read(partition)
        return super().read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Release the batch that ends at ``end``, which is in Spark's commit log.

        Never raises for a transient failure.
        """
        if self._runtime:
            super().commit(self._own(end))

    def _reader(self, start: Mapping[str, str], end: Mapping[str, str]) -> KeyShardBatchReader:
        return KeyShardBatchReader(BoundedRead(self._source, start, end), self._rows)

    @as_spark_error()
    def _take_subscription(self, checkpoint: Mapping[str, Any]) -> None:
        """Before the start, use the subscription of the checkpoint if the query names none."""
        if not self._made_up or self._runtime:
            return
        name = Checkpoint.from_dict(checkpoint).subscription
        if self._jvm_start or not checkpoint["partitions"]:
            _log.warning(
                "The query has no subscription, so it uses the new subscription %s, whose name "
                "the checkpoint stores. Until you delete the subscription, the broker retains "
                "its unacknowledged messages: delete it together with the checkpoint. To name "
                "the subscription, set predefinedSubscription.",
                name,
            )
        self._source = replace(self._source, subscription=name)

    @as_spark_error()
    def _own(self, offset: dict[str, Any]) -> dict[str, Any]:
        """Return an offset as a keyshard checkpoint."""
        if not _is_jvm(offset):
            return offset
        if self._jvm_start is None or self._jvm_start[0] != offset:
            source = self._source
            if source.admin_url is None:
                # Each start of the JVM connector moves its cursor, perhaps ahead of the checkpoint.
                raise ConfigError(
                    "The query continues a checkpoint of the JVM connector, and the admin "
                    "interface is needed to compare the subscription with it.",
                    "Set admin_url.",
                )
            # The offset has no publish time, so take now plus the largest difference of clocks.
            floor_ms = time.time_ns() // 1_000_000 + CLOCK_SKEW_MS
            partitions = {
                TopicPartition.parse(full_topic_name(name)): PartitionCheckpoint(
                    _floor(name, last), published_ms=floor_ms
                )
                for name, last in offset.items()
            }
            checkpoint = Checkpoint("", source.subscription, source.parallelism, partitions)
            self._jvm_start = offset, checkpoint.to_dict()
            _log.info("continuing a checkpoint of the JVM connector")
        return self._jvm_start[1]


def _is_jvm(offset: Mapping[str, Any]) -> bool:
    """Whether an offset is one of the JVM connector: bytes of a message id per topic partition."""
    return bool(offset) and all(isinstance(one, list) for one in offset.values())


def _behind(name: str, last: list[Any]) -> str:
    """Return the position after a batch's last entry, or ``earliest`` if it has none."""
    try:
        found = position_of(f"The JVM connector's offset of {name}", name, last, behind=True)
    except ConfigError as exc:
        raise CheckpointError(exc.problem, exc.remedy) from None
    if found == Edge.LATEST.value or found.endswith(":0"):
        raise CheckpointError(
            f"The JVM connector's offset of {name} is {shown(last)}, which is not a message.",
            "Start the query with a new checkpoint.",
        )
    return found


def _floor(name: str, last: list[Any]) -> EntryId | None:
    """Return the last entry that was read, or ``None``."""
    behind = parse_position(name, _behind(name, last))
    return EntryId(behind.ledger, behind.entry - 1) if isinstance(behind, MessageId) else None
