"""Writes the history of a source in Python: the events of its host and of its broker.

::

    with HistoryWriter("history.jsonl") as history:
        recorder = Recorder(history, worker="host")
        coordinator = Coordinator(source, lambda: recorder.broker(ClientBroker(connection)))
        coordinator.start()
        stream = SourceStream(coordinator)
        while batch := stream.next_batch(timeout_s=60):
            for rows in recorder.rows(batch):  # instead of: for rows in batch
                store(rows)
            save_checkpoint(batch.checkpoint)
            recorder.checkpointed(batch)  # it is durable now
            stream.commit(batch)

Without :meth:`Recorder.broker`, a plain ``source.open()`` works too; then the history lacks ranges,
acknowledgements and deliveries by the broker.

A recorder is also an observer of handlers: ``source.run(handle, observers=[recorder])``. Parked and
rejected messages are done when their dead letter is confirmed, which :meth:`Recorder.broker`
records.

The values must be those of a :class:`keyshard.testing.verify.workloads.Workload` with keys; other
messages are recorded without a sequence number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from keyshard.broker.port import Broker
from keyshard.core.message import Message
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.core.window.layout import shared_partition
from keyshard.handlers.batches import Batch
from keyshard.source_stream import SourceBatch
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recording_broker import RecordingBroker, message_name


class History(Protocol):
    """Destination of events, such as a :class:`keyshard.testing.verify.history.HistoryWriter`."""

    def write_all(self, events: Iterable[Event]) -> None: ...


class Recorder:
    """Writes the events of one host; several threads may use it.

    Args:
        history: Destination of the events.
        worker: Name of this host; a ``crashed`` event names it when it is killed.
        clock: Returns seconds, of the same clock for all writers of a history.
    """

    def __init__(
        self, history: History, worker: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._history = history
        self._worker = worker
        self._clock = clock

    def broker(
        self,
        broker: Broker,
        epoch: Callable[[], int | None] = lambda: None,
        subscription: str | None = None,
    ) -> RecordingBroker:
        """Wrap a broker so that ranges, deliveries and acknowledgements are recorded.

        Args:
            broker: The broker that does the work.
            epoch: Returns the number of the current assignment, or ``None`` if nothing counts it.
            subscription: The only subscription to record. A source with handlers has another one,
                of its dead-letter topic. ``None``: record all subscriptions.
        """
        return RecordingBroker(
            broker, self._history.write_all, self._worker, self._clock,
            epoch=epoch, subscription=subscription,
        )  # fmt: skip

    def sent(self, topic: str, per_key: Mapping[str, int]) -> None:
        """Record that a workload was published and confirmed.

        Args:
            topic: Full topic name.
            per_key: Number of messages of each key, as in a ``ProduceReport``.
        """
        self._history.write_all(sent_events(topic, per_key, self._clock()))

    def rows(self, batch: SourceBatch) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of one run of a batch, each recorded before it is yielded."""
        name = batch.end.batch_id
        self._write("started", batch=name)
        for part in batch.partitions:
            where = {
                "worker": self._worker,
                "batch": name,
                "part": part,
                "range": str(part_range(batch.end, part)),
            }
            for records in batch.read(part):
                self._history.write_all(row_events(self._clock(), records, where))
                yield records
        self._write("completed", batch=name)

    def checkpointed(self, batch: SourceBatch) -> None:
        """Record that a batch's checkpoint is durable; call it before ``SourceStream.commit``."""
        self._write("checkpointed", batch=batch.end.batch_id)

    # -- handlers: a recorder is an observer of ``source.run`` -------------------------------------

    def started(self, message: Message) -> None:
        """Record that a handler begins."""
        self._handled("started", message)

    def completed(self, message: Message, _seconds: float) -> None:
        """Record that a handler returned."""
        self._handled("completed", message)

    def failed(self, message: Message, _seconds: float, _error: BaseException) -> None:
        """Record that a handler raised."""
        self._handled("failed", message)

    def _handled(self, kind: str, message: Message) -> None:
        key, seq = message_name(message.value, message.routing_key)
        ledger, entry, index = message.message_id
        self._history.write_all([
            Event(
                self._clock(), kind, topic=message.topic, partition=message.partition,
                ledger=ledger, entry=entry, index=index, key=key, seq=seq, worker=self._worker,
            )
        ])  # fmt: skip

    # -- batches that a program acknowledges -------------------------------------------------------

    def records(self, name: str, batch: Batch) -> pa.RecordBatch:
        """Record and return the rows of a batch of ``source.batches()``.

        Args:
            name: Name of the batch, unique in the history.
            batch: The batch.
        """
        self._write("started", batch=name)
        where = {"worker": self._worker, "batch": name, "part": 0}
        self._history.write_all(row_events(self._clock(), batch.records, where))
        self._write("completed", batch=name)
        return batch.records

    def acknowledging(self, name: str) -> None:
        """Record that the program completed a batch; call it before ``Batch.ack``."""
        self._write("checkpointed", batch=name)

    # -- faults ------------------------------------------------------------------------------------

    def crashed(self) -> None:
        """Record that this host was killed, or stopped as if it had been killed."""
        self._write("crashed")

    def faults_stopped(self) -> None:
        """Record that no fault is injected from now on."""
        self._history.write_all([Event(self._clock(), "faults_stopped")])

    def _write(self, kind: str, batch: str | None = None) -> None:
        self._history.write_all([Event(self._clock(), kind, batch=batch, worker=self._worker)])


def part_range(end: Checkpoint, part: int) -> HashRange:
    """Return the part of the ring whose rows one partition of a batch contains.

    A partition of a small batch merges several adjacent hash ranges.

    Args:
        end: The batch's end checkpoint, with the numbers of its ranges and of its partitions.
        part: Number of the partition.
    """
    count = end.merged or end.ranges
    ranges = [
        hash_range
        for number, hash_range in enumerate(split_ring(end.ranges))
        if shared_partition(number, end.ranges, count) == part
    ]
    return HashRange(ranges[0].start, ranges[-1].end)


ROW_COLUMNS = ("value", "__key", "__topic", "__partition", "__messageId", "__slot")
"""Columns that identify the message of a row."""


def sent_events(topic: str, per_key: Mapping[str, int], t: float) -> Iterator[Event]:
    """Yield a ``sent`` event for each message of a workload.

    Args:
        topic: Full topic name.
        per_key: Number of messages of each key.
        t: Time of the confirmation, seconds.
    """
    for key, count in per_key.items():
        for seq in range(count):
            yield Event(t, "sent", topic=topic, key=key, seq=seq)


def row_events(t: float, records: pa.RecordBatch, where: Mapping[str, Any]) -> Iterator[Event]:
    """Yield a ``delivered`` event for each row.

    Args:
        t: Time of the delivery, seconds.
        records: Rows with at least :data:`ROW_COLUMNS`.
        where: Fields that all events share, such as ``batch`` and ``part``.
    """
    columns = (records.column(name).to_pylist() for name in ROW_COLUMNS)
    for value, key, topic, partition, message_id, slot in zip(*columns, strict=True):
        ledger, entry, index = map(int, message_id.split(":"))
        routing_key, seq = message_name(value, None if slot is None else key)
        yield Event(
            t, "delivered", topic=topic, partition=partition, ledger=ledger, entry=entry,
            index=index, key=routing_key, seq=seq, **where,
        )  # fmt: skip
