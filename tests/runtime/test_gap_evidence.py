"""Evidence about ack gaps: it is complete, of this topic, and in time. On the in-memory broker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker, MemoryReader, Message
from keyshard.coordinator import gap_resolver
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId
from keyshard.reading.gap_reader import GapReport, inspect_ack_gaps
from tests.helpers import commit, config, received, running, started, wait_until
from tests.support.faulty_broker import Fault, faulty
from tests.support.gap_topic import (
    FAST_KEY,
    SLOW_KEY,
    GapTopic,
    Gate,
    one_more,
    resolved_by_batches,
    running_gated,
)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap resolver looks often."""
    monkeypatch.setattr(gap_resolver, "ROUND_S", 0.02)


@pytest.mark.parametrize("with_admin", [False, True])
@pytest.mark.parametrize("entries_per_ledger", [2, 50_000])
@pytest.mark.parametrize("on_encrypted", ["park", "skip"])
def test_a_gap_before_an_unreadable_entry_is_resolved(
    on_encrypted: str, entries_per_ledger: int, with_admin: bool
) -> None:
    """A Reader that met the entry behind the gap proved nothing, and the floor stayed."""
    topic = GapTopic(entries_per_ledger=entries_per_ledger)
    for _ in range(4):
        topic.publish(FAST_KEY)
        marker = topic.cluster.publish_marker(topic.where)
        topic.cluster.publish(topic.where, Message(b"m", FAST_KEY), encrypted=True)
    coordinator = Coordinator(
        topic.source(on_encrypted=on_encrypted),
        lambda: MemoryBroker(topic.cluster),
        topic.admin if with_admin else None,
    )
    coordinator.unreadable = lambda _where, _entry, _why: None
    with started(coordinator):

        def floor_is_behind_the_marker() -> bool:
            floor = one_more(topic, coordinator).floor
            return floor is not None and floor > marker

        wait_until(floor_is_behind_the_marker)


def test_the_only_gap_is_resolved_although_one_run_follows_the_floor() -> None:
    """The gap was inspected only after a second gap had come, and the floor stayed."""
    topic = GapTopic()
    with running(topic.cluster, topic.source()) as coordinator:

        def floor_is_behind(marker: EntryId) -> bool:
            floor = one_more(topic, coordinator).floor
            return floor is not None and floor > marker

        one_more(topic, coordinator)
        first = topic.cluster.publish_marker(topic.where)
        wait_until(lambda: floor_is_behind(first))
        second = topic.cluster.publish_marker(topic.where)
        state = one_more(topic, coordinator)
        assert state.delivered.run_count == 1
        assert not state.covers(second)
        wait_until(lambda: floor_is_behind(second))


def test_a_skipped_last_entry_of_a_ledger_is_resolved_after_evidence_is_dropped() -> None:
    """The entry was taken for the border of its ledger, where a Reader proves no end."""
    topic = GapTopic(entries_per_ledger=4)
    source = topic.source(on_encrypted="skip")
    with running(topic.cluster, source) as coordinator:
        shared = coordinator.consumers.shared
        topic.publish(FAST_KEY, FAST_KEY, FAST_KEY)
        received(coordinator, 3)
        commit(coordinator)
        topic.cluster.publish(topic.where, Message(b"m", FAST_KEY), encrypted=True)
        wait_until(lambda: shared.window.counters.encrypted_skipped == 1)
        with shared.lock:
            shared.window.known[topic.where].doubt()
        state = resolved_by_batches(topic, coordinator)
        assert state.floor is not None
        assert state.floor >= EntryId(1, 3)


