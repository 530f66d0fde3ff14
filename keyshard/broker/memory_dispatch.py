"""How the in-memory broker hands entries to consumers: one subscription of one topic partition.

Private to :mod:`keyshard.broker.memory`, which documents the whole. Every method is called with the
lock of the cluster held; nothing here waits, and nothing here knows a client.

The rules are those of Pulsar 4.0's ``PersistentStickyKeyDispatcherMultipleConsumers``: order is
kept per slot, and an entry that cannot go to its owner now waits in the replay queue with its slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from keyshard.broker.memory_log import EntryLog, StoredEntry
from keyshard.core.hash_range import HashRange
from keyshard.errors import RangeConflictError

READ_UNDER_WAY_EVERY = 3
"""Every how many dispatches new entries are sent before what waits in the replay queue."""
READ_UNDER_WAY_ENTRIES = 3
"""How many of them."""


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How many entries of one topic partition may wait for their owner before all ranges stop."""

    per_consumer: int = 2_000
    """Entries for each connected consumer."""
    per_subscription: int = 20_000
    """Entries at most, whatever the number of consumers."""

    def limit(self, consumers: int) -> int:
        """Entries allowed with this many consumers."""
        return min(self.per_consumer * consumers, self.per_subscription)


@dataclass(slots=True, eq=False)
class Member:
    """One connection of one consumer, as the broker sees it; a reconnect makes a new one."""

    hash_range: HashRange
    name: str
    permits: int
    """Messages the broker may still send; a batch may take it below zero."""
    notify: Callable[[], None]
    """Called after something came into the inbox."""
    inbox: deque[StoredEntry] = field(default_factory=deque)
    """The client's queue."""
    pending: dict[int, int] = field(default_factory=dict)
    """Ordinals that were sent and are not acknowledged, with their slots."""


class Cursor:
    """What is acknowledged: everything up to ``mark_delete``, and holes above it."""

    def __init__(self, mark_delete: int) -> None:
        self.mark_delete = mark_delete
        """Highest ordinal with everything before it acknowledged, itself included."""
        self.acked: set[int] = set()
        """Acknowledged ordinals above it."""

    def ack(self, ordinal: int) -> None:
        """Acknowledge one entry. Idempotent."""
        if ordinal > self.mark_delete:
            self.acked.add(ordinal)
            self.advance(self.mark_delete)

    def advance(self, ordinal: int) -> None:
        """Acknowledge everything up to ``ordinal``, and move over what is acknowledged behind."""
        if ordinal > self.mark_delete:
            self.mark_delete = ordinal
            self.acked = {other for other in self.acked if other > ordinal}
        while self.mark_delete + 1 in self.acked:
            self.mark_delete += 1
            self.acked.discard(self.mark_delete)

    def is_acked(self, ordinal: int) -> bool:
        """Whether an entry is acknowledged."""
        return ordinal <= self.mark_delete or ordinal in self.acked


class ReplayQueue:
    """Entries that were read or sent and wait for their owner, in position order for each owner.

    An entry that is acknowledged while it waits stays, and counts, until its owner asks or the
    mark-delete passes it: a real broker does the same.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._per_slot: Counter[int] = Counter()
        self._heaps: dict[Member | None, list[int]] = {}
        self._all: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def has_slot(self, slot: int) -> bool:
        """Whether an entry of the slot waits; then no later one may overtake it."""
        return slot in self._per_slot

    def add(self, ordinal: int, slot: int, owner: Member | None) -> None:
        """Put an entry in; ``owner`` is ``None`` while nobody covers its slot."""
        assert ordinal not in self._slots
        self._slots[ordinal] = slot
        self._per_slot[slot] += 1
        heappush(self._heaps.setdefault(owner, []), ordinal)
        heappush(self._all, ordinal)

    def discard_up_to(self, mark_delete: int) -> None:
        """Take out what the mark-delete has passed. The owners' heaps drop it when it comes up."""
        while self._all and self._all[0] <= mark_delete:
            self._discard(heappop(self._all))

    def pop(self, owner: Member) -> int | None:
        """Take out the first entry that waits for ``owner``, or ``None``."""
        heap = self._heaps.get(owner, [])
        while heap:
            ordinal = heappop(heap)
            if ordinal in self._slots:
                self._discard(ordinal)
                return ordinal
        return None

    def regroup(self, owner_of: Callable[[int], Member | None]) -> None:
        """Follow a change of owners."""
        self._heaps = {}
        for ordinal, slot in self._slots.items():
            self._heaps.setdefault(owner_of(slot), []).append(ordinal)
        for heap in self._heaps.values():
            heapify(heap)

    def clear(self) -> None:
        """Forget everything."""
        self._slots.clear()
        self._per_slot.clear()
        self._heaps.clear()
        self._all.clear()

    def ordinals(self) -> set[int]:
        """What waits, for checks."""
        return set(self._slots)

    def _discard(self, ordinal: int) -> None:
        slot = self._slots.pop(ordinal, None)
        if slot is not None:
            self._per_slot[slot] -= 1
            if not self._per_slot[slot]:
                del self._per_slot[slot]


