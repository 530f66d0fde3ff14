"""Subscribes every hash range of topic partitions."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker, Consumer, StartPosition, SubscriptionSpec
from keyshard.broker.retry import retry_until
from keyshard.columns.content import content_columns
from keyshard.config.source import SourceConfig
from keyshard.consumers.limit_report import limit_behind, with_connected
from keyshard.consumers.receiver import OwnedRange, RangeConsumer, close_quietly
from keyshard.core.creation import subscriptions_missing
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_assembly import EntryAssembly
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.subscription_state import KEY_SHARED, SubscriptionState
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.errors import (
    BrokerError,
    LimitReachedError,
    RangeConflictError,
    SubscriptionInUseError,
    SubscriptionNotFoundError,
    TopicNotFoundError,
)
from keyshard.threads import Pool, wait_for

THREADS_MAX = 8
"""Subscriptions in parallel."""
HOLDERS_NAMED = 5
"""Most consumers that an error names."""
_OTHER_TYPE = re.compile(r"different type(?:.* (?:type|mode) of '?(\w+)'? is different)?")
"""The broker's text for a subscription of another type."""
_AUTO_SPLIT = "AUTO_SPLIT"


def open_range_consumers(
    broker: Broker, admin: Admin | None, config: SourceConfig, owned_ranges: Sequence[OwnedRange],
    start: StartPosition, *, make_queue: Callable[[], ReceiverQueueSize], leaves_out: bool = False,
) -> list[RangeConsumer]:  # fmt: skip
    """Subscribe all of some owned ranges, or none.

    A segment that the broker has deleted meanwhile is left out. It was acknowledged, and discovery
    drops it. With ``leaves_out``, so are other topic partitions that do not exist.

    Raises:
        SubscriptionInUseError: Another consumer held a range until ``subscribe_timeout_ms``.
        LimitReachedError: The broker had no room for all consumers within 5 s.
        SubscriptionNotFoundError: The subscription does not exist, and the broker creates none.
        BrokerError: The broker cannot be reached, or refused.
    """
    leaves_out = leaves_out or config.is_scalable
    stop = threading.Event()
    types = _Types(admin, config.subscription)
    limited: dict[TopicPartition, LimitReachedError] = {}

    def subscribe(owned_range: OwnedRange, where: StartPosition) -> RangeConsumer | None:
        queue = make_queue()

        def attempt() -> Consumer:
            try:
                return subscribe_once(broker, config, owned_range, queue, where)
            except RangeConflictError as exc:
                types.check(owned_range.topic_partition, exc)
                raise
            except LimitReachedError as exc:
                limited[owned_range.topic_partition] = exc
                raise

        try:
            made = retry_until(attempt, config.subscribe_timeout_ms / 1000, stop=stop)
        except BaseException as exc:
            if isinstance(exc, TopicNotFoundError) and leaves_out:
                return None
            stop.set()
            raise
        return RangeConsumer(owned_range, made, queue)

    def create(owned_range: OwnedRange) -> None:
        if (made := subscribe(owned_range, start)) is not None:
            made.consumer.close()

    firsts = {owned_range.topic_partition: owned_range for owned_range in reversed(owned_ranges)}
    with Pool(THREADS_MAX, "keyshard-subscribe") as pool:
        made: list[Future[None]] = []
        if start is not StartPosition.EARLIEST:
            # Only the first subscribe uses ``start``. All other consumers begin at the earliest
            # message: if a reconnect creates a deleted topic again, it is read from its beginning.
            made = [pool.submit(create, owned_range) for owned_range in firsts.values()]
            wait_for(made)
        futures = [
            pool.submit(subscribe, owned_range, StartPosition.EARLIEST)
            for owned_range in owned_ranges
        ]
        wait_for(futures)
        # A broker that was lost meanwhile may come back wiped. Then the queue of a consumer that
        # lost its connection holds old entries, and their ids would be acknowledged at the new one.
        again = {
            one.owned_range: pool.submit(_is_reopened, broker, config, one, stop, leaves_out)
            for one in _made(futures)
            if not one.consumer.is_connected()
        }
    every: list[Future[Any]] = [*made, *futures, *again.values()]
    errors = [error for future in every if (error := future.exception()) is not None]
    if not errors:
        deleted = {owned_range for owned_range, reopened in again.items() if not reopened.result()}
        return [one for one in _made(futures) if one.owned_range not in deleted]
    for one in _made(futures):
        close_quietly(one.consumer)
    if missing := _without_subscription(owned_ranges, futures):
        raise subscriptions_missing(missing, config.subscription, start.value)
    opens = Counter(owned_range.topic_partition for owned_range in owned_ranges)
    raise _reason(admin, config, errors, opens, limited)


