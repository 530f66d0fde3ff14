"""Plans a bounded read: what of each topic partition lies between its bounds, by the ledger list.

Bounds of time are publish times, as producers set them; of a producer batch its one time counts for
all its messages. They are exact: each split drops the rest. Which entries have to be read to find
them all is another question, because publish times are not in the order of entries: clocks differ,
what is sent again keeps its time, and so does what another cluster replicates. The broker knows
none of that before it reads. So without another word everything is read that is stored between the
other bounds. Who knows how far publish times go back says so, and then only what can matter is
read: see :func:`stretches`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from keyshard.broker.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.core.message import MessageId
from keyshard.core.position.bounds import Bound, Edge, check_order, fixed
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import Split, stretch
from keyshard.errors import ConfigError, DataLossTrimmedError, TopicNotFoundError

THREADS_MAX = 16
"""Topic partitions asked about at the same time."""

_log = logging.getLogger(__name__)


def stretches(
    admin: Admin,
    starts: Mapping[TopicPartition, Bound],
    ends: Mapping[TopicPartition, Bound],
    timeout_s: float,
    *,
    disorder_ms: int | None = None,
    fail_on_data_loss: bool = True,
) -> tuple[Split, ...]:
    """What a read takes of each topic partition, as of now; without spans where that is nothing.

    Args:
        admin: Lists ledgers, and finds positions by time.
        starts: First position or time of each topic partition.
        ends: Position or time of each up to which is read, exclusive.
        timeout_s: How long a request is tried again, seconds.
        disorder_ms: Most that publish times go back: no entry is stored behind another one whose
            publish time is more than this later than its own, and where the broker adds its own
            time to entries, the two differ by no more. Then what is outside of the bounds by more
            is not read. ``None``: not known; everything is read.
        fail_on_data_loss: Whether a position that is no longer stored is an error; else the read
            begins at what is, with a warning.

    Raises:
        ConfigError: A start is after its end, or a position is behind all that is stored.
        TopicNotFoundError: A topic partition does not exist any more.
        DataLossTrimmedError: What a position names is no longer stored.
        BrokerError: The admin interface cannot be reached, or refuses.
    """
    check_order(starts, ends)

    def one(topic_partition: TopicPartition) -> Split:
        ledgers = retry_until(lambda: admin.ledgers(topic_partition), timeout_s)
        if ledgers is None:
            raise TopicNotFoundError(
                f"Topic partition {topic_partition} does not exist any more.",
                topic=topic_partition.topic,
            )
        start, end = starts[topic_partition], ends[topic_partition]
        for name, bound in (("start", start), ("end", end)):
            if isinstance(bound, MessageId) and not _is_stored(
                name, topic_partition, bound, ledgers
            ):
                loss = _trimmed(name, topic_partition, bound, ledgers)
                if fail_on_data_loss:
                    raise loss
                _log.warning("%s Left out, because fail_on_data_loss is false.", loss)
        if start is Edge.LATEST or end is Edge.EARLIEST:
            return Split(topic_partition, (), end=fixed(end, ledgers))

        def pruned(bound: Bound, margin_ms: int | None) -> MessageId | None:
            if isinstance(bound, MessageId):
                return bound
            if isinstance(bound, Edge) or margin_ms is None:
                return None
            time_ms = max(0, bound + margin_ms)
            at = retry_until(lambda: admin.position_at(topic_partition, time_ms), timeout_s)
            return None if at is None else MessageId(*at, 0)

        # What the entry before the first position shows, of a time earlier by the disorder, is
        # that all entries before are earlier than the start; and the other way round.
        found = stretch(
            topic_partition,
            ledgers,
            pruned(start, None if disorder_ms is None else -disorder_ms),
            pruned(end, disorder_ms),
            start_ms=start if isinstance(start, int) else None,
            end_ms=end if isinstance(end, int) else None,
        )
        return replace(found, end=fixed(end, ledgers))

    with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-splits") as pool:
        return tuple(pool.map(one, starts))


def _is_stored(
    name: str, topic_partition: TopicPartition, position: MessageId, ledgers: tuple[Ledger, ...]
) -> bool:
    """Whether what is at a position, or would come next, is there; false when it is trimmed."""
    entry = EntryId(position.ledger, position.entry)
    sizes = {ledger.id: ledger.entries for ledger in ledgers}
    newest = max(sizes, default=-1)
    behind = entry.ledger > newest or entry.entry > sizes.get(entry.ledger, entry.entry)
    if behind:
        raise ConfigError(
            f"{name} of {topic_partition} is {position}, but nothing is stored there yet: its "
            f"newest ledger is {newest} with {sizes.get(newest, 0)} entries. It is a position of "
            "another topic, or of one that was deleted and created anew."
        )
    return entry.ledger >= min(sizes)


def _trimmed(
    name: str, topic_partition: TopicPartition, position: MessageId, ledgers: tuple[Ledger, ...]
) -> DataLossTrimmedError:
    return DataLossTrimmedError(
        f"{name} of {topic_partition} is {position}, but the first ledger that is still stored is "
        f"{ledgers[0].id}: retention or TTL removed what lay before. Begin at 'earliest', or set "
        "fail_on_data_loss to false if the loss is accepted.",
        topic_partition=topic_partition.name,
        missing=str(position),
    )
