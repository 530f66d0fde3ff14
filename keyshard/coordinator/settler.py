"""The settler: gathers evidence about holes in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from keyshard.broker.port import Admin, Broker
from keyshard.config.source import SourceConfig
from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.holes.foreign_acks import acknowledged_unknown
from keyshard.core.holes.settling import (
    FIRST,
    Lasting,
    Proofs,
    borders_of,
    holes_of,
    proofs_of_ledgers,
)
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import KeyShardError
from keyshard.reading.holes import Inspection, inspect_holes
from keyshard.threads import begin

ROUND_S = 2.0
"""Shortest time between two looks, seconds."""
READ_SHARE = 0.25
"""Part of its time that the settler reads at most."""
READ_S = 1.0
"""Longest time of reading over holes of one topic partition in one round, seconds."""
HOLE_AGE_MS = 5_000
"""Age from which a hole is read over; younger ones are mostly entries on their way. Where the admin
interface tells what is acknowledged, that alone is read over while the checkpoint has room."""
EXISTING_MAX = 20_000
"""Entries in holes that are remembered as existing, for each topic partition."""

_log = logging.getLogger(__name__)


class HolesView(NamedTuple):
    """What the settler needs to know of a topic partition with holes or several ledgers."""

    state: PartitionCheckpoint
    held: Collection[EntryId]
    """Entries that were received and are not released."""
    tight: bool
    """Whether its checkpoint has no room: then it matters which ranges owe entries of holes."""


class SettlerHost(Protocol):
    """What the settler works for; implemented by :mod:`~keyshard.coordinator.evidence`."""

    def holes_views(self) -> Mapping[TopicPartition, HolesView]:
        """Each topic partition with holes or several ledgers."""

    def prove(self, topic_partition: TopicPartition, proofs: Proofs, owed: frozenset[int]) -> None:
        """Take evidence, and the slots of entries that lie in holes and are still to come."""

    def lost(self, topic_partition: TopicPartition, entries: EntrySet) -> None:
        """Entries are stored that somebody else acknowledged, and that no batch holds."""


class _Watched:
    """What is remembered of one topic partition between rounds."""

    def __init__(self, hole_age_ms: int, settle_after_ms: int) -> None:
        self.open = Lasting(hole_age_ms)
        self.acknowledged = Lasting(settle_after_ms)
        self.marked = Lasting(settle_after_ms)
        self.existing: dict[EntryId, tuple[int, ...]] = {}
        """Entries of holes that a Reader showed, with the slots that may route them."""
        self.absent = EntrySet()
        """Holes that were proved empty and are in no checkpoint yet."""
        self.lost = EntrySet()
        """Entries of ``existing`` that the host was told of as lost."""


class Settler:
    """One daemon thread. Errors of the broker are kept for the status and tried again.

    Args:
        broker: Connection to read through.
        admin: Admin interface, where there is one.
        config: The source.
        host: Whose holes are settled.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, host: SettlerHost
    ) -> None:
        self._broker = broker
        self._admin = admin
        self._config = config
        self._host = host
        # A short settle time asks for short rounds; none is shorter than 20 ms.
        self._round_s = max(0.02, min(ROUND_S, config.settle_after_ms / 2_000))
        self._hole_age_ms = min(HOLE_AGE_MS, config.settle_after_ms)
        self._watched: dict[TopicPartition, _Watched] = {}
        self._stopping = threading.Event()
        self.error = ""
        """What went wrong in the newest round; empty when nothing did."""
        self._thread = begin("keyshard-settle", self._run)

    def stop(self) -> None:
        """Look at nothing more; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._round_s
        while not self._stopping.wait(wait_s):
            began = time.monotonic()
            error = ""
            for topic_partition, view in self._host.holes_views().items():
                if self._stopping.is_set():
                    return
                try:
                    self._look_at(topic_partition, view)
                except KeyShardError as exc:
                    error = str(exc)
                    _log.info("settling in %s is tried again: %s", topic_partition, exc)
            self.error = error
            wait_s = max(self._round_s, (time.monotonic() - began) / READ_SHARE)

    def _look_at(self, topic_partition: TopicPartition, view: HolesView) -> None:
        config, state = self._config, view.state
        watched = self._watched.setdefault(
            topic_partition, _Watched(self._hole_age_ms, config.settle_after_ms)
        )
        now_ms = time.monotonic_ns() // 1_000_000
        broker_state: BrokerState | None = None
        if self._admin is not None:
            broker_state = self._admin.broker_state(topic_partition, config.subscription)
        holes = _not_held(holes_of(state, broker_state), view.held)
        proofs, doubted, borders = Proofs(), EntrySet(), EntrySet()
        if broker_state is not None:
            proofs.merge(proofs_of_ledgers(state, holes, broker_state))
            # Where no checkpoint speaks of, it was acknowledged before the source began.
            doubted = _not_held(acknowledged_unknown(state, broker_state), view.held)
            lasting = self._acknowledged_long(watched, now_ms, holes | doubted, broker_state)
            self._report_lost(topic_partition, watched, lasting.settled & doubted)
            _leave_out(lasting, doubted - watched.absent - watched.lost)
            lasting.settled &= holes
            proofs.merge(lasting)
            if not view.tight:
                # The rest is on its way: the broker itself acknowledges what it gives to nobody.
                holes &= broker_state.acknowledged()
        else:
            borders = borders_of(state)
            holes |= borders
        proofs.merge(
            self._read_over(topic_partition, watched, now_ms, holes | doubted, proofs.settled)
        )
        # What is no entry must not enter a checkpoint: ledgers would seem longer than they are.
        proofs.settled -= borders
        self._host.prove(topic_partition, proofs, _owed(watched.existing, proofs.settled))

    def _report_lost(
        self, topic_partition: TopicPartition, watched: _Watched, acknowledged: EntrySet
    ) -> None:
        """Name what is stored and was acknowledged by somebody else, once."""
        lost = acknowledged & EntrySet.of(watched.existing)
        if lost - watched.lost:
            self._host.lost(topic_partition, lost - watched.lost)
        watched.lost = lost

    def _read_over(
        self,
        topic_partition: TopicPartition,
        watched: _Watched,
        now_ms: int,
        holes: EntrySet,
        settled: EntrySet,
    ) -> Proofs:
        """What a Reader proves of holes that have been there for a while, each looked at once."""
        watched.existing = {
            entry_id: slot for entry_id, slot in watched.existing.items() if entry_id in holes
        }
        watched.absent &= holes
        unknown = watched.open.update(now_ms, holes - settled)
        unknown -= watched.absent | EntrySet.of(watched.existing)
        room = EXISTING_MAX - len(watched.existing)
        if not unknown or room <= 0:
            return Proofs()
        deadline = time.monotonic() + READ_S
        found = inspect_holes(
            self._broker, topic_partition, unknown, deadline, existing_max=room,
            skipped=self._config.skipped, parked=self._config.parked,
        )  # fmt: skip
        watched.existing |= found.existing
        watched.absent |= found.proofs.settled
        if FIRST in unknown:
            found.proofs.base = _first_stored(found)
        return found.proofs

    @staticmethod
    def _acknowledged_long(
        watched: _Watched, now_ms: int, holes: EntrySet, broker_state: BrokerState
    ) -> Proofs:
        """Holes that somebody else acknowledged, and the mark-delete, both some time ago."""
        proofs = Proofs()
        proofs.settled = watched.acknowledged.update(now_ms, holes & broker_state.acknowledged())
        marked = broker_state.mark_delete
        if marked is not None:
            # As a set, because the mark-delete may fall back: what it leaves starts anew.
            below = broker_state.marked()
            lasting = watched.marked.update(now_ms, below).last
            if lasting is not None:
                proofs.base = EntryId(lasting.ledger, lasting.entry + 1)
        if proofs:
            proofs.published_ms = time.time_ns() // 1_000_000
        return proofs


def _not_held(entries: EntrySet, held: Collection[EntryId]) -> EntrySet:
    """What of some entries is not held: a window holds many, and few of them lie among holes."""
    first, last = entries.first, entries.last
    if first is None or last is None:
        return entries
    return entries - EntrySet.of([one for one in held if first <= one <= last])


def _leave_out(proofs: Proofs, undecided: EntrySet) -> None:
    """Settle nothing that may be an entry which somebody has to be told of."""
    proofs.settled -= undecided
    first = undecided.first
    if first is not None and proofs.base is not None:
        proofs.base = min(proofs.base, first)


def _owed(existing: Mapping[EntryId, tuple[int, ...]], settled: EntrySet) -> frozenset[int]:
    """Slots that may have routed entries that exist and are not settled."""
    return frozenset(
        slot for entry_id, slots in existing.items() if entry_id not in settled for slot in slots
    )


def _first_stored(found: Inspection) -> EntryId | None:
    """The first stored entry, as a Reader from the very first position showed it."""
    if FIRST in found.existing:
        return FIRST
    end = found.proofs.ledger_ends.get(FIRST.ledger)
    return end.next if end is not None and end.last < 0 else None