def _made(futures: Sequence[Future[RangeConsumer | None]]) -> list[RangeConsumer]:
    """Return the range consumers that were subscribed."""
    found = [future.result() for future in futures if future.exception() is None]
    return [one for one in found if one is not None]


def _reason(
    admin: Admin | None,
    config: SourceConfig,
    errors: Sequence[BaseException],
    opens: Mapping[TopicPartition, int],
    limited: Mapping[TopicPartition, LimitReachedError],
) -> BaseException:
    """Return the error that explains why not all ranges were subscribed.

    Args:
        admin: Names other consumers; ``None`` without ``admin_url``.
        config: The source.
        errors: Errors of the single consumers, which are closed.
        opens: Number of consumers that the source opens, by topic partition.
        limited: Topic partitions where a limit of the broker was met.
    """
    in_use = [error for error in errors if isinstance(error, SubscriptionInUseError)]
    at_limit = any(isinstance(error, LimitReachedError) for error in errors)
    conflicts = [error for error in errors if isinstance(error, RangeConflictError)]
    if not in_use and at_limit:
        where, error = next(iter(limited.items()))
        return with_connected(error, admin, where, opens[where])
    if not in_use and conflicts:
        found = limit_behind(conflicts[0], admin, config.subscription, opens)
        made = found or _in_use(admin, config, sorted(opens), conflicts[0])
        made.__cause__ = conflicts[0]
        return made
    return (in_use or errors)[0]


def _without_subscription(
    owned_ranges: Sequence[OwnedRange], futures: Sequence[Future[RangeConsumer | None]]
) -> list[str]:
    """Return the topics whose subscription is missing, and not created by the broker."""
    return [
        owned_range.topic_partition.topic
        for owned_range, future in zip(owned_ranges, futures, strict=True)
        if isinstance(future.exception(), SubscriptionNotFoundError)
    ]


class _Types:
    """Detects a conflict over the subscription type, which waiting does not resolve.

    Args:
        admin: Asked once per topic partition for the type and the addresses of the holders, which
            the broker's error may not name; ``None`` without ``admin_url``.
        subscription: Name of the subscription.
    """

    def __init__(self, admin: Admin | None, subscription: str) -> None:
        self._admin = admin
        self._subscription = subscription
        self._lock = threading.Lock()
        self._asked: set[TopicPartition] = set()

    def check(self, where: TopicPartition, conflict: RangeConflictError) -> None:
        """Check a conflict over a topic partition.

        Raises:
            SubscriptionInUseError: The subscription has another type.
        """
        found = _OTHER_TYPE.search(conflict.message)
        kind = (found[1] or "another type") if found else ""
        addresses: list[str] = []
        with self._lock:
            ask = self._admin is not None and where not in self._asked
            self._asked.add(where)
        if ask:
            assert self._admin is not None
            with suppress(BrokerError, ValueError):
                stats = self._admin.subscription(where, self._subscription)
                state = SubscriptionState.from_stats(stats or {})
                fits = state.kind in ("", KEY_SHARED) and state.sticky is not False
                if state.consumers and not fits:
                    kind = _AUTO_SPLIT if state.kind == KEY_SHARED else state.kind
                    addresses = sorted({one.address for one in state.consumers})
        if not kind:
            return
        what = kind if kind == "another type" else f"type {kind}"
        if kind == _AUTO_SPLIT:
            what = f"type {KEY_SHARED}, splitting the ring automatically ({_AUTO_SPLIT}),"
        who = f" by {', '.join(addresses[:HOLDERS_NAMED])}" if addresses else ""
        raise SubscriptionInUseError(
            f"Subscription {self._subscription!r} is of {what} on {where}, and is in use{who}. "
            f"The broker rejects keyshard, whose type is {KEY_SHARED} with sticky ranges.",
            "Stop those consumers, or give keyshard its own subscription.",
            holders=addresses,
        ) from None  # the message of the conflict adds nothing to this one


