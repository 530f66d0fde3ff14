"""Creates the subscriptions of a source that starts at positions or at a publish time.

The broker creates each subscription at its start position, before any consumer connects. So earlier
messages are not delivered, not acknowledged, and not part of the backlog. If a source dies before
its first checkpoint, its subscriptions are already where they should be.

The broker knows only whole entries. If a source begins inside an entry, a property of the
subscription names the first message that belongs to the source (docs/adr/0029).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing

from keyshard.broker.admin.port import BEGINS_PROPERTY, Admin
from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.broker.topics import Catalog, look, warn_of_existing
from keyshard.config.source import SourceConfig
from keyshard.coordinator.segment_starts import NAME, SegmentStarts, position_in
from keyshard.coordinator.subscription_ids import Properties, read_properties
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.read_bounds import (
    Bound,
    Edge,
    fixed,
    parse_bound,
    parse_bounds,
    parse_start,
)
from keyshard.core.position.split import stretch
from keyshard.core.read_target import Target
from keyshard.core.topic_segments import is_segment
from keyshard.errors import AdminError, ConfigError, NotRunningError
from keyshard.reading.split_planner import gone
from keyshard.reading.stored_positions import bounds_of, check_stored
from keyshard.threads import Pool

THREADS_MAX = 8
"""Topic partitions that are handled in parallel."""


def create_subscriptions(
    broker: Broker, admin: Admin | None, config: SourceConfig, found: Iterable[TopicPartition],
    topic_of: Callable[[TopicPartition], str],
) -> None:  # fmt: skip
    """Create missing subscriptions, if the source starts at positions or a time.

    If one of the positions is wrong, none is created. Existing subscriptions stay as they are.

    Args:
        broker: Moves cursors of segments.
        admin: Creates the others.
        config: The source.
        found: Its topic partitions.
        topic_of: Returns the topic of a topic partition; of a segment, its scalable topic.

    Raises:
        ConfigError: A topic partition has no position, or a position names one that is not
            consumed.
        DataLossTrimmedError, PositionAheadError, TopicRecreatedError: A position names an entry
            that is not stored; see :func:`keyshard.reading.stored_positions.check_stored`.
        BrokerError: The admin interface does not answer, or refuses.
    """
    found = tuple(found)
    if config.is_scalable:
        _create_in_segments(broker, admin, config, found, topic_of)
        return
    start = parse_start(NAME, config.starting_position)
    if isinstance(start, Edge) or not found:
        return
    assert admin is not None, "positions need admin_url"
    creator = _SubscriptionCreator(admin, config)
    # A time holds for all topic partitions.
    bounds = parse_bounds(NAME, start, found)
    warn_of_existing(admin, config.subscription, found, config.starting_position)
    with Pool(THREADS_MAX, "keyshard-begin") as pool:
        positions = list(pool.map(creator.position, found, map(bounds.__getitem__, found)))
        list(pool.map(creator.create, found, positions))


def _create_in_segments(
    broker: Broker, admin: Admin | None, config: SourceConfig, found: Collection[TopicPartition],
    topic_of: Callable[[TopicPartition], str],
) -> None:  # fmt: skip
    """Create missing subscriptions of scalable topics."""
    start = parse_start(NAME, config.starting_position)
    assert admin is not None, "a scalable topic needs admin_url"
    creator = _SubscriptionCreator(admin, config)

    def prepare(where: TopicPartition, bound: Bound) -> Callable[[], None]:
        position = creator.position(where, bound)
        return lambda: creator.create(where, position)

    def begins(topic: str) -> SegmentStarts:
        of_topic = [one for one in found if topic_of(one) == topic]
        return SegmentStarts(broker, admin, config, topic, of_topic, prepare=prepare)

    starts = list(map(begins, sorted(set(map(topic_of, found)))))
    with Pool(THREADS_MAX, "keyshard-begin") as pool:
        if isinstance(start, Edge):
            list(pool.map(SegmentStarts.abandon, starts))
            return
        are_due = list(pool.map(SegmentStarts.are_due, starts))
    due = list(itertools.compress(starts, are_due))
    if not due:
        return  # Segments with positions may have been deleted since they were consumed.
    bounds = bounds_of(NAME, start, found, config.fail_on_data_loss, topic_of)
    for one in due:
        one.create(bounds)


class _SubscriptionCreator:
    """Creates missing subscriptions at the start of the source.

    :meth:`position` finds and checks the start in a topic partition. Only :meth:`create` changes
    the broker.
    """

    def __init__(self, admin: Admin, config: SourceConfig) -> None:
        self._admin = admin
        self._subscription = config.subscription
        self._timeout_s = config.operation_timeout_ms / 1000
        self._fail_on_data_loss = config.fail_on_data_loss

    def position(self, where: TopicPartition, bound: Bound) -> MessageId | None:
        """Return the first message of the source; ``None`` if no subscription is to be created."""
        if retry_until(
            lambda: self._admin.subscription(where, self._subscription), self._timeout_s
        ):
            return None
        if isinstance(bound, int):
            time_ms = bound
            at = retry_until(lambda: self._admin.position_at(where, time_ms), self._timeout_s)
            if at is None:
                raise gone(where)
            return MessageId(*at, 0)
        ledgers = retry_until(lambda: self._admin.ledgers(where), self._timeout_s)
        if ledgers is None:
            raise gone(where)
        check_stored(
            self._admin, NAME, where, bound, ledgers, timeout_s=self._timeout_s,
            fail_on_data_loss=self._fail_on_data_loss,
        )  # fmt: skip
        stays = fixed(bound, ledgers)
        # For any other bound, the first consumer creates the subscription at the earliest message.
        return stays if isinstance(stays, MessageId) else None

    def create(self, where: TopicPartition, position: MessageId | None) -> None:
        """Create the subscription, and check its position.

        The broker creates the subscription and moves its cursor in two steps.
        """
        if position is None:
            return
        made = retry_until(
            lambda: self._admin.begin(where, self._subscription, position), self._timeout_s
        )
        cursor = _cursor(self._admin, where, self._subscription, self._timeout_s)
        if cursor is None:
            return
        behind, ledgers = cursor
        passed = stretch(where, ledgers, position._replace(batch_index=0), behind)
        if passed.entries:
            raise AdminError(
                f"Subscription {self._subscription!r} of {where} should begin at "
                f"{position.ledger}:{position.entry}, but begins at {behind}, {passed.entries} "
                f"entries later{'' if made else '; another client created it meanwhile'}. Nothing "
                "was consumed.",
                "Delete the subscription, and start again.",
            )


def _cursor(
    admin: Admin, where: TopicPartition, subscription: str, timeout_s: float
) -> tuple[MessageId, Sequence[Ledger]] | None:
    """Return the first message after the mark-delete, and the stored ledgers; ``None`` if unknown.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    state = retry_until(lambda: admin.broker_state(where, subscription), timeout_s)
    ledgers = retry_until(lambda: admin.ledgers(where), timeout_s)
    marked = None if state is None else state.mark_delete
    if marked is None or ledgers is None:
        return None
    return MessageId(marked.ledger, marked.entry + 1, 0), ledgers