class Subscription:
    """Cursor and dispatcher of one Key_Shared STICKY subscription on one topic partition.

    Args:
        log: The entries.
        mark_delete: Ordinal up to which the new subscription regards everything as acknowledged.
        look_ahead: When entries without a ready owner stop all ranges.
    """

    def __init__(self, log: EntryLog, mark_delete: int, look_ahead: LookAhead) -> None:
        self.log = log
        self._look_ahead = look_ahead
        self.cursor = Cursor(mark_delete)
        self.replay = ReplayQueue()
        self._members: list[Member] = []
        self._starts: list[int] = []
        self._read_next = mark_delete + 1
        self._dispatches = 0

    @property
    def backlog(self) -> int:
        """Entries stored and not acknowledged."""
        return len(self.log) - 1 - self.cursor.mark_delete - len(self.cursor.acked)

    @property
    def connected(self) -> int:
        """Consumers that hold a range."""
        return len(self._members)

    @property
    def stalled(self) -> bool:
        """Whether the replay queue is so long that no range gets anything new."""
        return len(self.replay) >= self._look_ahead.limit(len(self._members))

    def join(self, member: Member) -> None:
        """Give a member its range and send it what waits for it.

        Raises:
            RangeConflictError: Another member holds a part of the range.
        """
        wanted = member.hash_range
        for other in self._members:
            held = other.hash_range
            if held.start <= wanted.end and wanted.start <= held.end:
                raise RangeConflictError(
                    f"Range {wanted} overlaps range {held} of consumer {other.name!r}. "
                    "Wait until it is closed, or use another subscription name.",
                    wanted=str(wanted),
                    held=str(held),
                )
        self._set_members([*self._members, member])
        self.dispatch()

    def leave(self, member: Member) -> None:
        """Take a member's range away; what it has not acknowledged goes to the next owner."""
        if member not in self._members:
            return
        self._set_members([other for other in self._members if other is not member])
        if self._members:
            for ordinal, slot in member.pending.items():
                self.replay.add(ordinal, slot, self._owner(slot))
        else:
            self.replay.clear()
            self._read_next = self.cursor.mark_delete + 1
        member.pending.clear()
        self.dispatch()

    def acknowledge(self, ordinals: Iterable[int]) -> None:
        """Acknowledge entries, whoever received them, or nobody yet."""
        for ordinal in ordinals:
            self.cursor.ack(ordinal)
            for member in self._members:
                if member.pending.pop(ordinal, None) is not None:
                    break
        self.replay.discard_up_to(self.cursor.mark_delete)
        self.dispatch()

    def skip_trimmed(self) -> None:
        """Regard what the log forgot as acknowledged."""
        end = self.log.first
        self._read_next = max(self._read_next, end)
        self.cursor.advance(end - 1)
        for member in self._members:
            member.pending = {
                ordinal: slot for ordinal, slot in member.pending.items() if ordinal >= end
            }
        self.acknowledge(())

    def dispatch(self) -> None:
        """Send what can be sent: first what waits in the replay queue, then new entries.

        A real broker may have a read of new entries under way when permits arrive, and those are
        sent first where their slot has nothing waiting. Here this happens every third time.
        """
        self._dispatches += 1
        if self._dispatches % READ_UNDER_WAY_EVERY == 0:
            self._read(self._read_next + READ_UNDER_WAY_ENTRIES)
        for member in self._members:
            while member.permits > 0 and (ordinal := self.replay.pop(member)) is not None:
                if not self.cursor.is_acked(ordinal):
                    self._send(ordinal, member)
        self._read(len(self.log))

    def validate(self) -> None:
        """Assert that every entry is in exactly one place."""
        cursor, size = self.cursor, len(self.log)
        assert -1 <= cursor.mark_delete < max(size, 1)
        assert all(cursor.mark_delete + 1 < ordinal < size for ordinal in cursor.acked)
        places = [self.replay.ordinals(), *(set(member.pending) for member in self._members)]
        everywhere: set[int] = set().union(*places)
        assert len(everywhere) == sum(map(len, places)), "an entry is in two places"
        assert all(ordinal > cursor.mark_delete for ordinal in everywhere)
        unread = range(cursor.mark_delete + 1, self._read_next)
        unacked = {ordinal for ordinal in unread if ordinal not in cursor.acked}
        assert everywhere - cursor.acked == unacked, "an entry is lost or invented"
        for member in self._members:
            assert all(slot in member.hash_range for slot in member.pending.values())

    def _read(self, end: int) -> None:
        """Send or put into the replay queue new entries before an ordinal."""
        while self._read_next < min(end, len(self.log)) and self._may_read():
            ordinal = self._read_next
            self._read_next += 1
            entry = self.log.get(ordinal)
            if entry is None or self.cursor.is_acked(ordinal):
                continue
            if entry.is_marker:
                self.cursor.ack(ordinal)
                continue
            owner = self._owner(entry.slot)
            if owner is None or owner.permits <= 0 or self.replay.has_slot(entry.slot):
                self.replay.add(ordinal, entry.slot, owner)
            else:
                self._send(ordinal, owner)

    def _may_read(self) -> bool:
        return not self.stalled and any(member.permits > 0 for member in self._members)

    def _send(self, ordinal: int, member: Member) -> None:
        entry = self.log.get(ordinal)
        assert entry is not None
        member.permits -= len(entry.messages)
        member.pending[ordinal] = entry.slot
        member.inbox.append(entry)
        member.notify()

    def _owner(self, slot: int) -> Member | None:
        index = bisect_right(self._starts, slot) - 1
        if index >= 0 and slot in self._members[index].hash_range:
            return self._members[index]
        return None

    def _set_members(self, members: list[Member]) -> None:
        self._members = sorted(members, key=lambda member: member.hash_range)
        self._starts = [member.hash_range.start for member in self._members]
        self.replay.regroup(self._owner)
