"""Bounds of topic partitions that exist, and positions whose entries are stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from keyshard.broker.admin.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import Bound, Edge, parse_bounds
from keyshard.core.segment_bounds import check_deleted, segment_bounds
from keyshard.core.topic_segments import is_segment
from keyshard.errors import (
    DataLossTrimmedError,
    KeyShardError,
    PositionAheadError,
    TopicRecreatedError,
)

_log = logging.getLogger(__name__)


def bounds_of(
    name: str,
    given: object,
    found: Collection[TopicPartition],
    fail_on_data_loss: bool,
    topic_of: Callable[[TopicPartition], str] | None,
) -> dict[TopicPartition, Bound]:
    """Parse the bound of each topic partition.

    Args:
        name: ``start``, ``end`` or ``starting_position``.
        given: One bound for all, or a mapping from names to bounds.
        found: All topic partitions.
        fail_on_data_loss: Whether a position in a deleted segment is an error; if not, it is a
            warning.
        topic_of: Returns the scalable topic of a segment; ``None``: there are no segments.

    Raises:
        ConfigError: A bound is malformed; see :func:`parse_bounds` and :func:`segment_bounds`.
        DataLossTrimmedError: A position is in a segment that was deleted since.
    """
    if topic_of is None:
        return parse_bounds(name, given, found)
    # Of a segment that came after the positions, a read from them has all, and one up to them none.
    bounds, deleted = segment_bounds(name, given, found, set(map(topic_of, found)), Edge.EARLIEST)
    nothing = Edge.EARLIEST if name == "end" else Edge.LATEST
    loss = check_deleted(name, deleted, nothing)
    if loss is not None and fail_on_data_loss:
        raise loss
    if loss is not None:
        _log.warning(
            "%s The stored segments are read, because fail_on_data_loss is false.", loss.summary
        )
    return bounds


def check_stored(
    admin: Admin, name: str, topic_partition: TopicPartition, bound: Bound,
    ledgers: Sequence[Ledger], *, timeout_s: float, fail_on_data_loss: bool,
) -> None:  # fmt: skip
    """Check that the entry at a position is stored, or is the next one to be written.

    Args:
        admin: Knows the last written entry, even if it is no longer stored.
        name: Name of the bound, for errors.
        topic_partition: The topic partition of the bound.
        bound: Start or end of a read; only positions are checked.
        ledgers: All stored ledgers.
        timeout_s: How long a request is retried, seconds.
        fail_on_data_loss: Whether a failed check is an error; if not, it is a warning.

    Raises:
        DataLossTrimmedError: The entry is no longer stored.
        PositionAheadError: The position is after all stored entries, and is not the next one.
        TopicRecreatedError: The position names an entry that its ledger never had.
    """
    loss = isinstance(bound, MessageId) and _loss(name, topic_partition, bound, ledgers)
    if isinstance(loss, DataLossTrimmedError):
        last = retry_until(lambda: admin.last_written(topic_partition), timeout_s)
        # Retention removed all entries, and the position is that of the next one.
        if last is not None and bound == MessageId(last.ledger, last.entry + 1, 0):
            return
    if loss and fail_on_data_loss:
        raise loss
    if loss:
        _log.warning(
            "%s The stored entries are read, because fail_on_data_loss is false.", loss.summary
        )


def _loss(
    name: str, topic_partition: TopicPartition, position: MessageId, ledgers: Sequence[Ledger]
) -> KeyShardError | None:
    """Return the error of a position whose entry is neither stored nor the next one."""
    ledger, entry, index = position
    # A position inside an entry means that the entry existed.
    end = entry + (index > 0)
    sizes = {one.id: one.entries for one in ledgers}
    oldest, newest = min(sizes, default=-1), max(sizes, default=-1)
    says = f"{name} of {topic_partition} is {position}, but "
    facts = {"topic_partition": topic_partition.name, "missing": str(position)}
    wayout = "To read the stored entries, set fail_on_data_loss to false."
    if not sizes and is_segment(topic_partition):
        return DataLossTrimmedError(
            f"{says}nothing is stored there any more. Retention or TTL removed all messages, and "
            "brokers do not report whether there were messages after the position.",
            f"Begin at 'earliest'. {wayout}",
            **facts,
        )
    if (ledger, end) > (newest, sizes.get(newest, 0)):
        return PositionAheadError(
            f"{says}this is after all stored entries: the newest ledger {newest} has "
            f"{sizes.get(newest, 0)} entries, without those of open transactions. The position "
            "belongs to another topic, or to a topic that was deleted and created again.",
            f"Correct the position. {wayout}",
            **facts,
        )
    if ledger < oldest:
        return DataLossTrimmedError(
            f"{says}the first stored ledger is {oldest}. Retention or TTL removed the earlier "
            "ledgers, or the topic was deleted and created again.",
            f"Begin at 'earliest'. {wayout}",
            **facts,
        )
    # An empty ledger is removed when it closes; its position is that of the next ledger.
    if end > sizes.get(ledger, 0):
        has = f"has {sizes[ledger]} entries" if ledger in sizes else "does not exist"
        return TopicRecreatedError(
            f"{says}ledger {ledger} {has}. The position belongs to another topic, or to a topic "
            "that was deleted and created again.",
            f"Correct the position. {wayout}",
            **facts,
        )
    return None
