"""Recognises ids that a re-created topic or a wiped cluster hands out a second time."""

from __future__ import annotations

from dataclasses import dataclass

from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.holes.settling import FIRST
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import TopicRecreatedError

CLOCK_SKEW_MS = 10_000
"""Difference of producers' clocks that is no sign of anything, milliseconds."""


def lowest_known_ledger(state: PartitionCheckpoint) -> int:
    """Lowest ledger that a checkpoint knows; -1 when it knows none."""
    known = [entry.ledger for entry in (state.floor, state.delivered.first) if entry is not None]
    return min(known, default=-1)


@dataclass(frozen=True, slots=True)
class Known:
    """The entries of a topic partition that were known at one moment.

    What a cluster that was wiped since stores under these ids is newer than all of them.
    """

    state: PartitionCheckpoint
    held: EntrySet
    """Entries that were received, whether a batch has them or not."""
    published_ms: int
    """Latest publish time of all."""

    def __contains__(self, entry_id: EntryId) -> bool:
        return self.state.settled(entry_id) or entry_id in self.held

    @property
    def span(self) -> tuple[EntryId, EntryId]:
        """The first and the last position of which anything is known."""
        delivered, held, floor = self.state.delivered, self.held, self.state.floor
        ends = [delivered.first, delivered.last, held.first, held.last, floor]
        known = [one for one in ends if one is not None]
        return FIRST if floor is not None else min(known), max(known)

    def __bool__(self) -> bool:
        return self.state.floor is not None or bool(self.state.delivered) or bool(self.held)


def check_delivered(topic_partition: TopicPartition, published_ms: int, block: EntryBlock) -> None:
    """Check an entry whose id is settled.

    Args:
        topic_partition: Where it lies.
        published_ms: Latest time at which it may have been published.
        block: The entry.

    Raises:
        TopicRecreatedError: It was published later.
    """
    newest = block.publish_ms
    if newest > published_ms:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} is delivered according "
            f"to the checkpoint, but was published {newest - published_ms} ms after everything "
            "delivered",
        )


def check_held(topic_partition: TopicPartition, published_ms: int, block: EntryBlock) -> None:
    """Check an entry whose id is held already, as it was published then.

    Raises:
        TopicRecreatedError: It was published later: it is another one.
    """
    if block.publish_ms > published_ms:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} came again, but was "
            f"published {block.publish_ms - published_ms} ms after the one that came first",
        )


def check_unknown(
    topic_partition: TopicPartition,
    published_ms: int,
    lowest_ledger: int,
    block: EntryBlock,
) -> None:
    """Check an entry that no checkpoint knows.

    A late entry of a slow range may lie in a lower ledger than all that was delivered, but then it
    is older than what was.

    Args:
        topic_partition: Where it lies.
        published_ms: Latest publish time of everything delivered.
        lowest_ledger: Lowest ledger that was known when the run started, or when the topic
            partition was doubted; -1 where none was.
        block: The entry.

    Raises:
        TopicRecreatedError: Its ledger lies below all of them, and it was published later than
            everything delivered.
    """
    if block.id.ledger >= lowest_ledger:
        return
    later_ms = block.publish_ms - published_ms
    if later_ms > CLOCK_SKEW_MS:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} lies below ledger "
            f"{lowest_ledger}, the lowest that the checkpoint knows, but was published {later_ms} "
            "ms after everything delivered",
        )


def may_be_late(topic_partition: TopicPartition, known: Known, block: EntryBlock) -> bool:
    """Whether an entry below a known one can be a late one, where nothing known is stored.

    It is then older than that one, but for producers' clocks; and while its ledger is stored, what
    is known of it is, too.

    Args:
        topic_partition: Where it lies.
        known: What was known, of which a Reader has shown nothing.
        block: The newest entry that the Reader has shown.

    Returns:
        Whether it is as old as what is known; ``False`` while only clocks may explain it.

    Raises:
        TopicRecreatedError: No clock explains it.
    """
    later_ms, (ledger, entry) = block.publish_ms - known.published_ms, known.span[1]
    if later_ms > CLOCK_SKEW_MS:
        raise _recreated(
            topic_partition,
            f"Entry {block.id.ledger}:{block.id.entry} of {topic_partition} lies below "
            f"{ledger}:{entry}, which was known and is not stored, but was published {later_ms} ms "
            "after everything delivered",
        )
    return later_ms <= 0


def check_ledgers(
    topic_partition: TopicPartition, state: PartitionCheckpoint, broker: BrokerState
) -> None:
    """Check a checkpoint against the ledgers that the broker stores.

    Raises:
        TopicRecreatedError: It knows ledgers or entries that the broker has not made yet.
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
    for ledger, _, last in state.delivered.runs():
        entries = broker.ledgers.get(ledger)
        if entries is not None and last >= entries:
            raise _recreated(
                topic_partition,
                f"Entry {ledger}:{last} of {topic_partition} is delivered according to the "
                f"checkpoint, but the ledger has {entries} entries",
            )


def _recreated(topic_partition: TopicPartition, what: str) -> TopicRecreatedError:
    return TopicRecreatedError(
        f"{what}: the topic or the cluster was created anew and hands out the same ids again. "
        "Nothing was acknowledged. Start with a new checkpoint.",
        topic_partition=topic_partition.name,
    )
