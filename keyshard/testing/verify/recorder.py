"""Writes the history of a source in Python: what its host sees, and what passes at its broker.

::

    with HistoryWriter("history.jsonl") as history:
        recorder = Recorder(history, worker="host")
        coordinator = Coordinator(source, lambda: recorder.broker(PulsarBroker(connection)))
        coordinator.start()
        stream = SourceStream(coordinator)
        while batch := stream.next_batch(timeout_s=60):
            for rows in recorder.rows(batch):  # instead of: for rows in batch
                store(rows)
            save_checkpoint(batch.checkpoint)
            recorder.checkpointed(batch)  # it is durable now
            stream.commit(batch)

Without :meth:`Recorder.broker`, a plain ``source.open()`` does as well; then the history lacks
ranges, acknowledgements and what the broker delivered.

A recorder is an observer of handlers too: ``source.run(handle, observers=[recorder])``. Parked and
rejected messages are done when their dead letter is confirmed, which :meth:`Recorder.broker` sees.

The values must be those of a :class:`keyshard.testing.verify.workloads.Workload` with keys;
messages of others are recorded without a sequence number.
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
from keyshard.source import SourceBatch
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.recording_broker import RecordingBroker, message_name


class History(Protocol):
    """Where events go, such as a :class:`keyshard.testing.verify.history.HistoryWriter`."""

    def write_all(self, events: Iterable[Event]) -> None: ...


class Recorder:
    """Writes the events of one host; may be used from several threads.

    Args:
        history: Where they go.
        worker: Name of this host, which a ``crashed`` event names when it is killed.
        clock: Seconds, the same clock for all writers of a history.
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
        """A broker that also writes ranges, deliveries and acknowledgements to the history.

        Args:
            broker: What does the work.
            epoch: Number of the assignment generation now, where somebody counts.
            subscription: The one that the history is about, where parked keys need another one;
                ``None``: whatever is subscribed.
        """
        return RecordingBroker(
            broker, self._history.write_all, self._worker, self._clock,
            epoch=epoch, subscription=subscription,
        )  # fmt: skip

    def sent(self, topic: str, per_key: Mapping[str, int]) -> None:
        """A workload was published, and confirmed.

        Args:
            topic: Full topic name.
            per_key: Number of messages of each key, as a ``ProduceReport`` tells it.
        """
        self._history.write_all(sent_events(topic, per_key, self._clock()))

    def rows(self, batch: SourceBatch) -> Iterator[pa.RecordBatch]:
        """One run of a batch: its record batches, each written down before it is handed out."""
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
        """The checkpoint of a batch is durable; call it before ``SourceStream.commit``."""
        self._write("checkpointed", batch=batch.end.batch_id)

    # -- handlers: a recorder is an observer of ``source.run`` -------------------------------------

    def started(self, message: Message) -> None:
        """A handler begins."""
        self._handled("started", message)

    def completed(self, message: Message, _seconds: float) -> None:
        """A handler returned."""
        self._handled("completed", message)

    def failed(self, message: Message, _seconds: float, _error: BaseException) -> None:
        """A handler raised."""
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
        """The rows of a batch of ``source.batches()``, written down before they are handed out.

        Args:
            name: Of the batch, another one for each.
            batch: The batch.
        """
        self._write("started", batch=name)
        where = {"worker": self._worker, "batch": name, "part": 0}
        self._history.write_all(row_events(self._clock(), batch.records, where))
        self._write("completed", batch=name)
        return batch.records

    def acknowledging(self, name: str) -> None:
        """The program is done with a batch; call it before ``Batch.ack``."""
        self._write("checkpointed", batch=name)

    # -- faults ------------------------------------------------------------------------------------

    def crashed(self) -> None:
        """This host lost what it held in memory."""
        self._write("crashed")

    def faults_stopped(self) -> None:
        """No fault is injected from now on."""
        self._history.write_all([Event(self._clock(), "faults_stopped")])

    def _write(self, kind: str, batch: str | None = None) -> None:
        self._history.write_all([Event(self._clock(), kind, batch=batch, worker=self._worker)])


def part_range(end: Checkpoint, part: int) -> HashRange:
    """The part of the ring whose rows lie in one partition of a batch's layout.

    Args:
        end: The batch's end checkpoint; it says how many ranges share a partition.
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
"""Columns that name the message of a row."""


def sent_events(topic: str, per_key: Mapping[str, int], t: float) -> Iterator[Event]:
    """A ``sent`` for each message of a workload.

    Args:
        topic: Full topic name.
        per_key: Number of messages of each key.
        t: When they were confirmed, seconds.
    """
    for key, count in per_key.items():
        for seq in range(count):
            yield Event(t, "sent", topic=topic, key=key, seq=seq)


def row_events(t: float, records: pa.RecordBatch, where: Mapping[str, Any]) -> Iterator[Event]:
    """A ``delivered`` for each row.

    Args:
        t: When, seconds.
        records: Rows that have at least :data:`ROW_COLUMNS`.
        where: Fields that all of them share, such as ``batch`` and ``part``.
    """
    columns = (records.column(name).to_pylist() for name in ROW_COLUMNS)
    for value, key, topic, partition, message_id, slot in zip(*columns, strict=True):
        ledger, entry, index = map(int, message_id.split(":"))
        routing_key, seq = message_name(value, None if slot is None else key)
        yield Event(
            t, "delivered", topic=topic, partition=partition, ledger=ledger, entry=entry,
            index=index, key=routing_key, seq=seq, **where,
        )  # fmt: skip
