"""Plans a bounded read: finds the entries between its bounds in the ledger list.

Time bounds are publish times, as producers set them. A producer batch has one publish time for all
its messages. The result is exact, because each split drops messages outside the bounds.

Publish times are not in the order of entries: clocks differ, a message that is sent again keeps its
time, and so does a replicated one. The broker does not know their order before it reads. So by
default a read covers everything that is stored between the other bounds. If the caller states how
far publish times go back, it covers only entries that can match; see :func:`stretches`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

from keyshard.broker.admin.port import Admin
from keyshard.broker.auth.tls import context_of, of_bookies
from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import OpensReaders
from keyshard.broker.retry import retry_until
from keyshard.broker.topics import Catalog, look
from keyshard.config.segments import BROKER, Segments, check_segments
from keyshard.config.source import SourceConfig
from keyshard.core.message import MessageId
from keyshard.core.option_checks import check_seconds
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger, shown
from keyshard.core.position.read_bounds import (
    Bound,
    Edge,
    check_order,
    fixed,
    parse_bound,
)
from keyshard.core.position.replicas import OFFLOADED, UNKNOWN, LedgerReplicas, OffloadedLedger
from keyshard.core.position.split import Closed, Split, stretch
from keyshard.core.position.zones import Storage, Wanted, Zoned
from keyshard.core.topic_segments import is_segment
from keyshard.errors import (
    AuthorizationError,
    BrokerError,
    ConfigError,
    TopicNotFoundError,
)
from keyshard.reading.segment_ledgers import segment_ledgers, warn_of_limits
from keyshard.reading.stored_positions import bounds_of, check_stored
from keyshard.redaction import listed
from keyshard.threads import Pool

if TYPE_CHECKING:
    from keyshard.offloads.offload_reader import Offloads
    from keyshard.reading.ledger_index import LedgerIndex

ATTEMPTS = 3
"""Most plans of a read: a segment may be deleted after it was found."""
THREADS_MAX = 16
"""Topic partitions that are planned in parallel."""
NOT_OFFLOADED = "it is not offloaded"
"""The placement of a ledger that is not read from bookies, if only offloads are."""
NAMED_MAX = 20
"""Most ledgers of a topic partition that a log line names."""

_log = logging.getLogger(__name__)


def stretches(
    admin: Admin,
    starts: Mapping[TopicPartition, Bound],
    ends: Mapping[TopicPartition, Bound],
    timeout_s: float,
    *,
    broker: OpensReaders | None = None,
    disorder_ms: int | None = None,
    published: tuple[int | None, int | None] = (None, None),
    fail_on_data_loss: bool = True,
    segments: Segments = Segments(),  # noqa: B008 - immutable
    index: LedgerIndex | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 - immutable
) -> tuple[Split, ...]:
    """Return the split of each topic partition as of now; without spans if it has no entries.

    With an index, there is a split for each stretch of entries that it does not rule out.

    Args:
        admin: Lists ledgers, and finds positions by time.
        starts: First position or time of each topic partition.
        ends: End position or time of each topic partition, exclusive.
        timeout_s: How long a request is retried, seconds.
        broker: Reads the ledgers of segments of scalable topics, which the admin interface does not
            list. ``None``: there are no segments.
        disorder_ms: Most that publish times go back from an entry to any later one, milliseconds.
            If the broker adds its own time to entries, it also differs from the publish time by at
            most this. Entries further outside the bounds are then not read. ``None``: unknown, so
            everything is read.
        published: First publish time that is wanted between the bounds, and the end, exclusive,
            milliseconds since the epoch.
        fail_on_data_loss: Whether a position that is not stored is an error. If not, the read takes
            what is stored between the bounds, and logs a warning.
        segments: Where closed ledgers are read; the splits say where their entries are stored.
        index: Knows the bounds of messages in closed ledgers.
        wanted: Keys and event times that are wanted. Only an index looks at them.

    Raises:
        ConfigError: A start is after its end.
        TopicNotFoundError: A topic partition no longer exists.
        DataLossTrimmedError: A position is no longer stored.
        PositionAheadError: A position is after all stored entries, and is not the next one.
        TopicRecreatedError: A position names an entry that its ledger never had.
        BrokerError: The admin interface cannot be reached, or refuses.
    """
    check_order(starts, ends)

    def one(where: TopicPartition) -> list[Split]:
        is_listed = not is_segment(where)
        if is_listed:
            ledgers, closed = retry_until(lambda: _shown(admin, where, segments), timeout_s)
        else:
            assert broker is not None, "segments are read by the broker"
            ledgers, closed = segment_ledgers(broker, admin, where, timeout_s), {}
        start, end = starts[where], ends[where]
        for name, bound in (("start", start), ("end", end)):
            check_stored(
                admin, name, where, bound, ledgers, timeout_s=timeout_s,
                fail_on_data_loss=fail_on_data_loss,
            )  # fmt: skip
        if start is Edge.LATEST or end is Edge.EARLIEST:
            return [Split(where, (), end=fixed(end, ledgers))]

        def at(time_ms: int) -> MessageId | None:
            found = retry_until(lambda: admin.position_at(where, max(0, time_ms)), timeout_s)
            return None if found is None else MessageId(*found, 0)

        found = _stretch_between(
            where, ledgers, start, end, published,
            at=at if is_listed and disorder_ms is not None else None,
            disorder_ms=disorder_ms or 0,
        )  # fmt: skip
        found = replace(found, end=fixed(end, ledgers), created=created(admin, where))
        if index is None or not found.created or not is_listed:
            return [found]
        storage = Storage(where, found.created, closed)
        limited = replace(wanted, published=(found.start_ms, found.end_ms))
        zones = index.zones(storage, keys=wanted.keys is not None)
        return Zoned(zones, limited).of(found, closed)

    with Pool(THREADS_MAX, "keyshard-splits") as pool:
        return tuple(chain.from_iterable(pool.map(one, starts)))


def _stretch_between(
    where: TopicPartition, ledgers: Sequence[Ledger], start: Bound, end: Bound,
    published: tuple[int | None, int | None], *,
    at: Callable[[int], MessageId | None] | None, disorder_ms: int,
) -> Split:  # fmt: skip
    """Return the entries between two bounds, as far as positions and times limit them.

    Args:
        where: The topic partition.
        ledgers: Its ledgers.
        start: Start of the read.
        end: End of the read.
        published: Publish times between the bounds, as for :func:`stretches`.
        at: Returns the position at a time, milliseconds; ``None``: times do not limit positions.
        disorder_ms: Most that publish times go back, milliseconds.
    """
    start_ms, end_ms = published
    if isinstance(start, int):
        start_ms = start if start_ms is None else max(start, start_ms)
    if isinstance(end, int):
        end_ms = end if end_ms is None else min(end, end_ms)
    starting = [start] if isinstance(start, MessageId) else []
    ending = [end] if isinstance(end, MessageId) else []
    # If the entry before the first position is earlier than the start by the disorder, all
    # entries before it are earlier than the start. The same holds, mirrored, for the end.
    if at is not None and start_ms is not None and (found := at(start_ms - disorder_ms)):
        starting.append(found)
    if at is not None and end_ms is not None and (found := at(end_ms + disorder_ms)):
        ending.append(found)
    return stretch(
        where, ledgers, max(starting, default=None), min(ending, default=None),
        start_ms=start_ms, end_ms=end_ms,
    )  # fmt: skip


def _shown(
    admin: Admin, topic_partition: TopicPartition, segments: Segments
) -> tuple[tuple[Ledger, ...], dict[int, Closed]]:
    """Return the ledgers that Readers can see, and all that are closed."""
    if segments.by_broker_only:
        ledgers = admin.ledgers(topic_partition)
    else:
        ledgers = _placed(admin, topic_partition, segments)
    if ledgers is None:
        raise gone(topic_partition)
    # The list of ledgers comes first, so that the second request knows of each transaction that
    # holds back listed entries. The list also makes the broker load the topic, which the second
    # request needs. If that request fails, the caller retries both.
    closed = {one.id: Closed(one.entries, one.size_bytes) for one in ledgers[:-1]}
    try:
        return shown(ledgers, admin.held_back_behind(topic_partition)), closed
    except AuthorizationError as exc:
        _log.warning(
            "It is unknown whether open transactions hold back entries of %s: %s Two "
            "consecutive reads may both miss rows of such transactions.",
            topic_partition, exc.message,
        )  # fmt: skip
    # The broker holds back the entries after the start of an open transaction, also in later
    # ledgers. Bookies do not.
    why = UNKNOWN
    if not segments.by_broker_only:
        why = "it is unknown whether transactions hold back its entries"
    return tuple(replace(one, placement=why) for one in ledgers), closed


def _placed(
    admin: Admin, topic_partition: TopicPartition, segments: Segments
) -> tuple[Ledger, ...] | None:
    """Return all ledgers, and where each is read; ``None`` if there is no such topic."""
    ledgers = admin.placed_ledgers(topic_partition)
    if ledgers is None:
        return None
    if segments.source == BROKER:
        ledgers = tuple(
            replace(one, placement=NOT_OFFLOADED) if isinstance(one.placement, LedgerReplicas)
            else one for one in ledgers
        )  # fmt: skip
    if segments.offloads is None or all(one.placement != OFFLOADED for one in ledgers):
        return ledgers
    try:
        found = admin.offloads(topic_partition) or {}
    except AuthorizationError as exc:
        why = f"its offload is refused: {exc.message}"
        return tuple(
            replace(one, placement=why) if one.placement == OFFLOADED else one for one in ledgers
        )
    return tuple(_in_store(one, found.get(one.id)) for one in ledgers)


def _in_store(ledger: Ledger, uuid: str | None) -> Ledger:
    """Return a ledger with the place of its offload, if it has one."""
    if ledger.placement != OFFLOADED or uuid is None:
        return ledger
    stored = OffloadedLedger(ledger.id, ledger.entries - 1, ledger.size_bytes, uuid)
    return replace(ledger, placement=stored)


def created(admin: Admin, topic_partition: TopicPartition) -> str:
    """Return the creation time of a topic partition, or ``""`` if this role may not see it."""
    try:
        return admin.created(topic_partition)
    except BrokerError as exc:
        _log.debug("the creation time of %s is unknown: %s", topic_partition, exc.summary)
        return ""


def gone(topic_partition: TopicPartition) -> TopicNotFoundError:
    """Return the error for a topic partition that disappeared after it was looked up."""
    return TopicNotFoundError(
        f"Topic partition {topic_partition} does not exist any more. The topic is being deleted, "
        "or the broker deleted an inactive partition.",
        "In the second case, create the partition again (pulsar-admin topics "
        "create-missed-partitions), and set a retention for topics without a subscription.",
        topic=topic_partition.topic,
    )


# -- A bounded read of a source's topics; its subscription is not used ----------------------------

DISORDER_S_MAX = timedelta(days=3_650).total_seconds()
"""Largest disorder that is accepted, seconds."""


def plan_read(
    source: SourceConfig,
    start: object = "earliest",
    end: object = "latest",
    *,
    disorder_max_s: float | None = None,
    published: tuple[int | None, int | None] = (None, None),
    segments: Segments | None = None,
    ledger_index: str | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 - immutable
) -> tuple[Split, ...]:
    """Plan the entries between two bounds now, as one split for each topic partition.

    With an index, there is a split for each stretch of entries that it does not rule out.

    Args:
        source: Names the cluster and the topics. Its ``fail_on_data_loss`` and
            ``operation_timeout_ms`` apply; its subscription is not used.
        start: First message; see :mod:`keyshard.core.position.read_bounds`.
        end: End, exclusive.
        disorder_max_s: How far publish times go back at most, seconds; see :func:`stretches`.
        published: Publish times that are wanted between the bounds; see :func:`stretches`.
        segments: Where closed ledgers are read; ``None``: by the broker. The log says for which
            ledgers the broker is asked all the same, and why.
        ledger_index: Path or fsspec URL of the index of closed ledgers; ``None``: there is none.
        wanted: Keys and event times that are wanted. The index leaves out zones without them; the
            read may return others.

    Raises:
        ConfigError: A bound, an option or a file is wrong, or the source has no ``admin_url``.
        TopicNotFoundError: A topic does not exist.
        DataLossTrimmedError, PositionAheadError, TopicRecreatedError: A position is not stored; see
            :func:`stretches`.
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    if disorder_max_s is not None:
        check_seconds("disorder_max_s", disorder_max_s, DISORDER_S_MAX)
    check_segments(segments)
    for name, bound in (("start", start), ("end", end)):
        if not isinstance(bound, Mapping):
            parse_bound(name, bound)  # before the broker is asked for topic partitions
    segments = segments or Segments()
    if tls := of_bookies(segments):
        context_of(tls)  # a task would find out later
    if source.admin_url is None:
        raise ConfigError(
            "A bounded read needs the admin interface, which lists the stored entries.",
            "Set admin_url.",
        )
    index = None if ledger_index is None else open_index(ledger_index)
    if source.is_scalable:
        warn_of_limits({"disorder_max_s": disorder_max_s, "ledger_index": ledger_index})
    timeout_s = source.operation_timeout_ms / 1000
    connection = source.how_to_connect()
    if segments.offloads is not None:
        open_offloads(segments.offloads)  # a task would find out later
    with closing(connect(connection)) as broker, closing(connect_admin(connection)) as admin:
        for attempt in range(1, ATTEMPTS + 1):
            catalog = Catalog(broker, admin, source)
            found = look(catalog, None, timeout_s).consumed
            of_topic = catalog.scalable.topic_of if source.is_scalable else None
            try:
                found_stretches = stretches(
                    admin,
                    bounds_of("start", start, found, source.fail_on_data_loss, of_topic),
                    bounds_of("end", end, found, source.fail_on_data_loss, of_topic),
                    timeout_s,
                    broker=broker,
                    disorder_ms=None if disorder_max_s is None else round(disorder_max_s * 1000),
                    published=published,
                    fail_on_data_loss=source.fail_on_data_loss,
                    segments=segments,
                    index=index,
                    wanted=wanted,
                )
                break
            except TopicNotFoundError as exc:
                # The broker deleted a segment that is acknowledged; another look does not find it.
                if not source.is_scalable or attempt == ATTEMPTS:
                    raise
                _log.info("looking up the segments again: %s", exc.summary)
    if not segments.by_broker_only:
        _log_placements(found_stretches)
    if index is not None:
        _log_skipped(found_stretches)
    return found_stretches


