"""What the settler sees of the window, and where its evidence goes."""

from __future__ import annotations

import logging

from keyshard.config.source import SourceConfig
from keyshard.coordinator.settler import HolesView
from keyshard.core.holes.foreign_acks import acked_elsewhere
from keyshard.core.holes.settling import Proofs
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.worker.worker import Worker

_log = logging.getLogger(__name__)


class Evidence:
    """The :class:`~keyshard.coordinator.settler.SettlerHost` of a source.

    Args:
        worker: Has the window.
        config: The source.
    """

    def __init__(self, worker: Worker, config: SourceConfig) -> None:
        self._worker = worker
        self._shared = worker.shared
        self._config = config

    def holes_views(self) -> dict[TopicPartition, HolesView]:
        with self._shared.lock:
            window = self._shared.window
            parts = {tp: window.known[tp] for tp in window.partitions}
            return {
                tp: HolesView(part.state, list(part.held), part.tight)
                for tp, part in parts.items()
                if part.holes
            }

    def prove(self, topic_partition: TopicPartition, proofs: Proofs, owed: frozenset[int]) -> None:
        with self._shared.lock:
            owners = frozenset(map(self._worker.owners.__getitem__, owed))
            self._shared.window.prove(topic_partition, proofs, owners)
            self._shared.lock.notify_all()

    def lost(self, topic_partition: TopicPartition, entries: EntrySet) -> None:
        error = acked_elsewhere(topic_partition, self._config.subscription, entries)
        if self._config.fail_on_data_loss:
            self._shared.fail(error)
            return
        _log.warning("%s Settled, because fail_on_data_loss is false.", error)
        with self._shared.lock:
            self._shared.window.counters.entries_lost += len(entries)
