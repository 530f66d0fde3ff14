"""The window of one topic partition: its entries, its evidence, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter

from keyshard.core.ack_gaps import GapEvidence, Resolution, resolve, resolves_more
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition, memory_of
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.topic_identity import (
    KnownEntries,
    check_delivered,
    check_held,
    check_unknown,
)
from keyshard.core.window.admission import Sizes, take_aligned
from keyshard.core.window.checkpoint_size import fitting


class ReceiveResult(Enum):
    """The outcome of a delivery."""

    ACCEPTED = auto()
    """The entry is new and is in the window now."""
    HELD = auto()
    """The window has the entry already. It is dropped, and acknowledged when its batch is
    released."""
    COMMITTED = auto()
    """The entry is committed or resolved. Drop it, and acknowledge it again."""


@dataclass(slots=True)
class PartitionWindow:
    """Entries of one topic partition, from their receipt to their release.

    Its :class:`~keyshard.core.window.window.Window` admits entries, and sets the limits of a batch.
    """

    state: PartitionCheckpoint
    """Floor and delivered set as of the newest cut; ``batch`` is the batch of that cut."""
    whole: bool = False
    """Whether one consumer, of the whole ring, receives all of it; it counts as range 0."""
    received: list[EntryBlock] = field(default_factory=list)
    """Entries received and not cut."""
    taken: dict[EntryId, EntryBlock] = field(default_factory=dict)
    """Entries handed to handlers and not in a batch."""
    held: dict[EntryId, int] = field(default_factory=dict)
    """All entries received, taken or planned, with their publish times."""
    late: set[EntryId] = field(default_factory=set)
    """Received or taken entries that were late when they came: below the newest delivered one."""
    expected: EntrySet = field(default_factory=EntrySet)
    """Ids of a planned batch that is not replayed yet."""
    rows: int = 0
    bytes: int = 0
    """All held entries (received, taken, planned): rows, and memory in bytes."""
    received_rows: int = 0
    received_bytes: int = 0
    received_payload: int = 0
    """Entries received and not cut: rows; memory and payload in bytes."""
    range_rows: Counter[int] = field(default_factory=Counter)
    """Rows of all held entries by the range that received them; of a replay, under -1."""
    left_out: set[int] = field(default_factory=set)
    """Ranges that had data and were left out of the newest cut."""
    proofs: GapEvidence = field(default_factory=GapEvidence)
    """Evidence that the next cut with rows puts into its checkpoint."""
    owners: frozenset[int] = frozenset()
    """Ranges known to owe an entry of an ack gap."""
    tight: bool = False
    """Whether the newest cut or commit left entries out because the checkpoint had no room."""
    waiting_rows: int = 0
    """Received rows that no cut can take until a new entry or evidence comes."""
    refused_at_bytes: int = 0
    """Size of the whole checkpoint at the newest look for rows that fit, bytes."""
    lowest_ledger: int = -1
    """Lowest ledger in the checkpoint of the start; -1 if it has none."""
    doubted: KnownEntries | None = None
    """The known state at the time when the identity of the topic partition became uncertain;
    ``None`` while it is certain."""
    doubts: int = 0
    """Times that the evidence was dropped."""
    gone: bool = False
    """Whether the topic partition was deleted. The next checkpoint leaves it out."""
    lost: EntrySet = field(default_factory=EntrySet)
    """Entries that another client acknowledged, and that may still come: consumers may have them
    already."""
    counted_lost: EntrySet = field(default_factory=EntrySet)
    """Such entries that the audit at the start has counted."""

    @property
    def ready_rows(self) -> int:
        """Received rows that a cut could take."""
        return self.received_rows - self.waiting_rows

    @property
    def received_sizes(self) -> Sizes:
        """Rows, memory and payload of entries received and not cut."""
        return self.received_rows, self.received_bytes, self.received_payload

    @property
    def ack_gaps(self) -> int:
        """Number of gaps between runs of delivered entries."""
        return max(0, self.state.delivered.run_count - 1)

    @property
    def has_ack_gaps(self) -> bool:
        """Whether entries may be missing between runs, or between the floor and the first run.

        Without a floor, entries before the first run are no ack gap.
        """
        floor, first = self.state.floor, self.state.delivered.first
        if floor is None or first is None:
            return self.ack_gaps > 0
        return self.ack_gaps > 0 or first != (floor.ledger, floor.entry + 1)

    def receive(
        self, topic_partition: TopicPartition, range_index: int, blocks: Sequence[EntryBlock]
    ) -> list[ReceiveResult]:
        """Take those entries of a delivery to a range that are new.

        Raises:
            TopicRecreatedError: As :meth:`Window.receive
                <keyshard.core.window.window.Window.receive>` says.
        """
        held, state, lowest_ledger = self.held, self.state, self.lowest_ledger
        newest, floor = state.delivered.last, state.floor
        # Every resolved entry is at or below one of them.
        resolved_to = max((one for one in (newest, floor) if one is not None), default=None)
        outcomes: list[ReceiveResult] = []
        new: list[EntryBlock] = []
        try:
            for block in blocks:
                entry_id = block.id
                below = resolved_to is not None and entry_id <= resolved_to
                if entry_id in held or (below and state.covers(entry_id)):
                    outcomes.append(self.check_known(topic_partition, block))
                    continue
                if entry_id.ledger < lowest_ledger:
                    check_unknown(topic_partition, state.published_ms, lowest_ledger, block)
                if below and self.is_late(entry_id):
                    self.late.add(entry_id)
                held[entry_id] = block.publish_ms
                block.received_by = range_index
                new.append(block)
                outcomes.append(ReceiveResult.ACCEPTED)
        finally:
            self._add(new, range_index)
        return outcomes

    def _add(self, new: Sequence[EntryBlock], range_index: int) -> None:
        """Add new entries that a range received, after they became held."""
        if not new:
            return
        rows, memory = rows_of(new), memory_of(new)
        self._count(rows, memory)
        self.range_rows[range_index] += rows
        self.received += new
        self.waiting_rows = 0
        self.received_rows += rows
        self.received_bytes += memory
        self.received_payload += payload_of(new)

    def is_late(self, entry_id: EntryId) -> bool:
        """Return whether an entry that is not delivered is below the newest delivered one."""
        newest = self.state.delivered.last
        return newest is not None and entry_id < newest

    def reassign(self, owners: Sequence[int], ranges: int) -> None:
        """Move received entries to the new owners of the ring. Keyless entries stay.

        Those of the consumer of a whole ring stay, too.

        Args:
            owners: The range that owns each slot.
            ranges: Number of ranges.
        """
        if self.whole:
            return
        left_out: set[int] = set()
        for block in self.received:
            before, slot = block.received_by, block.slot
            block.received_by = before % ranges if slot is None else owners[slot]
            self.range_rows[before] -= block.rows
            self.range_rows[block.received_by] += block.rows
            if before in self.left_out:
                left_out.add(block.received_by)
        self.left_out = left_out
        self.owners = frozenset()

    def drop_received(self) -> None:
        """Forget received entries that are in no batch."""
        self.let_go(self.received)
        self.late.difference_update(map(_id, self.received))
        self.received = []
        self.received_rows = self.received_bytes = self.received_payload = 0
        self.waiting_rows = 0
        self.left_out = set()

    def take_oldest(self, rows_max: int | None) -> list[EntryBlock]:
        """Hand out the entries received first. They stay held.

        Args:
            rows_max: Row count after which no further entry is taken; ``None``: no limit.
        """
        count, rows = len(self.received), self.received_rows
        if rows_max is not None and rows > rows_max:
            count = rows = 0
            while rows < rows_max:
                rows += self.received[count].rows
                count += 1
        taken, self.received = self.received[:count], self.received[count:]
        self.received_rows -= rows
        self.received_bytes -= memory_of(taken)
        self.received_payload -= payload_of(taken)
        self.waiting_rows = 0
        self.taken.update((block.id, block) for block in taken)
        return taken

    def give_back(
        self, completed: Collection[EntryId], checkpoint_bytes_max: int
    ) -> list[EntryBlock]:
        """Select completed entries for the next batch. They stay held.

        Args:
            completed: Ids of entries that handlers took.
            checkpoint_bytes_max: Size of this topic partition's share of the checkpoint. Completed
                entries that do not fit stay taken.
        """
        blocks = [self.taken[entry_id] for entry_id in sorted(completed)]
        count = self._fitting(blocks, checkpoint_bytes_max)
        for block in blocks[:count]:
            del self.taken[block.id]
        return blocks[:count]

    def holds(self, entry_id: EntryId) -> bool:
        """Return whether an entry is received, taken, planned or expected."""
        return entry_id in self.held or entry_id in self.expected

    def has_rest(self, backlog: int) -> bool:
        """Return whether all unacknowledged entries, of a number that the broker told, are held.

        Then none of them is still to come, if the topic partition is sealed and no other client
        acknowledges entries: the broker counts every held entry.
        """
        return len(self.held) == backlog and not self.expected

    def check_known(self, topic_partition: TopicPartition, block: EntryBlock) -> ReceiveResult:
        """Return the outcome for an entry whose id is held or resolved.

        Raises:
            TopicRecreatedError: The broker assigned the id a second time.
        """
        latest_ms, published_ms = self._latest_ms_of(block.id), self.held.get(block.id)
        if published_ms is None and self.expected and block.id in self.expected:
            published_ms = latest_ms
        if published_ms is not None:
            check_held(topic_partition, published_ms, block)
            return ReceiveResult.HELD
        check_delivered(topic_partition, latest_ms, block)
        return ReceiveResult.COMMITTED

    def _latest_ms_of(self, entry_id: EntryId) -> int:
        """Return the latest possible publish time of a resolved entry, milliseconds."""
        known = self.doubted
        return (known if known and entry_id in known else self.state).published_ms

    def doubt(self) -> None:
        """Mark the identity of the topic partition as uncertain.

        Evidence that is in no checkpoint yet is dropped, and must be gathered again.
        """
        self.proofs = GapEvidence()
        self.doubts += 1
        if self.doubted is None:
            newest_ms = max([self.state.published_ms, *self.held.values()])
            known = KnownEntries(self.state, EntrySet.of(self.held), newest_ms)
            self.doubted = known or None

    def compare(self, topic_partition: TopicPartition, block: EntryBlock) -> bool:
        """Compare a stored entry with the known state; return whether it ends the doubt.

        It ends the doubt in two cases: the id is known and the publish time fits; or the id is
        above all known ones, because ids only grow.

        Raises:
            TopicRecreatedError: The broker assigned the ids a second time.
        """
        known = self.doubted
        if known is None:
            return True
        first, last = known.span
        if block.id in known:
            self.check_known(topic_partition, block)
        elif block.id < last:
            check_unknown(topic_partition, known.published_ms, first.ledger, block)
            return False
        self.doubted = None
        return True

    def compare_id(self, entry_id: EntryId) -> bool:
        """Compare the id of an unreadable entry. Only an id above all known ones ends the doubt."""
        known = self.doubted
        if known is not None and entry_id > known.span[1]:
            self.doubted = None
        return self.doubted is None

    def hold(self, blocks: Sequence[EntryBlock]) -> None:
        """Count replayed entries as held. No range received them."""
        self.held.update(zip(map(_id, blocks), map(_publish_ms, blocks), strict=True))
        rows = rows_of(blocks)
        self._count(rows, memory_of(blocks))
        self.range_rows[-1] += rows

    def _count(self, rows: int, memory: int) -> None:
        """Add to the rows and bytes held; negative numbers subtract."""
        self.rows += rows
        self.bytes += memory

    def date(self, block: EntryBlock, published_ms: int) -> None:
        """Set an upper bound for the publish time of a held entry that has none."""
        self.held[block.id] = block.publish_ms = published_ms

    def let_go(self, blocks: Sequence[EntryBlock]) -> None:
        """Stop counting entries as held."""
        held, range_rows = self.held, self.range_rows
        for entry_id in map(_id, blocks):
            held.pop(entry_id, None)
        sizes = list(map(len, map(_indices, blocks)))
        for range_index, count in zip(map(_received_by, blocks), sizes, strict=True):
            range_rows[range_index] -= count
        self._count(-sum(sizes), -memory_of(blocks))

    def take(self, limits: Sizes, checkpoint_bytes_max: int) -> list[EntryBlock]:
        """Take the entries of the next batch out of the received ones. They stay held.

        Args:
            limits: Most rows, memory and payload; a single larger entry is still taken.
            checkpoint_bytes_max: Size of this topic partition's share of the checkpoint.
        """
        received = self.received
        if len(received) > 1:
            received.sort(key=_id)
        count = self._fitting(received, checkpoint_bytes_max)
        if not count:
            self.waiting_rows = self.received_rows
            return []
        rows_max, memory_max, payload_max = limits
        if (
            count == len(received)
            and self.received_rows <= rows_max
            and self.received_bytes <= memory_max
            and self.received_payload <= payload_max
        ):
            return self._take_all()
        taken, rest = take_aligned(received[:count], limits, _sizes, self.left_out)
        self.received = rest + received[count:]
        self.left_out = {block.received_by for block in self.received}
        self.left_out -= {block.received_by for block in taken}
        self.received_rows -= rows_of(taken)
        self.received_bytes -= memory_of(taken)
        self.received_payload -= payload_of(taken)
        return taken

    def _take_all(self) -> list[EntryBlock]:
        blocks, self.received = self.received, []
        self.left_out = set()
        self.received_rows = self.received_bytes = self.received_payload = 0
        return blocks

    def _fitting(self, entries: Sequence[EntryBlock], bytes_max: int) -> int:
        """Return how many of the given ascending entries fit into the next checkpoint."""
        count = fitting(self.state.delivered, entries, bytes_max)
        if count < len(entries) and self._evidence:
            # Proofs close ack gaps, so the checkpoint of this cut has more room than the newest.
            resolved = resolve(self.state, self._evidence, self._undelivered())
            count = fitting(resolved.delivered, entries, bytes_max)
        self.tight = count < len(entries)
        return count

    def advance(self, blocks: Sequence[EntryBlock]) -> int:
        """Make the state after a batch with these entries the newest.

        Returns:
            Number of entries of ack gaps that became resolved.
        """
        evidence, ids, before = self._evidence, list(map(_id, blocks)), self.state
        floor, delivered, newly = before.floor, before.delivered, 0
        if evidence:
            floor, delivered, newly = self._resolve(evidence, ids)
        elif floor is not None:
            # No other entry can be in the run after the floor, because none of them is delivered.
            floor, delivered = delivered.following(floor)
        batch = EntrySet.of(ids)
        self.late.difference_update(ids)
        self.state = PartitionCheckpoint(
            floor=floor,
            delivered=delivered | batch,
            batch=batch,
            partial={
                block.id: frozenset(block.indices)
                for block in blocks
                if len(block.indices) != block.batch_size
            },
            published_ms=max(
                [before.published_ms, evidence.published_ms, *map(_publish_ms, blocks)]
            ),
        )
        return newly

    def lose(self, entries: EntrySet) -> None:
        """Record entries that another client acknowledged, except delivered and resolved ones."""
        floor = self.state.floor
        left = entries if floor is None else entries.above(floor)
        self.lost |= left - self.state.delivered

    def newly_lost(self) -> int:
        """Return the number of lost entries that the newest state resolves, each once.

        Only then is their loss certain: an entry that came before is delivered.
        """
        if not self.lost:
            return 0
        self.lost -= EntrySet.of(one for one in self.held if one in self.lost)
        floor, delivered = self.state.floor, self.state.delivered
        left = (self.lost if floor is None else self.lost.above(floor)) - delivered
        gone, self.lost = self.lost - left - self.counted_lost, left
        return len(gone)

    def _resolve(self, evidence: GapEvidence, joining: Sequence[EntryId]) -> Resolution:
        """Apply the evidence to the newest state, before other entries, ascending, join it."""
        undelivered = self._undelivered() if resolves_more(self.state, evidence) else []
        resolved = resolve(self.state, evidence, [*undelivered, *joining])
        evidence.applied(resolved.floor)
        return resolved

    @property
    def _evidence(self) -> GapEvidence:
        """Evidence for the next checkpoint; none while the topic partition is doubted."""
        return self.proofs if self.doubted is None else GapEvidence()

    def _undelivered(self) -> list[EntryId]:
        """Entries that were received and are in no batch."""
        return [*map(_id, self.received), *self.taken]

    def prove(self, proofs: GapEvidence, owners: frozenset[int]) -> None:
        """Take evidence, and the ranges that owe an entry of an ack gap."""
        self.proofs.merge(proofs)
        self.owners = frozenset([0]) if self.whole and owners else owners
        if proofs:
            self.waiting_rows = 0

    def validate(self, planned: Sequence[EntryBlock]) -> None:
        """Assert the invariants.

        Args:
            planned: Entries that are in a checkpoint and not released.
        """
        ids = list(map(_id, self.received))
        received, in_batches = set(ids), {block.id for block in planned}
        assert len(received) == len(ids), "an entry is received twice"
        assert len(in_batches) == len(planned), "an entry is planned twice"
        assert not any(one in self.expected for one in in_batches), "or read again twice"
        assert self.held.keys() == in_batches | received | self.taken.keys()
        assert not any(map(self.state.covers, ids)), "a received entry is resolved"
        assert self.late <= received | self.taken.keys()
        assert all(map(self.state.covers, in_batches | set(self.expected)))
        assert self.received_rows == sum(block.rows for block in self.received)
        others = [*planned, *self.taken.values()]
        assert self.rows == self.received_rows + sum(block.rows for block in others)
        of_ranges: Counter[int] = Counter()
        for block in [*self.received, *others]:
            of_ranges[block.received_by] += block.rows
        assert +self.range_rows == of_ranges, "the rows of a range are counted wrong"


_id = attrgetter("id")
_indices = attrgetter("indices")
_payload = attrgetter("payload_bytes")
_publish_ms = attrgetter("publish_ms")
_received_by = attrgetter("received_by")


def rows_of(blocks: Iterable[EntryBlock]) -> int:
    """Return the number of messages of some entries."""
    return sum(map(len, map(_indices, blocks)))


def payload_of(blocks: Iterable[EntryBlock]) -> int:
    """Return the payload of some entries, bytes."""
    return sum(map(_payload, blocks))


def _sizes(block: EntryBlock) -> Sizes:
    return block.rows, block.memory_bytes, block.payload_bytes
