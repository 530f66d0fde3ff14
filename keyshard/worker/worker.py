"""Hosts ranges: their consumers, the window of what they received, acknowledgement and rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from keyshard.arrow.columns import columns_of, record_batches
from keyshard.broker.port import Admin, Broker, StartPosition
from keyshard.config.source import SourceConfig
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.assignment import Assignment, slot_owners
from keyshard.core.ring.slot_load import SlotLoad
from keyshard.core.window.budget import Budget
from keyshard.worker.acknowledger import Acknowledger
from keyshard.worker.continuity import Continuity
from keyshard.worker.intake import Admit, Intake, Unreadable
from keyshard.worker.load_meter import LoadMeter
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import OwnedRange, RangeConsumer
from keyshard.worker.reconnector import Reconnector
from keyshard.worker.shared_window import SharedWindow


class Worker:
    """Opened first, then begun; methods that are called after that may be called by any thread.

    Args:
        broker: Connection to the broker; whoever made it closes it.
        admin: Admin REST interface, where there is one.
        config: The source.
        shared: The window, its lock, and what ended the source.
        assignment: Who owns which ranges.
        begins: The first messages of subscriptions that begin inside a producer batch.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, shared: SharedWindow,
        assignment: Assignment, *, begins: Mapping[TopicPartition, MessageId],
    ) -> None:  # fmt: skip
        self._broker = broker
        self._begins = begins
        self._config = config
        self.shared = shared
        self.changing = threading.Lock()
        """Held while consumers come and go: by discovery, and by who rescales."""
        self.owners: Sequence[int] = slot_owners(assignment)
        """The range that owns each slot."""
        self.range_consumers = RangeConsumers(broker, admin, config, assignment)
        self.range_consumers.queue_max = shared.window.budget.queue_max

    def open(
        self,
        consumed: Collection[TopicPartition],
        start: StartPosition,
        held: Collection[TopicPartition],
    ) -> list[RangeConsumer]:
        """Own every range of some topic partitions; nothing is received yet.

        Args:
            consumed: Topic partitions to receive from.
            start: Where a subscription begins that does not exist.
            held: Topic partitions to acknowledge in only.

        Raises:
            SubscriptionInUseError: Somebody else held a range until the deadline.
            BrokerError: The broker cannot be reached, or refused.
        """
        opened = self.range_consumers.open(consumed, start)
        self.range_consumers.hold(held)
        return opened

    def begin(
        self,
        opened: Sequence[RangeConsumer],
        admit: Admit | None,
        ahead_rows_max: int | None,
        unreadable: Unreadable | None,
    ) -> None:
        """Begin to receive and to acknowledge.

        Args:
            opened: What :meth:`open` gave.
            admit: Chooses what is taken; ``None``: everything.
            ahead_rows_max: Rows received and not yet taken at which receiving pauses.
            unreadable: Is told of entries that cannot be read, where those are handed out.
        """
        shared, consumers, config = self.shared, self.range_consumers, self._config
        continuity = Continuity(self._broker, consumers, shared)
        self.acknowledger = Acknowledger(
            consumers.consumer_of, continuity.acknowledgeable,
            config.acknowledge_timeout_ms / 1000, shared.fail,
        )  # fmt: skip
        self._reconnector = Reconnector(
            self._broker,
            consumers,
            config,
            self.changing,
            continuity=continuity,
            fail=shared.fail,
        )
        self.intake = consumers.sink = Intake(
            shared, consumers, continuity=continuity, acknowledger=self.acknowledger,
            reopen=self._reconnector.reopen, config=config, admit=admit,
            ahead_rows_max=ahead_rows_max, unreadable=unreadable, begins=self._begins,
        )  # fmt: skip
        consumers.serve(opened)

    def stop(self, deadline_s: float) -> None:
        """Receive nothing more, and hand over waiting acknowledgements in half of the time left."""
        self.range_consumers.stop()
        self._reconnector.stop()
        self.acknowledger.stop(max(0.1, (deadline_s - time.monotonic()) / 2))

    def join(self, deadline_s: float) -> None:
        """Wait for the threads' end until a monotonic time."""
        self.range_consumers.join(deadline_s)
        for thread in (self._reconnector, self.acknowledger):
            thread.join(max(0.1, deadline_s - time.monotonic()))

    def read(
        self, batch_id: str, index: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one layout partition of a planned batch: the same at every call.

        Args:
            batch_id: The batch.
            index: The layout partition.
            columns: Columns wanted, in their order; default the source's.

        Raises:
            BatchReleasedError: The batch was released.
            BatchUnknownError: It was never planned here, or has no such partition.
        """
        with self.shared.lock:
            located = self.shared.window.batches.partition(batch_id, index)
        return record_batches(located, columns or columns_of(self._config.metadata_columns))

    def acknowledge(self, released: Mapping[TopicPartition, Sequence[EntryId]]) -> None:
        """Acknowledge what the window released; never waits."""
        for topic_partition, entries in released.items():
            self.acknowledger.submit(topic_partition, entries)

    def owned_ranges(self) -> list[tuple[OwnedRange, bool, bool]]:
        """Every owned range, whether its consumer is connected, and whether it has no room."""
        pauses = self.shared.window.pauses
        return [
            (one, connected, pauses.include(one.topic_partition, one.range_index))
            for one, connected in self.range_consumers.connected()
        ]

    def troubles(self) -> dict[TopicPartition, str]:
        """Refusals and brokers that do not answer, of the topic partitions that have any."""
        return self.range_consumers.troubles()

    def adopt(self, assignment: Assignment, budget: Budget) -> Sequence[int]:
        """Let the window follow another assignment; returns the owner of each slot."""
        with self.shared.lock:
            self.owners = slot_owners(assignment)
            self.shared.window.reassign(self.owners, budget)
            return self.owners

    def measure_load(self) -> None:
        """From now on the load is measured."""
        self.intake.load_meter = LoadMeter()

    def load(self) -> SlotLoad:
        """The load since :meth:`measure_load`."""
        with self.shared.lock:
            meter = self.intake.load_meter
            return SlotLoad() if meter is None else meter.load()
