"""The model of the window's property test: stored entries, consumers, batches of a host."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from keyshard.core.ack_gaps import GapEvidence, LedgerEnd
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_assembly import UNSURE_ENDS_ALIKE, EntryAssembly
from keyshard.core.position.entry_set import EntrySet
from tests.helpers import block


@dataclass
class Stored:
    """An entry at the broker."""

    id: EntryId
    key: str
    size: int
    foreign: set[int] = field(default_factory=set)
    """Indices that another client acknowledged."""
    acked: bool = False
    marker: bool = False
    """It has an id, but no client sees it."""

    def part(self, indices: list[int]) -> EntryBlock:
        keys = [self.key] * len(indices)
        return block(*self.id, *keys, of=self.size, indices=indices, publish_ms=self.publish_ms)

    @property
    def publish_ms(self) -> int:
        return self.id.ledger * 100 + self.id.entry

    @property
    def open_indices(self) -> list[int]:
        return (
            []
            if self.acked or self.marker
            else [i for i in range(self.size) if i not in self.foreign]
        )


@dataclass
class Planned:
    """A batch as the host saw it."""

    start: Checkpoint
    end: Checkpoint
    layout: dict[int, list[tuple[TopicPartition, EntryId, tuple[int, ...]]]]


class Lane:
    """The model of a consumer: the entries that the broker will send, and their assembly."""

    def __init__(self) -> None:
        self.queue: list[tuple[Stored, int]] = []
        self.assembly = EntryAssembly()
        self.sent: list[Stored] = []

    def ends_as_before(self) -> bool:
        """Return whether one more early end here makes the open entry count as partial.

        The assembly cannot tell so many breaks of a connection at the same index from another
        client's acknowledgement of the rest of the entry.
        """
        held = self.assembly.open
        if held is None or held.id not in self.assembly.doubted:
            return False
        indices, times, _ = self.assembly.doubted[held.id]
        return indices == tuple(held.indices) and times >= UNSURE_ENDS_ALIKE - 1


def shown_by_a_reader(stretch: list[Stored], *, from_the_beginning: bool) -> GapEvidence:
    """Return the proofs of a Reader over a stretch of entries: it shows all but markers."""
    shown = [stored for stored in stretch if not stored.marker]
    proofs = GapEvidence()
    if shown:
        if from_the_beginning:
            proofs.base = shown[0].id
        passed = [stored.id for stored in stretch if stored.marker and stored.id < shown[-1].id]
        proofs.resolved = EntrySet.of(passed)
        proofs.ledger_ends = _ledger_ends(shown)
    return proofs


def known_at_the_end(log: list[Stored]) -> GapEvidence:
    """Return all possible proofs for a topic partition: entries that no client will see."""
    resolved = (one.id for one in log if one.marker or len(one.foreign) == one.size)
    now_ms = log[-1].publish_ms if log else 0
    return GapEvidence(EntryId(1, 0), EntrySet.of(resolved), _ledger_ends(log), now_ms)


def _ledger_ends(entries: list[Stored]) -> dict[int, LedgerEnd]:
    return {
        entry.id.ledger: LedgerEnd(entry.id.entry, later.id)
        for entry, later in pairwise(entries)
        if later.id.ledger > entry.id.ledger
    }
