"""The sink of the receive threads: puts received entries into the window."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from keyshard.broker.unreadable_entries import entry_of
from keyshard.columns.content import entry_block, gather, metadata_in
from keyshard.columns.entry_rows import only
from keyshard.config.source import UNREADABLE, SourceConfig
from keyshard.consumers.acknowledger import Acknowledger
from keyshard.consumers.identity_check import IdentityCheck
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.receive_state import Rest
from keyshard.consumers.receiver import OwnedRange, RangeConsumer, routing_of
from keyshard.consumers.shared_window import SharedWindow
from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.key_slot import routing_key
from keyshard.core.ring.slot_load import KEYS_MAX, SlotLoad
from keyshard.core.window.partition_window import ReceiveResult
from keyshard.errors import (
    EncryptedMessageError,
    KeyShardError,
    MisroutedError,
    UnreadableEntryError,
)

COMPARE_AGAIN_S = 0.5
"""Rest of a range whose topic partition cannot be compared yet, seconds."""
ROOM_AGAIN_S = 10.0
"""Time after which a range looks for missing entries again while the checkpoint has no room,
seconds. Each look receives again the entries that the range holds, so looks are rare."""


class Admitted(NamedTuple):
    """The entries that are taken."""

    entries: Sequence[EntryBlock]
    rest: Rest | None
    """Time for which the range consumer takes nothing; ``None``: no rest."""


Unreadable = Callable[[TopicPartition, EntryId, str], None]
"""Called with the position of an entry that cannot be read, and with the reason.

