"""Ack gaps, pauses and the audit in a running source, on the in-memory broker."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.gap_resolver import GapResolver
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import BrokerUnavailableError, DataLossAckedElsewhereError, TopicRecreatedError
from tests.helpers import commit, received, rows_of, running, started, wait_until
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
)


@pytest.fixture
def topic() -> Iterator[GapTopic]:
    made = GapTopic()
    yield made
    made.cluster.validate()


@pytest.mark.parametrize("with_admin", [False, True])
def test_three_thousand_markers_leave_nothing_in_a_checkpoint(
    topic: GapTopic, with_admin: bool
) -> None:
    with running(
        topic.cluster, topic.source(), admin=topic.admin if with_admin else None
    ) as coordinator:
        for _ in range(3_000):
            topic.publish(FAST_KEY)
            topic.cluster.publish_marker(topic.where)
        received(coordinator, 3_000)
        first = commit(coordinator)
        assert coordinator.status()["ackGaps"] == 2_999
        assert len(first.to_json()) > 2_000
        resolved_by_batches(topic, coordinator)
        assert coordinator.status()["ackGapsResolved"] >= 2_999
        assert len(coordinator.newest.to_json()) < 512
        assert coordinator.newest.partitions[topic.where].floor is not None


def test_late_entries_are_delivered_however_long_they_were_ack_gaps(topic: GapTopic) -> None:
    """An ack gap before entries that are merely not delivered yet is never resolved."""
    entries = [entry for _ in range(50) for entry in topic.publish(FAST_KEY, SLOW_KEY)]
    gate = Gate()
    with running_gated(topic, topic.source(), gate) as coordinator:
        received(coordinator, 50)
        rounds = gate.readers
        state = commit(coordinator).partitions[topic.where]
        assert len(state.delivered) == 50
        wait_until(lambda: gate.readers >= rounds + 1)
        for _ in range(3):
            topic.publish(FAST_KEY)
            wait_until(lambda: coordinator.status()["windowRows"] > 0)
            state = commit(coordinator).partitions[topic.where]
        assert not any(map(state.covers, entries[1::2]))
        gate.open()
        received(coordinator, 103)
        state = commit(coordinator).partitions[topic.where]
        assert str(state.batch) == str(EntrySet.of(entries[1::2]))
        wait_until(lambda: topic.backlog() == 0)


def test_entries_in_flight_are_not_read_if_the_broker_lists_them(
    topic: GapTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow range's entries are ack gaps for long; a Reader over them would read everything
    twice."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ACK_GAP_AGE_MS", 20)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    rounds, gate = ScriptedCall(), Gate()
    faulty(topic.admin, broker_state=rounds)
    source = topic.source(settle_after_ms=300_000)
    entries = [entry for _ in range(50) for entry in topic.publish(FAST_KEY, SLOW_KEY)]
    with running_gated(topic, source, gate, topic.admin) as coordinator:
        received(coordinator, 50)
        commit(coordinator)
        assert coordinator.status()["ackGaps"] >= 49
        wait_rounds(rounds)
        assert gate.readers == 0
        topic.acknowledge(entries[1:9:2])
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
    topic: GapTopic,
) -> None:
    """The fast range pauses; when the slow one comes back, everything is delivered once."""
    count = 20_000
    limit = 4_096
    keys = [FAST_KEY, SLOW_KEY] * count
    entries = topic.publish(*keys)
    gate = Gate()
    source = topic.source(
        checkpoint_bytes_max=limit, window_rows_max=4_000, settle_after_ms=300_000
    )
    got: list[EntryId] = []
    sizes: list[int] = []

    def step() -> None:
        end = coordinator.batches.cut()
        if end is not None:
            sizes.append(len(end.to_json()))
            got.extend(end.partitions[topic.where].batch)
            coordinator.batches.release(end)

    with running_gated(topic, source, gate) as coordinator:

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
        wait_until(lambda: topic.backlog() == 0)


def late_entries_acknowledged(topic: GapTopic, coordinator: Coordinator) -> list[EntryId]:
    """Another client acknowledges the entries that wait for a slow range; returns all entries."""
    entries = topic.publish(*[FAST_KEY, SLOW_KEY] * 20)
    received(coordinator, 20)
    commit(coordinator)
    topic.acknowledge(entries[1::2])
    return entries


def ends_with_loss(topic: GapTopic, coordinator: Coordinator, said: str) -> None:
    """Publish until the source ends because of a loss."""

    def ended() -> bool:
        topic.publish(FAST_KEY)
        coordinator.batches.wait_for_rows(5)
        return coordinator.batches.cut() is None

    with pytest.raises(DataLossAckedElsewhereError, match=said):
        wait_until(ended)


def test_an_acknowledgement_by_another_client_ends_the_running_source(topic: GapTopic) -> None:
    """Found by the simulation, seed 7324: it was resolved silently, and no restart named it.

    1. entries wait for a slow range
    2. another client acknowledges them, and they stay acknowledged for ``settle_after_ms``
    """
    with running_gated(topic, topic.source(), Gate(), topic.admin) as coordinator:
        late_entries_acknowledged(topic, coordinator)
        ends_with_loss(topic, coordinator, r"20 entries of .*, first 1:1,3")


def test_an_acknowledgement_of_the_only_late_entry_ends_the_running_source(
    topic: GapTopic,
) -> None:
    """It lies between the floor and a single run, and the running source did not name it."""
    with running_gated(topic, topic.source(), Gate(), topic.admin) as coordinator:
        for _ in range(2):
            floor = one_more(topic, coordinator).floor
        late = topic.publish(SLOW_KEY)
        state = one_more(topic, coordinator)
        assert floor is not None
        assert state.delivered.run_count == 1
        assert not state.covers(late[0])
        topic.acknowledge(late)
        ends_with_loss(topic, coordinator, r"1 entries of .*, first 1:2")


def test_entries_acknowledged_by_another_client_are_resolved_if_loss_is_accepted(
    topic: GapTopic,
) -> None:
    source = topic.source(fail_on_data_loss=False)
    with running_gated(topic, source, Gate(), topic.admin) as coordinator:
        entries = late_entries_acknowledged(topic, coordinator)
        state = resolved_by_batches(topic, coordinator)
        # The newest gap may still be left between the floor and a single run. Or the mark-delete
        # passes it without counting entries.
        assert all(map(state.covers, entries[:-1]))
        assert coordinator.status()["ackGapsResolved"] >= 19
        assert coordinator.status()["entriesLost"] == 20


def test_the_floor_moves_over_ledgers(topic: GapTopic) -> None:
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


def test_errors_of_the_broker_are_shown_and_tried_again(topic: GapTopic) -> None:
    asks = ScriptedCall()
    faulty(topic.admin, broker_state=asks)
    with running(topic.cluster, topic.source(), admin=topic.admin) as coordinator:
        topic.publish(FAST_KEY)
        topic.cluster.publish_marker(topic.where)
        topic.publish(FAST_KEY)
        asks.raises = BrokerUnavailableError("away")
        received(coordinator, 2)
        commit(coordinator)
        wait_until(lambda: "away" in coordinator.status()["gapResolverError"])
        asks.raises = None
        resolved_by_batches(topic, coordinator)
        wait_until(lambda: coordinator.status()["gapResolverError"] == "")


@pytest.mark.parametrize("kind", ["encrypted", "corrupt"])
def test_ack_gaps_are_resolved_beside_unreadable_entries_that_a_handler_parks(
    topic: GapTopic, kind: str
) -> None:
    """Issue: an entry that was to be parked, and was on its way to a slow range, ended each look.

    1. The slow range is to receive entries that cannot be read. 2. A marker lies among them.
    """
    gate = Gate()
    for _ in range(3):
        topic.publish(FAST_KEY)
        topic.cluster.publish(
            topic.where, Message(b"m", SLOW_KEY),
            encrypted=kind == "encrypted", corrupt=kind == "corrupt",
        )  # fmt: skip
        topic.cluster.publish_marker(topic.where)
    source = topic.source(on_encrypted="park", on_corrupt="park")
    output: list[EntryId] = []
    coordinator = Coordinator(source, lambda: gate.broker(topic))
    coordinator.unreadable = lambda _where, entry_id, _why: output.append(entry_id)
    with started(coordinator):
        received(coordinator, 3)
        commit(coordinator)

        def resolved() -> bool:
            one_more(topic, coordinator)
            return coordinator.status()["ackGapsResolved"] == 3

        wait_until(resolved)
        assert not coordinator.status()["gapResolverError"]
        gate.open()
        wait_until(lambda: len(output) == 3)


# -- the audit --------------------------------------------------------------------------------


def committed(topic: GapTopic, batches: int) -> list[Checkpoint]:
    """End checkpoints of batches of ten messages, all committed and acknowledged."""
    ends = []
    with running(topic.cluster, topic.source(), admin=topic.admin) as coordinator:
        for number in range(batches):
            topic.publish(*[FAST_KEY, SLOW_KEY] * 5)
            received(coordinator, 10 * (number + 1))
            ends.append(commit(coordinator))
        wait_until(lambda: topic.backlog() == 0)
    return ends


def test_a_restored_older_checkpoint_is_data_loss_with_count_and_first_ids(topic: GapTopic) -> None:
    ends = committed(topic, 3)
    with (
        pytest.raises(DataLossAckedElsewhereError, match=r"10 entries .* first 1:20-29") as caught,
        running(topic.cluster, topic.source(), ends[1], admin=topic.admin),
    ):
        pass
    assert caught.value.facts["count"] == 10
    with running(topic.cluster, topic.source(), ends[2], admin=topic.admin):
        pass


def test_an_accepted_loss_is_resolved_and_counted(topic: GapTopic) -> None:
    ends = committed(topic, 3)
    source = topic.source(fail_on_data_loss=False)
    with running(topic.cluster, source, ends[1], admin=topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 10
        topic.publish(FAST_KEY, FAST_KEY)
        received(coordinator, 2)
        commit(coordinator)
        state = resolved_by_batches(topic, coordinator)
        assert state.covers(EntryId(1, 25))


def test_markers_that_the_broker_acknowledged_are_no_loss(topic: GapTopic) -> None:
    with running(topic.cluster, topic.source(), admin=topic.admin) as coordinator:
        topic.publish(FAST_KEY)
        received(coordinator, 1)
        end = commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)
        for _ in range(5):
            topic.cluster.publish_marker(topic.where)
    with running(topic.cluster, topic.source(), end, admin=topic.admin) as coordinator:
        topic.publish(FAST_KEY)
        received(coordinator, 1)
        commit(coordinator)
        resolved_by_batches(topic, coordinator)


def test_entries_acknowledged_before_the_first_start_are_resolved_at_once(topic: GapTopic) -> None:
    """An existing subscription with 10,000 ack gaps: the checkpoint never sees them."""
    broker, earlier = topic.earlier_owner()
    entries = topic.publish(*[FAST_KEY] * 20_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = topic.source(settle_after_ms=86_400_000)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        received(coordinator, 10_000)
        first = coordinator.batches.cut(100)
        assert first is not None
        coordinator.batches.release(first)
        commit(coordinator)
        topic.publish(FAST_KEY)
        received(coordinator, 10_001)
        second = commit(coordinator)
        assert len(second.to_json()) < 4_096
        wait_until(lambda: topic.backlog() == 0)
    with running(topic.cluster, source, second, admin=topic.admin):
        pass


def test_a_restart_after_the_first_batch_takes_no_earlier_entry_for_a_loss(
    topic: GapTopic,
) -> None:
    """Entries acknowledged before the first start are in the first checkpoint, at any position."""
    broker, earlier = topic.earlier_owner()
    entries = topic.publish(*[FAST_KEY] * 100, publish_ms=5_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = topic.source(settle_after_ms=86_400_000)
    with running(topic.cluster, source, admin=topic.admin) as coordinator:
        received(coordinator, 50)
        end = coordinator.batches.cut(10)
        assert end is not None
        coordinator.batches.release(end)
        wait_until(lambda: topic.backlog() == 40)
    with running(topic.cluster, source, end, admin=topic.admin) as coordinator:
        received(coordinator, 40)
        commit(coordinator)
        wait_until(lambda: topic.backlog() == 0)


def test_a_checkpoint_that_knows_more_than_the_broker_is_of_another_topic(topic: GapTopic) -> None:
    (end,) = committed(topic, 1)
    again = GapTopic()
    again.publish(FAST_KEY)
    with pytest.raises(TopicRecreatedError, match="has 1 entries"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)
    state = end.partitions[topic.where]
    later = dataclasses.replace(state, delivered=EntrySet.parse("9:0"), batch=EntrySet())
    end = dataclasses.replace(end, partitions={topic.where: later})
    with pytest.raises(TopicRecreatedError, match="newest ledger there is 1"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)


def test_markers_have_ids_and_are_never_delivered(topic: GapTopic) -> None:
    broker = MemoryBroker(topic.cluster)
    consumer = broker.subscribe(
        SubscriptionSpec(
            topic.where, "unit", split_ring(1)[0], consumer_name="c", receiver_queue_size=10
        ),
        StartPosition.EARLIEST,
    )
    first, *_ = topic.publish(FAST_KEY)
    marker = topic.cluster.publish_marker(topic.where)
    last, *_ = topic.publish(FAST_KEY)
    assert (first, marker, last) == (EntryId(1, 0), EntryId(1, 1), EntryId(1, 2))
    assert [block.id for block in consumer.receive(100)] == [first, last]
    reader = broker.reader(topic.where, marker)
    assert [block.id for block in reader.read(100)] == [last]
    assert reader.at_end()
    consumer.acknowledge([first, last])
    assert topic.backlog() == 0
    broker.close()


def test_trimmed_entries_of_a_planned_batch_are_left_out_where_loss_is_accepted(
    topic: GapTopic,
) -> None:
    topic.publish(*[FAST_KEY] * 10)
    with running(topic.cluster, topic.source()) as coordinator:
        received(coordinator, 10)
        end = coordinator.batches.cut()
        assert end is not None
    topic.cluster.trim(topic.where, EntryId(1, 4))
    source = topic.source(fail_on_data_loss=False)
    with running(topic.cluster, source, end, planned=True) as coordinator:
        rows = rows_of(coordinator, end)
        assert [len(part) for part in rows.values()] == [6]
        assert coordinator.status()["entriesLost"] == 4
        coordinator.batches.release(end)
        wait_until(lambda: topic.backlog() == 0)
        assert coordinator.status()["windowRows"] == 0


def wait_rounds(rounds: ScriptedCall) -> None:
    """Wait for many more rounds than an acknowledgement needs to count as lasting."""
    before = len(rounds.asked)
    wait_until(lambda: len(rounds.asked) >= before + 10)


@pytest.fixture
def rounds(topic: GapTopic, monkeypatch: pytest.MonkeyPatch) -> ScriptedCall:
    """The rounds in which the gap resolver asks the admin interface."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.READ_SHARE", 1.0)
    made = ScriptedCall()
    faulty(topic.admin, broker_state=made)
    return made


