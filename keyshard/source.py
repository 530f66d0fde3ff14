"""The public source: what to consume, and the embedded way to consume it from Python."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from keyshard.config import SourceConfig
from keyshard.core.checkpoint import Checkpoint

if TYPE_CHECKING:
    import pyarrow as pa

    from keyshard.runtime.coordinator import Coordinator

_log = logging.getLogger(__name__)


class KeyShardSource(SourceConfig):
    """Topics of a Pulsar cluster, consumed by ``parallelism`` hash ranges.

    A frozen description; nothing connects before :meth:`open`, or before a host engine starts it::

        source = KeyShardSource("orders", subscription="billing", parallelism=10)

    Args: see the fields of :class:`keyshard.config.SourceConfig`.

    Raises:
        ConfigError: A value is missing or outside its limits.
        NonPersistentTopicError: A topic is non-persistent.
    """

    def coordinator(self) -> Coordinator:
        """An unstarted runtime for this source; connects in the process that starts it."""
        from keyshard.broker.connect import connect, connect_admin  # noqa: PLC0415
        from keyshard.runtime.coordinator import Coordinator  # noqa: PLC0415

        admin = None if self.admin_url is None else connect_admin(self.admin_url)
        timeout_s = max(1, self.operation_timeout_ms // 1000)
        return Coordinator(self, lambda: connect(self.service_url, timeout_s), admin)

    def open(self, checkpoint: str | None = None) -> SourceStream:
        """Start consuming in this process.

        Args:
            checkpoint: Text of the checkpoint that was committed last; ``None`` at first start.

        Raises:
            KeyShardError: See :meth:`keyshard.runtime.coordinator.Coordinator.start`.
        """
        coordinator = self.coordinator()
        coordinator.start(None if checkpoint is None else Checkpoint.from_json(checkpoint))
        return SourceStream(coordinator)


class SourceStream:
    """A running source, for programs that are their own host; a context manager.

    Store the rows and the checkpoint of a batch together, then :meth:`commit`::

        with source.open(load_checkpoint()) as stream:
            while batch := stream.next_batch(timeout_s=60):
                for rows in batch:
                    store(rows)
                save_checkpoint(batch.checkpoint)
                stream.commit(batch)
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def next_batch(self, timeout_s: float, rows_max: int | None = None) -> SourceBatch | None:
        """The next batch; ``None`` when nothing came in time.

        Args:
            timeout_s: Longest wait for the first row, seconds.
            rows_max: Most rows; default ``batch_rows_max`` of the source.

        Raises:
            KeyShardError: What ended the source.
        """
        if not self._coordinator.wait_for_rows(timeout_s):
            return None
        checkpoint = self._coordinator.cut(rows_max)
        return None if checkpoint is None else SourceBatch(self._coordinator, checkpoint)

    def commit(self, batch: SourceBatch) -> None:
        """The batch's checkpoint is durable: acknowledge it, and all batches before it."""
        self._coordinator.release(batch.end)

    def status(self) -> dict[str, Any]:
        """Counts since the start, as plain JSON values."""
        return self._coordinator.status()

    def close(self) -> None:
        """Stop receiving, flush acknowledgements and give the ranges back. Idempotent."""
        self._coordinator.stop()

    def __enter__(self) -> SourceStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SourceBatch:
    """A planned batch: Arrow record batches, one layout partition after the other.

    The rows of one key lie in one layout partition, in publish order per topic partition.
    """

    def __init__(self, coordinator: Coordinator, end: Checkpoint) -> None:
        self._coordinator = coordinator
        self.end = end

    @property
    def checkpoint(self) -> str:
        """Text to store; :meth:`KeyShardSource.open` continues after this batch."""
        return self.end.to_json()

    @property
    def partitions(self) -> list[int]:
        """Indices of the hash ranges that have rows in this batch."""
        return self._coordinator.plan(self.end)

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Rows of one hash range, the same at every call until :meth:`SourceStream.commit`."""
        return self._coordinator.read(self.end.batch_id, partition)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for partition in self.partitions:
            yield from self.read(partition)
