"""Detects ids that a re-created topic or a wiped cluster assigns a second time."""

from __future__ import annotations

from dataclasses import dataclass

from keyshard.core.ack_gaps import FIRST
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.subscription_state import CursorState
from keyshard.errors import TopicRecreatedError

CLOCK_SKEW_MS = 10_000
"""Tolerated difference of producers' clocks, milliseconds."""


def lowest_known_ledger(state: PartitionCheckpoint) -> int:
    """Return the lowest ledger in a checkpoint; -1 if it has none."""
    known = [entry.ledger for entry in (state.floor, state.delivered.first) if entry is not None]
    return min(known, default=-1)


@dataclass(frozen=True, slots=True)
class KnownEntries:
    """The entries of a topic partition that were known at one moment.

    If the cluster was wiped since, everything it stores under these ids is newer.
    """

    state: PartitionCheckpoint
    held: EntrySet
    """Received entries, in a batch or not."""
    published_ms: int
    """Latest publish time of all."""

    def __contains__(self, entry_id: EntryId) -> bool:
        return self.state.covers(entry_id) or entry_id in self.held

    @property
    def span(self) -> tuple[EntryId, EntryId]:
        """The first and the last known position."""
        delivered, held, floor = self.state.delivered, self.held, self.state.floor
        ends = [delivered.first, delivered.last, held.first, held.last, floor]
        known = [one for one in ends if one is not None]
        return FIRST if floor is not None else min(known), max(known)

    def __bool__(self) -> bool:
        return self.state.floor is not None or bool(self.state.delivered) or bool(self.held)


def check_delivered(topic_partition: TopicPartition, published_ms: int, block: EntryBlock) -> None:
    """Check an entry whose id is resolved.

    Args:
        topic_partition: Its topic partition.
        published_ms: Latest possible publish time of the resolved entry.
        block: The entry.

    Raises:
        TopicRecreatedError: The entry was published later.
    """
    newest = block.publish_ms
    if newest > published_ms:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} is delivered "
            f"according to the checkpoint, but was published {newest - published_ms} ms after "
            "all delivered entries",
        )


def check_held(topic_partition: TopicPartition, published_ms: int, block: EntryBlock) -> None:
    """Check an entry whose id is held already, against the publish time of the held one.

    Raises:
        TopicRecreatedError: The entry was published later, so it is a different one.
    """
    if block.publish_ms > published_ms:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} was delivered again, "
            f"but was published {block.publish_ms - published_ms} ms after the first delivery",
        )


def check_unknown(
    topic_partition: TopicPartition,
    published_ms: int,
    lowest_ledger: int,
    block: EntryBlock,
) -> None:
    """Check an entry that no checkpoint knows.

    A late entry of a slow range may lie in a lower ledger than all delivered ones. Then it must
    also be older.

    Args:
        topic_partition: Its topic partition.
        published_ms: Latest publish time of all delivered entries.
        lowest_ledger: Lowest ledger known when the run started, or when the identity of the topic
            partition became uncertain; -1 without one.
        block: The entry.

    Raises:
        TopicRecreatedError: Its ledger lies below all known ones, and it was published later than
            everything delivered.
    """
    if block.id.ledger >= lowest_ledger:
        return
    later_ms = block.publish_ms - published_ms
    if later_ms > CLOCK_SKEW_MS:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} is below ledger "
            f"{lowest_ledger}, the lowest of the checkpoint, but was published {later_ms} ms "
            "after all delivered entries",
        )


def may_be_late(topic_partition: TopicPartition, known: KnownEntries, block: EntryBlock) -> bool:
    """Return whether an entry below a known one may be a late entry of the same topic.

    It is called only if none of the known entries is stored any more. A late entry is older than
    the known one, within the tolerance for clocks. While its ledger is stored, known entries of
    that ledger are stored, too.

    Args:
        topic_partition: Its topic partition.
        known: The known entries; a Reader has found none of them.
        block: The newest entry that the Reader has found.

    Returns:
        ``True`` if the entry is not newer than the known ones; ``False`` if it is newer, but by no
            more than clocks may differ.

    Raises:
        TopicRecreatedError: The entry is newer by more than clocks may differ.
    """
    later_ms, (ledger, entry) = block.publish_ms - known.published_ms, known.span[1]
    if later_ms > CLOCK_SKEW_MS:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} is below "
            f"{ledger}:{entry}, which is not stored any more, but was published {later_ms} ms "
            "after all delivered entries",
        )
    return later_ms <= 0


def check_ledgers(
    topic_partition: TopicPartition, state: PartitionCheckpoint, broker: CursorState
) -> None:
    """Check a checkpoint against the ledgers that the broker stores.

    Raises:
        TopicRecreatedError: The checkpoint has ledgers or entries that the broker has not created
            yet.
    """
    newest = state.delivered.last or state.floor
    if newest is None or not broker.ledgers:
        return
    what = f"Entry {newest.ledger}:{newest.entry} of {topic_partition} is delivered according to"
    if newest.ledger > broker.newest_ledger:
        raise _recreated(
            topic_partition,
            f"{what} the checkpoint, but the newest ledger there is {broker.newest_ledger}",
        )
    for ledger, last in state.delivered.last_entries.items():
        entries = broker.ledgers.get(ledger)
        if entries is not None and last >= entries:
            raise _recreated(
                topic_partition,
                f"Entry {ledger}:{last} of {topic_partition} is delivered according to the "
                f"checkpoint, but the ledger has {entries} entries",
            )


def _recreated(topic_partition: TopicPartition, what: str) -> TopicRecreatedError:
    return TopicRecreatedError(
        f"{what}. The topic or the cluster was created again, and reuses the same ids. Nothing "
        "was acknowledged.",
        "Start with a new checkpoint.",
        topic_partition=topic_partition.name,
    )
