"""The gap resolver: gathers evidence about ack gaps in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from typing import NamedTuple

from keyshard.broker.admin.port import Admin
from keyshard.broker.port import Broker
from keyshard.config.source import SourceConfig
from keyshard.consumers.consumers import Consumers
from keyshard.core.ack_gaps import (
    FIRST,
    AgedEntries,
    GapEvidence,
    ack_gaps_of,
    acked_elsewhere,
    acknowledged_unknown,
    evidence_of_ledgers,
    ledger_borders,
)
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.subscription_state import CursorState
from keyshard.core.window.partition_window import PartitionWindow
from keyshard.errors import KeyShardError
from keyshard.reading.gap_reader import GapReport, inspect_ack_gaps
from keyshard.threads import begin

ROUND_S = 2.0
"""Shortest time between two rounds, seconds."""
READ_SHARE = 0.25
"""Largest fraction of its time that the gap resolver spends on reading."""
READ_S, SLOW_READ_S = 1.0, 16.0
"""Longest time to read ack gaps of one topic partition in one round, seconds. The second is for a
broker that does not answer a Reader in the first."""
ACK_GAP_AGE_MS = 5_000
"""Age from which an ack gap is read, milliseconds. Entries of younger ones are mostly on their way.
If the admin interface lists acknowledged entries and the checkpoint has room, only those are
read."""
EXISTING_MAX = 20_000
"""Existing entries in ack gaps whose slots are remembered per topic partition."""
WARN_AFTER_S, WARN_INTERVAL_S = 10.0, 60.0
"""Time without room in the checkpoint before a warning, and between two warnings, seconds."""

_log = logging.getLogger(__name__)


class AckGapsView(NamedTuple):
    """Evidence about a topic partition with ack gaps or several ledgers."""

    window: PartitionWindow
    state: PartitionCheckpoint
    held: Collection[EntryId]
    """Entries that are received and not released."""
    tight: bool
    """Whether its checkpoint has no room. Then ranges that owe entries of ack gaps must not
    pause."""
    doubts: int
    """Times that the window dropped its evidence."""


class _GapEvidence:
    """State of one topic partition between rounds."""

    def __init__(self, window: PartitionWindow, ack_gap_age_ms: int, settle_after_ms: int) -> None:
        self.window = window
        """A topic partition that is created again has another window, and other evidence."""
        self.open = AgedEntries(ack_gap_age_ms)
        self.acknowledged = AgedEntries(settle_after_ms)
        self.marked = AgedEntries(settle_after_ms)
        self.existing: dict[EntryId, tuple[int, ...]] = {}
        """Entries of ack gaps that a Reader returned, with the slots that may route them."""
        self.unplaced = EntrySet()
        """Further such entries. Any range may owe them: a Reader shows no slot of a message without
        a key, or of an unreadable entry, or the slots are too many."""
        self.absent = EntrySet()
        """Entries that were proved absent and are in no checkpoint yet."""
        self.skipped = EntrySet()
        """Entries of ``absent`` that are unreadable, and that the source skips."""
        self.read_s = READ_S
        """Longest time of the next read, seconds."""
        self.doubts = 0
        """Times that the window had dropped its evidence when they were read."""
        self.lost = EntrySet()
        """Entries of ``existing`` that were reported as lost."""


class GapResolver:
    """Resolves ack gaps in rounds, in one daemon thread.

    A round gathers evidence about each topic partition with ack gaps or several ledgers, and gives
    it to the window.
    Broker errors appear in the status, and the next round tries again.

    Args:
        broker: Connection for Readers.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        config: The source.
        consumers: Has the window whose ack gaps are resolved.
    """

    def __init__(
        self, broker: Broker, admin: Admin | None, config: SourceConfig, consumers: Consumers
    ) -> None:
        self._broker = broker
        self._admin = admin
        self._config = config
        self._consumers = consumers
        self._shared = consumers.shared
        # A short time until gaps are resolved needs short rounds; the minimum is 20 ms.
        self._round_s = max(0.02, min(ROUND_S, config.settle_after_ms / 2_000))
        self._ack_gap_age_ms = min(ACK_GAP_AGE_MS, config.settle_after_ms)
        self._evidence: dict[TopicPartition, _GapEvidence] = {}
        self._stopping = threading.Event()
        self.error = ""
        """Error of the newest round, or ``""``."""
        self._warned_s = -WARN_INTERVAL_S
        self._thread = begin("keyshard-gap-resolver", self._run)

    def stop(self) -> None:
        """End the thread after its current topic partition; returns without waiting."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, at most ``timeout_s`` seconds."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._round_s
        while not self._stopping.wait(wait_s):
            began = time.monotonic()
            error = ""
            for topic_partition, view in self._ack_gap_views().items():
                if self._stopping.is_set():
                    return
                try:
                    self._look_at(topic_partition, view)
                except KeyShardError as exc:
                    error = exc.summary
                    _log.info(
                        "resolving gaps in %s is tried again: %s", topic_partition, exc.summary
                    )
            self.error = error
            self._look_for_room()
            wait_s = max(self._round_s, (time.monotonic() - began) / READ_SHARE)

    def _look_at(self, topic_partition: TopicPartition, view: AckGapsView) -> None:
        config, state = self._config, view.state
        evidence = self._evidence.get(topic_partition)
        if evidence is None or evidence.window is not view.window:
            evidence = _GapEvidence(view.window, self._ack_gap_age_ms, config.settle_after_ms)
            self._evidence[topic_partition] = evidence
        if view.doubts != evidence.doubts:
            evidence.doubts, evidence.absent = view.doubts, EntrySet()
        now_ms = time.monotonic_ns() // 1_000_000
        broker_state: CursorState | None = None
        if self._admin is not None:
            broker_state = self._admin.broker_state(topic_partition, config.subscription)
        ack_gaps = _not_held(ack_gaps_of(state, broker_state), view.held)
        proofs, doubted, borders = GapEvidence(), EntrySet(), EntrySet()
        if broker_state is not None:
            proofs.merge(evidence_of_ledgers(state, ack_gaps, broker_state))
            # Entries outside every checkpoint were acknowledged before the source began.
            doubted = _not_held(acknowledged_unknown(state, broker_state), view.held)
            lasting = self._acknowledged_long(evidence, now_ms, ack_gaps | doubted, broker_state)
            self._report_lost(topic_partition, view, evidence, lasting.resolved & doubted)
            _leave_out(lasting, doubted - evidence.absent - evidence.lost)
            lasting.resolved &= ack_gaps
            proofs.merge(lasting)
            if not view.tight:
                # The rest is on its way: the broker itself acknowledges entries that it delivers to
                # no consumer.
                ack_gaps &= broker_state.acknowledged()
        else:
            borders = ledger_borders(state)
            ack_gaps |= borders
        proofs.merge(
            self._read_over(topic_partition, evidence, now_ms, ack_gaps | doubted, proofs.resolved)
        )
        # Borders are not entries. In a checkpoint they would make ledgers look too long.
        proofs.resolved -= borders - evidence.skipped
        missing = _missing_slots(evidence, proofs.resolved)
        self._prove(topic_partition, view, proofs, missing)

    def _look_for_room(self) -> None:
        """Let the next cut retry rows that had no room in the checkpoint; warn of long waits."""
        with self._shared.lock:
            if self._shared.window.retry_without_room():
                self._shared.lock.notify_all()
        now_s, waited_s = time.monotonic(), self._shared.without_room_s
        if waited_s < WARN_AFTER_S or now_s - self._warned_s < WARN_INTERVAL_S:
            return
        with self._shared.lock:
            window = self._shared.window
            without = {where: window.known[where].ack_gaps for where in window.tight}
            size = window.checkpoint_bytes
        if not without:
            return
        self._warned_s = now_s
        most = max(without, key=without.__getitem__)
        _log.warning(
            "The checkpoint of %d bytes has had no room for %.0f s, so new entries of %d topic "
            "partitions wait. %s has %d gaps: entries that were delivered around missing ones. "
            "Missing entries are delayed messages whose time has not come, or those of a slow "
            "range. They are still received. To have room for more gaps, raise "
            "checkpoint_bytes_max (maxCheckpointBytes), which is %d.",
            size, waited_s, len(without), most, without[most], self._config.checkpoint_bytes_max,
        )  # fmt: skip

    def _report_lost(
        self,
        topic_partition: TopicPartition,
        view: AckGapsView,
        evidence: _GapEvidence,
        acknowledged: EntrySet,
    ) -> None:
        """Call :meth:`_lose`, once, for stored entries that another consumer acknowledged."""
        lost = acknowledged & (EntrySet.of(evidence.existing) | evidence.unplaced)
        if lost - evidence.lost:
            self._lose(topic_partition, view, lost - evidence.lost)
        evidence.lost = lost

    def _read_over(
        self,
        topic_partition: TopicPartition,
        evidence: _GapEvidence,
        now_ms: int,
        ack_gaps: EntrySet,
        resolved: EntrySet,
    ) -> GapEvidence:
        """Read ack gaps that have lasted for a while, each once, and return what is proved.

        An entry that was read as the border of a ledger may be an ack gap later. So everything that
        was proved absent is returned until a checkpoint has it.
        """
        evidence.existing = {
            entry_id: slot for entry_id, slot in evidence.existing.items() if entry_id in ack_gaps
        }
        evidence.unplaced &= ack_gaps
        evidence.absent &= ack_gaps
        evidence.skipped &= ack_gaps
        unknown = evidence.open.update(now_ms, ack_gaps - resolved)
        unknown -= evidence.absent | evidence.unplaced | EntrySet.of(evidence.existing)
        if not unknown:
            return GapEvidence(resolved=evidence.absent)
        deadline = time.monotonic() + evidence.read_s
        found = inspect_ack_gaps(
            self._broker, topic_partition, unknown, deadline, existing_max=EXISTING_MAX,
            skipped=self._config.skipped,
        )  # fmt: skip
        placed = [(entry_id, slots) for entry_id, slots in found.existing.items() if slots]
        evidence.existing.update(placed[: max(0, EXISTING_MAX - len(evidence.existing))])
        evidence.unplaced |= EntrySet.of(found.existing) - EntrySet.of(evidence.existing)
        evidence.absent |= found.proofs.resolved
        evidence.skipped |= found.skipped
        slow = not (found.complete or found.existing or found.proofs)
        evidence.read_s = min(SLOW_READ_S, 2 * evidence.read_s) if slow else READ_S
        found.proofs.resolved = evidence.absent
        if FIRST in unknown:
            found.proofs.base = _first_stored(found)
        return found.proofs

    @staticmethod
    def _acknowledged_long(
        evidence: _GapEvidence, now_ms: int, ack_gaps: EntrySet, broker_state: CursorState
    ) -> GapEvidence:
        """Return gaps acknowledged elsewhere, and the mark-delete, if they lasted long enough."""
        proofs = GapEvidence()
        proofs.resolved = evidence.acknowledged.update(
            now_ms, ack_gaps & broker_state.acknowledged()
        )
        marked = broker_state.mark_delete
        if marked is not None:
            # As a set, because the mark-delete may move back: entries above it start their time
            # again.
            below = broker_state.marked()
            lasting = evidence.marked.update(now_ms, below).last
            if lasting is not None:
                proofs.base = EntryId(lasting.ledger, lasting.entry + 1)
        if proofs:
            proofs.published_ms = time.time_ns() // 1_000_000
        return proofs

    def _ack_gap_views(self) -> dict[TopicPartition, AckGapsView]:
        """Return a view of each topic partition with ack gaps or several ledgers.

        Evidence of forgotten topic partitions is dropped.
        """
        with self._shared.lock:
            window = self._shared.window
            for topic_partition in self._evidence.keys() - window.known.keys():
                del self._evidence[topic_partition]
            parts = {tp: window.known[tp] for tp in window.partitions}
            return {
                tp: AckGapsView(part, part.state, list(part.held), part.tight, part.doubts)
                for tp, part in parts.items()
                if part.has_ack_gaps
            }

    def _prove(
        self,
        topic_partition: TopicPartition,
        view: AckGapsView,
        proofs: GapEvidence,
        missing_slots: Collection[int],
    ) -> None:
        """Give the window the evidence, and the ranges that still owe entries of ack gaps.

        If the topic partition was doubted, dropped or created again after the view was taken, the
        evidence is dropped.

        Args:
            topic_partition: The topic partition.
            view: The view from which the evidence comes.
            proofs: The evidence.
            missing_slots: Slots that may have routed entries that are still to come.
        """
        with self._shared.lock:
            known = self._shared.window.known.get(topic_partition)
            if known is not view.window or known.doubts != view.doubts:
                return
            owners = frozenset(map(self._consumers.owners.__getitem__, missing_slots))
            self._shared.window.prove(topic_partition, proofs, owners)
            self._shared.lock.notify_all()

    def _lose(self, topic_partition: TopicPartition, view: AckGapsView, entries: EntrySet) -> None:
        """End the source because of lost entries; or warn, and let the window count them.

        ``fail_on_data_loss`` decides. Lost entries are stored and in no batch, but another consumer
        acknowledged them.
        """
        error = acked_elsewhere(topic_partition, self._config.subscription, entries)
        if self._config.fail_on_data_loss:
            self._shared.fail(error)
            return
        _log.warning("%s Resolved, because fail_on_data_loss is false.", error.summary)
        with self._shared.lock:
            known = self._shared.window.known.get(topic_partition)
            if known is view.window:
                known.lose(entries)