def read_first_messages(
    admin: Admin | None, config: SourceConfig, properties: Properties, *, starts: bool
) -> dict[TopicPartition, MessageId]:
    """Return the first message of each subscription that begins inside a producer batch.

    Every start of a source reads the first messages from the properties: options may have changed,
    and a broker that lost acknowledgements delivers the whole producer batch again. If a
    cursor was reset to an earlier entry, the subscription no longer begins inside the batch.

    Args:
        admin: Admin REST interface; without one the result is empty.
        config: Names the subscription.
        properties: Properties of the subscription in each topic partition.
        starts: Whether the source starts. Then the property is removed from a subscription whose
            cursor was reset: otherwise it would hold again once the cursor reaches the batch.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    if admin is None:
        return {}
    timeout_s = config.operation_timeout_ms / 1000
    begins = {
        where: each[BEGINS_PROPERTY]
        for where, each in properties.items()
        if each and BEGINS_PROPERTY in each
    }

    def first_message(where: TopicPartition, text: str) -> MessageId | None:
        position = parse_bound(f"Property {BEGINS_PROPERTY} of {config.subscription!r}", text)
        cursor = _cursor(admin, where, config.subscription, timeout_s)
        if cursor is None or not isinstance(position, MessageId):
            return None
        behind, ledgers = cursor
        before = stretch(where, ledgers, behind, position._replace(batch_index=0))
        if not before.entries:
            return position
        if starts:
            retry_until(
                lambda: admin.set_property(where, config.subscription, BEGINS_PROPERTY, None),
                timeout_s,
            )
        return None

    with Pool(THREADS_MAX, "keyshard-begin") as pool:
        positions = list(pool.map(first_message, begins.keys(), begins.values()))
    return {
        where: position
        for where, position in zip(begins, positions, strict=True)
        if position is not None
    }


# -- Positions that a stream has reached, for a bounded read of its messages ----------------------


def positions_of(source: SourceConfig, checkpoint: Checkpoint) -> dict[str, MessageId | Edge]:
    """Return, per topic partition, the first entry after those of a checkpoint.

    Segments that were deleted have no position: they were acknowledged.

    Raises:
        ConfigError: The source has no ``admin_url``.
        NotRunningError: Earlier entries are in no batch yet.
        TopicNotFoundError: A topic no longer exists.
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    if source.admin_url is None:
        raise ConfigError(
            "The positions of a stream need the admin interface, which lists the stored entries.",
            "Set admin_url.",
        )
    timeout_s = source.operation_timeout_ms / 1000
    connection = source.how_to_connect()
    with closing(connect(connection)) as broker, closing(connect_admin(connection)) as admin:
        found = look(Catalog(broker, admin, source), checkpoint, timeout_s).consumed
        return {
            where.name: (
                position_in(broker, admin, source, where, state)
                if is_segment(where)
                else _position_after(admin, source, where, state)
            )
            for where in found
            for state in [checkpoint.partitions.get(where, PartitionCheckpoint())]
        }


