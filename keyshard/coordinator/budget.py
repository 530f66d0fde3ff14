"""How much a source may hold, below what the broker leaves unacknowledged."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

from keyshard.broker.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.position.entry import TopicPartition
from keyshard.core.window.admission import held_max
from keyshard.core.window.budget import Budget
from keyshard.errors import AdminError, AuthorizationError, ConfigError

_log = logging.getLogger(__name__)


class UnacknowledgedLimits(NamedTuple):
    """Messages that the broker leaves unacknowledged per topic partition; 0 for no limit."""

    per_consumer: int = 50_000
    per_subscription: int = 200_000


def unacknowledged_limits(
    admin: Admin | None, topic_partitions: Iterable[TopicPartition], timeout_s: float
) -> UnacknowledgedLimits:
    """The lowest limits of some topics; the broker's defaults where no admin_url tells them.

    Raises:
        BrokerUnavailableError: No answer within ``timeout_s`` seconds.
    """
    topics = {topic_partition.topic for topic_partition in topic_partitions}
    if admin is None or not topics:
        return UnacknowledgedLimits()
    try:
        limits = [
            retry_until(partial(admin.unacknowledged_limits, topic), timeout_s)
            for topic in sorted(topics)
        ]
    except (AdminError, AuthorizationError) as exc:
        _log.warning("the broker's limits are taken to be its defaults: %s", exc)
        return UnacknowledgedLimits()
    per_consumer, per_subscription = zip(*limits, strict=True)
    return UnacknowledgedLimits(
        min(filter(None, per_consumer), default=0), min(filter(None, per_subscription), default=0)
    )


def window_budget(
    config: SourceConfig,
    admin: Admin | None,
    topic_partitions: Collection[TopicPartition],
    consumers: int,
) -> Budget:
    """The budget of a source's window; says so when the broker's limits make it smaller.

    Args:
        config: The source.
        admin: Admin REST interface, where there is one.
        topic_partitions: What it consumes.
        consumers: Number of consumers in each topic partition.

    Raises:
        ConfigError: The broker's limits have no room for so many consumers.
        BrokerUnavailableError: The admin interface does not answer in time.
    """
    timeout_s = config.operation_timeout_ms / 1000
    limits = unacknowledged_limits(admin, topic_partitions, timeout_s)
    held = held_max(
        window_rows_max=config.window_rows_max,
        topic_partitions=len(topic_partitions),
        ranges=consumers,
        queue=config.receiver_queue_size,
        per_consumer=limits.per_consumer,
        per_subscription=limits.per_subscription,
    )
    if held.rows < 1:
        raise ConfigError(
            f"{consumers} consumers in each topic partition do not work: each asks for at least "
            f"one message ahead, and the broker leaves {limits.per_consumer} per consumer and "
            f"{limits.per_subscription} per subscription unacknowledged. Lower parallelism, or "
            "raise maxUnackedMessagesPerConsumer and maxUnackedMessagesPerSubscription at the "
            "broker."
        )
    wanted = config.window_rows_max // max(1, len(topic_partitions))
    if held.rows < wanted or held.queue < config.receiver_queue_size:
        _log.info(
            "the window holds at most %d rows per topic partition and each client queue %d: the "
            "broker leaves %d per consumer and %d per subscription unacknowledged",
            held.rows, held.queue, limits.per_consumer, limits.per_subscription,
        )  # fmt: skip
    return Budget(
        config.window_rows_max, config.window_bytes_max, held.rows, config.checkpoint_bytes_max,
        held.queue,
    )  # fmt: skip
