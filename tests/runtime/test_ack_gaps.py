"""Ack gaps and pauses in a running source, on the in-memory broker."""

from __future__ import annotations

import pytest

from keyshard.broker.memory import MemoryBroker, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError
from tests.helpers import commit, received, running, started, wait_until
from tests.support.deadlines import deadline
from tests.support.faulty_broker import ScriptedCall, faulty
from tests.support.gap_topic import (
    FAST_KEY,
    SLOW_KEY,
    GapTopic,
    Gate,
    one_more,
    resolved_by_batches,
    running_gated,
    wait_rounds,
)


@pytest.mark.parametrize("with_admin", [False, True])
@pytest.mark.simulated(seeds=1)
def test_three_thousand_markers_leave_nothing_in_a_checkpoint(
    gap_topic: GapTopic, with_admin: bool
) -> None:
    with running(
        gap_topic.cluster, gap_topic.source(), admin=gap_topic.admin if with_admin else None
    ) as coordinator:
        for _ in range(3_000):
            gap_topic.publish(FAST_KEY)
            gap_topic.cluster.publish_marker(gap_topic.where)
        received(coordinator, 3_000)
        first = commit(coordinator)
        assert coordinator.status()["ackGaps"] == 2_999
        assert len(first.to_json()) > 2_000
        resolved_by_batches(gap_topic, coordinator)
        assert coordinator.status()["ackGapsResolved"] >= 2_999
        assert len(coordinator.newest.to_json()) < 512
        assert coordinator.newest.partitions[gap_topic.where].floor is not None


def test_late_entries_are_delivered_however_long_they_were_ack_gaps(gap_topic: GapTopic) -> None:
    """An ack gap before entries that are merely not delivered yet is never resolved."""
    entries = [entry for _ in range(50) for entry in gap_topic.publish(FAST_KEY, SLOW_KEY)]
    gate = Gate()
    with running_gated(gap_topic, gap_topic.source(), gate) as coordinator:
        received(coordinator, 50)
        rounds = gate.readers
        state = commit(coordinator).partitions[gap_topic.where]
        assert len(state.delivered) == 50
        wait_until(lambda: gate.readers >= rounds + 1)
        for _ in range(3):
            gap_topic.publish(FAST_KEY)
            wait_until(lambda: coordinator.status()["windowRows"] > 0)
            state = commit(coordinator).partitions[gap_topic.where]
        assert not any(map(state.covers, entries[1::2]))
        gate.open()
        received(coordinator, 103)
        state = commit(coordinator).partitions[gap_topic.where]
        assert str(state.batch) == str(EntrySet.of(entries[1::2]))
        wait_until(lambda: gap_topic.backlog() == 0)


def test_entries_in_flight_are_not_read_if_the_broker_lists_them(
    gap_topic: GapTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow range's entries are ack gaps for long; a Reader over them would read everything
    twice."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ACK_GAP_AGE_MS", 20)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    rounds, gate = ScriptedCall(), Gate()
    faulty(gap_topic.admin, broker_state=rounds)
    source = gap_topic.source(settle_after_ms=300_000)
    entries = [entry for _ in range(50) for entry in gap_topic.publish(FAST_KEY, SLOW_KEY)]
    with running_gated(gap_topic, source, gate, gap_topic.admin) as coordinator:
        received(coordinator, 50)
        commit(coordinator)
        assert coordinator.status()["ackGaps"] >= 49
        wait_rounds(rounds)
        assert gate.readers == 0
        gap_topic.acknowledge(entries[1:9:2])
        wait_until(lambda: gate.readers)


def test_evidence_dropped_by_an_uncertain_topic_identity_is_gathered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the simulation, seed 7077 of workers: the floor never rose again."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ACK_GAP_AGE_MS", 20)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    topic = GapTopic(entries_per_ledger=2)
    topic.publish(*[FAST_KEY] * 6)
    with running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 6)
        commit(coordinator)
        shared = coordinator.consumers.shared
        window = shared.window.known[topic.where]
        wait_until(lambda: window.proofs.base is not None)
        with shared.lock:
            window.doubt()
        wait_until(lambda: window.proofs.base is not None)