def _position_after(
    admin: Admin, source: SourceConfig, where: TopicPartition, state: PartitionCheckpoint
) -> MessageId:
    timeout_s = source.operation_timeout_ms / 1000
    # The cursor is read first: each acknowledged entry is in a batch, perhaps one after the
    # checkpoint.
    broker = retry_until(lambda: admin.broker_state(where, source.subscription), timeout_s)
    ledgers = retry_until(lambda: admin.ledgers(where), timeout_s)
    if broker is None or ledgers is None:
        raise gone(where)
    delivered = [one for one in (state.floor, state.delivered.last) if one is not None]
    if not state.delivered:
        properties = read_properties(admin, source, [where])
        begin = read_first_messages(admin, source, properties, starts=False).get(where)
        if begin is not None and (broker.mark_delete or EntryId(0, -1)) < begin[:2]:
            return begin
    last = max(delivered, default=broker.mark_delete) or EntryId(0, -1)
    missing = [
        one
        for gap in Target(last).open_gaps(state.delivered, state.floor, broker)
        if (one := stretch(where, ledgers, MessageId(*gap.start, 0), MessageId(*gap.end, 0))).spans
    ]
    if missing:
        first = missing[0].first
        raise NotRunningError(
            f"{sum(one.entries for one in missing)} entries of {where} before "
            f"{last.ledger}:{last.entry} are in no batch yet, the first is "
            f"{first.ledger}:{first.entry}. A slow range has not delivered them.",
            "Try again when progress shows no ackGaps.",
        )
    return MessageId(last.ledger, last.entry + 1, 0)
