"""The stream reader of ``format("pulsar")``, which goes on from checkpoints of the JVM connector.

Such a checkpoint says, for each topic partition, the last message that its batches have read, and
their ends are ends of entries. So the query goes on behind them, as from a checkpoint of its own
whose floor they are. A batch that was planned there and not committed is read as it was planned.
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
from keyshard.core.position.bounds import Edge, parse_position
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition, full_topic_name
from keyshard.core.position.fingerprint import CLOCK_SKEW_MS
from keyshard.errors import CheckpointError, ConfigError
from keyshard.redaction import shown
from spark_adapter.batch_reader import KeyShardBatchReader, KeyShardSplit
from spark_adapter.bounded_options import BoundedRead
from spark_adapter.pulsar_options import position_of
from spark_adapter.stream_reader import KeyShardStreamReader
from spark_adapter.wording import told_to_spark

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard import KeyShardSource
    from spark_adapter.structure import Rows

_log = logging.getLogger(__name__)


class PulsarStreamReader(KeyShardStreamReader):
    """Reader of one query; see :class:`KeyShardStreamReader`.

    Args:
        source: What to consume.
        rows: Columns of the query's schema, and how they are made.
        made_up: Whether the query names no subscription: it has that of its checkpoint, and at its
            first start the source's, which nobody else knows (``docs/adr/0031``).
    """

    def __init__(self, source: KeyShardSource, rows: Rows, *, made_up: bool) -> None:
        super().__init__(source, rows)
        self._made_up = made_up

    _begun: tuple[Mapping[str, Any], dict[str, Any]] | None = None
    """The JVM connector's offsets that the query goes on from, and what they are here."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of the next batch; ``start`` itself when there are no rows."""
        own = self._own(start)
        self._take_subscription(own)
        end = super().latestOffset(own, limit)
        return start if end == own else end

    @told_to_spark()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One partition per hash range with data; of a batch of the JVM connector, splits."""
        if not _is_jvm(end):
            self._take_subscription(end)
            return super().partitions(start, end)
        if start == end:
            return []  # Spark compares texts, and those of Python have spaces
        if not _is_jvm(start):
            raise CheckpointError(
                "The first batch of this checkpoint was planned by the JVM connector and never "
                "committed, and only the JVM connector knows where it begins. Start the query with "
                "a new checkpoint."
            )
        positions = {name: _behind(name, last) for name, last in end.items()}
        begins = {
            name: _behind(name, start[name]) if name in start else Edge.EARLIEST.value
            for name in end
        }
        return self._reader(begins, positions).partitions()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of a partition, in a Python worker; may run several times per batch."""
        if isinstance(partition, KeyShardSplit):
            return self._reader({}, {}).read(partition)
        return super().read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """``end`` is in Spark's commit log; never raises for a transient failure."""
        if self._runtime:
            super().commit(self._own(end))

    def _reader(self, start: Mapping[str, str], end: Mapping[str, str]) -> KeyShardBatchReader:
        return KeyShardBatchReader(BoundedRead(self._source, start, end), self._rows)

    @told_to_spark()
    def _take_subscription(self, checkpoint: Mapping[str, Any]) -> None:
        """Before the start: the subscription of the checkpoint, where the query names none."""
        if not self._made_up or self._runtime:
            return
        name = Checkpoint.from_dict(checkpoint).subscription
        if self._begun or not checkpoint["partitions"]:
            _log.warning(
                "The query names no subscription and begins with a new one, %s, which its "
                "checkpoint keeps. Delete it when you delete the checkpoint: until then the broker "
                "stores what it has not acknowledged. Option predefinedSubscription names one.",
                name,
            )
        self._source = replace(self._source, subscription=name)

    @told_to_spark()
    def _own(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint that an offset is."""
        if not _is_jvm(offset):
            return offset
        if self._begun is None or self._begun[0] != offset:
            source = self._source
            if source.admin_url is None:
                # Each start of the JVM connector moves its cursor, which may be ahead since.
                raise ConfigError(
                    "The query goes on from a checkpoint of the JVM connector, and only the admin "
                    "REST interface shows whether the subscription fits it. Set admin_url."
                )
            # Nothing of it says when it was published: before now, by clocks that differ.
            floor_ms = time.time_ns() // 1_000_000 + CLOCK_SKEW_MS
            partitions = {
                TopicPartition.parse(full_topic_name(name)): PartitionCheckpoint(
                    _floor(name, last), published_ms=floor_ms
                )
                for name, last in offset.items()
            }
            checkpoint = Checkpoint("", source.subscription, source.parallelism, partitions)
            self._begun = offset, checkpoint.to_dict()
            _log.info("the query goes on from a checkpoint of the JVM connector")
        return self._begun[1]


def _is_jvm(offset: Mapping[str, Any]) -> bool:
    """Whether an offset is of the JVM connector: bytes of a message id by topic partition."""
    return bool(offset) and all(isinstance(one, list) for one in offset.values())


def _behind(name: str, last: list[Any]) -> str:
    """The position behind a batch's last entry, or ``earliest`` where it has none."""
    try:
        found = position_of(f"The JVM connector's offset of {name}", name, last, behind=True)
    except ConfigError as exc:
        raise CheckpointError(exc.message) from None
    if found == Edge.LATEST.value or found.endswith(":0"):
        raise CheckpointError(f"The JVM connector's offset of {name} is {shown(last)}, no message.")
    return found


def _floor(name: str, last: list[Any]) -> EntryId | None:
    """The last entry that is read; ``None``: none is."""
    behind = parse_position(name, _behind(name, last))
    return EntryId(behind.ledger, behind.entry - 1) if isinstance(behind, MessageId) else None