def test_evidence_of_a_deleted_topic_says_nothing_about_one_with_the_same_ids() -> None:
    """The cluster was wiped: an undelivered entry counted as absent, and was lost."""
    topic, gate = GapTopic(entries_per_ledger=4), Gate()
    gate.open()
    kept = topic.cluster.create_topic("kept", partitions=1)
    source = config([topic.topic, kept], parallelism=2, settle_after_ms=20)
    with running_gated(topic, source, gate) as coordinator:
        window = coordinator.consumers.shared.window
        topic.publish(FAST_KEY)
        for _ in range(3):
            topic.cluster.publish_marker(topic.where)
        topic.publish(FAST_KEY)
        received(coordinator, 2)
        commit(coordinator)
        wait_until(lambda: window.known[topic.where].proofs.base is not None)
        topic.cluster.delete_topic(topic.topic)
        for _ in range(3):
            coordinator.discovery.round()
        topic.cluster.publish(kept, Message(b"m", key=FAST_KEY))
        received(coordinator, 3)
        commit(coordinator)
        wait_until(lambda: topic.where not in window.known)
        topic.cluster._store._next_ledger = 0
        topic.cluster.create_topic("orders", partitions=1)
        coordinator.discovery.round()
        gate.closed = True
        readers = gate.readers
        late = topic.publish(FAST_KEY, SLOW_KEY, FAST_KEY)[1]
        received(coordinator, 5)
        commit(coordinator)
        wait_until(lambda: gate.readers > readers)
        for _ in range(5):
            assert not one_more(topic, coordinator).covers(late)


def test_evidence_from_before_the_topic_identity_became_uncertain_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = GapTopic()
    topic.publish(FAST_KEY)
    marker = topic.cluster.publish_marker(topic.where)
    topic.publish(FAST_KEY)
    looks = []
    with running(topic.cluster, topic.source()) as coordinator:
        shared = coordinator.consumers.shared
        window = shared.window.known[topic.where]

        def doubted_meanwhile(*arguments: Any, **options: Any) -> GapReport:
            found = inspect_ack_gaps(*arguments, **options)
            if marker in found.proofs.resolved:
                with shared.lock:
                    looks.append(marker in window.proofs.resolved)
                    if len(looks) < 3:
                        window.doubt()
            return found

        monkeypatch.setattr(gap_resolver, "inspect_ack_gaps", doubted_meanwhile)
        received(coordinator, 2)
        commit(coordinator)
        wait_until(lambda: marker in window.proofs.resolved)
        assert looks == [False, False, False]


def test_a_reader_that_needs_longer_than_a_look_proves_gaps_at_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gap_resolver, "READ_S", 0.05)

    def slow(call: Fault, *arguments: Any) -> MemoryReader:
        begin_s = time.monotonic() + 0.3

        def late(read: Fault, timeout_ms: int) -> Any:
            waits_s = begin_s - time.monotonic()
            if waits_s > 0:
                time.sleep(min(waits_s, timeout_ms / 1_000))
            return read(timeout_ms) if time.monotonic() >= begin_s else []

        return faulty(call(*arguments), read=late)

    topic = GapTopic()
    broker = faulty(MemoryBroker(topic.cluster), reader=slow)
    with running(topic.cluster, topic.source(), connect=lambda: broker) as coordinator:
        topic.publish(FAST_KEY)
        topic.cluster.publish_marker(topic.where)
        topic.publish(FAST_KEY)
        received(coordinator, 2)
        commit(coordinator)
        assert coordinator.status()["ackGaps"] == 1
        resolved_by_batches(topic, coordinator)


def test_ack_gaps_are_resolved_beside_any_number_of_existing_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gap resolver remembers the slots of only some entries."""
    monkeypatch.setattr(gap_resolver, "EXISTING_MAX", 5)
    topic, gate = GapTopic(), Gate()
    for _ in range(20):
        topic.publish(SLOW_KEY, FAST_KEY)
    with running_gated(topic, topic.source(), gate) as coordinator:
        received(coordinator, 20)
        commit(coordinator)
        window = coordinator.consumers.shared.window.known[topic.where]
        wait_until(lambda: window.owners)
        for _ in range(100):
            topic.cluster.publish_marker(topic.where)
            topic.publish(FAST_KEY)
        received(coordinator, 120)
        commit(coordinator)

        def only_late_entries_are_missing() -> bool:
            one_more(topic, coordinator)
            return coordinator.status()["ackGapsResolved"] == 100

        wait_until(only_late_entries_are_missing)
        assert window.owners == {0, 1}, "any range may owe those without known slots"
        gate.open()
        wait_until(lambda: resolved_by_batches(topic, coordinator).floor is not None)
