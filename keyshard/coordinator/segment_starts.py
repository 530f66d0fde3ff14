"""Start positions in scalable topics, and the positions that streams reach there.

No request creates the subscription of a segment at a position, and none reads its properties. So
the broker first creates it at the earliest message, and then moves its cursor. Meanwhile a second
subscription is registered with the topic: the mark of a start that has not ended. If a start finds
it, nothing was consumed, and the start moves all cursors again. A start at an edge moves no cursor,
and removes the mark before it consumes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.broker.retry import retry_until
from keyshard.broker.topics import warn_of_existing
from keyshard.config.source import SourceConfig
from keyshard.consumers.subscribe import open_range_consumer
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.read_bounds import Bound, Edge, fixed
from keyshard.core.read_target import Target
from keyshard.core.ring.hash_range import RING_SIZE, HashRange
from keyshard.core.topic_segments import STARTING, is_segment
from keyshard.errors import (
    AdminError,
    ConfigError,
    NotRunningError,
    RangeConflictError,
    ReplayTimeoutError,
    SubscriptionInUseError,
    TopicNotFoundError,
)
from keyshard.reading.segment_ledgers import first_block, first_stored, segment_ledgers
from keyshard.reading.stored_positions import check_stored
from keyshard.threads import Pool

THREADS_MAX = 8
"""Segments that are handled in parallel."""
NAME = "starting_position"
_WHOLE_RING = HashRange(0, RING_SIZE - 1)
_WAIT_MS = 200
_FIRST, _END = MessageId(0, 0, 0), MessageId((1 << 63) - 1, (1 << 63) - 1, 0)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The first message of a source in a segment."""

    where: TopicPartition
    start: MessageId | int
    """First message, or publish time, milliseconds since the epoch."""
    batch_size: int = 1
    """Number of messages in its entry."""
    is_position: bool = False
    """Whether an entry is known at which the source must begin."""


