"""What the property test of the window plays: entries at a broker, consumers, batches of a host."""

from __future__ import annotations

from dataclasses import dataclass, field

from helpers import block
from keyshard.core.assembly import EntryAssembly
from keyshard.core.checkpoint import Checkpoint
from keyshard.core.entry import EntryBlock, EntryId, TopicPartition


@dataclass
class Stored:
    """An entry at the broker."""

    id: EntryId
    key: str
    size: int
    foreign: set[int] = field(default_factory=set)
    """Indices that somebody else acknowledged."""
    acked: bool = False
    marker: bool = False
    """It takes an id and is shown to nobody."""

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
    """One consumer: what the broker is going to send it, and its assembly."""

    def __init__(self) -> None:
        self.queue: list[tuple[Stored, int]] = []
        self.assembly = EntryAssembly()
        self.sent: list[Stored] = []
