"""Finds the ledgers of a segment of a scalable topic with plain Readers.

The admin interface of Pulsar 5.0 lists the ledgers of topics, and none of segments. A Reader that
is opened at a position shows the first entry at or after it, across ledgers. So a few short Readers
find where each ledger begins and ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import OpensReaders, ReadOptions
from keyshard.broker.retry import retry_until
from keyshard.broker.unreadable_entries import entry_of
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger, ledgers_read
from keyshard.errors import (
    BrokerUnavailableError,
    ChunkedMessageError,
    ReplayTimeoutError,
    TopicNotFoundError,
    UnreadableEntryError,
)
from keyshard.reading.scan import READ_WAIT_MS

UNLISTED = "the broker lists no ledgers of segments"
"""The placement of ledgers of segments."""
_log = logging.getLogger(__name__)
_EARLIEST = EntryId(0, 0)
_ONE = ReadOptions(receiver_queue_size=1, first=1, columns=())


def warn_of_limits(limits: Mapping[str, object]) -> None:
    """Log the options of a read that have no effect on scalable topics.

    Args:
        limits: Options that leave out entries by the list of ledgers, by name; ``None``: not given.
    """
    for name, limit in limits.items():
        if limit is not None:
            _log.warning("%s leaves out no entries of a scalable topic: %s", name, UNLISTED)


def segment_ledgers(
    broker: OpensReaders, admin: Admin, where: TopicPartition, timeout_s: float
) -> tuple[Ledger, ...]:
    """Return the ledgers of a segment. Their sizes are estimates.

    Args:
        broker: Opens Readers.
        admin: Knows the stored size of the segment.
        where: The segment.
        timeout_s: Longest wait for an answer, seconds.

    Raises:
        TopicNotFoundError: The segment was deleted.
        ReplayTimeoutError: A Reader returned nothing in time (retriable).
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    size_bytes = retry_until(lambda: admin.stored_bytes(where), timeout_s)
    if size_bytes is None:
        raise _deleted(where)
    return ledgers_read(lambda at: first_stored(broker, where, timeout_s, at), size_bytes, UNLISTED)


def first_stored(
    broker: OpensReaders, where: TopicPartition, timeout_s: float, at: EntryId = _EARLIEST
) -> EntryId | None:
    """Return the first entry that is stored in a segment from a position on.

    Returns:
        ``None`` if there is none.

    Raises:
        TopicNotFoundError: The segment was deleted.
        ReplayTimeoutError: A Reader returned nothing in time (retriable).
        BrokerError: The broker cannot be reached, or refuses.
    """
    found = first_block(broker, where, at, timeout_s)
    return found.id if isinstance(found, EntryBlock) else found


def first_block(
    broker: OpensReaders, where: TopicPartition, at: EntryId, timeout_s: float
) -> EntryBlock | EntryId | None:
    """Return messages of the first entry that is stored at or after a position.

    Returns:
        The id of an entry that cannot be read, and ``None`` if nothing is stored.

    Raises:
        As for :func:`first_stored`.
    """

    def look() -> EntryBlock | EntryId | None:
        end_s = time.monotonic() + timeout_s
        with closing(broker.reader(where, at, _ONE)) as reader:
            while time.monotonic() < end_s:
                # The question for the end is cheaper than a read that waits in vain.
                if reader.at_end() and reader.stayed_connected():
                    return None
                try:
                    blocks = reader.read(READ_WAIT_MS)
                except (UnreadableEntryError, ChunkedMessageError) as exc:
                    return entry_of(exc)
                if blocks:
                    return blocks[0]
                if not reader.stayed_connected():
                    raise BrokerUnavailableError(
                        f"A reader of {where} lost its connection at {at.ledger}:{at.entry}, so it "
                        "is unknown whether an entry follows.",
                        "Check that the broker is running.",
                    )
        raise ReplayTimeoutError(
            f"A reader of {where} returned nothing from {at.ledger}:{at.entry} on for "
            f"{timeout_s:g} s.",
            "Check the load of the broker, or raise operation_timeout_ms.",
        )

    return retry_until(look, timeout_s)


def _deleted(where: TopicPartition) -> TopicNotFoundError:
    return TopicNotFoundError(
        f"Segment {where} does not exist any more. Brokers delete a sealed segment after the "
        "retention time, once all registered subscriptions have acknowledged it.",
        "Read again.",
        topic=where.topic,
    )