def _not_held(entries: EntrySet, held: Collection[EntryId]) -> EntrySet:
    """Return the entries that are not held.

    A window holds many entries, and few of them lie among ack gaps.
    """
    first, last = entries.first, entries.last
    if first is None or last is None:
        return entries
    return entries - EntrySet.of([one for one in held if first <= one <= last])


def _leave_out(proofs: GapEvidence, undecided: EntrySet) -> None:
    """Remove undecided entries from the evidence: they may have to be reported as lost."""
    proofs.resolved -= undecided
    first = undecided.first
    if first is not None and proofs.base is not None:
        proofs.base = min(proofs.base, first)


def _missing_slots(evidence: _GapEvidence, resolved: EntrySet) -> Collection[int]:
    """Return the slots that may have routed entries that exist and are not resolved."""
    if evidence.unplaced - resolved:
        return range(RING_SIZE)
    return frozenset(
        slot
        for entry_id, slots in evidence.existing.items()
        if entry_id not in resolved
        for slot in slots
    )


def _first_stored(found: GapReport) -> EntryId | None:
    """Return the first stored entry, as a Reader from the very first position returned it."""
    if FIRST in found.existing:
        return FIRST
    end = found.proofs.ledger_ends.get(FIRST.ledger)
    return end.next if end is not None and end.last < 0 else None