class LateAdmin(MemoryAdmin):
    """An admin interface that calls ``happens`` once, while the gap resolver waits for an answer.

    ``seen`` decides whether the request for a topic partition is the one.
    """

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.seen: Callable[[TopicPartition], bool] = lambda _: False
        self.happens: Callable[[], object] | None = None

    def broker_state(self, *asked: Any) -> Any:
        resolves = threading.current_thread().name == "keyshard-gap-resolver"
        if resolves and self.happens is not None and self.seen(asked[0]):
            happens, self.happens = self.happens, None
            happens()
        return super().broker_state(*asked)


def test_entries_that_are_delivered_during_a_look_are_not_lost(
    topic: GapTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that others acknowledged come, and are committed, while the broker is asked."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.READ_SHARE", 1.0)
    admin, gate = LateAdmin(topic.cluster), Gate()
    resolvers: list[GapResolver] = []
    begin = GapResolver.__init__

    def noted(resolver: GapResolver, *args: Any, **how: Any) -> None:
        begin(resolver, *args, **how)
        resolvers.append(resolver)

    def seen(where: TopicPartition) -> bool:
        evidence = resolvers[0]._evidence.get(where)
        return evidence is not None and bool(evidence.existing or evidence.unplaced)

    monkeypatch.setattr(GapResolver, "__init__", noted)
    source = topic.source(fail_on_data_loss=False, settle_after_ms=40)
    coordinator = Coordinator(source, lambda: gate.broker(topic), admin)
    entries = topic.publish(FAST_KEY, SLOW_KEY, FAST_KEY)
    coordinator.start()
    delivered: list[int] = []

    def deliver() -> None:
        gate.open()
        received(coordinator, 23)
        end = cut(coordinator)
        rows = rows_of(coordinator, end)
        coordinator.batches.release(end)
        wait_until(lambda: coordinator.status()["windowRows"] == 0)
        delivered.append(sum(map(len, rows.values())))

    try:
        received(coordinator, 2)
        commit(coordinator)
        late = [entries[1], *topic.publish(*[SLOW_KEY] * 20)]
        admin.seen, admin.happens = seen, deliver
        topic.acknowledge(late)
        wait_until(lambda: delivered)
        one_more(topic, coordinator)
        one_more(topic, coordinator)
        assert delivered == [21]
        assert coordinator.status()["entriesLost"] == 0
    finally:
        coordinator.stop()


