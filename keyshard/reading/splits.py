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
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keyshard.broker.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.core.message import MessageId
from keyshard.core.position.bounds import Bound, Edge, check_order, fixed
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger, shown
from keyshard.core.position.split import Split, stretch
from keyshard.errors import (
    BrokerError,
    DataLossTrimmedError,
    KeyShardError,
    PositionAheadError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from keyshard.threads import Pool

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
    published: tuple[int | None, int | None] = (None, None),
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
        published: First publish time that is wanted of what lies between the bounds, and the one
            that is not wanted any more, milliseconds since the epoch.
        fail_on_data_loss: Whether a position of what is not there is an error; else what is there
            between the bounds is read, with a warning.

    Raises:
        ConfigError: A start is after its end.
        TopicNotFoundError: A topic partition does not exist any more.
        DataLossTrimmedError: What a position names is no longer stored.
        PositionAheadError: A position is behind all that is stored.
        TopicRecreatedError: A position is of a ledger that the topic partition never had so.
        BrokerError: The admin interface cannot be reached, or refuses.
    """
    check_order(starts, ends)

    def one(topic_partition: TopicPartition) -> Split:
        ledgers = retry_until(lambda: _shown(admin, topic_partition), timeout_s)
        start, end = starts[topic_partition], ends[topic_partition]
        for name, bound in (("start", start), ("end", end)):
            check_stored(
                admin, name, topic_partition, bound, ledgers, timeout_s=timeout_s,
                fail_on_data_loss=fail_on_data_loss,
            )  # fmt: skip
        if start is Edge.LATEST or end is Edge.EARLIEST:
            return Split(topic_partition, (), end=fixed(end, ledgers))

        def at(time_ms: int | None, side: int) -> MessageId | None:
            if time_ms is None or disorder_ms is None:
                return None
            time_ms = max(0, time_ms + side * disorder_ms)
            found = retry_until(lambda: admin.position_at(topic_partition, time_ms), timeout_s)
            return None if found is None else MessageId(*found, 0)

        start_ms, end_ms = published
        if isinstance(start, int):
            start_ms = start if start_ms is None else max(start, start_ms)
        if isinstance(end, int):
            end_ms = end if end_ms is None else min(end, end_ms)
        # What the entry before the first position shows, of a time earlier by the disorder, is
        # that all entries before are earlier than the start; and the other way round.
        starting = [one for one in (start, at(start_ms, -1)) if isinstance(one, MessageId)]
        ending = [one for one in (end, at(end_ms, 1)) if isinstance(one, MessageId)]
        found = stretch(
            topic_partition,
            ledgers,
            max(starting, default=None),
            min(ending, default=None),
            start_ms=start_ms,
            end_ms=end_ms,
        )
        return replace(found, end=fixed(end, ledgers), created=created(admin, topic_partition))

    with Pool(THREADS_MAX, "keyshard-splits") as pool:
        return tuple(pool.map(one, starts))


def _shown(admin: Admin, topic_partition: TopicPartition) -> tuple[Ledger, ...]:
    """What is stored and shown to Readers."""
    ledgers = admin.ledgers(topic_partition)
    if ledgers is None:
        raise gone(topic_partition)
    # Asked for second: what an open transaction holds back now was in the list, or came later. Both
    # again where the second fails: the list makes the broker load the topic, which that needs.
    return shown(ledgers, admin.held_back_behind(topic_partition))


def created(admin: Admin, topic_partition: TopicPartition) -> str:
    """When a topic partition was created; empty where the broker does not say it to this role."""
    try:
        return admin.created(topic_partition)
    except BrokerError as exc:
        _log.debug("no creation time of %s: %s", topic_partition, exc)
        return ""


def check_stored(
    admin: Admin, name: str, topic_partition: TopicPartition, bound: Bound,
    ledgers: Sequence[Ledger], *, timeout_s: float, fail_on_data_loss: bool,
) -> None:  # fmt: skip
    """Check that what is at a bound is there, or what would come next, where it is a position.

    Args:
        admin: Knows the last entry that was written, also where it is no longer stored.
        name: What the bound is of, for errors.
        topic_partition: Where it is.
        bound: Start or end of a read.
        ledgers: All that is stored.
        timeout_s: How long a request is tried again, seconds.
        fail_on_data_loss: Whether it is an error if not; else a warning.

    Raises:
        DataLossTrimmedError: It is no longer stored.
        PositionAheadError: It is behind all that is stored.
        TopicRecreatedError: It is of a ledger that the topic partition never had so.
    """
    loss = isinstance(bound, MessageId) and _loss(name, topic_partition, bound, ledgers)
    if isinstance(loss, DataLossTrimmedError):
        last = retry_until(lambda: admin.last_written(topic_partition), timeout_s)
        # Retention removed all that was written, and nothing was written behind the position.
        if last is not None and bound == MessageId(last.ledger, last.entry + 1, 0):
            return
    if loss and fail_on_data_loss:
        raise loss
    if loss:
        _log.warning("%s fail_on_data_loss is false: what is there is read.", loss)


def _loss(
    name: str, topic_partition: TopicPartition, position: MessageId, ledgers: Sequence[Ledger]
) -> KeyShardError | None:
    """What is wrong where neither what is at a position is there, nor what would come next."""
    ledger, entry, index = position
    # Of an entry that a place is inside, messages were there.
    end = entry + (index > 0)
    sizes = {one.id: one.entries for one in ledgers}
    oldest, newest = min(sizes, default=-1), max(sizes, default=-1)
    says = f"{name} of {topic_partition} is {position}, but "
    facts = {"topic_partition": topic_partition.name, "missing": str(position)}
    wayout = "or set fail_on_data_loss to false to read what is there."
    if (ledger, end) > (newest, sizes.get(newest, 0)):
        return PositionAheadError(
            f"{says}nothing is stored there yet: its newest ledger is {newest} with "
            f"{sizes.get(newest, 0)} entries, without those that an open transaction holds back. "
            "It is a position of another topic, or of one that was deleted and created anew. "
            f"Correct it, {wayout}",
            **facts,
        )
    if ledger < oldest:
        return DataLossTrimmedError(
            f"{says}the first ledger that is still stored is {oldest}: retention or TTL removed "
            "what lay before, or the topic was deleted and created anew. Begin at 'earliest', "
            f"{wayout}",
            **facts,
        )
    # A ledger that closes without entries is removed; its place is that of the next one.
    if end > sizes.get(ledger, 0):
        has = f"has {sizes[ledger]} entries" if ledger in sizes else "is none of its ledgers"
        return TopicRecreatedError(
            f"{says}ledger {ledger} {has}. It is a position of another topic, or of one that was "
            f"deleted and created anew. Correct it, {wayout}",
            **facts,
        )
    return None


def gone(topic_partition: TopicPartition) -> TopicNotFoundError:
    """A topic partition was there when it was looked up, and is not now."""
    return TopicNotFoundError(
        f"Topic partition {topic_partition} does not exist, and its topic did when it was looked "
        "up: it is being deleted, or the broker deleted a partition that was inactive. For the "
        "latter, create it again (pulsar-admin topics create-missed-partitions), and give topics "
        "that nobody subscribes to a retention.",
        topic=topic_partition.topic,
    )
