"""The start of a source: its cluster, its start position, its window, and the audit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker, StartPosition
from keyshard.broker.retry import FIRST_TRIES_S, retry_until
from keyshard.broker.topics import Found, warn_of_existing
from keyshard.config.source import SourceConfig
from keyshard.core.ack_gaps import (
    GapEvidence,
    Trimmed,
    acked_elsewhere,
    acknowledged_unknown,
    before_the_start,
    trimmed_unread,
    without_subscription,
)
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.read_bounds import Edge, parse_start
from keyshard.core.ring.assignment import Assignment, assign
from keyshard.core.subscription_state import CursorState
from keyshard.core.topic_identity import check_delivered, check_ledgers
from keyshard.core.topic_segments import consumers_each, topic_of
from keyshard.core.window.admission import Budget, held_max
from keyshard.core.window.task_costs import TaskCosts
from keyshard.core.window.window import Window
from keyshard.errors import (
    AdminError,
    AuthorizationError,
    BrokerUnavailableError,
    CheckpointMismatchError,
    ConfigError,
    KeyShardError,
)
from keyshard.reading.gap_reader import inspect_ack_gaps
from keyshard.reading.scan import Scan
from keyshard.threads import Pool

_log = logging.getLogger(__name__)


def cluster_of(admin: Admin | None, config: SourceConfig, checkpoint: Checkpoint | None) -> str:
    """Return the name of the cluster.

    Without an admin interface it is the name in the checkpoint, or ``""``. The same holds if this
    role may not list clusters, which needs a permission from Pulsar 5.0 on.

    Raises:
        CheckpointMismatchError: The checkpoint belongs to another subscription or cluster.
        BrokerError: The admin interface does not answer, or refuses.
    """
    cluster = ""
    if admin is not None:
        timeout_s = config.operation_timeout_ms / 1000
        if checkpoint is None:
            timeout_s = min(timeout_s, FIRST_TRIES_S)
        try:
            cluster = retry_until(admin.cluster, timeout_s)
        except AuthorizationError as exc:
            _log.info("the name of the cluster is unknown: %s", exc.message)
    if checkpoint is None:
        return cluster
    _check_belongs(checkpoint, config.subscription, cluster)
    return cluster or checkpoint.cluster


def first_assignment(config: SourceConfig, checkpoint: Checkpoint | None) -> Assignment:
    """Return the last rescale's assignment, or a new one if ``parallelism`` changed."""
    rescaled = None if checkpoint is None else checkpoint.rescaled
    if rescaled is None:
        return assign(config.parallelism)
    count = len(rescaled.assignment)
    if rescaled.parallelism != config.parallelism:
        _log.info(
            "parallelism is %d, but was %d when the source was rescaled to %d ranges; "
            "starting with %d ranges",
            config.parallelism, rescaled.parallelism, count, config.parallelism,
        )  # fmt: skip
        return assign(config.parallelism)
    _log.info(
        "the source was rescaled from %d ranges to %d; starting with these",
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
    first_messages: Mapping[TopicPartition, MessageId],
    same: Callable[[TopicPartition], bool],
) -> Window:
    """Create the window of a source that starts.

    With an admin interface, :func:`audit` compares the broker's cursors with the checkpoint, and
    the window takes the evidence.

    Args:
        broker: Connection for Readers.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        config: The source.
        checkpoint: Where to continue; ``None`` for the first start of a source.
        found: Topic partitions that the source consumes, and those that it consumed before.
        cluster: Name of the cluster.
        planned: Whether the checkpoint's batch will be read again.
        assignment: The owner of each range.
        first_messages: The first messages of subscriptions that begin inside a producer batch.
        same: As in :func:`audit`.

    Raises:
        KeyShardError: As :func:`audit`.
    """
    base = Checkpoint(
        cluster,
        config.subscription,
        len(assignment),
        checkpoint.partitions if checkpoint else {},
        subscription_id=checkpoint.subscription_id if checkpoint else None,
    )
    consumers = consumers_each(found.consumed, assignment)
    budget = window_budget(config, admin, found.consumed, consumers)
    window = Window(base, len(assignment), budget)
    window.task_costs = TaskCosts(config.batch_tasks)
    for topic_partition in found.consumed:
        window.add_partition(topic_partition)
    if checkpoint is not None and planned:
        window.expect(checkpoint)
    for topic_partition in found.kept | found.gone:
        window.drop_partition(topic_partition, gone=topic_partition in found.gone)
    if admin is not None:
        audited = audit(
            broker, admin, config, checkpoint, window.partitions,
            first_messages=first_messages, same=same,
        )  # fmt: skip
        for topic_partition, proofs in audited.proofs.items():
            window.prove(topic_partition, proofs)
            window.known[topic_partition].counted_lost = audited.acknowledged[topic_partition]
        window.counters.entries_lost += audited.entries_lost
    return window


