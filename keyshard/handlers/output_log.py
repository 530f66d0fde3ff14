"""Outputs that are in the checkpoint before they are published, so that each is stored once.

In this module, a *batch* is a batch of outputs: messages that are published under one batch id. It
takes these steps::

    1. begin     the outputs of completed messages become a batch
    2. save      the checkpoint with the batch and the completed messages is durable
    3. publish   under the name and batch id of the checkpoint; repeated until it is confirmed
    4. release   the entries of the messages are acknowledged

If the process ends before step 2, nothing was published, and the messages are handled again. If it
ends later, the next start publishes the batch again, and the broker drops what it has.
"""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import pyarrow as pa

from keyshard.base_error import one_line
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker, EntryProducer
from keyshard.columns.outgoing import Outgoing, OutgoingMessage
from keyshard.config.sink import SinkConfig
from keyshard.core.lanes.lane_status import OutputsStatus
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.outputs import (
    Handled,
    Outputs,
    TopicRows,
    check_owner,
    copied,
    forget,
    note,
)
from keyshard.core.publishing import BATCH_ID_MAX, HashingScheme
from keyshard.errors import BatchMismatchError, BrokerError, CheckpointError, ConfigError
from keyshard.publishing.batch_part import ENTRY_OVERHEAD
from keyshard.publishing.batch_writer import BatchWriter, place
from keyshard.publishing.preflight import check_deduplication

TOPICS_MAX = 1_000
"""Maximum number of topics that the outputs of a run go to: each keeps producers."""
T = TypeVar("T")
SHARES = 4
"""Topic partitions that share the pending bytes of a producer that is opened early."""


class OpenTopics(Generic[T]):
    """The topics of the outputs of a run, each opened with its first output.

    Args:
        sink: Options of the sink. Its topic is that of outputs that name none.
        open_topic: Opens the topic of the options that it gets.
    """

    def __init__(self, sink: SinkConfig, open_topic: Callable[[SinkConfig], T]) -> None:
        self._sink = sink
        self._open = open_topic
        self._named: dict[str | None, T] = {}
        """By the name that an output gives."""
        self._opened: dict[str, T] = {}
        """By the full name of the topic."""

    def known(self, name: str | None) -> T | None:
        """Return a topic that is open; ``None`` if it is not. Any thread may call it."""
        return self._named.get(name)

    def of(self, name: str | None) -> T:
        """Return a topic; the first call opens it.

        Args:
            name: Its name; ``None`` for the topic of the sink.

        Raises:
            KeyShardError: It cannot be opened.
        """
        found = self._named.get(name)
        if found is None:
            sink = self._sink if name is None else replace(self._sink, topic=name)
            found = self._opened.get(sink.topic)
            if found is None:
                if len(self._opened) >= TOPICS_MAX:
                    raise ConfigError(
                        f"Outputs go to {TOPICS_MAX:,} topics already, which is the most, and "
                        f"{name} is not opened.",
                        "Use keys or properties instead of so many topics.",
                    )
                found = self._opened[sink.topic] = self._open(sink)
            self._named[name] = found
        return found

    def opened(self) -> tuple[T, ...]:
        """Return all open topics."""
        return tuple(self._opened.values())


@dataclass(slots=True, eq=False)
class OutputTopic:
    """An open topic."""

    name: str
    """Full name."""
    partitions: tuple[TopicPartition, ...]
    message_bytes_max: int
    """Size up to which a message fits for certain, bytes."""


@dataclass(frozen=True, slots=True)
class _TopicBatch:
    """The outputs of the newest batch for one topic."""

    topic: OutputTopic
    partitions: int
    rows: Outgoing
    scheme: HashingScheme