def open_range_consumer(
    broker: Broker,
    config: SourceConfig,
    topic_partition: TopicPartition,
    hash_range: HashRange,
) -> RangeConsumer:
    """Subscribe one range in order to acknowledge, not to receive."""
    owned_range = OwnedRange(topic_partition, 0, hash_range)
    queue = ReceiverQueueSize(bytes_max=1, messages_max=1)
    made = retry_until(
        lambda: subscribe_once(broker, config, owned_range, queue),
        config.subscribe_timeout_ms / 1000,
    )
    return RangeConsumer(owned_range, made, queue)


def close_range_consumers(range_consumers: Iterable[RangeConsumer]) -> None:
    """Close all consumers; acknowledgements that the client holds reach the broker."""
    with Pool(THREADS_MAX, "keyshard-close") as pool:
        for closing in [
            pool.submit(range_consumer.consumer.close) for range_consumer in range_consumers
        ]:
            closing.result()


def reopen_range_consumer(
    broker: Broker, config: SourceConfig, range_consumer: RangeConsumer, stop: threading.Event
) -> None:
    """Give a range consumer a new consumer, so that all unacknowledged entries come again.

    If it has a successor already, that one is used. Handlers keep running, as they do while a
    connection is lost, because the range keeps its owner.
    """
    close_quietly(range_consumer.consumer, for_another=True)

    def attempt() -> Consumer:
        successor, range_consumer.successor = range_consumer.successor, None
        return successor or subscribe_once(
            broker, config, range_consumer.owned_range, range_consumer.queue
        )

    range_consumer.consumer = retry_until(attempt, config.subscribe_timeout_ms / 1000, stop=stop)
    range_consumer.assembly = EntryAssembly(doubted=range_consumer.assembly.doubted)


def _is_reopened(
    broker: Broker, config: SourceConfig, range_consumer: RangeConsumer, stop: threading.Event,
    leaves_out: bool,
) -> bool:  # fmt: skip
    """Reopen a range consumer; return ``False`` if it is left out, as its topic was deleted."""
    try:
        reopen_range_consumer(broker, config, range_consumer, stop)
    except TopicNotFoundError:
        if leaves_out:
            return False
        raise
    return True


def subscribe_once(
    broker: Broker,
    config: SourceConfig,
    owned_range: OwnedRange,
    queue: ReceiverQueueSize,
    start: StartPosition = StartPosition.EARLIEST,
) -> Consumer:
    """Try once to subscribe an owned range.

    Raises:
        RangeConflictError: Another consumer has the range or a part of it.
        BrokerError: The broker cannot be reached, or refused.
    """
    return broker.subscribe(
        SubscriptionSpec(
            owned_range.topic_partition,
            config.subscription,
            owned_range.hash_range,
            consumer_name=consumer_name(owned_range),
            receiver_queue_size=queue.size,
            receiver_queue_bytes=queue.bytes_max,
            columns=content_columns(config.metadata_columns),
        ),
        start,
    )


def consumer_name(owned_range: OwnedRange) -> str:
    """Return the name by which the broker shows the consumer of an owned range."""
    return f"keyshard-{socket.gethostname()}-range-{owned_range.range_index}"


def _in_use(
    admin: Admin | None,
    config: SourceConfig,
    topic_partitions: Iterable[TopicPartition],
    conflict: RangeConflictError,
) -> SubscriptionInUseError:
    holders = sorted(_holders(admin, config, topic_partitions)) if admin else []
    who = f" by {', '.join(holders[:HOLDERS_NAMED])}" if holders else ""
    hint = "" if admin else " (with admin_url, this error names the other consumer)"
    if conflict.facts.get("or_limit") and not holders:
        hint += ", or a limit of consumers is reached, which transport wire tells apart"
    return SubscriptionInUseError(
        f"Subscription {config.subscription!r} is in use{who}: its ranges were not free within "
        f"{config.subscribe_timeout_ms} ms{hint}.",
        "Stop the other query, wait until a crashed query ends, or give this query its own "
        "subscription.",
        holders=holders,
    )


def _holders(
    admin: Admin, config: SourceConfig, topic_partitions: Iterable[TopicPartition]
) -> set[str]:
    holders: set[str] = set()
    for topic_partition in topic_partitions:
        try:
            stats = admin.subscription(topic_partition, config.subscription) or {}
        except BrokerError:
            continue
        holders |= {str(consumer.get("address", "?")) for consumer in stats.get("consumers", ())}
    return holders
