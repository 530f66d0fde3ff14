"""The consumers of a source: their ranges, window, acknowledgements and rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker, StartPosition
from keyshard.config.source import SourceConfig
from keyshard.consumers.acknowledger import Acknowledger
from keyshard.consumers.identity_check import IdentityCheck
from keyshard.consumers.intake import Admit, Intake, LoadMeter, Unreadable
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.receiver import OwnedRange, RangeConsumer
from keyshard.consumers.reconnector import Reconnector
from keyshard.consumers.shared_window import SharedWindow
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.assignment import Assignment, slot_owners
from keyshard.core.ring.slot_load import SlotLoad
from keyshard.core.topic_segments import is_segment
from keyshard.core.window.admission import Budget


class Consumers:
    """All consumers of a source. Call :meth:`open`, then :meth:`start`.

    After :meth:`start`, methods may be called from any thread.

    Args:
        broker: Connection to the broker; the caller closes it.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        config: The source.
        shared: The window, its lock, and the error that ended the source.
        assignment: The owner of each range.
        first_messages: The first messages of subscriptions that begin inside a producer batch.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, shared: SharedWindow,
        assignment: Assignment, *, first_messages: Mapping[TopicPartition, MessageId],
    ) -> None:  # fmt: skip
        self._broker = broker
        self._first_messages = first_messages
        self._config = config
        self.shared = shared
        self.changing = threading.Lock()
        """Held by discovery and by a rescale while they open or close consumers."""
        self.owners: Sequence[int] = slot_owners(assignment)
        """The range that owns each slot."""
        self.range_consumers = RangeConsumers(
            broker, admin, config, assignment, shared.window.order
        )
        self.range_consumers.queue_max = shared.window.budget.queue_max

    def open(
        self,
        consumed: Collection[TopicPartition],
        start: StartPosition,
        held: Collection[TopicPartition],
    ) -> list[RangeConsumer]:
        """Subscribe every range of some topic partitions; nothing is received yet.

        Args:
            consumed: Topic partitions to receive from.
            start: Where a new subscription begins.
            held: Topic partitions in which entries are only acknowledged.

        Raises:
            SubscriptionInUseError: Another consumer held a range until the deadline.
            BrokerError: The broker cannot be reached, or refused.
        """
        opened = self.range_consumers.open(consumed, start)
        self.range_consumers.hold(held)
        return opened

    def start(
        self,
        opened: Sequence[RangeConsumer],
        admit: Admit | None,
        ahead_rows_max: int | None,
        unreadable: Unreadable | None,
        *,
        measures_load: bool,
    ) -> None:
        """Begin to receive and to acknowledge.

        Args:
            opened: The result of :meth:`open`.
            admit: Chooses the entries to take; ``None``: all.
            ahead_rows_max: Receiving pauses at this number of rows received and not yet taken.
            unreadable: Called with unreadable entries, if the source delivers them.
            measures_load: Whether all messages count in the load; otherwise it is sampled.
        """
        shared, consumers, config = self.shared, self.range_consumers, self._config
        identity_check = IdentityCheck(self._broker, consumers, shared)
        self.acknowledger = Acknowledger(
            consumers.consumer_of, identity_check.acknowledgeable,
            config.acknowledge_timeout_ms / 1000, shared.fail,
        )  # fmt: skip
        self._reconnector = Reconnector(
            self._broker,
            consumers,
            config,
            self.changing,
            identity_check=identity_check,
            fail=shared.fail,
        )
        self.intake = consumers.sink = Intake(
            shared, consumers, identity_check=identity_check, acknowledger=self.acknowledger,
            reopen=self._reconnector.reopen, config=config, admit=admit,
            ahead_rows_max=ahead_rows_max, unreadable=unreadable,
            first_messages=self._first_messages,
        )  # fmt: skip
        self._keys_elsewhere = any(worker.keeps_content for worker in self._broker.workers())
        if measures_load:
            self.intake.load_meter = LoadMeter()
        consumers.serve(opened)

    def stop(self, deadline_s: float) -> None:
        """Stop receiving, and hand over waiting acknowledgements in half of the time left."""
        self.range_consumers.stop()
        self._reconnector.stop()
        self.acknowledger.stop(max(0.1, (deadline_s - time.monotonic()) / 2))

    def join(self, deadline_s: float) -> None:
        """Wait until the threads end, or until a monotonic time."""
        self.range_consumers.join(deadline_s)
        for thread in (self._reconnector, self.acknowledger):
            thread.join(max(0.1, deadline_s - time.monotonic()))

    def acknowledge(self, released: Mapping[TopicPartition, Sequence[EntryId]]) -> None:
        """Queue acknowledgements of released entries; never waits."""
        for topic_partition, entries in released.items():
            self.acknowledger.submit(topic_partition, entries)

    def owned_ranges(self) -> list[tuple[OwnedRange, bool, bool]]:
        """Return each owned range, whether its consumer is connected, and whether it is paused.

        The consumer of a segment stands for all ranges.
        """
        pauses, assignment = self.shared.window.pauses, self.range_consumers.assignment
        found: list[tuple[OwnedRange, bool, bool]] = []
        for one, connected in self.range_consumers.connected():
            where = one.topic_partition
            paused = self.intake.paused or pauses.include(where, one.range_index)
            each = [one]
            if is_segment(where):
                each = [
                    OwnedRange(where, owner, part, one.epoch)
                    for owner, ranges in enumerate(assignment)
                    for part in ranges
                ]
            found += [(owned_range, connected, paused) for owned_range in each]
        return found

    def asked(self) -> dict[TopicPartition, bool]:
        """Return, by topic partition, whether a range waits for messages.

        Such a range is connected, not paused, and holds no rows in the window.
        """
        known, asked = self.shared.window.known, dict[TopicPartition, bool]()
        for one, connected in self.range_consumers.connected():
            where, held = one.topic_partition, known.get(one.topic_partition)
            rows = 0 if held is None else held.range_rows[one.range_index]
            asks = connected and not rows and not self.intake.is_paused(one)
            asked[where] = asked.get(where, False) or asks
        return asked

    def problems(self) -> dict[TopicPartition, str]:
        """Return one sentence for each topic partition whose broker refuses or does not answer."""
        return self.range_consumers.problems()

    def adopt(self, assignment: Assignment, budget: Budget) -> Sequence[int]:
        """Let the window follow a new assignment; return the owner of each slot."""
        with self.shared.lock:
            self.owners = slot_owners(assignment)
            self.shared.window.reassign(self.owners, budget)
            return self.owners

    def hot_keys(self, count_max: int, share_min: float) -> list[tuple[str, float]] | None:
        """Return the most frequent keys, and the share of each; ``None`` if workers keep the keys.

        The shares cover the time since the start. If the load is sampled, they are estimates for
        the last minutes.
        """
        if self._keys_elsewhere:
            return None
        with self.shared.lock:
            return self.intake.load_meter.hot_keys(count_max, share_min)

    def load(self) -> SlotLoad:
        """Return the load since the start; if it is sampled, an estimate for the last minutes."""
        with self.shared.lock:
            return self.intake.load_meter.load()
