"""What a source begins with: its cluster, its position and a window that goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from keyshard.broker.port import Admin, Broker, StartPosition
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.config.source import SourceConfig
from keyshard.coordinator.audit import audit
from keyshard.coordinator.budget import window_budget
from keyshard.coordinator.topics import Found, warn_of_existing
from keyshard.core.message import MessageId
from keyshard.core.position.bounds import Edge, parse_start
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.assignment import Assignment, assign
from keyshard.core.window.window import Window
from keyshard.errors import CheckpointMismatchError

_log = logging.getLogger(__name__)


def cluster_of(admin: Admin | None, config: SourceConfig, checkpoint: Checkpoint | None) -> str:
    """Name of the cluster; where no admin interface tells it, as the checkpoint has it, or empty.

    Raises:
        CheckpointMismatchError: The checkpoint is of another subscription or cluster.
        BrokerError: The admin interface does not answer, or refuses.
    """
    cluster = ""
    if admin is not None:
        timeout_s = config.operation_timeout_ms / 1000
        if checkpoint is None:
            timeout_s = min(timeout_s, FIRST_TRIES_S)
        cluster = retry_until(admin.cluster, timeout_s)
    if checkpoint is None:
        return cluster
    _check_belongs(checkpoint, config.subscription, cluster)
    return cluster or checkpoint.cluster


def first_assignment(config: SourceConfig, checkpoint: Checkpoint | None) -> Assignment:
    """Who owns which ranges at a start: as after the last rescale, unless parallelism is new."""
    rescaled = None if checkpoint is None else checkpoint.rescaled
    if rescaled is None:
        return assign(config.parallelism)
    count = len(rescaled.assignment)
    if rescaled.parallelism != config.parallelism:
        _log.info(
            "parallelism is %d, and was %d when the source was rescaled to %d ranges: it begins "
            "with %d ranges",
            config.parallelism, rescaled.parallelism, count, config.parallelism,
        )  # fmt: skip
        return assign(config.parallelism)
    _log.info(
        "the source was rescaled from %d ranges to %d, and begins with these",
        rescaled.parallelism, count,
    )  # fmt: skip
    return rescaled.assignment


def open_window(
    broker: Broker,
    admin: Admin | None,
    config: SourceConfig,
    checkpoint: Checkpoint | None,
    found: Found,
    *,
    cluster: str,
    planned: bool,
    assignment: Assignment,
    begins: Mapping[TopicPartition, MessageId],
) -> Window:
    """The window of a source that starts, audited where there is an admin interface.

    Args:
        broker: Connection for Readers.
        admin: Admin REST interface, where there is one.
        config: The source.
        checkpoint: Where to continue; ``None`` for the first start of a source.
        found: Topic partitions that it consumes, and those that it did.
        cluster: Name of the cluster.
        planned: Whether the checkpoint's batch is going to be read again.
        assignment: Who owns which ranges.
        begins: The first messages of subscriptions that begin inside a producer batch.

    Raises:
        KeyShardError: What :func:`~keyshard.coordinator.audit.audit` raises.
    """
    base = Checkpoint(
        cluster,
        config.subscription,
        len(assignment),
        checkpoint.partitions if checkpoint else {},
    )
    budget = window_budget(config, admin, found.consumed, sum(map(len, assignment)))
    window = Window(base, len(assignment), budget)
    for topic_partition in found.consumed:
        window.add_partition(topic_partition)
    if checkpoint is not None and planned:
        window.expect(checkpoint)
    for topic_partition in found.kept | found.gone:
        window.drop_partition(topic_partition, gone=topic_partition in found.gone)
    if admin is not None:
        audited = audit(broker, admin, config, checkpoint, window.partitions, begins=begins)
        for topic_partition, proofs in audited.proofs.items():
            window.prove(topic_partition, proofs)
        window.counters.entries_lost += audited.entries_lost
    return window


def start_position(
    admin: Admin | None, config: SourceConfig, checkpoint: Checkpoint | None, found: Found
) -> StartPosition:
    """Where a subscription begins that does not exist: only a first start may skip anything."""
    if checkpoint is not None:
        _log.info(
            "the checkpoint is continued, and the starting position %r does not apply",
            config.starting_position,
        )
        return StartPosition.EARLIEST
    edge = parse_start("starting_position", config.starting_position)
    if not isinstance(edge, Edge):
        return StartPosition.EARLIEST  # those that did not exist were created where they begin
    start = StartPosition(edge.value)
    if admin is not None:
        warn_of_existing(admin, config.subscription, found.consumed, start.value)
    return start


def _check_belongs(checkpoint: Checkpoint, subscription: str, cluster: str) -> None:
    """Check that a checkpoint is of this subscription and cluster.

    Raises:
        CheckpointMismatchError: It is not; an empty cluster name is unknown, and fits.
    """
    if checkpoint.subscription != subscription:
        raise CheckpointMismatchError(
            f"The checkpoint belongs to subscription {checkpoint.subscription!r}, this source uses "
            f"{subscription!r}. Use that subscription, or start with a new checkpoint."
        )
    if cluster and checkpoint.cluster and checkpoint.cluster != cluster:
        raise CheckpointMismatchError(
            f"The checkpoint belongs to cluster {checkpoint.cluster!r}, the broker is of cluster "
            f"{cluster!r}. Check service_url and admin_url, or start with a new checkpoint."
        )