class SegmentStarts:
    """Creates the subscriptions of one scalable topic at the start of the source.

    Args:
        broker: Moves cursors, and reads segments.
        admin: Registers the subscription.
        config: The source.
        topic: The scalable topic.
        found: Its segments, and the partitions that it was migrated from.
        prepare: Checks the start in a partition that the topic was migrated from, and returns a
            function that creates the subscription there.
    """

    def __init__(
        self,
        broker: Broker,
        admin: Admin,
        config: SourceConfig,
        topic: str,
        found: Collection[TopicPartition],
        *,
        prepare: Callable[[TopicPartition, Bound], Callable[[], None]],
    ) -> None:
        self._broker = broker
        self._admin = admin
        self._config = config
        self._topic = topic
        self._mark = config.subscription + STARTING
        self._found = found
        self._prepare = prepare
        self._timeout_s = config.operation_timeout_ms / 1000

    def are_due(self) -> bool:
        """Return whether the subscription exists nowhere, or a start that made it has not ended.

        Raises:
            BrokerError: The broker or the admin interface does not answer, or refuses.
        """
        if self._has_mark() or not self._exists_in_some():
            return True
        name, start = self._config.subscription, self._config.starting_position
        warn_of_existing(self._admin, name, self._found, start)
        return False

    def abandon(self) -> None:
        """Give up a start that has not ended: the subscription will be consumed as it is.

        Raises:
            BrokerError: The admin interface does not answer, or refuses.
        """
        if self._has_mark():
            _log.warning(
                "an earlier start of subscription %r of %s at positions has not ended; segments in "
                "which it created the subscription continue there",
                self._config.subscription, self._topic,
            )  # fmt: skip
            self._unmark()

    def create(self, bounds: Mapping[TopicPartition, Bound]) -> None:
        """Create the subscription in all segments, unless another source did so meanwhile.

        If a bound is wrong, it is created in none.

        Args:
            bounds: Start in each segment, and in each partition that the topic was migrated from.

        Raises:
            DataLossTrimmedError, PositionAheadError, TopicRecreatedError: A position names an entry
                that is not stored.
            ConfigError: The broker cannot begin inside a producer batch.
            SubscriptionInUseError: Another client uses the subscription.
            BrokerError: The broker or the admin interface does not answer, or refuses.
        """
        with Pool(THREADS_MAX, "keyshard-begin") as pool:
            segments = list(filter(is_segment, self._found))
            beginnings = list(pool.map(lambda where: self._find(where, bounds[where]), segments))
            partitions = list(itertools.filterfalse(is_segment, self._found))
            prepared = list(
                pool.map(self._prepare, partitions, map(bounds.__getitem__, partitions))
            )
            # It took time to find them, and another source may consume meanwhile. A mark would stay
            # beside its subscription.
            if not self.are_due():
                return
            if self._has_mark():
                _log.warning(
                    "an earlier start of subscription %r of %s ended before anything was consumed; "
                    "its start positions are set again",
                    self._config.subscription, self._topic,
                )  # fmt: skip
            self._register(self._mark)
            list(pool.map(lambda create: create(), prepared))
            list(pool.map(self._begin, beginnings))
        # From now on the subscription exists in each open segment, and keeps sealed ones.
        self._register(self._config.subscription)
        self._unmark()

    def _has_mark(self) -> bool:
        return self._exists(TopicPartition(self._topic), self._mark)

    def _unmark(self) -> None:
        retry_until(lambda: self._admin.unregister(self._topic, self._mark), self._timeout_s)

    def _exists(self, where: TopicPartition, subscription: str) -> bool:
        found = retry_until(lambda: self._admin.subscription(where, subscription), self._timeout_s)
        return found is not None

    def _exists_in_some(self) -> bool:
        with Pool(THREADS_MAX, "keyshard-existing") as pool:
            name = self._config.subscription
            return any(pool.map(lambda where: self._exists(where, name), self._found))

    def _register(self, subscription: str) -> None:
        retry_until(lambda: self._admin.register(self._topic, subscription), self._timeout_s)

    def _find(self, where: TopicPartition, bound: Bound) -> _Beginning:
        """Find and check the start in a segment. Nothing is changed."""
        if isinstance(bound, MessageId):
            ledgers = segment_ledgers(self._broker, self._admin, where, self._timeout_s)
            check_stored(
                self._admin, NAME, where, bound, ledgers, timeout_s=self._timeout_s,
                fail_on_data_loss=self._config.fail_on_data_loss,
            )  # fmt: skip
            bound = fixed(bound, ledgers)
        if isinstance(bound, MessageId):
            return self._inside(where, bound)
        if isinstance(bound, Edge):
            return _Beginning(where, _FIRST if bound is Edge.EARLIEST else _END)
        return _Beginning(where, bound)

    def _inside(self, where: TopicPartition, position: MessageId) -> _Beginning:
        """Return the beginning at a position, which may be inside a producer batch."""
        at = EntryId(*position[:2])
        found = None
        if position.batch_index:
            found = first_block(self._broker, where, at, self._timeout_s)
        if not isinstance(found, EntryBlock) or found.id != at:
            return _Beginning(where, MessageId(*at, 0), is_position=True)
        if position.batch_index >= found.batch_size:
            after = MessageId(at.ledger, at.entry + 1, 0)
            return _Beginning(where, after, is_position=True)
        return _Beginning(where, position, found.batch_size, is_position=True)

    def _begin(self, one: _Beginning) -> None:
        """Create the subscription in a segment, move its cursor, and check where it is."""
        try:
            behind = self._move(one)
            if one.is_position:
                self._check(one, behind)
        except TopicNotFoundError as exc:
            if one.is_position and self._config.fail_on_data_loss:
                raise
            _log.warning("the broker has deleted a segment at the start: %s", exc.summary)

    def _move(self, one: _Beginning) -> EntryId:
        name = self._config.subscription
        try:
            return retry_until(
                lambda: self._broker.begin(one.where, name, one.start, one.batch_size),
                self._config.subscribe_timeout_ms / 1000,
            )
        except RangeConflictError as exc:
            raise SubscriptionInUseError(
                f"Subscription {name!r} of {one.where} is in use, so it cannot begin at "
                f"{self._config.starting_position!r}.",
                "Stop the other client, or give this source its own subscription.",
            ) from exc

    def _check(self, one: _Beginning, behind: EntryId) -> None:
        """Check that a subscription begins at its position.

        Raises:
            AdminError: It begins at another entry.
            ConfigError: It begins at another message of the entry.
        """
        assert isinstance(one.start, MessageId)
        at = EntryId(*one.start[:2])
        first, second = (
            first_stored(self._broker, one.where, self._timeout_s, start) for start in (at, behind)
        )
        if first != second:
            raise AdminError(
                f"Subscription {self._config.subscription!r} of {one.where} should begin at "
                f"{at.ledger}:{at.entry}, but begins at {behind.ledger}:{behind.entry}. Nothing "
                "was consumed.",
                "Start again.",
            )
        if one.start.batch_index and self._first_index(one.where, at) != one.start.batch_index:
            raise ConfigError(
                f"{NAME} of {one.where} is {one.start}, inside a producer batch. The broker does "
                "not keep which messages of a batch are acknowledged.",
                "Set acknowledgmentAtBatchIndexLevelEnabled at the broker, or begin at "
                f"'{at.ledger}:{at.entry}'.",
            )

    def _first_index(self, where: TopicPartition, at: EntryId) -> int | None:
        """Receive the first message, and return its batch index; ``None`` if its entry is not
        ``at``."""
        made = open_range_consumer(self._broker, self._config, where, _WHOLE_RING)
        end_s = time.monotonic() + self._timeout_s
        with closing(made.consumer) as consumer:
            while time.monotonic() < end_s:
                if blocks := consumer.receive(_WAIT_MS):
                    return blocks[0].indices[0] if blocks[0].id == at else None
        raise ReplayTimeoutError(
            f"The broker did not deliver the entry {at.ledger}:{at.entry} of {where} within "
            f"{self._timeout_s:g} s, so it is unknown where the subscription begins.",
            "Check the load of the broker, or raise operation_timeout_ms.",
        )


