"""The audit at start: what the broker calls acknowledged against what the checkpoint knows."""

from __future__ import annotations

from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import DataLossAckedElsewhereError

IDS_SHOWN_MAX = 80
"""Characters of ids in a message."""


def acknowledged_unknown(state: PartitionCheckpoint, broker: BrokerState) -> EntrySet:
    """Entries that are stored, acknowledged, and neither delivered nor settled.

    Where a checkpoint has no floor, what lies before its first delivered entry was acknowledged
    before the source began.
    """
    acknowledged = broker.acknowledged() - state.delivered
    if state.floor is not None:
        return acknowledged.above(state.floor)
    first = state.delivered.first
    return EntrySet() if first is None else acknowledged.above(first)


def before_the_start(broker: BrokerState, now_ms: int) -> Proofs:
    """What a source settles that begins on an existing subscription: all that is acknowledged."""
    marked = broker.mark_delete
    if marked is None:
        return Proofs()
    return Proofs(EntryId(marked.ledger, marked.entry + 1), broker.individually, {}, now_ms)


def acked_elsewhere(
    topic_partition: TopicPartition, subscription: str, lost: EntrySet
) -> DataLossAckedElsewhereError:
    """The error that names entries somebody else acknowledged."""
    return DataLossAckedElsewhereError(
        f"{len(lost)} entries of {topic_partition} are acknowledged for {subscription!r}, but no "
        f"batch up to this checkpoint holds them, first {str(lost)[:IDS_SHOWN_MAX]}. Either the "
        "checkpoint is an older copy, or somebody else acknowledged, skipped or expired them. "
        "Restore the newest checkpoint, or set fail_on_data_loss to false if the loss is accepted.",
        topic_partition=topic_partition.name,
        count=len(lost),
        first=str(lost)[:IDS_SHOWN_MAX],
    )