The call comes before the entry is handed out. It is then one message without a key: its value is
the stored bytes, its time the time of receipt.
"""
Admit = Callable[[RangeConsumer, Sequence[EntryBlock]], Admitted]
"""Chooses the entries that belong to the run."""


class Intake:
    """The :class:`~keyshard.consumers.receiver.Sink` of a source.

    Args:
        shared: The window.
        range_consumers: Knows which ranges are owned.
        identity_check: Knows whether a topic partition was created again.
        acknowledger: Acknowledges entries that are committed already.
        reopen: Gives a range consumer a new consumer, as the sink's ``reopen``.
        config: The source.
        admit: Chooses the entries to take; ``None``: all.
        ahead_rows_max: Receiving pauses at this number of rows received and not yet taken;
            ``None``: never.
        unreadable: Called with unreadable entries; ``None``: the source does not deliver them.
        first_messages: The first messages of subscriptions that begin inside a producer batch.
            Earlier messages of its entry count as acknowledged by another consumer.
    """

    def __init__(
        self, shared: SharedWindow, range_consumers: RangeConsumers, *,
        identity_check: IdentityCheck,
        acknowledger: Acknowledger, reopen: Callable[[RangeConsumer], bool], config: SourceConfig,
        admit: Admit | None, ahead_rows_max: int | None, unreadable: Unreadable | None = None,
        first_messages: Mapping[TopicPartition, MessageId] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._first_messages = first_messages
        self._shared = shared
        self._range_consumers = range_consumers
        self._identity_check = identity_check
        self._acknowledger = acknowledger
        self.reopen = reopen
        self._config = config
        self._admit = admit
        self.ahead_rows_max = ahead_rows_max
        self._unreadable = unreadable
        self._anomalies = Anomalies(fail_on_misrouted=config.on_misrouted == "fail")
        self.load_meter: LoadMeter | LoadSample = LoadSample()
        """Measures the load; a sample without a rescaler."""
        self.paused = False
        """Whether all ranges pause until this is reset."""

    def is_paused(self, owned_range: OwnedRange) -> bool:
        window, ahead_max = self._shared.window, self.ahead_rows_max
        return (
            self.paused
            or (ahead_max is not None and window.received_rows >= ahead_max)
            or self._range_consumers.suspends(owned_range)
            or window.pauses.include(owned_range.topic_partition, owned_range.range_index)
        )

    def deliver(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str = ""
    ) -> Rest | None:
        """See :meth:`Sink.deliver <keyshard.consumers.receiver.Sink.deliver>`.

        Args:
            wrong: The reason why the entries are unreadable; they are delivered as stored bytes.
        """
        entries, rest = self._admitted(range_consumer, entries, wrong)
        if entries:
            self._take(range_consumer, entries, wrong)
        return rest

    def _take(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str
    ) -> None:
        owned_range = range_consumer.owned_range
        if (one := entries[0].column_bytes) > 2 * range_consumer.queue.bytes_max:
            self._anomalies.large(one, self._range_consumers.count, self._config.window_bytes_max)
        misrouted, keyless = routing_of(entries, owned_range.hash_range)
        unreadable = 0
        for block in filter(_unreadable, entries):
            unreadable += block.unreadable
            self._anomalies.unreadable(owned_range, block)
        if misrouted:
            self._anomalies.misrouted(owned_range, misrouted)
        with self._shared.lock:
            if not self._range_consumers.owns(owned_range):
                return  # it is delivered again, to its present owner
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
        where = owned_range.topic_partition
        stored = _of_stored(entry_id, error.stored, self._config.metadata_columns)
        if isinstance(error, self._config.parked) and self._unreadable is not None:
            return self.deliver(range_consumer, [stored], error.message)
        if self._admit is not None:
            taken, rest = self._admit(range_consumer, [stored])
            if not taken:
                return rest  # it lies after the target of the bounded run
        if not isinstance(error, self._config.skipped):
            raise error
        if not self._identity_check.may_receive(where, [entry_id]):
            return Rest(time.monotonic() + COMPARE_AGAIN_S)
        with self._shared.lock:
            window = self._shared.window
            if not self._range_consumers.owns(owned_range) or window.known[where].holds(entry_id):
                return None  # an earlier delivery was readable: it is acknowledged with its batch
            new, counters = self._resolve(where, entry_id), window.counters
            if isinstance(error, EncryptedMessageError):
                counters.encrypted_skipped += new
                skipped = counters.encrypted_skipped
            else:
                counters.corrupt_skipped += new
                skipped = counters.corrupt_skipped
        self._anomalies.skipped(error, skipped)
        self._acknowledger.submit(where, [entry_id])
        return None

    def _admitted(
        self, range_consumer: RangeConsumer, entries: Sequence[EntryBlock], wrong: str
    ) -> Admitted:
        """Return the entries that are taken now."""
        where = range_consumer.owned_range.topic_partition
        if not self._identity_check.may_receive(where, (block.id for block in entries)):
            # After the rest, a new consumer receives everything again.
            return Admitted((), Rest(time.monotonic() + COMPARE_AGAIN_S))
        first = self._first_messages.get(where)
        # The messages of an unreadable entry are unknown, so all of it belongs to the subscription.
        if first is not None and not wrong:
            entries = self._from(first, range_consumer, entries)
        rest: Rest | None = None
        if self._admit is not None:
            entries, rest = self._admit(range_consumer, entries)
        late = self._late_only(range_consumer.owned_range, entries)
        if len(late) < len(entries):
            rest = Rest(time.monotonic() + ROOM_AGAIN_S)
        return Admitted(late, rest)

    def _late_only(
        self, owned_range: OwnedRange, entries: Sequence[EntryBlock]
    ) -> Sequence[EntryBlock]:
        """Return the entries that a checkpoint without room lets a range take.

        Those are late entries, and entries that the window has already. A new consumer receives
        unacknowledged entries in their order, so late entries come before all that wait for room.
        """
        window, where = self._shared.window, owned_range.topic_partition
        if not window.pauses.late_only(where, owned_range.range_index):
            return entries
        with self._shared.lock:
            known = window.known[where]
            return [one for one in entries if known.is_late(one.id) or known.holds(one.id)]

    def _from(
        self, first: MessageId, range_consumer: RangeConsumer, entries: Sequence[EntryBlock]
    ) -> list[EntryBlock]:
        """Return the messages from the first message of the subscription on."""
        found: list[EntryBlock] = []
        for block in entries:
            if block.id == first[:2] and block.indices[0] < first.batch_index:
                own = frozenset(one for one in block.indices if one >= first.batch_index)
                if own:
                    found.append(only(block, own))
                else:
                    self._resolve_empty(range_consumer.owned_range, block.id)
            else:
                found.append(block)
        return found

    def _resolve_empty(self, owned_range: OwnedRange, entry_id: EntryId) -> None:
        """Resolve an entry that has no message of the subscription."""
        with self._shared.lock:
            if not self._range_consumers.owns(owned_range):
                return  # it is delivered again, to its present owner
            self._resolve(owned_range.topic_partition, entry_id)
        self._acknowledger.submit(owned_range.topic_partition, [entry_id])

    def _resolve(self, where: TopicPartition, entry_id: EntryId) -> bool:
        """Resolve an entry, under the lock; return whether it was not resolved before."""
        window = self._shared.window
        if window.known[where].state.covers(entry_id):
            return False
        resolved = EntrySet.of([entry_id])
        proofs = GapEvidence(resolved=resolved, published_ms=time.time_ns() // 1_000_000)
        window.prove(where, proofs, window.known[where].owners)
        return True

    def _receive(
        self, owned_range: OwnedRange, entries: Sequence[EntryBlock], wrong: str
    ) -> list[EntryId]:
        """Put entries into the window; return those that are committed already."""
        window, where = self._shared.window, owned_range.topic_partition
        accepted, committed = entries, list[EntryId]()
        outcomes = window.receive(where, owned_range.range_index, entries)
        if outcomes.count(ReceiveResult.ACCEPTED) < len(entries):
            each = list(zip(outcomes, entries, strict=True))
            accepted = [block for outcome, block in each if outcome is ReceiveResult.ACCEPTED]
            committed = [block.id for outcome, block in each if outcome is ReceiveResult.COMMITTED]
        if wrong and self._unreadable is not None:
            for block in accepted:
                # Another delivery may be readable. If it comes first, it is handled instead.
                self._unreadable(where, block.id, wrong)
                window.known[where].date(block, time.time_ns() // 1_000_000)
        self.load_meter.add(accepted)
        was_full = window.pauses.any_full
        window.pauses.received(where, owned_range.range_index)
        if window.pauses.any_full and not was_full:
            self._shared.full_since_s = time.monotonic()
        return committed

    def fail(self, error: KeyShardError) -> None:
        self._shared.fail(error)


_unreadable = attrgetter("unreadable")


def _of_stored(entry_id: EntryId, stored: bytes, columns: Collection[str]) -> EntryBlock:
    """Return an unreadable entry as one message of the stored bytes, with null metadata."""
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
        metadata={name: [None] for name in metadata_in(columns)},
    )


# -- Load by slot and key: every entry at first, then a sample -------------------------------------

ALL_MESSAGES = 20_000
"""Messages up to which every entry is counted."""
ONE_OF = 16
"""After that, one random entry of this number is counted, and stands for all of them. To look at
the key of an entry takes a fifth of the time to make its messages."""


class LoadMeter:
    """Measures the load of a source. Not thread-safe: the owner calls it under its lock."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._load = SlotLoad()

    def add(self, blocks: Sequence[EntryBlock]) -> None:
        """Count new entries; a message without a key does not count, as no key routes it."""
        times = ONE_OF if self._load.messages >= ALL_MESSAGES else 1
        if times > 1:
            blocks = [block for block in blocks if not self._random.randrange(ONE_OF)]
        for block, keys in zip(blocks, _keys_of(blocks), strict=True):
            count = times * block.rows // len(keys)
            for slot, key in zip(block.mixed_slots or [block.slot], keys, strict=True):
                if slot is not None:
                    self._load.add(slot, count, key)

    def hot_keys(self, count_max: int, share_min: float) -> list[tuple[str, float]]:
        """Return the most frequent keys since the meter began, and a lower bound of each share."""
        return self._load.hot_keys(count_max, share_min)

    def load(self) -> SlotLoad:
        """Return a copy of the load so far."""
        return self._load.copy()