# -- The position that a stream has reached in a segment ------------------------------------------


def position_in(
    broker: Broker, admin: Admin, source: SourceConfig, where: TopicPartition,
    state: PartitionCheckpoint,
) -> MessageId | Edge:  # fmt: skip
    """Return the first entry of a segment after those of a checkpoint.

    Entries before the first delivered one count as before the start: no request tells where the
    subscription began.

    Raises:
        NotRunningError: Earlier entries, or those after the start, are in no batch yet.
        TopicNotFoundError: The segment was deleted.
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    timeout_s = source.operation_timeout_ms / 1000
    last = max((one for one in (state.floor, state.delivered.last) if one), default=None)
    if last is None:
        return _unread_position(broker, admin, source, where)
    for gap in Target(last).open_gaps(state.delivered, state.floor):
        if gap.start == (0, 0):
            continue
        first = first_stored(broker, where, timeout_s, gap.start)
        if first is not None and first < gap.end:
            raise NotRunningError(
                f"Entries of {where} before {last.ledger}:{last.entry} are in no batch yet, the "
                f"first is {first.ledger}:{first.entry}.",
                "Try again later.",
            )
    return MessageId(last.ledger, last.entry + 1, 0)


def _unread_position(
    broker: Broker, admin: Admin, source: SourceConfig, where: TopicPartition
) -> MessageId | Edge:
    """Return the position in a segment of which nothing was delivered, if the backlog tells it."""
    timeout_s = source.operation_timeout_ms / 1000

    def backlog() -> int:
        found = retry_until(lambda: admin.subscription(where, source.subscription), timeout_s)
        return -1 if found is None else int(found["msgBacklog"])

    # Entries may be published meanwhile. They raise the second backlog, and the count of entries.
    before = backlog()
    ledgers = segment_ledgers(broker, admin, where, timeout_s)
    if before >= sum(one.entries for one in ledgers):
        return Edge.EARLIEST
    if backlog() == 0:
        return MessageId(ledgers[-1].id, ledgers[-1].entries, 0)
    raise NotRunningError(
        f"No entry of {where} is in a batch yet, so the position of the stream there is unknown.",
        "Try again when a batch has rows of it.",
    )