def start_position(
    admin: Admin | None, config: SourceConfig, checkpoint: Checkpoint | None, found: Found
) -> StartPosition:
    """Return where a new subscription begins. Only a first start may skip messages."""
    if checkpoint is not None:
        _log.info(
            "continuing from the checkpoint; the starting position %r is ignored",
            config.starting_position,
        )
        return StartPosition.EARLIEST
    edge = parse_start("starting_position", config.starting_position)
    if not isinstance(edge, Edge):
        return StartPosition.EARLIEST  # create_subscriptions created the missing ones
    start = StartPosition(edge.value)
    if admin is not None:
        warn_of_existing(admin, config.subscription, found.consumed, start.value)
    return start


def _check_belongs(checkpoint: Checkpoint, subscription: str, cluster: str) -> None:
    """Check that a checkpoint belongs to this subscription and cluster.

    An empty cluster name is unknown, and fits.

    Raises:
        CheckpointMismatchError: It does not.
    """
    if checkpoint.subscription != subscription:
        raise CheckpointMismatchError(
            f"The checkpoint belongs to subscription {checkpoint.subscription!r}, but this source "
            f"uses {subscription!r}.",
            "Use that subscription, or start with a new checkpoint.",
        )
    if cluster and checkpoint.cluster and checkpoint.cluster != cluster:
        raise CheckpointMismatchError(
            f"The checkpoint belongs to cluster {checkpoint.cluster!r}, but the broker belongs to "
            f"cluster {cluster!r}.",
            "Check service_url and admin_url, or start with a new checkpoint.",
        )


# -- The audit at a start; nothing is subscribed or acknowledged before it -------------------------

THREADS_MAX = 8
"""Topic partitions audited at the same time."""
LOST_COUNTED_MAX = 10_000
"""Lost entries of a topic partition from which on no more are counted."""


@dataclass(slots=True)
class Audited:
    """Findings of an audit."""

    proofs: dict[TopicPartition, GapEvidence] = field(default_factory=dict)
    acknowledged: dict[TopicPartition, EntrySet] = field(default_factory=dict)
    """Lost entries that another consumer acknowledged."""
    entries_lost: int = 0
    """Entries acknowledged elsewhere or no longer stored, if that is not an error."""


