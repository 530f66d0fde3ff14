"""The audit at start, with the admin interface; nothing is subscribed or acknowledged before it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from keyshard.broker.port import Admin, Broker
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.holes.foreign_acks import acked_elsewhere, acknowledged_unknown, before_the_start
from keyshard.core.holes.settling import Proofs
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.fingerprint import check_delivered, check_ledgers
from keyshard.errors import BrokerUnavailableError
from keyshard.reading.holes import inspect_holes
from keyshard.reading.scan import Scan
from keyshard.threads import Pool

THREADS_MAX = 8
"""Topic partitions audited at the same time."""
LOST_COUNTED_MAX = 10_000
"""Lost entries of a topic partition from which on they are not counted exactly."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Audited:
    """What an audit found that the window has to know."""

    proofs: dict[TopicPartition, Proofs] = field(default_factory=dict)
    entries_lost: int = 0
    """Entries that somebody else acknowledged, where that is no error."""


def audit(
    broker: Broker,
    admin: Admin,
    config: SourceConfig,
    checkpoint: Checkpoint | None,
    topic_partitions: Iterable[TopicPartition],
    *,
    begins: Mapping[TopicPartition, MessageId] = MappingProxyType({}),
) -> Audited:
    """Compare each topic partition's cursor and ledgers with the checkpoint.

    Where the checkpoint says nothing of a topic partition, what is acknowledged there was so before
    the source began, and is settled. So is an entry all of which lies before the first message of a
    subscription that begins inside it: it is acknowledged before a checkpoint says so.

    Raises:
        TopicRecreatedError: The checkpoint knows entries that the broker has not made yet.
        DataLossAckedElsewhereError: Entries are acknowledged that the checkpoint does not know.
        BrokerError: The broker does not answer, or refuses.
    """
    known = checkpoint.partitions if checkpoint is not None else {}
    result = Audited()

    def look_at(topic_partition: TopicPartition) -> tuple[Proofs, EntrySet]:
        broker_state = retry_until(
            lambda: admin.broker_state(topic_partition, config.subscription),
            config.operation_timeout_ms / 1000,
        )
        if broker_state is None:
            return Proofs(), EntrySet()
        state = known.get(topic_partition)
        if state is None:
            return before_the_start(broker_state, _now_ms()), EntrySet()
        check_ledgers(topic_partition, state, broker_state)
        deadline = time.monotonic() + config.operation_timeout_ms / 1000
        _check_newest(broker, topic_partition, state, broker_state, deadline)
        unknown = acknowledged_unknown(state, broker_state)
        if not unknown:
            return Proofs(), unknown
        # Markers of transactions are acknowledged by the broker itself: no Reader shows them.
        found = inspect_holes(
            broker, topic_partition, unknown, deadline, existing_max=LOST_COUNTED_MAX,
            skipped=config.skipped, parked=config.parked,
        )  # fmt: skip
        if not found.complete and not found.existing:
            raise _unread(topic_partition)
        proofs = Proofs(settled=unknown, published_ms=_now_ms())
        lost = EntrySet.of(found.existing)
        begin = begins.get(topic_partition)
        if begin is not None and _lies_before(broker, topic_partition, begin, lost, deadline):
            lost -= EntrySet.of([EntryId(*begin[:2])])
        return proofs, lost

    names = tuple(topic_partitions)
    with Pool(THREADS_MAX, "keyshard-audit") as pool:
        looked = list(pool.map(look_at, names))
    for topic_partition, (proofs, lost) in zip(names, looked, strict=True):
        result.proofs[topic_partition] = proofs
        if lost:
            error = acked_elsewhere(topic_partition, config.subscription, lost)
            if config.fail_on_data_loss:
                raise error
            _log.warning("%s Settled, because fail_on_data_loss is false.", error)
            result.entries_lost += len(lost)
    return result


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _lies_before(
    broker: Broker, where: TopicPartition, begin: MessageId, lost: EntrySet, deadline: float
) -> bool:
    """Whether one of some entries is that of a first message, and has none from there on."""
    entry_id = EntryId(*begin[:2])
    if entry_id not in lost:
        return False
    block = _read_one(broker, where, entry_id, deadline)
    return block is not None and block.batch_size <= begin.batch_index


def _check_newest(
    broker: Broker,
    topic_partition: TopicPartition,
    state: PartitionCheckpoint,
    broker_state: BrokerState,
    deadline: float,
) -> None:
    """Read the newest delivered entry, if it is stored: is it as old as the checkpoint says?"""
    newest = state.delivered.last
    if newest is None or newest.ledger not in broker_state.ledgers:
        return
    block = _read_one(broker, topic_partition, newest, deadline)
    if block is not None:
        check_delivered(topic_partition, state.published_ms, block)


def _read_one(
    broker: Broker, topic_partition: TopicPartition, entry_id: EntryId, deadline: float
) -> EntryBlock | None:
    """What is stored under an id; ``None``: nothing that can be read."""
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
        f"What is stored in {topic_partition} could not be compared with the checkpoint in time. "
        "Check the broker's load, or raise operation_timeout_ms."
    )
