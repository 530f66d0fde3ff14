"""What the receive threads call: received entries go into the window."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from keyshard.arrow.content import entry_block, only
from keyshard.broker.refused_entries import entry_of
from keyshard.config.source import SourceConfig
from keyshard.core.holes.settling import Proofs
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.reception import Rest
from keyshard.core.window.partition_window import Receipt
from keyshard.errors import EncryptedMessageError, KeyShardError, UnreadableEntryError
from keyshard.worker.acknowledger import Acknowledger
from keyshard.worker.continuity import Continuity
from keyshard.worker.load_meter import LoadMeter
from keyshard.worker.oddities import Oddities
from keyshard.worker.range_consumers import RangeConsumers
from keyshard.worker.receiver import OwnedRange, RangeConsumer, routing_of
from keyshard.worker.shared_window import SharedWindow

COMPARE_AGAIN_S = 0.5
"""Pause of a range of which nothing shows yet that it is what it was, seconds."""


class Admitted(NamedTuple):
    """What is to be taken of some entries."""

    entries: Sequence[EntryBlock]
    rest: Rest | None
    """Whether its range consumer takes nothing for a while."""


Unreadable = Callable[[TopicPartition, EntryId, str], None]
"""Is told where an entry lies that cannot be read, and what is wrong with it, before it is handed
out as a message without key whose value is what is stored, and whose time is that of receipt."""
Admit = Callable[[RangeConsumer, Sequence[EntryBlock]], Admitted]
"""Chooses those of some entries that belong to the run."""


class Intake:
    """The :class:`~keyshard.worker.receiver.Sink` of one worker.

    Args:
        shared: Where entries go.
        range_consumers: Who owns what.
        continuity: Tells whether a topic partition is what it was.
        acknowledger: Acknowledges what is committed already.
        reopen: Gives a range consumer a new consumer, as the sink's ``reopen``.
        config: The source.
        admit: Chooses what is taken; ``None``: everything.
        ahead_rows_max: Rows received and not yet taken at which receiving pauses; ``None``: never.
        unreadable: Is told of entries that cannot be read; ``None``: they are not handed out.
        begins: The first messages of subscriptions that begin inside a producer batch: what lies
            before in its entry is nobody's, as if somebody else had acknowledged it.
    """

    def __init__(
        self, shared: SharedWindow, range_consumers: RangeConsumers, *, continuity: Continuity,
        acknowledger: Acknowledger, reopen: Callable[[RangeConsumer], bool], config: SourceConfig,
        admit: Admit | None, ahead_rows_max: int | None, unreadable: Unreadable | None = None,
        begins: Mapping[TopicPartition, MessageId] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._begins = begins
        self._shared = shared
        self._range_consumers = range_consumers
        self._continuity = continuity
        self._acknowledger = acknowledger
        self.reopen = reopen
        self._config = config
        self._admit = admit
        self.ahead_rows_max = ahead_rows_max
        self._unreadable = unreadable
        self._oddities = Oddities(fail_on_misrouted=config.on_misrouted == "fail")
        self.load_meter: LoadMeter | None = None
        """Measures the load, where somebody may rescale."""

    def is_paused(self, owned_range: OwnedRange) -> bool:
        window, ahead_max = self._shared.window, self.ahead_rows_max
        return (
            (ahead_max is not None and window.received_rows >= ahead_max)
            or self._range_consumers.suspends(owned_range)
            or window.pauses.include(owned_range.topic_partition, owned_range.range_index)
        )

    def deliver(self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]) -> Rest | None:
        return self._deliver(range_consumer, entries)

    def _deliver(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str = ""
    ) -> Rest | None:
        entries, rest = self._admitted(range_consumer, entries, wrong)
        if entries:
            self._take(range_consumer, entries, wrong)
        return rest

    def _take(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str
    ) -> None:
        owned_range = range_consumer.owned_range
        misrouted = keyless = unreadable = 0
        for block in entries:
            outside, without_key = routing_of(block, range_consumer)
            misrouted += outside
            keyless += without_key
            if block.unreadable:
                unreadable += block.unreadable
                self._oddities.unreadable(owned_range, block)
        if misrouted:
            self._oddities.misrouted(owned_range, misrouted)
        with self._shared.lock:
            if not self._range_consumers.owns(owned_range):
                return  # it is delivered again, to who owns it now
            committed = self._receive(owned_range, entries, wrong)
            counters = self._shared.window.counters
            counters.misrouted += misrouted
            counters.keyless += keyless
            counters.unreadable += unreadable
            self._shared.lock.notify_all()
        if committed:
            self._acknowledger.submit(owned_range.topic_partition, committed)

    def refused(self, range_consumer: RangeConsumer, error: UnreadableEntryError) -> Rest | None:
        owned_range, entry_id = range_consumer.owned_range, entry_of(error)
        where, stored = owned_range.topic_partition, _of_stored(entry_id, error.stored)
        if isinstance(error, self._config.parked) and self._unreadable is not None:
            return self._deliver(range_consumer, [stored], error.message)
        if self._admit is not None:
            taken, rest = self._admit(range_consumer, [stored])
            if not taken:
                return rest  # It lies behind the run.
        if not isinstance(error, self._config.skipped):
            raise error
        if not self._continuity.may_receive(where, [entry_id]):
            return Rest(time.monotonic() + COMPARE_AGAIN_S)
        with self._shared.lock:
            window = self._shared.window
            if not self._range_consumers.owns(owned_range) or window.known[where].holds(entry_id):
                return None  # it could be read once: it is acknowledged with its batch
            new, counters = self._settle(where, entry_id), window.counters
            if isinstance(error, EncryptedMessageError):
                counters.encrypted_skipped += new
                skipped = counters.encrypted_skipped
            else:
                counters.corrupt_skipped += new
                skipped = counters.corrupt_skipped
        self._oddities.skipped(error, skipped)
        self._acknowledger.submit(where, [entry_id])
        return None

    def _admitted(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str
    ) -> Admitted:
        """Those of some entries that are to be taken now."""
        where = range_consumer.owned_range.topic_partition
        if not self._continuity.may_receive(where, (block.id for block in entries)):
            # Everything comes again to the consumer that is subscribed then.
            return Admitted((), Rest(time.monotonic() + COMPARE_AGAIN_S))
        begins = self._begins.get(where)
        # Of one that cannot be read nobody knows which messages are its own: all of it is.
        if begins is not None and not wrong:
            entries = self._from(begins, range_consumer, entries)
        if self._admit is None:
            return Admitted(entries, None)
        return self._admit(range_consumer, entries)

    def _from(
        self, begins: MessageId, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]
    ) -> list[EntryBlock]:
        """What some entries have from the first message of the subscription on."""
        found: list[EntryBlock] = []
        for block in entries:
            if block.id == begins[:2] and block.indices[0] < begins.batch_index:
                own = frozenset(one for one in block.indices if one >= begins.batch_index)
                if own:
                    found.append(only(block, own))
                else:
                    self._pass_over(range_consumer.owned_range, block.id)
            else:
                found.append(block)
        return found

    def _pass_over(self, owned_range: OwnedRange, entry_id: EntryId) -> None:
        """An entry that has no message of the subscription counts as settled."""
        with self._shared.lock:
            if not self._range_consumers.owns(owned_range):
                return  # it is delivered again, to who owns it now
            self._settle(owned_range.topic_partition, entry_id)
        self._acknowledger.submit(owned_range.topic_partition, [entry_id])

    def _settle(self, where: TopicPartition, entry_id: EntryId) -> bool:
        """Count an entry as settled, under the lock; whether it was not."""
        window = self._shared.window
        if window.known[where].state.settled(entry_id):
            return False
        settled = EntrySet.of([entry_id])
        proofs = Proofs(settled=settled, published_ms=time.time_ns() // 1_000_000)
        window.prove(where, proofs, window.known[where].owners)
        return True

    def _receive(
        self, owned_range: OwnedRange, entries: Sequence[EntryBlock], wrong: str
    ) -> list[EntryId]:
        """Put entries into the window; those that are committed already."""
        window, where = self._shared.window, owned_range.topic_partition
        accepted: list[EntryBlock] = []
        committed: list[EntryId] = []
        for block in entries:
            receipt = window.receive(where, owned_range.range_index, block)
            if receipt is Receipt.COMMITTED:
                committed.append(block.id)
            elif receipt is Receipt.ACCEPTED:
                accepted.append(block)
                if wrong and self._unreadable is not None:
                    # Another delivery of it may be readable, and is handled if it comes first.
                    self._unreadable(where, block.id, wrong)
                    window.known[where].date(block, time.time_ns() // 1_000_000)
        if self.load_meter is not None:
            self.load_meter.add(accepted)
        was_full = window.pauses.any_full
        window.pauses.received(where)
        if window.pauses.any_full and not was_full:
            self._shared.full_since_s = time.monotonic()
        return committed

    def fail(self, error: KeyShardError) -> None:
        self._shared.fail(error)


def _of_stored(entry_id: EntryId, stored: bytes) -> EntryBlock:
    """An entry that cannot be read, as one message of what is stored."""
    return entry_block(
        entry_id,
        batch_size=1,
        batched=False,
        indices=range(1),
        values=[stored],
        partition_keys=[None],
        ordering_keys=[None],
        publish_ms=0,
        event_ms=[0],
        properties=[{}],
    )