def open_index(url: str) -> LedgerIndex:
    """Return the index of closed ledgers at a path or fsspec URL.

    Raises:
        ConfigError: The URL is not a string, or names no known file system.
    """
    from keyshard.reading.ledger_index import LedgerIndex  # noqa: PLC0415 - few reads need it

    return LedgerIndex(url)


def open_offloads(url: str) -> Offloads:
    """Return the store of offloaded ledgers at a path or fsspec URL.

    Raises:
        ConfigError: The URL is not a string, or names no known file system.
    """
    from keyshard.offloads.offload_reader import Offloads  # noqa: PLC0415 - few reads need it

    return Offloads(url)


def _log_placements(planned: Sequence[Split]) -> None:
    """Log how the ledgers of a plan are read; a warning if the broker returns everything."""
    for one in planned:
        left = [span for span in one.spans if isinstance(span.placement, str)]
        offloaded = sum(isinstance(span.placement, OffloadedLedger) for span in one.spans)
        why = listed((f"{span.ledger} ({span.placement})" for span in left), NAMED_MAX)
        level = logging.WARNING if left and len(left) == len(one.spans) else logging.INFO
        _log.log(
            level,
            "%s: %d of %d ledgers are read from bookies%s. The broker is asked for these: %s.",
            one.topic_partition, len(one.spans) - len(left) - offloaded, len(one.spans),
            f", and {offloaded} from the store of offloads" if offloaded else "",
            why or "none",
        )  # fmt: skip


def _log_skipped(planned: Sequence[Split]) -> None:
    """Log how many entries the index rules out."""
    left_out: Counter[TopicPartition] = Counter()
    kept: Counter[TopicPartition] = Counter()
    for one in planned:
        left_out[one.topic_partition] += sum(span.entries for span in one.skipped)
        kept[one.topic_partition] += one.entries
    for where, entries in left_out.items():
        _log.info("%s: the index rules out %s entries; %s are read.",
                  where, f"{entries:,}", f"{kept[where]:,}")  # fmt: skip
