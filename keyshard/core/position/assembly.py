"""Joins the messages of an entry that several deliveries brought.

One assembly belongs to one consumer. An entry is open until its last index. When another entry
follows before that, two things may have happened, and the client shows neither:

1. a reconnect cleared the client's queue: the entry will come again, from its first index;
2. somebody acknowledged the missing indices one by one: they never come.

They are told apart by asking again: the consumer is re-opened, which makes the broker deliver every
unacknowledged entry once more. An entry that comes with the same indices twice is partial (case 2),
if no reconnect can lie between its end and what follows: both came with one ``receive``, or nothing
followed at all. Two connections can break at the same index; then its rest is still to come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keyshard.core.position.entry import EntryBlock, EntryId

ENDS_ALIKE = 2
"""Ends at the same index that prove an entry partial, where no reconnect can have caused them."""
UNSURE_ENDS_ALIKE = 10
"""The same of all ends: an entry may always end with a ``receive``."""
DOUBTED_MAX = 10_000
"""Entries that ended early which are remembered; the oldest is asked about once more."""


@dataclass(slots=True)
class EntryAssembly:
    """Assembles blocks, in delivery order, into entries."""

    open: EntryBlock | None = None
    """The entry whose last index has not come yet."""
    doubted: dict[EntryId, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    """Indices that came of entries which ended early, how often, and how often without a reconnect,
    until one comes whole.

    They stay after an entry proved partial: until it is acknowledged, it comes again with every
    redelivery that another entry asks for, and must not be asked about a second time.
    """

    def add(self, block: EntryBlock, *, after_gap: bool = False) -> list[EntryBlock]:
        """Take the next block; returns the entries that it completed, in order: none, one or two.

        Args:
            block: Messages of one entry.
            after_gap: Whether a reconnect may lie between the block before and this one.

        Raises:
            RedeliveryNeeded: The open entry ended early, which is no proof yet. The block is not
                taken: re-open the consumer, then everything unacknowledged comes again.
        """
        done: list[EntryBlock] = []
        held = self.open
        if held is not None and held.id != block.id:
            done.append(self.end_early(unsure=after_gap))
            held = None
        if held is None or block.indices[0] <= held.indices[-1]:
            self.open = held = block
        else:
            self.open = held = held.joined(block)
        if held.indices[-1] == held.batch_size - 1:
            self.open = None
            self.doubted.pop(held.id, None)
            done.append(held)
        return done

    def end_early(self, *, unsure: bool = False) -> EntryBlock:
        """Decide about the open entry when nothing more of it is to come.

        Args:
            unsure: Whether a reconnect may have cut it off.

        Raises:
            RedeliveryNeeded: It ended early, and that is no proof yet.
        """
        held = self.open
        assert held is not None
        self.open = None
        indices = tuple(held.indices)
        before, times, sure = self.doubted.get(held.id, (indices, 0, 0))
        if before != indices:
            times = sure = 0
        times, sure = times + 1, sure + (not unsure)
        proved = times >= UNSURE_ENDS_ALIKE or sure >= ENDS_ALIKE
        self.doubted[held.id] = indices, UNSURE_ENDS_ALIKE if proved else times, sure
        if len(self.doubted) > DOUBTED_MAX:
            del self.doubted[next(iter(self.doubted))]
        if not proved:
            raise RedeliveryNeeded(held.id)
        return held


class RedeliveryNeeded(Exception):  # noqa: N818 - an instruction to the caller, not an error
    """The consumer must be re-opened; :attr:`entry_id` ended before its last index."""

    def __init__(self, entry_id: EntryId) -> None:
        super().__init__(entry_id)
        self.entry_id = entry_id
