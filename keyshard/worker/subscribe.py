"""Owns every hash range of topic partitions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from keyshard.arrow.content import content_columns
from keyshard.broker.port import Admin, Broker, Consumer, StartPosition
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.assembly import EntryAssembly
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.window.client_queue import ClientQueue
from keyshard.errors import BrokerError, RangeConflictError, SubscriptionInUseError
from keyshard.worker.receiver import OwnedRange, RangeConsumer, close_quietly

THREADS_MAX = 8
"""Subscriptions made at the same time."""


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

    def subscribe(owned_range: OwnedRange, where: StartPosition) -> RangeConsumer:
        queue = make_queue()
        try:
            return RangeConsumer(
                owned_range,
                _subscribe(broker, config, owned_range, where, stop, queue=queue),
                queue,
            )
        except BaseException:
            stop.set()
            raise

    def create(owned_range: OwnedRange) -> None:
        subscribe(owned_range, start).consumer.close()

    firsts = {owned_range.topic_partition: owned_range for owned_range in reversed(owned_ranges)}
    with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-subscribe") as pool:
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
        if isinstance(error, RangeConflictError):
            raise _in_use(admin, config, sorted(firsts)) from error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def open_range_consumer(
    broker: Broker,
    config: SourceConfig,
    topic_partition: TopicPartition,
    hash_range: HashRange,
) -> RangeConsumer:
    """Subscribe one range, to acknowledge and not to receive."""
    owned_range = OwnedRange(topic_partition, 0, hash_range)
    earliest = StartPosition.EARLIEST
    queue = ClientQueue(bytes_max=1, messages_max=1)
    stop = threading.Event()
    return RangeConsumer(
        owned_range, _subscribe(broker, config, owned_range, earliest, stop, queue=queue), queue
    )


def close_range_consumers(range_consumers: Iterable[RangeConsumer]) -> None:
    """Give every range back; acknowledgements that the client holds reach the broker."""
    with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-close") as pool:
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
        columns=content_columns(config.metadata_columns),
    )


def _subscribe(
    broker: Broker,
    config: SourceConfig,
    owned_range: OwnedRange,
    start: StartPosition,
    stop: threading.Event,
    *,
    queue: ClientQueue,
) -> Consumer:
    return retry_until(
        lambda: subscribe_once(broker, config, owned_range, queue, start),
        config.subscribe_timeout_ms / 1000,
        stop=stop,
    )


def _in_use(
    admin: Admin | None, config: SourceConfig, topic_partitions: Iterable[TopicPartition]
) -> SubscriptionInUseError:
    holders = sorted(_holders(admin, config, topic_partitions)) if admin else []
    who = f" by {', '.join(holders[:5])}" if holders else ""
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
