"""Owns every hash range of topic partitions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from keyshard.broker.port import Broker, Consumer, StartPosition
from keyshard.config import SourceConfig
from keyshard.core.assembly import EntryAssembly
from keyshard.core.broker_state import BrokerState
from keyshard.core.client_queue import ClientQueue
from keyshard.core.entry import TopicPartition
from keyshard.core.hash_range import HashRange
from keyshard.errors import (
    BrokerError,
    RangeConflictError,
    SubscriptionInUseError,
)
from keyshard.runtime.receiver import RangeConsumer, Seat, close_quietly
from keyshard.runtime.retry import retry_until

THREADS_MAX = 8
"""Subscriptions made at the same time."""


class Admin(Protocol):
    """What the runtime asks the admin interface; see :class:`keyshard.broker.admin.PulsarAdmin`."""

    def version(self) -> str: ...

    def settings(self) -> Mapping[str, str]: ...

    def cluster(self) -> str: ...

    def partition_count(self, topic: str) -> int | None: ...

    def topics(self, tenant: str, namespace: str) -> set[str]: ...

    def created(self, topic_partition: TopicPartition) -> str: ...

    def remove_leftover(self, topic_partition: TopicPartition, subscription: str) -> bool: ...

    def subscription(
        self, topic_partition: TopicPartition, subscription: str
    ) -> Mapping[str, Any] | None: ...

    def subscriptions(self, topic_partition: TopicPartition) -> Mapping[str, Mapping[str, Any]]: ...

    def broker_state(
        self, topic_partition: TopicPartition, subscription: str
    ) -> BrokerState | None: ...

    def unacknowledged_limits(self, topic: str) -> tuple[int, int]: ...

    def close(self) -> None: ...


def open_range_consumers(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    seats: Sequence[Seat],
    start: StartPosition,
    *,
    make_queue: Callable[[], ClientQueue],
) -> list[RangeConsumer]:
    """Subscribe every one of some seats, or none.

    Raises:
        SubscriptionInUseError: Somebody else held a range until ``subscribe_timeout_ms``.
        BrokerError: The broker cannot be reached, or refused.
    """
    stop = threading.Event()

    def subscribe(seat: Seat, where: StartPosition) -> RangeConsumer:
        queue = make_queue()
        try:
            return RangeConsumer(
                seat, _subscribe(broker, config, seat, where, stop, queue=queue), queue
            )
        except BaseException:
            stop.set()
            raise

    def create(seat: Seat) -> None:
        subscribe(seat, start).consumer.close()

    firsts = {seat.topic_partition: seat for seat in reversed(seats)}
    with ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="keyshard-subscribe") as pool:
        made: list[Future[None]] = []
        if start is not StartPosition.EARLIEST:
            # Only the subscription begins there. A consumer that brings a deleted topic back by a
            # reconnect begins where the new one does.
            made = [pool.submit(create, seat) for seat in firsts.values()]
            wait(made)
        futures = [pool.submit(subscribe, seat, StartPosition.EARLIEST) for seat in seats]
    outcomes = [future.exception() for future in made] + [future.exception() for future in futures]
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
    seat = Seat(topic_partition, 0, hash_range)
    earliest = StartPosition.EARLIEST
    queue = ClientQueue(bytes_max=1, messages_max=1)
    stop = threading.Event()
    return RangeConsumer(seat, _subscribe(broker, config, seat, earliest, stop, queue=queue), queue)


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
            broker, config, range_consumer.seat, range_consumer.queue
        )

    range_consumer.consumer = retry_until(attempt, config.subscribe_timeout_ms / 1000, stop=stop)
    range_consumer.assembly = EntryAssembly(doubted=range_consumer.assembly.doubted)
    range_consumer.silent_from_s = 0.0


def subscribe_once(
    broker: Broker,
    config: SourceConfig,
    seat: Seat,
    queue: ClientQueue,
    start: StartPosition = StartPosition.EARLIEST,
) -> Consumer:
    """One attempt to own what a seat says.

    Raises:
        RangeConflictError: Somebody else has it, or a part of it.
        BrokerError: The broker cannot be reached, or refused.
    """
    return broker.subscribe(
        seat.topic_partition,
        config.subscription,
        seat.hash_range,
        start=start,
        consumer_name=f"keyshard-{socket.gethostname()}-range-{seat.range_index}",
        receiver_queue_size=queue.size,
    )


def _subscribe(
    broker: Broker,
    config: SourceConfig,
    seat: Seat,
    start: StartPosition,
    stop: threading.Event,
    *,
    queue: ClientQueue,
) -> Consumer:
    return retry_until(
        lambda: subscribe_once(broker, config, seat, queue, start),
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
