"""Owns every hash range of topic partitions."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from keyshard.arrow.content import content_columns
from keyshard.broker.port import Admin, Broker, Consumer, StartPosition
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.assembly import EntryAssembly
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.subscription_state import KEY_SHARED, SubscriptionState
from keyshard.core.window.client_queue import ClientQueue
from keyshard.errors import BrokerError, RangeConflictError, SubscriptionInUseError
from keyshard.threads import Pool
from keyshard.worker.receiver import OwnedRange, RangeConsumer, close_quietly

THREADS_MAX = 8
"""Subscriptions made at the same time."""
HOLDERS_NAMED = 5
"""Consumers that an error names."""
_OTHER_TYPE = re.compile(r"different type(?:.* (?:type|mode) of '?(\w+)'? is different)?")
"""A broker's text for a subscription of another type."""
_AUTO_SPLIT = "AUTO_SPLIT"


def open_range_consumers(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    owned_ranges: Sequence[OwnedRange],
    start: StartPosition,
    *,
    make_queue: Callable[[], ClientQueue],
) -> list[RangeConsumer]:
    """Subscribe every one of some owned ranges, or none.

    Raises:
        SubscriptionInUseError: Somebody else held a range until ``subscribe_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    stop = threading.Event()
    types = _Types(admin, config.subscription)

    def subscribe(owned_range: OwnedRange, where: StartPosition) -> RangeConsumer:
        queue = make_queue()

        def attempt() -> Consumer:
            try:
                return subscribe_once(broker, config, owned_range, queue, where)
            except RangeConflictError as exc:
                types.check(owned_range.topic_partition, exc)
                raise

        try:
            made = retry_until(attempt, config.subscribe_timeout_ms / 1000, stop=stop)
        except BaseException:
            stop.set()
            raise
        return RangeConsumer(owned_range, made, queue)

    def create(owned_range: OwnedRange) -> None:
        subscribe(owned_range, start).consumer.close()

    firsts = {owned_range.topic_partition: owned_range for owned_range in reversed(owned_ranges)}
    with Pool(THREADS_MAX, "keyshard-subscribe") as pool:
        made: list[Future[None]] = []
        if start is not StartPosition.EARLIEST:
            # Only the subscription begins there. A consumer that brings a deleted topic back by a
            # reconnect begins where the new one does.
            made = [pool.submit(create, owned_range) for owned_range in firsts.values()]
            wait(made)
        futures = [
            pool.submit(subscribe, owned_range, StartPosition.EARLIEST)
            for owned_range in owned_ranges
        ]
        wait(futures)
        # A broker that went away meanwhile may come back as another one: what is in the queue of
        # who lost the connection would be taken, and then acknowledged there.
        again = [
            pool.submit(reopen_range_consumer, broker, config, future.result(), stop)
            for future in futures
            if future.exception() is None and not future.result().consumer.is_connected()
        ]
    everything: list[Future[Any]] = [*made, *futures, *again]
    outcomes = [future.exception() for future in everything]
    errors = [error for error in outcomes if error is not None]
    if errors:
        for future in futures:
            if future.exception() is None:
                close_quietly(future.result().consumer)
    for error in errors:
        if isinstance(error, SubscriptionInUseError):
            raise error
    for error in errors:
        if isinstance(error, RangeConflictError):
            raise _in_use(admin, config, sorted(firsts)) from error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


class _Types:
    """Whether a conflict is one over the type of the subscription, which no wait ends.

    Args:
        admin: Says the type, where the broker does not; ``None``: nobody does.
        subscription: Its name.
    """

    def __init__(self, admin: Admin | None, subscription: str) -> None:
        self._admin = admin
        self._subscription = subscription
        self._lock = threading.Lock()
        self._asked: set[TopicPartition] = set()

    def check(self, where: TopicPartition, conflict: RangeConflictError) -> None:
        """Look at a conflict over a topic partition.

        Raises:
            SubscriptionInUseError: The subscription is of another type.
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
                fits = state.kind in ("", KEY_SHARED) and state.sticky
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
            f"Subscription {self._subscription!r} is of {what} on {where}, and in use{who}: "
            f"keyshard, which is {KEY_SHARED} with sticky ranges, is refused. Stop those "
            "consumers, or give keyshard a subscription of its own.",
            holders=addresses,
        ) from None  # the conflict says less


def open_range_consumer(
    broker: Broker,
    config: SourceConfig,
    topic_partition: TopicPartition,
    hash_range: HashRange,
) -> RangeConsumer:
    """Subscribe one range, to acknowledge and not to receive."""
    owned_range = OwnedRange(topic_partition, 0, hash_range)
    queue = ClientQueue(bytes_max=1, messages_max=1)
    made = retry_until(
        lambda: subscribe_once(broker, config, owned_range, queue),
        config.subscribe_timeout_ms / 1000,
    )
    return RangeConsumer(owned_range, made, queue)


def close_range_consumers(range_consumers: Iterable[RangeConsumer]) -> None:
    """Give every range back; acknowledgements that the client holds reach the broker."""
    with Pool(THREADS_MAX, "keyshard-close") as pool:
        for closing in [
            pool.submit(range_consumer.consumer.close) for range_consumer in range_consumers
        ]:
            closing.result()


def reopen_range_consumer(
    broker: Broker, config: SourceConfig, range_consumer: RangeConsumer, stop: threading.Event
) -> None:
    """Give a range consumer a new consumer; everything unacknowledged is delivered to it again.

    One that was subscribed for it meanwhile takes the place. Handlers go on meanwhile, as they do
    while a connection is lost: the range has its owner.
    """
    close_quietly(range_consumer.consumer, for_another=True)

    def attempt() -> Consumer:
        successor, range_consumer.successor = range_consumer.successor, None
        return successor or subscribe_once(
            broker, config, range_consumer.owned_range, range_consumer.queue
        )

    range_consumer.consumer = retry_until(attempt, config.subscribe_timeout_ms / 1000, stop=stop)
    range_consumer.assembly = EntryAssembly(doubted=range_consumer.assembly.doubted)


def subscribe_once(
    broker: Broker,
    config: SourceConfig,
    owned_range: OwnedRange,
    queue: ClientQueue,
    start: StartPosition = StartPosition.EARLIEST,
) -> Consumer:
    """One attempt to own what an owned range says.

    Raises:
        RangeConflictError: Somebody else has it, or a part of it.
        BrokerError: The broker cannot be reached, or refused.
    """
    return broker.subscribe(
        owned_range.topic_partition,
        config.subscription,
        owned_range.hash_range,
        start=start,
        consumer_name=f"keyshard-{socket.gethostname()}-range-{owned_range.range_index}",
        receiver_queue_size=queue.size,
        receiver_queue_bytes=queue.bytes_max,
        columns=content_columns(config.metadata_columns),
    )


def _in_use(
    admin: Admin | None, config: SourceConfig, topic_partitions: Iterable[TopicPartition]
) -> SubscriptionInUseError:
    holders = sorted(_holders(admin, config, topic_partitions)) if admin else []
    who = f" by {', '.join(holders[:HOLDERS_NAMED])}" if holders else ""
    hint = "" if admin else " (admin_url would let this message name the other side)"
    return SubscriptionInUseError(
        f"Subscription {config.subscription!r} is in use{who}: its ranges were not free within "
        f"{config.subscribe_timeout_ms} ms{hint}. Stop the other query, wait for a crashed one to "
        "end, or give this one a subscription of its own.",
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