class OutputLog:
    """The outputs of a run. Its owner calls it from one thread at a time.

    Args:
        sink: Options of the sink. With a checkpoint, it has a ``sink_id``.
        checkpointed: Whether there is a checkpoint. Without one, a batch whose publication failed
            may be stored twice.
    """

    def __init__(self, sink: SinkConfig, *, checkpointed: bool = True) -> None:
        self._sink = sink
        self._checkpointed = checkpointed
        self._broker: Broker | None = None
        self._topics = OpenTopics(sink, self._open)
        self._outputs = Outputs(sink.sink_id or "", secrets.token_hex(4))
        self._batch: list[_TopicBatch] = []
        self._new = False
        """Whether the batch was never given to the broker."""
        self.handled: Handled = {}
        """Handled messages of entries that are not delivered, as the checkpoint has them."""
        self.published = 0
        """Number of messages that were published, those of repeated attempts included."""
        self.confirmed = self.failed = 0
        """Number of those that the broker confirmed, and of those that it did not."""

    def open(self, stored: Checkpoint | None) -> None:
        """Connect, and publish the batch of the checkpoint, which may not be stored yet.

        Raises:
            CheckpointMismatchError: The checkpoint has outputs of another sink.
            DeduplicationError: The broker does not deduplicate the topic.
            KeyShardError: The broker is not reachable or refuses, or the batch is not confirmed in
                time.
        """
        outputs = None if stored is None else stored.outputs
        check_owner(outputs, self._sink.sink_id)
        if self._checkpointed:
            check_deduplication(self._sink, [self._sink.topic])
        self._broker = connect(self._sink.how_to_connect())
        self._outputs = outputs or self._outputs
        # A run without a sink has them in the checkpoint itself.
        before = {} if stored is None else stored.handled
        self.handled = copied(self._outputs.handled or before)
        self._writer = self._new_writer()
        self.topic(None)
        self._batch = [self._restored(*item) for item in self._outputs.topics.items()]
        self.publish()

    def known(self, name: str | None) -> OutputTopic | None:
        """Return a topic that is open; ``None`` if it is not. Any thread may call it."""
        return self._topics.known(name)

    def topic(self, name: str | None) -> OutputTopic:
        """Open a topic; see :meth:`OpenTopics.of`."""
        return self._topics.of(name)

    def check(self, topic: OutputTopic, message: OutgoingMessage) -> None:
        """Check the size of a message.

        Raises:
            MessageTooLargeError: It exceeds the limit of the broker.
        """
        if message.size() > topic.message_bytes_max:
            self._open_producer(topic.partitions).check(message)

    def begin(
        self, rows: Mapping[str, Outgoing], done: Iterable[tuple[TopicPartition, EntryId, int]]
    ) -> None:
        """Make a batch, after the earlier one was published.

        Args:
            rows: Messages by full name of their topic, which is open.
            done: Handled messages: topic partition, entry and batch index.
        """
        assert not self._batch, "the earlier batch is not confirmed"
        note(self.handled, done)
        if rows:
            self._next_batch()
        self._new = True
        topics = {name: self.topic(name) for name in rows}
        self._batch = [
            _TopicBatch(
                topics[name], len(topics[name].partitions), columns, self._sink.hashing_scheme
            )
            for name, columns in rows.items()
        ]

    def forget(self, entries: Mapping[TopicPartition, Iterable[EntryId]]) -> None:
        """Forget the handled messages of entries that are in the checkpoint."""
        forget(self.handled, entries)

    def state(self) -> Outputs:
        """Return the part of the next checkpoint about outputs."""
        topics = {
            one.topic.name: TopicRows(
                one.partitions, b64encode(one.rows.to_bytes()).decode(), one.scheme
            )
            for one in self._batch
        }
        self._outputs = replace(self._outputs, topics=topics, handled=self.handled)
        return self._outputs

    @property
    def unsaved(self) -> bool:
        """Whether the newest :meth:`state` has a confirmed batch. The next checkpoint drops it."""
        return bool(self._outputs.topics) and not self._batch

    def status(self) -> OutputsStatus:
        """Return JSON values. Any thread may call it."""
        return {
            "topic": self._sink.topic,
            "guarantee": "exactly once" if self._checkpointed else "at least once",
            "waiting": 0, "unconfirmed": self.unconfirmed, "forSeconds": 0.0, "error": "",
        }  # fmt: skip

    @property
    def unconfirmed(self) -> int:
        """Number of messages of the newest batch that are not known to be stored."""
        return sum(len(one.rows) for one in self._batch)

    def publish(self) -> None:
        """Publish the newest batch, which is in the durable checkpoint. Idempotent.

        Raises:
            KeyShardError: Not everything was confirmed. Call it again if the error is retriable.
        """
        if not self._batch:
            return
        batch_id = self._outputs.batch_id
        placed = [
            found
            for one in self._batch
            for found in place(
                one.rows, one.topic.partitions[: one.partitions], batch_id, one.scheme
            )
        ]
        new, self._new = self._new, False
        self.published += self.unconfirmed
        try:
            self._writer.write(placed, batch_id, new=new)
        except BaseException:
            self.failed += self.unconfirmed
            self._writer.leave()
            raise
        self.confirmed += self.unconfirmed
        self._batch = []

    def abandon(self) -> None:
        """Disconnect while another thread publishes, which then fails."""
        if self._broker is not None:
            with suppress(BrokerError):
                self._broker.close()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._broker is not None:
            self._writer.leave()
            with suppress(BrokerError):
                self._broker.close()

    def _next_batch(self) -> None:
        if self._outputs.batch_id < BATCH_ID_MAX:
            self._outputs = replace(self._outputs, batch_id=self._outputs.batch_id + 1)
            return
        # A new producer name has batch ids from 1 on. All batches of the old one are confirmed.
        self._writer.leave()
        self._outputs = replace(self._outputs, batch_id=1, run_id=secrets.token_hex(4))
        self._writer = self._new_writer()

    def _restored(self, name: str, stored: TopicRows) -> _TopicBatch:
        topic = self.topic(name)
        if len(topic.partitions) < stored.partitions:
            raise BatchMismatchError(
                f"Topic {name} has {len(topic.partitions)} topic partitions, but the outputs of "
                f"the checkpoint were distributed over {stored.partitions}.",
                "If the topic was created again, use another checkpoint.",
            )
        try:
            rows = Outgoing.from_bytes(b64decode(stored.rows, validate=True))
        except (ValueError, TypeError, OSError, pa.ArrowException) as exc:
            raise CheckpointError(
                f"The outputs of the checkpoint for {name} cannot be read: {one_line(exc)}.",
                "Restore the checkpoint, or start with a new one.",
            ) from exc
        return _TopicBatch(topic, stored.partitions, rows, stored.scheme)

    def _new_writer(self) -> BatchWriter:
        assert self._broker is not None
        name = f"{self._outputs.sink_id}-{self._outputs.run_id}"
        return BatchWriter(self._broker, self._sink, name if self._checkpointed else None)

    def _open_producer(self, partitions: Sequence[TopicPartition]) -> EntryProducer:
        return self._writer.open(partitions[0], self._sink.pending_bytes_max // SHARES)

    def _open(self, sink: SinkConfig) -> OutputTopic:
        if sink.topic != self._sink.topic and self._checkpointed:  # open() checks the sink's topic
            check_deduplication(sink, [sink.topic])
        assert self._broker is not None
        partitions = self._broker.partitions(sink.topic, create=True)
        limit = self._open_producer(partitions).message_bytes_max - ENTRY_OVERHEAD
        return OutputTopic(sink.topic, partitions, limit)