def test_a_slow_range_keeps_the_checkpoint_small_and_stops_nothing_for_good(
    gap_topic: GapTopic,
) -> None:
    """The fast range pauses; when the slow one comes back, everything is delivered once."""
    count = 13_000
    limit = 4_096
    keys = [FAST_KEY, SLOW_KEY] * count
    entries = gap_topic.publish(*keys)
    gate = Gate()
    source = gap_topic.source(
        checkpoint_bytes_max=limit, window_rows_max=4_000, settle_after_ms=300_000
    )
    got: list[EntryId] = []
    sizes: list[int] = []

    def step() -> None:
        end = coordinator.batches.cut()
        if end is not None:
            sizes.append(len(end.to_json()))
            got.extend(end.partitions[gap_topic.where].batch)
            coordinator.batches.release(end)

    with running_gated(gap_topic, source, gate) as coordinator:

        def fast_pauses() -> bool:
            step()
            return bool(coordinator.status()["rangesPaused"])

        wait_until(fast_pauses)
        held = coordinator.status()["windowRows"]
        assert held < 4_000
        # Every second entry is there, and base64 holds six entries in a character.
        assert len(got) <= limit * 3 < count, "the fast range stopped long before its end"
        gate.open()

        def all_came() -> bool:
            coordinator.batches.wait_for_rows(0.1)
            step()
            return len(got) == 2 * count

        wait_until(all_came, deadline(60))
        assert sorted(got) == sorted(entries)
        assert max(sizes) <= limit, max(sizes)
        assert coordinator.status()["rangesPaused"] == 0
        wait_until(lambda: gap_topic.backlog() == 0)


def test_the_floor_moves_over_ledgers() -> None:
    for with_admin in (False, True):
        topic = GapTopic(entries_per_ledger=10)
        with running(
            topic.cluster, topic.source(), admin=topic.admin if with_admin else None
        ) as coordinator:
            for _ in range(5):
                topic.publish(*[FAST_KEY] * 10)
            received(coordinator, 50)
            commit(coordinator)
            state = resolved_by_batches(topic, coordinator)
            assert state.floor is not None
            assert state.floor.ledger >= 5
            assert state.delivered.run_count <= 1