def test_entries_that_still_arrive_are_not_counted_as_lost(
    topic: GapTopic, rounds: ScriptedCall
) -> None:
    """A broker that evicts a backlog also acknowledges entries that consumers already hold.

    1. Entries wait for a slow range: one in an ack gap, and 20 above the delivered ones.
    2. The broker acknowledges them.
    3. The slow range receives them.
    """
    gate = Gate()
    source = topic.source(fail_on_data_loss=False, settle_after_ms=40)
    entries = topic.publish(FAST_KEY, SLOW_KEY, FAST_KEY)
    with running_gated(topic, source, gate, topic.admin) as coordinator:
        received(coordinator, 2)
        commit(coordinator)
        evicted = [entries[1], *topic.publish(*[SLOW_KEY] * 20)]
        topic.acknowledge(evicted)
        wait_rounds(rounds)
        gate.open()
        received(coordinator, 23)
        rows = rows_of(coordinator, end := cut(coordinator))
        assert sum(map(len, rows.values())) == 21
        coordinator.batches.release(end)
        one_more(topic, coordinator)
        assert coordinator.status()["entriesLost"] == 0


def cut(coordinator: Coordinator) -> Checkpoint:
    """Cut a batch that the caller releases."""
    end = coordinator.batches.cut()
    assert end is not None
    return end


def test_a_loss_that_the_start_has_counted_is_not_counted_again(
    topic: GapTopic, rounds: ScriptedCall
) -> None:
    source = topic.source(fail_on_data_loss=False, settle_after_ms=40)
    entries = topic.publish(*[FAST_KEY, SLOW_KEY] * 20)
    with running_gated(topic, source, Gate()) as coordinator:
        received(coordinator, 20)
        checkpoint = commit(coordinator)
        wait_until(lambda: topic.backlog() == 20)
    topic.acknowledge(entries[1::2])
    with running(topic.cluster, source, checkpoint, admin=topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 20
        wait_rounds(rounds)
        assert coordinator.status()["entriesLost"] == 20
        one_more(topic, coordinator)
        one_more(topic, coordinator)
        assert coordinator.status()["entriesLost"] == 20
