"""Joins the messages of an entry that came in several deliveries.

One assembly serves one consumer. Complete blocks need it only while it is not empty. An
entry is open until its last index comes. If another entry comes first, there are two possible
causes, and a client that splits entries shows neither:

1. a reconnect cleared the client's queue: the entry comes again, from its first index;
2. another application acknowledged the missing indices one by one: they never come.

Redelivery distinguishes the two: the consumer is re-opened, so the broker redelivers every
unacknowledged entry. An entry that comes with the same indices twice is partial (case 2), if no
reconnect can lie between its end and the next message. That is certain if both came with one
``receive``, or if no message followed. Otherwise two connections may have broken at the same index,
and the rest is still to come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keyshard.core.position.entry import EntryBlock, EntryId

ENDS_ALIKE = 2
"""Ends at the same index that prove an entry partial, if no reconnect can have caused them."""
UNSURE_ENDS_ALIKE = 10
"""Ends at the same index that prove an entry partial in any case. If an entry ends with a
``receive`` every time, a reconnect can never be excluded."""
DOUBTED_MAX = 10_000
"""Number of remembered entries that ended early. For a forgotten one, another redelivery is
needed."""


@dataclass(slots=True)
class EntryAssembly:
    """Joins blocks, in delivery order, into entries."""

    open: EntryBlock | None = None
    """The entry whose last index has not come yet."""
    doubted: dict[EntryId, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    """Entries that ended early: their indices, how often they ended so, and how often without a
    possible reconnect. An entry stays until it comes whole.

    Partial entries stay as well. Until it is acknowledged, a partial entry comes again with
    every redelivery, and must not cause another one."""

    @property
    def is_empty(self) -> bool:
        """Whether no entry is open, and none ended early."""
        return self.open is None and not self.doubted

    def add(self, block: EntryBlock, *, after_gap: bool = False) -> list[EntryBlock]:
        """Take the next block, and return the entries that it completed, in order.

        Args:
            block: Messages of one entry.
            after_gap: Whether a reconnect may lie between the previous block and this one.

        Returns:
            The completed entries, at most two.

        Raises:
            RedeliveryNeeded: The open entry ended early, without proof that it is partial. The
                block is not taken. Re-open the consumer, so that the broker redelivers all
                unacknowledged entries.
        """
        held = self.open
        if held is None and not self.doubted and block.ends:
            return [block]
        done: list[EntryBlock] = []
        if held is not None and held.id != block.id:
            done.append(self.end_early(unsure=after_gap))
            held = None
        if held is None or block.indices[0] <= held.indices[-1]:
            self.open = held = block
        else:
            self.open = held = held.joined(block)
        if held.ends:
            self.open = None
            self.doubted.pop(held.id, None)
            done.append(held)
        return done

    def end_early(self, *, unsure: bool = False) -> EntryBlock:
        """Close the open entry before its last index, and return it if it is proved partial.

        Args:
            unsure: Whether a reconnect may have caused the end.

        Raises:
            RedeliveryNeeded: There is no proof yet.
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
    """The consumer must be re-opened: :attr:`entry_id` ended before its last index."""

    def __init__(self, entry_id: EntryId) -> None:
        super().__init__(entry_id)
        self.entry_id = entry_id