def audit(
    broker: Broker,
    admin: Admin,
    config: SourceConfig,
    checkpoint: Checkpoint | None,
    topic_partitions: Iterable[TopicPartition],
    *,
    first_messages: Mapping[TopicPartition, MessageId] = MappingProxyType({}),
    same: Callable[[TopicPartition], bool] = lambda _: True,
) -> Audited:
    """Compare each topic partition's cursor and ledgers with the checkpoint.

    A subscription retains the entries that it has not acknowledged. If it is gone, or is another
    one of the same name, the broker may have deleted entries after those of the checkpoint.

    If a subscription begins inside a producer batch, an entry all of whose messages lie before that
    beginning is resolved too. It is acknowledged before a checkpoint contains it.

    Args:
        broker: Connection for Readers.
        admin: Admin REST interface.
        config: The source.
        checkpoint: Where to continue; ``None`` for the first start of a source.
        topic_partitions: Topic partitions that the source consumes.
        first_messages: The first messages of subscriptions that begin inside a producer batch.
        same: Whether an existing subscription may be the one of the checkpoint.

    Raises:
        TopicRecreatedError: The checkpoint contains entries that the broker has not created yet.
        DataLossTrimmedError: A subscription is gone, and entries are no longer stored.
        DataLossAckedElsewhereError: Entries are acknowledged that the checkpoint does not contain.
        BrokerError: The broker does not answer, or refuses.
    """
    known = checkpoint.partitions if checkpoint is not None else {}
    result = Audited()

    def look_at(topic_partition: TopicPartition) -> _Looked:
        broker_state = _broker_state(admin, config, topic_partition)
        if broker_state is None:
            return _Looked(GapEvidence())
        state = known[topic_partition]
        check_ledgers(topic_partition, state, broker_state)
        trimmed: Trimmed | None = None
        if broker_state.mark_delete is None or not same(topic_partition):
            trimmed = trimmed_unread(state, broker_state)
        deadline = time.monotonic() + config.operation_timeout_ms / 1000
        _check_newest(broker, topic_partition, state, broker_state, deadline)
        unknown = acknowledged_unknown(state, broker_state)
        if not unknown:
            return _Looked(GapEvidence(), trimmed=trimmed)
        # The broker itself acknowledges transaction markers; a Reader does not return them.
        found = inspect_ack_gaps(
            broker, topic_partition, unknown, deadline, existing_max=LOST_COUNTED_MAX,
            skipped=config.skipped,
        )  # fmt: skip
        if not found.complete and not found.existing:
            raise _unread(topic_partition)
        proofs = GapEvidence(resolved=unknown, published_ms=_now_ms())
        lost = EntrySet.of(found.existing)
        first = first_messages.get(topic_partition)
        if first is not None and _lies_before(broker, topic_partition, first, lost, deadline):
            lost -= EntrySet.of([EntryId(*first[:2])])
        return _Looked(proofs, lost, trimmed, found.complete)

    names = tuple(where for where in topic_partitions if where in known)
    with Pool(THREADS_MAX, "keyshard-audit") as pool:
        looked = list(pool.map(look_at, names))
    for where, (proofs, lost, trimmed, complete) in zip(names, looked, strict=True):
        result.proofs[where] = proofs
        result.acknowledged[where] = lost
        losses: list[tuple[KeyShardError, int]] = []
        if trimmed:
            proofs.resolved |= trimmed.entries
            error = without_subscription(where, config.subscription, trimmed)
            losses.append((error, trimmed.least))
        elif trimmed is not None:
            _log.info(
                "no subscription %r of %s has retained entries since the checkpoint, but the "
                "broker still stores all of them",
                config.subscription, where,
            )  # fmt: skip
        if lost:
            elsewhere = acked_elsewhere(where, config.subscription, lost, complete=complete)
            losses.append((elsewhere, len(lost)))
        for loss, count in losses:
            if config.fail_on_data_loss:
                raise loss
            _log.warning("%s Resolved, because fail_on_data_loss is false.", loss.summary)
            result.entries_lost += count
    return result


def prove_beginnings(
    admin: Admin | None,
    config: SourceConfig,
    checkpoint: Checkpoint | None,
    window: Window,
) -> None:
    """Resolve the entries before the start of subscriptions that the checkpoint does not know.

    The subscriptions exist, and no entry that they delivered is acknowledged yet. So acknowledged
    entries lie before the start. If such a subscription is created again later, from the earliest
    entry, these entries are not delivered to the host.

    Args:
        admin: Admin REST interface; without one, nothing is proved.
        config: The source.
        checkpoint: Where to continue; ``None`` for the first start of a source.
        window: Gets the evidence.

    Raises:
        BrokerError: The admin interface does not answer, or refuses.
    """
    if admin is None:
        return
    known = checkpoint.partitions if checkpoint is not None else {}
    new = tuple(where for where in window.partitions if where not in known)
    with Pool(THREADS_MAX, "keyshard-audit") as pool:
        states = pool.map(partial(_broker_state, admin, config), new)
        for where, broker_state in zip(new, states, strict=True):
            if broker_state is not None:
                window.prove(where, before_the_start(broker_state, _now_ms()))


def _broker_state(
    admin: Admin, config: SourceConfig, topic_partition: TopicPartition
) -> CursorState | None:
    return retry_until(
        lambda: admin.broker_state(topic_partition, config.subscription),
        config.operation_timeout_ms / 1000,
    )