SAMPLE_ENTRIES, SAMPLE_S = 4_096, 0.02
"""A sample is one message for each number of entries, or for each time, seconds. It takes as long
as to receive about ten messages."""
FADE_S = 120.0
"""Time after which the messages so far count half, seconds."""
SAMPLES_MIN, KEY_SAMPLES_MIN = 10, 3
"""Fewest samples, and fewest of a key, to name it. A sample may stand for thousands of messages."""


class LoadSample:
    """Estimates the load of the last minutes by a few messages, for sources that only show it.

    Not thread-safe: the owner calls it under its lock.
    """

    def __init__(self) -> None:
        self._random = random.Random()
        self._load = SlotLoad(messages_max=2**48)
        self._samples, self._elsewhere = 0, False
        self._key_samples: Counter[str] = Counter()
        """Number of samples by key, for at most twice ``KEYS_MAX`` keys."""
        self._entries = 0
        self._sampled_s = 0.0
        self._faded_s = time.monotonic()

    def add(self, blocks: Sequence[EntryBlock]) -> None:
        """If due, sample one message; it stands for all entries since the previous sample."""
        self._entries += len(blocks)
        now_s = time.monotonic()
        early = self._entries < SAMPLE_ENTRIES and now_s < self._sampled_s + SAMPLE_S
        if early or not blocks:
            return
        if now_s >= self._faded_s + FADE_S:
            self._faded_s = now_s
            self._load.halve()
        block = blocks[self._random.randrange(len(blocks))]
        row = self._random.randrange(block.rows - sum(part.rows for part in block.later_parts))
        slot = block.slot if block.mixed_slots is None else block.mixed_slots[row]
        if slot is not None:
            at, routed_by = block.start + row, None
            here = at < block.content.num_rows  # otherwise, a worker keeps the keys
            self._elsewhere |= not here
            if here:
                key, ordering_key = (
                    block.content.column(name)[at].as_py() for name in ("__key", "__orderingKey")
                )
                routed_by = routing_key(key, ordering_key)
            self._load.add(slot, self._entries * block.rows, routed_by)
            self._count(routed_by)
        self._entries, self._sampled_s = 0, now_s

    def _count(self, key: str | None) -> None:
        self._samples += 1
        if key is not None:
            self._key_samples[key] += 1
            if len(self._key_samples) > 2 * KEYS_MAX:
                kept = (known for known, _ in self._load.hottest_keys())
                self._key_samples = Counter({known: self._key_samples[known] for known in kept})

    def hot_keys(self, count_max: int, share_min: float) -> list[tuple[str, float]] | None:
        """Return the keys as LoadMeter does, from enough samples; ``None`` if workers keep them."""
        if self._elsewhere or self._samples < SAMPLES_MIN:
            return None if self._elsewhere else []
        hottest = self._load.hot_keys(2 * KEYS_MAX, share_min)
        return [one for one in hottest if self._key_samples[one[0]] >= KEY_SAMPLES_MIN][:count_max]

    def load(self) -> SlotLoad:
        """Return a copy of the load."""
        return self._load.copy()


