"""Dispatch of the in-memory broker: one subscription of one topic partition.

Private to :mod:`keyshard.broker.memory`, which documents the package. Call every method under the
lock of the cluster. No method waits, and none knows a client.

The rules are those of Pulsar's ``PersistentStickyKeyDispatcherMultipleConsumers``: order is kept
per slot. If the owner of an entry is not ready, the entry and its slot wait in the replay
queue.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from keyshard.broker.memory.cursor import Cursor
from keyshard.broker.memory.delayed import DelayedEntries
from keyshard.broker.memory.limits import LookAhead, UnackedLimits
from keyshard.broker.memory.log import EntryLog, StoredEntry
from keyshard.core.releases import Release
from keyshard.core.ring.hash_range import HashRange
from keyshard.errors import RangeConflictError

READ_UNDER_WAY_EVERY = 3
"""Every this many dispatches, new entries are sent before the replay queue."""
READ_UNDER_WAY_ENTRIES = 3
"""Number of these new entries."""


class Delivery(NamedTuple):
    """An entry that is sent to a client, with the indices of its unacknowledged messages."""

    entry: StoredEntry
    indices: Sequence[int]


class UnackedEntry(NamedTuple):
    """An entry that was sent and is not acknowledged."""

    slot: int
    messages: int


@dataclass(slots=True, eq=False)
class Member:
    """One connection of one consumer, as the broker sees it. A reconnect creates a new one."""

    hash_range: HashRange
    name: str
    permits: int
    """Messages that the broker may still send; a batch may make it negative."""
    deliver: Callable[[Delivery], None]
    """Adds to the client's queue. It may call only :meth:`return_permits` in turn."""
    answers: Callable[[], bool]
    """Asks whether its client answers. If not, it closes the connection, and so this member."""
    pending: dict[int, UnackedEntry] = field(default_factory=dict)
    """Sent and unacknowledged entries, by ordinal."""
    unacked: int = 0
    """Number of their messages."""
    blocked: bool = False
    """Whether it reached its limit. Permits then count only once half of them are acknowledged."""
    withheld: int = 0
    """Permits that arrived while it was blocked."""

    def return_permits(self, messages: int) -> None:
        """Allow the broker to send more messages."""
        if self.blocked:
            self.withheld += messages
        else:
            self.permits += messages

    def sent(self, ordinal: int, pending: UnackedEntry, limit: int) -> None:
        """Count a sent entry."""
        known = self.pending.get(ordinal)
        self.pending[ordinal] = pending
        self.unacked += pending.messages - (known.messages if known else 0)
        self.permits -= pending.messages
        if limit and self.unacked >= limit:
            self.blocked = True

    def acked(self, ordinal: int, limit: int) -> UnackedEntry | None:
        """Count an acknowledged entry; ``None`` if it was not sent here."""
        found = self.pending.pop(ordinal, None)
        if found is not None:
            self.unacked -= found.messages
            if self.blocked and self.unacked <= limit // 2:
                self.blocked = False
                self.permits += self.withheld
                self.withheld = 0
        return found