class _Looked(NamedTuple):
    """Findings about one topic partition."""

    proofs: GapEvidence
    acknowledged: EntrySet = EntrySet()
    """Stored entries that another consumer acknowledged."""
    trimmed: Trimmed | None = None
    """Entries that are no longer stored, if the subscription is not that of the checkpoint."""
    complete: bool = True  # whether ``acknowledged`` has all such entries


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _lies_before(
    broker: Broker, where: TopicPartition, first: MessageId, lost: EntrySet, deadline: float
) -> bool:
    """Whether the entry of ``first`` is lost, and has only messages before ``first``."""
    entry_id = EntryId(*first[:2])
    if entry_id not in lost:
        return False
    block = _read_one(broker, where, entry_id, deadline)
    return block is not None and block.batch_size <= first.batch_index


def _check_newest(
    broker: Broker,
    topic_partition: TopicPartition,
    state: PartitionCheckpoint,
    broker_state: CursorState,
    deadline: float,
) -> None:
    """Read the newest delivered entry, if it is stored, and compare its age with the checkpoint."""
    newest = state.delivered.last
    if newest is None or newest.ledger not in broker_state.ledgers:
        return
    block = _read_one(broker, topic_partition, newest, deadline)
    if block is not None:
        check_delivered(topic_partition, state.published_ms, block)


def _read_one(
    broker: Broker, topic_partition: TopicPartition, entry_id: EntryId, deadline: float
) -> EntryBlock | None:
    """Return the entry stored under an id; ``None`` if there is none that can be read."""
    with Scan(broker, topic_partition, entry_id, entry_id, unreadable={}) as scan:
        while not scan.done:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise _unread(topic_partition)
            for block in retry_until(scan.read, left_s):
                if block.id == entry_id:
                    return block
    return None


def _unread(topic_partition: TopicPartition) -> BrokerUnavailableError:
    return BrokerUnavailableError(
        f"The entries of {topic_partition} could not be compared with the checkpoint in time.",
        "Check the load of the broker, or raise operation_timeout_ms.",
    )


# -- Limits of the window, below the broker's limits ----------------------------------------------


class UnacknowledgedLimits(NamedTuple):
    """Most unacknowledged messages that the broker allows per topic partition; 0 for no limit."""

    per_consumer: int = 50_000
    per_subscription: int = 200_000


def unacknowledged_limits(
    admin: Admin | None, topic_partitions: Iterable[TopicPartition], timeout_s: float
) -> UnacknowledgedLimits:
    """Return the lowest limits of some topics; unknown ones count as the broker's defaults.

    Raises:
        BrokerUnavailableError: No answer within ``timeout_s`` seconds.
    """
    topics = set(map(topic_of, topic_partitions))
    if admin is None or not topics:
        return UnacknowledgedLimits()
    limits: list[tuple[int, int]] = []
    for topic in sorted(topics):
        try:
            limits.append(retry_until(partial(admin.unacknowledged_limits, topic), timeout_s))
        except (AdminError, AuthorizationError) as exc:  # noqa: PERF203 - it may be deleted
            _log.warning("limits of %s are unknown, so defaults apply: %s", topic, exc.summary)
            limits.append(UnacknowledgedLimits())
            if isinstance(exc, AuthorizationError):
                break
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
    """Return the budget of a source's window. Log it if the broker's limits reduce it.

    Args:
        config: The source.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        topic_partitions: Topic partitions of the source.
        consumers: Number of consumers in each topic partition.

    Raises:
        ConfigError: The broker's limits have no room for all consumers.
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
            f"{consumers} consumers in each topic partition exceed the limits of the broker. Each "
            "consumer needs a permit for at least one message. The broker allows "
            f"{limits.per_consumer} unacknowledged messages per consumer and "
            f"{limits.per_subscription} per subscription.",
            "Lower parallelism, or raise maxUnackedMessagesPerConsumer and "
            "maxUnackedMessagesPerSubscription at the broker.",
        )
    if held.queue < config.receiver_queue_size:
        _log.info(
            "limited the window to %d rows per topic partition and each client queue to %d: the "
            "broker allows %d unacknowledged messages per consumer and %d per subscription",
            held.rows, held.queue, limits.per_consumer, limits.per_subscription,
        )  # fmt: skip
    return Budget(
        config.window_rows_max, config.window_bytes_max, held.rows, config.checkpoint_bytes_max,
        held.queue, held.range_rows, held.behind_rows,
    )  # fmt: skip
