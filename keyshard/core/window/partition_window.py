"""The window's share of one topic partition: its entries and evidence, and their counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter, le

from keyshard.core.holes.settling import Proofs, Settled, settle, settles_more
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.fingerprint import (
    Known,
    check_delivered,
    check_held,
    check_unknown,
)
from keyshard.core.window.admission import Sizes, take_aligned
from keyshard.core.window.checkpoint_size import fitting


class Receipt(Enum):
    """What became of a delivered entry."""

    ACCEPTED = auto()
    """It is new and in the window now."""
    HELD = auto()
    """It is in the window already: dropped; acknowledged when its batch is released."""
    COMMITTED = auto()
    """Its batch is committed, or it is settled: dropped; acknowledge it, the broker forgot."""


@dataclass(slots=True)
class PartitionWindow:
    """Entries of one topic partition, from their receipt to their release.

    Its :class:`~keyshard.core.window.window.Window` decides what enters, and the limits of a batch.
    """

    state: PartitionCheckpoint
    """Floor and delivered set as of the newest cut; ``batch`` is that cut's."""
    received: list[EntryBlock] = field(default_factory=list)
    """Entries not yet cut."""
    taken: dict[EntryId, EntryBlock] = field(default_factory=dict)
    """Entries handed to handlers, until a batch has them."""
    held: dict[EntryId, int] = field(default_factory=dict)
    """All entries received, taken or planned, with their publish times."""
    expected: EntrySet = field(default_factory=EntrySet)
    """Ids of a planned batch that is not read again yet."""
    rows: int = 0
    bytes: int = 0
    """What is held: received, taken and planned."""
    received_rows: int = 0
    received_bytes: int = 0
    received_payload: int = 0
    """What is received and not cut: rows, memory and payload."""
    left_out: set[int] = field(default_factory=set)
    """Ranges that had data and no part in the newest cut."""
    proofs: Proofs = field(default_factory=Proofs)
    """Evidence that the next cut with rows puts into its checkpoint."""
    owners: frozenset[int] = frozenset()
    """Ranges that owe an entry of a hole, as far as known."""
    tight: bool = False
    """Whether the newest cut or commit left entries out because the checkpoint had no room."""
    waiting_rows: int = 0
    """Received rows that no cut takes before something else comes."""
    lowest_ledger: int = -1
    """Lowest ledger that the checkpoint of the start knows; -1 when it knows none."""
    doubted: Known | None = None
    """What was known when nothing showed any longer that this is the same topic partition; ``None``
    while that is sure."""
    gone: bool = False
    """Whether the topic partition exists no more: the next checkpoint leaves it out."""

    @property
    def ready_rows(self) -> int:
        """Received rows that a cut could take."""
        return self.received_rows - self.waiting_rows

    @property
    def received_sizes(self) -> Sizes:
        """What is received and not cut."""
        return self.received_rows, self.received_bytes, self.received_payload

    @property
    def holes(self) -> int:
        """Gaps between the runs of delivered entries."""
        return max(0, self.state.delivered.run_count - 1)

    def receive(self, block: EntryBlock, range_index: int) -> None:
        """Take a new entry that a range received."""
        rows, memory = self.hold(block)
        block.received_by = range_index
        self.received.append(block)
        self.waiting_rows = 0
        self.received_rows += rows
        self.received_bytes += memory
        self.received_payload += block.payload_bytes

    def reassign(self, owners: Sequence[int], ranges: int) -> None:
        """Others own the ring now: what is received is theirs, keyless entries stay as they are.

        Args:
            owners: The range that owns each slot.
            ranges: Number of ranges.
        """
        left_out: set[int] = set()
        for block in self.received:
            before, slot = block.received_by, block.slot
            block.received_by = before % ranges if slot is None else owners[slot]
            if before in self.left_out:
                left_out.add(block.received_by)
        self.left_out = left_out
        self.owners = frozenset()

    def drop_received(self) -> None:
        """Forget what is received and in no batch."""
        self.let_go(self.received)
        self.received = []
        self.received_rows = self.received_bytes = self.received_payload = 0
        self.waiting_rows = 0
        self.left_out = set()

    def take_oldest(self, rows_max: int | None) -> list[EntryBlock]:
        """Hand out what was received first; it stays held.

        Args:
            rows_max: Rows after which no entry is begun; ``None``: everything.
        """
        count, rows = len(self.received), self.received_rows
        if rows_max is not None and rows > rows_max:
            count = rows = 0
            while rows < rows_max:
                rows += self.received[count].rows
                count += 1
        taken, self.received = self.received[:count], self.received[count:]
        self.received_rows -= rows
        self.received_bytes -= sum(map(_memory, taken))
        self.received_payload -= sum(block.payload_bytes for block in taken)
        self.waiting_rows = 0
        self.taken.update((block.id, block) for block in taken)
        return taken

    def give_back(
        self, completed: Collection[EntryId], checkpoint_bytes_max: int
    ) -> list[EntryBlock]:
        """The entries of the next batch out of what handlers completed; they stay held.

        Args:
            completed: Ids of entries that were handed out.
            checkpoint_bytes_max: Size of this topic partition's share of the checkpoint; completed
                entries that do not fit stay taken.
        """
        blocks = [self.taken[entry_id] for entry_id in sorted(completed)]
        count = self._fitting(blocks, checkpoint_bytes_max)
        for block in blocks[:count]:
            del self.taken[block.id]
        return blocks[:count]

    def holds(self, entry_id: EntryId) -> bool:
        """Whether an entry is received, taken or planned, perhaps before it is read again."""
        return entry_id in self.held or entry_id in self.expected

    def check_known(self, topic_partition: TopicPartition, block: EntryBlock) -> Receipt:
        """What becomes of an entry whose id is held or settled.

        Raises:
            TopicRecreatedError: The id was handed out a second time.
        """
        latest_ms, published_ms = self._latest_ms_of(block.id), self.held.get(block.id)
        if published_ms is None and self.expected and block.id in self.expected:
            published_ms = latest_ms
        if published_ms is not None:
            check_held(topic_partition, published_ms, block)
            return Receipt.HELD
        check_delivered(topic_partition, latest_ms, block)
        return Receipt.COMMITTED

    def _latest_ms_of(self, entry_id: EntryId) -> int:
        """Latest time at which an entry that is settled may have been published."""
        known = self.doubted
        return (known if known and entry_id in known else self.state).published_ms

    def doubt(self) -> None:
        """Nothing shows any longer that this is the topic partition that was received from.

        What was proved of it and is in no checkpoint yet is proved anew, of whatever is there then.
        """
        self.proofs = Proofs()
        if self.doubted is None:
            newest_ms = max([self.state.published_ms, *self.held.values()])
            known = Known(self.state, EntrySet.of(self.held), newest_ms)
            self.doubted = known or None

    def compare(self, topic_partition: TopicPartition, block: EntryBlock) -> bool:
        """Whether what is stored of this topic partition, if that is doubted, ends the doubt.

        It does where the id is known and the entry as old as it should be; and where the id is
        higher than all that are known, because ids only grow.

        Raises:
            TopicRecreatedError: The ids were handed out a second time.
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
        """As :meth:`compare`, of an entry that cannot be read: its id alone may be the higher."""
        known = self.doubted
        if known is not None and entry_id > known.span[1]:
            self.doubted = None
        return self.doubted is None

    def hold(self, block: EntryBlock) -> tuple[int, int]:
        """Count an entry as held; its rows and memory."""
        self.held[block.id] = block.publish_ms
        rows = block.rows
        memory = block.memory_bytes
        self.rows += rows
        self.bytes += memory
        return rows, memory

    def date(self, block: EntryBlock, published_ms: int) -> None:
        """A held entry that tells no publish time was published at this one, or before."""
        self.held[block.id] = block.publish_ms = published_ms

    def let_go(self, blocks: Sequence[EntryBlock]) -> None:
        """Count entries as held no longer."""
        held, rows = self.held, 0
        for block in blocks:
            held.pop(block.id, None)
            rows += len(block.indices)
        self.rows -= rows
        self.bytes -= sum(map(_memory, blocks))

    def take(self, limits: Sizes, checkpoint_bytes_max: int) -> list[EntryBlock]:
        """Take the entries of the next batch out of what is received; they stay held.

        Args:
            limits: Most rows, memory and payload; a single larger entry is still taken.
            checkpoint_bytes_max: Size of this topic partition's share of the checkpoint.
        """
        self.received.sort(key=_id)
        count = self._fitting(self.received, checkpoint_bytes_max)
        if not count:
            self.waiting_rows = self.received_rows
            return []
        if count == len(self.received) and all(map(le, self.received_sizes, limits)):
            return self._take_all()
        taken, rest = take_aligned(self.received[:count], limits, _sizes, self.left_out)
        self.received = rest + self.received[count:]
        self.left_out = {block.received_by for block in self.received}
        self.left_out -= {block.received_by for block in taken}
        self.received_rows -= sum(block.rows for block in taken)
        self.received_bytes -= sum(map(_memory, taken))
        self.received_payload -= sum(block.payload_bytes for block in taken)
        return taken

    def _take_all(self) -> list[EntryBlock]:
        blocks, self.received = self.received, []
        self.left_out = set()
        self.received_rows = self.received_bytes = self.received_payload = 0
        return blocks

    def _fitting(self, entries: Sequence[EntryBlock], bytes_max: int) -> int:
        """How many of some entries, ascending, the next checkpoint has room for."""
        count = fitting(self.state.delivered, entries, bytes_max)
        if count < len(entries) and self._evidence:
            # The checkpoint of this cut is going to have fewer holes than the newest.
            settled = settle(self.state, self._evidence, self._undelivered())
            count = fitting(settled.delivered, entries, bytes_max)
        self.tight = count < len(entries)
        return count

    def advance(self, blocks: Sequence[EntryBlock]) -> int:
        """Make the state after a batch with these entries the newest.

        Returns:
            Entries of holes that it calls settled, and the state before did not.
        """
        settled = self._settle(blocks)
        batch = EntrySet.of(block.id for block in blocks)
        published_ms = [block.publish_ms for block in blocks]
        self.state = PartitionCheckpoint(
            floor=settled.floor,
            delivered=settled.delivered | batch,
            batch=batch,
            partial={block.id: frozenset(block.indices) for block in blocks if not block.whole},
            published_ms=max(self.state.published_ms, self._evidence.published_ms, *published_ms),
        )
        return settled.newly

    def _settle(self, blocks: Sequence[EntryBlock]) -> Settled:
        """What the evidence makes of the newest state, before ``blocks`` join it."""
        evidence = self._evidence
        undelivered = self._undelivered() if settles_more(self.state, evidence) else []
        settled = settle(self.state, evidence, [*undelivered, *(block.id for block in blocks)])
        evidence.applied(settled.floor)
        return settled

    @property
    def _evidence(self) -> Proofs:
        """What may enter a checkpoint: nothing, while it may be of another topic partition."""
        return self.proofs if self.doubted is None else Proofs()

    def _undelivered(self) -> list[EntryId]:
        """Entries that were received and are in no batch."""
        return [*map(_id, self.received), *self.taken]

    def prove(self, proofs: Proofs, owners: frozenset[int]) -> None:
        """Take evidence, and the ranges that owe an entry of a hole."""
        self.proofs.merge(proofs)
        self.owners = owners
        if proofs:
            self.waiting_rows = 0

    def validate(self, planned: Sequence[EntryBlock]) -> None:
        """Assert the invariants.

        Args:
            planned: Entries that are in a checkpoint, and held until their release.
        """
        ids = list(map(_id, self.received))
        received, in_batches = set(ids), {block.id for block in planned}
        assert len(received) == len(ids), "an entry is received twice"
        assert len(in_batches) == len(planned), "an entry is planned twice"
        assert not any(one in self.expected for one in in_batches), "or read again twice"
        assert self.held.keys() == in_batches | received | self.taken.keys()
        assert not any(map(self.state.settled, ids)), "a received entry is settled"
        assert all(map(self.state.settled, in_batches | set(self.expected)))
        assert self.received_rows == sum(block.rows for block in self.received)
        others = [*planned, *self.taken.values()]
        assert self.rows == self.received_rows + sum(block.rows for block in others)


_id = attrgetter("id")
_memory = attrgetter("memory_bytes")


def _sizes(block: EntryBlock) -> Sizes:
    return block.rows, block.memory_bytes, block.payload_bytes
