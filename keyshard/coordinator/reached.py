"""The positions that a stream has reached, for a bounded read of just what it had."""

from __future__ import annotations

from contextlib import closing

from keyshard.broker.connect import connect, connect_admin
from keyshard.broker.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.config.source import SourceConfig
from keyshard.coordinator.starting import begun_inside
from keyshard.coordinator.topics import Catalog, look
from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.split import stretch
from keyshard.core.position.target import Target
from keyshard.errors import ConfigError, NotRunningError
from keyshard.reading.splits import gone


def positions_of(source: SourceConfig, checkpoint: Checkpoint) -> dict[str, MessageId]:
    """Of each topic partition, the first entry that no batch up to a checkpoint has.

    Raises:
        ConfigError: The source has no ``admin_url``.
        NotRunningError: There are gaps: entries before that came to no batch yet.
        TopicNotFoundError: A topic does not exist any more.
        BrokerError: The broker or the admin interface cannot be reached, or refuses.
    """
    if source.admin_url is None:
        raise ConfigError(
            "Positions of a stream need the admin REST interface, which lists what is stored. Set "
            "admin_url."
        )
    timeout_s = source.operation_timeout_ms / 1000
    connection = source.how_to_connect()
    with closing(connect(connection)) as broker, closing(connect_admin(connection)) as admin:
        found = look(Catalog(broker, admin, source), checkpoint, timeout_s).consumed
        return {
            where.name: _reached(
                admin, source, where, checkpoint.partitions.get(where, PartitionCheckpoint())
            )
            for where in found
        }


def _reached(
    admin: Admin, source: SourceConfig, where: TopicPartition, state: PartitionCheckpoint
) -> MessageId:
    timeout_s = source.operation_timeout_ms / 1000
    # First what is acknowledged: whatever is so is in a batch, also in one after the checkpoint.
    broker = retry_until(lambda: admin.broker_state(where, source.subscription), timeout_s)
    ledgers = retry_until(lambda: admin.ledgers(where), timeout_s)
    if broker is None or ledgers is None:
        raise gone(where)
    delivered = [one for one in (state.floor, state.delivered.last) if one is not None]
    if not state.delivered:
        begins = begun_inside(admin, source, [where], starts=False).get(where)
        if begins is not None and (broker.mark_delete or EntryId(0, -1)) < begins[:2]:
            return begins
    last = max(delivered, default=broker.mark_delete) or EntryId(0, -1)
    missing = [
        one
        for gap in Target(last).open_gaps(state.delivered, state.floor, broker)
        if (one := stretch(where, ledgers, MessageId(*gap.start, 0), MessageId(*gap.end, 0))).spans
    ]
    if missing:
        first = missing[0].first
        raise NotRunningError(
            f"{sum(one.entries for one in missing)} entries of {where} before "
            f"{last.ledger}:{last.entry} are in no batch yet, first {first.ledger}:{first.entry}: "
            "a slow range owes them, or nobody receives them. Ask again when progress shows no "
            "ackHoles."
        )
    return MessageId(last.ledger, last.entry + 1, 0)