class Subscription:
    """Cursor and dispatcher of one Key_Shared STICKY subscription on one topic partition.

    Args:
        log: The entries.
        cursor: The acknowledgements.
        look_ahead: When entries without a ready owner stop all ranges.
        unacked_limits: When unacknowledged messages stop a range, or all.
        now_ms: The clock, milliseconds.
        delays: Called when an entry waits for its time.
        release: The Pulsar version that the broker imitates.
    """

    def __init__(
        self,
        log: EntryLog,
        cursor: Cursor,
        look_ahead: LookAhead,
        unacked_limits: UnackedLimits,
        now_ms: Callable[[], int],
        *,
        delays: Callable[[Subscription], None],
        release: Release,
    ) -> None:
        self.log = log
        self._release = release
        self._delays = delays
        self._look_ahead = look_ahead
        self._limits = unacked_limits
        self._now_ms = now_ms
        self.cursor = cursor
        self.properties: Mapping[str, str] = {}
        self.replay = ReplayQueue()
        self.delayed = self._new_delayed()
        self.delivered = 0
        """Number of messages sent."""
        self._members: list[Member] = []
        self._starts: list[int] = []
        self._read_next = cursor.mark_delete + 1
        self._dispatches = 0
        self._unacked = 0
        self._blocked = False

    @property
    def backlog(self) -> int:
        """Number of stored, unacknowledged entries."""
        return len(self.log) - 1 - self.cursor.mark_delete - len(self.cursor.acked)

    @property
    def connected(self) -> int:
        """Number of consumers that hold a range."""
        return len(self._members)

    @property
    def members(self) -> Sequence[Member]:
        """The consumers that hold a range."""
        return tuple(self._members)

    @property
    def blocked(self) -> bool:
        """Whether the limit of unacknowledged messages stops all new entries."""
        return self._blocked

    @property
    def unacked(self) -> int:
        """Number of sent, unacknowledged messages."""
        return self._unacked

    @property
    def stalled(self) -> bool:
        """Whether the replay queue is so long that no range gets new entries."""
        return len(self.replay) >= self._look_ahead.limit(len(self._members))

    def join(self, member: Member) -> None:
        """Give a member its range, and send it the waiting entries.

        If a member with an overlapping range has a client that does not answer, it loses its range.

        Raises:
            RangeConflictError: Another member holds a part of the range, and its client answers.
        """
        wanted = member.hash_range
        for other in list(self._members):
            held = other.hash_range
            overlaps = held.start <= wanted.end and wanted.start <= held.end
            if overlaps and other in self._members and other.answers():
                raise RangeConflictError(
                    f"Range {wanted} overlaps range {held} of consumer {other.name!r}.",
                    "Wait until that consumer is closed, or use another subscription.",
                    wanted=str(wanted),
                    held=str(held),
                )
        self._set_members([*self._members, member])
        self.dispatch()

    def leave(self, member: Member) -> None:
        """Take a member's range away; its unacknowledged entries go to the next owner."""
        if member not in self._members:
            return
        self._set_members([other for other in self._members if other is not member])
        if self._members:
            for ordinal, pending in member.pending.items():
                self.replay.add(ordinal, pending.slot, self._owner(pending.slot))
        else:
            self.replay.clear()
            self.delayed.clear()
            self._read_next = self.cursor.mark_delete + 1
        member.pending.clear()
        self._count(-member.unacked)
        member.unacked = 0
        self.dispatch()

    def acknowledge(self, ordinals: Iterable[int]) -> None:
        """Acknowledge entries, whichever consumer received them, even before any did."""
        self.cursor.write_if_due(self._now_ms())
        for ordinal in ordinals:
            self.cursor.ack(ordinal)
            self._forget_pending(ordinal)
        self._acknowledged()

    def acknowledge_indices(self, ordinal: int, indices: Collection[int]) -> None:
        """Acknowledge some messages of a batch, as a client with batch index acknowledgements."""
        entry = self.log.get(ordinal)
        self.cursor.write_if_due(self._now_ms())
        if entry and self.cursor.ack_indices(ordinal, indices, len(entry.messages)):
            self._forget_pending(ordinal)
        self._acknowledged()

    def skip_trimmed(self) -> None:
        """Treat trimmed entries as acknowledged."""
        end = self.log.first
        self._read_next = max(self._read_next, end)
        self.cursor.advance(end - 1)
        for member in self._members:
            for ordinal in [ordinal for ordinal in member.pending if ordinal < end]:
                self._forget_pending(ordinal)
        self.replay.discard_up_to(self.cursor.mark_delete)
        self.dispatch()

    def restart(self, *, lossy: bool) -> None:
        """Reload the cursor, without members; if ``lossy``, only its last written state."""
        assert not self._members
        self.cursor.write_if_due(self._now_ms())
        if lossy:
            self.cursor.forget()
            self.cursor.advance(self.log.first - 1)
        else:
            self.cursor.write(self._now_ms())
        self._read_next = self.cursor.mark_delete + 1
        self._blocked = False
        self.delayed = self._new_delayed()

    def deliver_again(self, ordinal: int) -> bool:
        """Send an entry once more. Return ``False`` if it was never sent, or its slot has no owner.

        An entry in the replay queue is not sent, because it would overtake earlier ones. An entry
        that waits for its time is not sent either.
        """
        entry = self.log.get(ordinal)
        owner = self._owner(entry.slot) if entry and not entry.hidden else None
        waits = ordinal >= self._read_next or ordinal in self.replay or ordinal in self.delayed
        if entry is None or owner is None or waits:
            return False
        owner.permits -= len(entry.messages)
        self.delivered += len(entry.messages)
        owner.deliver(Delivery(entry, range(len(entry.messages))))
        return True

    def dispatch(self) -> None:
        """Send all that can be sent: first the replay queue, then new entries.

        In a real broker, a read of new entries may be in progress when permits arrive. These
        entries are sent first, unless their slot has waiting ones. Here every third dispatch does
        that.
        """
        self._release_due()
        if self.delayed.stop_all():
            return
        self._dispatches += 1
        if self._dispatches % READ_UNDER_WAY_EVERY == 0:
            self._read(self._read_next + READ_UNDER_WAY_ENTRIES)
        for member in self._members:
            while (
                self._anybody_ready()
                and self._is_ready(member)
                and (ordinal := self.replay.pop(member)) is not None
            ):
                if not self.cursor.is_acked(ordinal):
                    self._send(ordinal, member)
        self._read(len(self.log))

    def validate(self) -> None:
        """Assert that every entry is in exactly one place."""
        cursor, size = self.cursor, len(self.log)
        assert -1 <= cursor.mark_delete < max(size, 1)
        assert all(cursor.mark_delete + 1 < ordinal < size for ordinal in cursor.acked)
        early = {ordinal for ordinal in self.delayed.ordinals() if ordinal > cursor.mark_delete}
        waiting = self.replay.ordinals()
        if self._release.acknowledged_wait:
            waiting = {ordinal for ordinal in waiting if not cursor.is_acked(ordinal)}
        places = [waiting, *(set(member.pending) for member in self._members), early]
        everywhere: set[int] = set().union(*places)
        assert len(everywhere) == sum(map(len, places)), "an entry is in two places"
        assert all(ordinal > cursor.mark_delete for ordinal in everywhere)
        unread = range(cursor.mark_delete + 1, self._read_next)
        unacked = {ordinal for ordinal in unread if ordinal not in cursor.acked}
        assert everywhere - cursor.acked == unacked, "an entry is lost or invented"
        assert self._unacked == sum(member.unacked for member in self._members)
        for member in self._members:
            assert all(one.slot in member.hash_range for one in member.pending.values())
            assert member.unacked == sum(one.messages for one in member.pending.values())

    def _read(self, end: int) -> None:
        """Send new entries before an ordinal, or add them to the replay queue."""
        while self._read_next < min(end, len(self.log)) and self._may_read():
            ordinal = self._read_next
            self._read_next += 1
            entry = self.log.get(ordinal)
            if entry is None or self.cursor.is_acked(ordinal):
                continue
            owner = self._owner(entry.slot)
            if owner is None or not self._is_ready(owner) or self.replay.has_slot(entry.slot):
                self.replay.add(ordinal, entry.slot, owner)
            else:
                self._send(ordinal, owner)

    def _may_read(self) -> bool:
        stopped = self.stalled or self._blocked or self.delayed.stop_all()
        return not stopped and self._anybody_ready()

    def _anybody_ready(self) -> bool:
        """Return whether any consumer has permits and is not blocked; else nothing is read."""
        return any(member.permits > 0 and not member.blocked for member in self._members)

    def _is_ready(self, member: Member) -> bool:
        limit = self._limits.per_consumer
        return member.permits > 0 and not (limit and member.unacked >= limit)

    def _release_due(self) -> None:
        """Let the entries that are due wait for their owner. They do not stop their slot."""
        for ordinal in self.delayed.take_due():
            entry = self.log.get(ordinal)
            if entry is not None and not self.cursor.is_acked(ordinal):
                self.replay.add(ordinal, entry.slot, self._owner(entry.slot), in_order=False)

    def _send(self, ordinal: int, member: Member) -> None:
        """Send an entry to its owner. Keep one that is not due, and acknowledge a hidden one."""
        entry = self.log.get(ordinal)
        assert entry is not None
        if entry.hidden:
            self.cursor.ack(ordinal)
            self._discard_acknowledged()
            return
        if self.delayed.keeps(ordinal, entry.deliver_at_ms):
            self._delays(self)
            return
        acked = self.cursor.acked_indices(ordinal)
        count = len(entry.messages)
        indices = [i for i in range(count) if i not in acked] if acked else range(count)
        member.sent(ordinal, UnackedEntry(entry.slot, len(indices)), self._limits.per_consumer)
        self._count(len(indices))
        self.delivered += len(indices)
        member.deliver(Delivery(entry, indices))

    def _forget_pending(self, ordinal: int) -> None:
        for member in self._members:
            found = member.acked(ordinal, self._limits.per_consumer)
            if found is not None:
                self._count(-found.messages)
                return

    def _count(self, messages: int) -> None:
        """Count unacknowledged messages. From the limit until half of it, stop new entries."""
        self._unacked += messages
        limit = self._limits.per_subscription
        if limit and self._unacked >= limit:
            self._blocked = True
        elif self._unacked < max(1, limit // 2):
            self._blocked = False

    def _acknowledged(self) -> None:
        self.cursor.write_if_due(self._now_ms())
        self._discard_acknowledged()
        self.dispatch()

    def _discard_acknowledged(self) -> None:
        if not self._release.acknowledged_wait:
            self.replay.discard_up_to(self.cursor.mark_delete)

    def _new_delayed(self) -> DelayedEntries:
        return DelayedEntries(
            self._look_ahead.delayed,
            self._now_ms,
            first_waits=self._release.first_delayed_waits,
        )

    def _owner(self, slot: int) -> Member | None:
        index = bisect_right(self._starts, slot) - 1
        if index >= 0 and slot in self._members[index].hash_range:
            return self._members[index]
        return None

    def _set_members(self, members: list[Member]) -> None:
        self._members = sorted(members, key=lambda member: member.hash_range)
        self._starts = [member.hash_range.start for member in self._members]
        self.replay.regroup(self._owner)


# -- Replay queue ----------------------------------------------------------------------------------


class ReplayQueue:
    """Entries that wait for their owner, in position order per owner.

    An entry that is acknowledged while it waits stays in the queue until its owner asks for it. In
    Pulsar versions without ``acknowledged_wait``, it leaves as soon as the mark-delete passes it.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._unordered: set[int] = set()
        """Entries that later ones of their slot may overtake."""
        self._per_slot: Counter[int] = Counter()
        self._heaps: dict[Hashable, list[int]] = {}
        self._all: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._slots

    def has_slot(self, slot: int) -> bool:
        """Return whether an entry of the slot waits; no later one may overtake it."""
        return slot in self._per_slot

    def add(self, ordinal: int, slot: int, owner: Hashable, *, in_order: bool = True) -> None:
        """Add an entry.

        Args:
            ordinal: The entry.
            slot: Its slot.
            owner: Its owner; ``None`` while no consumer covers its slot.
            in_order: Whether later entries of its slot wait behind it.
        """
        assert ordinal not in self._slots
        self._slots[ordinal] = slot
        if in_order:
            self._per_slot[slot] += 1
        else:
            self._unordered.add(ordinal)
        heappush(self._heaps.setdefault(owner, []), ordinal)
        heappush(self._all, ordinal)

    def discard_up_to(self, mark_delete: int) -> None:
        """Remove entries up to the mark-delete. The owners' heaps drop them later."""
        while self._all and self._all[0] <= mark_delete:
            self._discard(heappop(self._all))

    def pop(self, owner: Hashable) -> int | None:
        """Remove and return the first entry that waits for ``owner``, or ``None``."""
        heap = self._heaps.get(owner, [])
        while heap:
            ordinal = heappop(heap)
            if ordinal in self._slots:
                self._discard(ordinal)
                return ordinal
        return None

    def regroup(self, owner_of: Callable[[int], Hashable]) -> None:
        """Regroup entries after a change of owners."""
        self._heaps = {}
        for ordinal, slot in self._slots.items():
            self._heaps.setdefault(owner_of(slot), []).append(ordinal)
        for heap in self._heaps.values():
            heapify(heap)

    def clear(self) -> None:
        """Remove all entries."""
        self._slots.clear()
        self._unordered.clear()
        self._per_slot.clear()
        self._heaps.clear()
        self._all.clear()

    def ordinals(self) -> set[int]:
        """The waiting entries, for checks."""
        return set(self._slots)

    def _discard(self, ordinal: int) -> None:
        slot = self._slots.pop(ordinal, None)
        if ordinal in self._unordered:
            self._unordered.remove(ordinal)
        elif slot is not None:
            self._per_slot[slot] -= 1
            if not self._per_slot[slot]:
                del self._per_slot[slot]