def test_a_marker_at_the_border_of_a_ledger_is_resolved_once_later_entries_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the simulation, seed 403 of spark: the gap stayed, and the checkpoint filled up.

    1. the newest delivered entry of a ledger is before a marker, and a later ledger is delivered
    2. a Reader at the border of the two ledgers proves that the marker is no entry
    3. the late entries behind the marker are delivered, so it is an ack gap now
    """
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    topic, gate = GapTopic(entries_per_ledger=4), Gate()
    topic.publish(FAST_KEY)
    marker = topic.cluster.publish_marker(topic.where)
    topic.publish(SLOW_KEY, SLOW_KEY)
    later = topic.publish(FAST_KEY)[0]
    assert later.ledger > marker.ledger
    with running_gated(topic, topic.source(), gate) as coordinator:
        received(coordinator, 2)
        commit(coordinator)
        window = coordinator.consumers.shared.window.known[topic.where]
        wait_until(lambda: window.proofs.base is not None)
        gate.open()
        received(coordinator, 4)
        commit(coordinator)
        state = resolved_by_batches(topic, coordinator)
        assert state.covers(marker)


def test_errors_of_the_broker_are_shown_and_tried_again(gap_topic: GapTopic) -> None:
    asks = ScriptedCall()
    faulty(gap_topic.admin, broker_state=asks)
    with running(gap_topic.cluster, gap_topic.source(), admin=gap_topic.admin) as coordinator:
        gap_topic.publish(FAST_KEY)
        gap_topic.cluster.publish_marker(gap_topic.where)
        gap_topic.publish(FAST_KEY)
        asks.raises = BrokerUnavailableError("away")
        received(coordinator, 2)
        commit(coordinator)
        wait_until(lambda: "away" in coordinator.status()["gapResolverError"])
        asks.raises = None
        resolved_by_batches(gap_topic, coordinator)
        wait_until(lambda: coordinator.status()["gapResolverError"] == "")


@pytest.mark.parametrize("kind", ["encrypted", "corrupt"])
def test_ack_gaps_are_resolved_beside_unreadable_entries_that_a_handler_parks(
    gap_topic: GapTopic, kind: str
) -> None:
    """Issue: an entry that was to be parked, and was on its way to a slow range, ended each look.

    1. The slow range is to receive entries that cannot be read. 2. A marker lies among them.
    """
    gate = Gate()
    for _ in range(3):
        gap_topic.publish(FAST_KEY)
        gap_topic.cluster.publish(
            gap_topic.where, Message(b"m", SLOW_KEY),
            encrypted=kind == "encrypted", corrupt=kind == "corrupt",
        )  # fmt: skip
        gap_topic.cluster.publish_marker(gap_topic.where)
    source = gap_topic.source(on_encrypted="park", on_corrupt="park")
    output: list[EntryId] = []
    coordinator = Coordinator(source, lambda: gate.broker(gap_topic))
    coordinator.unreadable = lambda _where, entry_id, _why: output.append(entry_id)
    with started(coordinator):
        received(coordinator, 3)
        commit(coordinator)

        def resolved() -> bool:
            one_more(gap_topic, coordinator)
            return coordinator.status()["ackGapsResolved"] == 3

        wait_until(resolved)
        assert not coordinator.status()["gapResolverError"]
        gate.open()
        wait_until(lambda: len(output) == 3)


def test_entries_acknowledged_before_the_first_start_are_resolved_at_once(
    gap_topic: GapTopic,
) -> None:
    """An existing subscription with 10,000 ack gaps: the checkpoint never sees them."""
    broker, earlier = gap_topic.earlier_owner()
    entries = gap_topic.publish(*[FAST_KEY] * 20_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = gap_topic.source(settle_after_ms=86_400_000)
    with running(gap_topic.cluster, source, admin=gap_topic.admin) as coordinator:
        received(coordinator, 10_000)
        first = coordinator.batches.cut(100)
        assert first is not None
        coordinator.batches.release(first)
        commit(coordinator)
        gap_topic.publish(FAST_KEY)
        received(coordinator, 10_001)
        second = commit(coordinator)
        assert len(second.to_json()) < 4_096
        wait_until(lambda: gap_topic.backlog() == 0)
    with running(gap_topic.cluster, source, second, admin=gap_topic.admin):
        pass


def test_markers_have_ids_and_are_never_delivered(gap_topic: GapTopic) -> None:
    broker = MemoryBroker(gap_topic.cluster)
    consumer = broker.subscribe(
        SubscriptionSpec(
            gap_topic.where, "unit", split_ring(1)[0], consumer_name="c", receiver_queue_size=10
        ),
        StartPosition.EARLIEST,
    )
    first, *_ = gap_topic.publish(FAST_KEY)
    marker = gap_topic.cluster.publish_marker(gap_topic.where)
    last, *_ = gap_topic.publish(FAST_KEY)
    assert (first, marker, last) == (EntryId(1, 0), EntryId(1, 1), EntryId(1, 2))
    assert [block.id for block in consumer.receive(100)] == [first, last]
    reader = broker.reader(gap_topic.where, marker)
    assert [block.id for block in reader.read(100)] == [last]
    assert reader.at_end()
    consumer.acknowledge([first, last])
    assert gap_topic.backlog() == 0
    broker.close()