def _keys_of(blocks: Sequence[EntryBlock]) -> Iterator[list[str | None]]:
    """Return the routing key of the first message of each entry; of mixed entries, of all."""
    if not blocks:
        return
    columns = gather(blocks, ("__key", "__orderingKey"))
    keys, ordering_keys = (column.to_pylist() for column in columns.values())
    first = 0
    for block in blocks:
        rows = range(first, first + (1 if block.mixed_slots is None else block.rows))
        yield [routing_key(keys[row], ordering_keys[row]) for row in rows]
        first += block.rows


# -- Anomalies: misrouted and unreadable messages -------------------------------------------------

WARN_INTERVAL_S = 60.0
"""Shortest time between two warnings of the same anomaly, seconds."""

_BATCHING = "Enable batching by key at the producer (BatchingType.KeyBased), or disable it."
_log = logging.getLogger(__name__)


class Anomalies:
    """Logs anomalies. Called by receive threads.

    Args:
        fail_on_misrouted: Whether a misrouted message ends the source; otherwise it is logged.
    """

    def __init__(self, *, fail_on_misrouted: bool) -> None:
        self._fail_on_misrouted = fail_on_misrouted
        self._warned_s = -WARN_INTERVAL_S
        self._named_unreadable = self._named_large = False
        self._named_skipped_s = dict.fromkeys(UNREADABLE, -WARN_INTERVAL_S)

    def misrouted(self, owned_range: OwnedRange, rows: int) -> None:
        """Report messages whose keys hash outside the range that received them.

        Raises:
            MisroutedError: If a misrouted message ends the source.
        """
        text = (
            f"Range {owned_range.hash_range} of {owned_range.topic_partition} received {rows} "
            "messages with keys of other ranges. A producer uses default batching, so the "
            "broker routes its batches by the first key, and the order of the other keys is "
            "lost."
        )
        if self._fail_on_misrouted:
            raise MisroutedError(
                text,
                f"{_BATCHING} To receive such messages anyway, set on_misrouted to warn.",
                topic_partition=owned_range.topic_partition.name,
            )
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_INTERVAL_S:
            self._warned_s = now_s
            _log.warning("%s %s", text, _BATCHING)

    def skipped(self, error: UnreadableEntryError, skipped: int) -> None:
        """Log that an unreadable entry is skipped, and why.

        Args:
            error: Names the entry.
            skipped: Number of skipped entries of its kind.
        """
        option = next(name for name, kind in UNREADABLE.items() if isinstance(error, kind))
        now_s, level = time.monotonic(), logging.DEBUG
        if now_s - self._named_skipped_s[option] >= WARN_INTERVAL_S:
            self._named_skipped_s[option], level = now_s, logging.WARNING
        why = error.message.partition(". ")[0]
        _log.log(
            level, "%s. The entry is acknowledged and skipped, because %s is skip; %d so far.",
            why, option, skipped,
        )  # fmt: skip

    def large(self, entry_bytes: int, consumers: int, window_bytes: int) -> None:
        """Log, once, that one entry for each consumer takes more memory than the window."""
        if not self._named_large and entry_bytes * consumers > window_bytes:
            self._named_large = True
            _log.warning(
                "An entry of %d bytes came. Each of %d consumers may hold one beside the window, "
                "so such entries take up to %d bytes more than window_bytes_max (%d). Lower "
                "parallelism, or give the process this memory.",
                entry_bytes, consumers, entry_bytes * consumers, window_bytes,
            )  # fmt: skip

    def unreadable(self, owned_range: OwnedRange, block: EntryBlock) -> None:
        """Log, once, that a message has metadata that is not valid."""
        if not self._named_unreadable:
            self._named_unreadable = True
            _log.warning(
                "%d messages of entry %d:%d of %s have a time, key or property that cannot be "
                "read. A time before 1970 or after 9998 becomes null, and its number becomes "
                "the property __eventTime or __publishTime. Invalid UTF-8 is replaced. Such "
                "messages are delivered and counted as 'unreadable'. Further ones are not "
                "logged.",
                block.unreadable, *block.id, owned_range.topic_partition,
            )  # fmt: skip
