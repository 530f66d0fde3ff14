"""Entries that others acknowledged, or that are trimmed: a loss that is named or counted."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from keyshard.broker.memory import MemoryBroker, MemoryCluster
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.coordinator import startup
from keyshard.coordinator.coordinator import Coordinator
from keyshard.coordinator.gap_resolver import GapResolver
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.errors import DataLossAckedElsewhereError, TopicRecreatedError
from tests.helpers import commit, received, rows_of, running, wait_until
from tests.support.coordinated_topic import cut
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


def late_entries_acknowledged(gap_topic: GapTopic, coordinator: Coordinator) -> list[EntryId]:
    """Another client acknowledges the entries that wait for a slow range; returns all entries."""
    entries = gap_topic.publish(*[FAST_KEY, SLOW_KEY] * 20)
    received(coordinator, 20)
    commit(coordinator)
    gap_topic.acknowledge(entries[1::2])
    return entries


def ends_with_loss(gap_topic: GapTopic, coordinator: Coordinator, said: str) -> None:
    """Publish until the source ends because of a loss."""

    def ended() -> bool:
        gap_topic.publish(FAST_KEY)
        coordinator.batches.wait_for_rows(5)
        return coordinator.batches.cut() is None

    with pytest.raises(DataLossAckedElsewhereError, match=said):
        wait_until(ended)


def test_an_acknowledgement_by_another_client_ends_the_running_source(gap_topic: GapTopic) -> None:
    """Found by the simulation, seed 7324: it was resolved silently, and no restart named it.

    1. entries wait for a slow range
    2. another client acknowledges them, and they stay acknowledged for ``settle_after_ms``
    """
    with running_gated(gap_topic, gap_topic.source(), Gate(), gap_topic.admin) as coordinator:
        late_entries_acknowledged(gap_topic, coordinator)
        ends_with_loss(gap_topic, coordinator, r"20 entries of .*, first 1:1,3")


def test_an_acknowledgement_of_the_only_late_entry_ends_the_running_source(
    gap_topic: GapTopic,
) -> None:
    """It lies between the floor and a single run, and the running source did not name it."""
    with running_gated(gap_topic, gap_topic.source(), Gate(), gap_topic.admin) as coordinator:
        for _ in range(2):
            floor = one_more(gap_topic, coordinator).floor
        late = gap_topic.publish(SLOW_KEY)
        state = one_more(gap_topic, coordinator)
        assert floor is not None
        assert state.delivered.run_count == 1
        assert not state.covers(late[0])
        gap_topic.acknowledge(late)
        ends_with_loss(gap_topic, coordinator, r"1 entries of .*, first 1:2")


def test_entries_acknowledged_by_another_client_are_resolved_if_loss_is_accepted(
    gap_topic: GapTopic,
) -> None:
    source = gap_topic.source(fail_on_data_loss=False)
    with running_gated(gap_topic, source, Gate(), gap_topic.admin) as coordinator:
        entries = late_entries_acknowledged(gap_topic, coordinator)
        state = resolved_by_batches(gap_topic, coordinator)
        # The newest gap may still be left between the floor and a single run. Or the mark-delete
        # passes it without counting entries.
        assert all(map(state.covers, entries[:-1]))
        assert coordinator.status()["ackGapsResolved"] >= 19
        assert coordinator.status()["entriesLost"] == 20


def committed(gap_topic: GapTopic, batches: int) -> list[Checkpoint]:
    """End checkpoints of batches of ten messages, all committed and acknowledged."""
    ends = []
    with running(gap_topic.cluster, gap_topic.source(), admin=gap_topic.admin) as coordinator:
        for number in range(batches):
            gap_topic.publish(*[FAST_KEY, SLOW_KEY] * 5)
            received(coordinator, 10 * (number + 1))
            ends.append(commit(coordinator))
        wait_until(lambda: gap_topic.backlog() == 0)
    return ends


def test_a_restored_older_checkpoint_is_data_loss_with_count_and_first_ids(
    gap_topic: GapTopic,
) -> None:
    ends = committed(gap_topic, 3)
    with (
        pytest.raises(DataLossAckedElsewhereError, match=r"10 entries .* first 1:20-29") as caught,
        running(gap_topic.cluster, gap_topic.source(), ends[1], admin=gap_topic.admin),
    ):
        pass
    assert caught.value.facts["count"] == 10
    with running(gap_topic.cluster, gap_topic.source(), ends[2], admin=gap_topic.admin):
        pass


def test_a_loss_that_is_not_counted_to_its_end_is_named_so(
    gap_topic: GapTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyshard.broker.memory.client.READ_MESSAGES_MAX", 2)
    monkeypatch.setattr(startup, "LOST_COUNTED_MAX", 3)
    ends = committed(gap_topic, 3)
    with (
        pytest.raises(DataLossAckedElsewhereError, match=r"At least 4 entries .* first 1:20-23"),
        running(gap_topic.cluster, gap_topic.source(), ends[1], admin=gap_topic.admin),
    ):
        pass


def test_an_accepted_loss_is_resolved_and_counted(gap_topic: GapTopic) -> None:
    ends = committed(gap_topic, 3)
    source = gap_topic.source(fail_on_data_loss=False)
    with running(gap_topic.cluster, source, ends[1], admin=gap_topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 10
        gap_topic.publish(FAST_KEY, FAST_KEY)
        received(coordinator, 2)
        commit(coordinator)
        state = resolved_by_batches(gap_topic, coordinator)
        assert state.covers(EntryId(1, 25))


def test_markers_that_the_broker_acknowledged_are_no_loss(gap_topic: GapTopic) -> None:
    with running(gap_topic.cluster, gap_topic.source(), admin=gap_topic.admin) as coordinator:
        gap_topic.publish(FAST_KEY)
        received(coordinator, 1)
        end = commit(coordinator)
        wait_until(lambda: gap_topic.backlog() == 0)
        for _ in range(5):
            gap_topic.cluster.publish_marker(gap_topic.where)
    with running(gap_topic.cluster, gap_topic.source(), end, admin=gap_topic.admin) as coordinator:
        gap_topic.publish(FAST_KEY)
        received(coordinator, 1)
        commit(coordinator)
        resolved_by_batches(gap_topic, coordinator)


def test_a_restart_after_the_first_batch_takes_no_earlier_entry_for_a_loss(
    gap_topic: GapTopic,
) -> None:
    """Entries acknowledged before the first start are in the first checkpoint, at any position."""
    broker, earlier = gap_topic.earlier_owner()
    entries = gap_topic.publish(*[FAST_KEY] * 100, publish_ms=5_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = gap_topic.source(settle_after_ms=86_400_000)
    with running(gap_topic.cluster, source, admin=gap_topic.admin) as coordinator:
        received(coordinator, 50)
        end = coordinator.batches.cut(10)
        assert end is not None
        coordinator.batches.release(end)
        wait_until(lambda: gap_topic.backlog() == 40)
    with running(gap_topic.cluster, source, end, admin=gap_topic.admin) as coordinator:
        received(coordinator, 40)
        commit(coordinator)
        wait_until(lambda: gap_topic.backlog() == 0)


def test_a_checkpoint_that_knows_more_than_the_broker_is_of_another_topic(
    gap_topic: GapTopic,
) -> None:
    (end,) = committed(gap_topic, 1)
    again = GapTopic()
    again.publish(FAST_KEY)
    with pytest.raises(TopicRecreatedError, match="has 1 entries"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)
    state = end.partitions[gap_topic.where]
    later = dataclasses.replace(state, delivered=EntrySet.parse("9:0"), batch=EntrySet())
    end = dataclasses.replace(end, partitions={gap_topic.where: later})
    with pytest.raises(TopicRecreatedError, match="newest ledger there is 1"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)


def test_trimmed_entries_of_a_planned_batch_are_left_out_where_loss_is_accepted(
    gap_topic: GapTopic,
) -> None:
    gap_topic.publish(*[FAST_KEY] * 10)
    with running(gap_topic.cluster, gap_topic.source()) as coordinator:
        received(coordinator, 10)
        end = coordinator.batches.cut()
        assert end is not None
    gap_topic.cluster.trim(gap_topic.where, EntryId(1, 4))
    source = gap_topic.source(fail_on_data_loss=False)
    with running(gap_topic.cluster, source, end, planned=True) as coordinator:
        rows = rows_of(coordinator, end)
        assert [len(part) for part in rows.values()] == [6]
        assert coordinator.status()["entriesLost"] == 4
        coordinator.batches.release(end)
        wait_until(lambda: gap_topic.backlog() == 0)
        assert coordinator.status()["windowRows"] == 0


@pytest.fixture
def rounds(gap_topic: GapTopic, monkeypatch: pytest.MonkeyPatch) -> ScriptedCall:
    """The rounds in which the gap resolver asks the admin interface."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.READ_SHARE", 1.0)
    made = ScriptedCall()
    faulty(gap_topic.admin, broker_state=made)
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
    gap_topic: GapTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that others acknowledged come, and are committed, while the broker is asked."""
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.ROUND_S", 0.02)
    monkeypatch.setattr("keyshard.coordinator.gap_resolver.READ_SHARE", 1.0)
    admin, gate = LateAdmin(gap_topic.cluster), Gate()
    resolvers: list[GapResolver] = []
    begin = GapResolver.__init__

    def noted(resolver: GapResolver, *args: Any, **how: Any) -> None:
        begin(resolver, *args, **how)
        resolvers.append(resolver)

    def seen(where: TopicPartition) -> bool:
        evidence = resolvers[0]._evidence.get(where)
        return evidence is not None and bool(evidence.existing or evidence.unplaced)

    monkeypatch.setattr(GapResolver, "__init__", noted)
    source = gap_topic.source(fail_on_data_loss=False, settle_after_ms=40)
    coordinator = Coordinator(source, lambda: gate.broker(gap_topic), admin)
    entries = gap_topic.publish(FAST_KEY, SLOW_KEY, FAST_KEY)
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
        late = [entries[1], *gap_topic.publish(*[SLOW_KEY] * 20)]
        admin.seen, admin.happens = seen, deliver
        gap_topic.acknowledge(late)
        wait_until(lambda: delivered)
        one_more(gap_topic, coordinator)
        one_more(gap_topic, coordinator)
        assert delivered == [21]
        assert coordinator.status()["entriesLost"] == 0
    finally:
        coordinator.stop()


def test_entries_that_still_arrive_are_not_counted_as_lost(
    gap_topic: GapTopic, rounds: ScriptedCall
) -> None:
    """A broker that evicts a backlog also acknowledges entries that consumers already hold.

    1. Entries wait for a slow range: one in an ack gap, and 20 above the delivered ones.
    2. The broker acknowledges them.
    3. The slow range receives them.
    """
    gate = Gate()
    source = gap_topic.source(fail_on_data_loss=False, settle_after_ms=40)
    entries = gap_topic.publish(FAST_KEY, SLOW_KEY, FAST_KEY)
    with running_gated(gap_topic, source, gate, gap_topic.admin) as coordinator:
        received(coordinator, 2)
        commit(coordinator)
        evicted = [entries[1], *gap_topic.publish(*[SLOW_KEY] * 20)]
        gap_topic.acknowledge(evicted)
        wait_rounds(rounds)
        gate.open()
        received(coordinator, 23)
        rows = rows_of(coordinator, end := cut(coordinator))
        assert sum(map(len, rows.values())) == 21
        coordinator.batches.release(end)
        one_more(gap_topic, coordinator)
        assert coordinator.status()["entriesLost"] == 0


def test_a_loss_that_the_start_has_counted_is_not_counted_again(
    gap_topic: GapTopic, rounds: ScriptedCall
) -> None:
    source = gap_topic.source(fail_on_data_loss=False, settle_after_ms=40)
    entries = gap_topic.publish(*[FAST_KEY, SLOW_KEY] * 20)
    with running_gated(gap_topic, source, Gate()) as coordinator:
        received(coordinator, 20)
        checkpoint = commit(coordinator)
        wait_until(lambda: gap_topic.backlog() == 20)
    gap_topic.acknowledge(entries[1::2])
    with running(gap_topic.cluster, source, checkpoint, admin=gap_topic.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 20
        wait_rounds(rounds)
        assert coordinator.status()["entriesLost"] == 20
        one_more(gap_topic, coordinator)
        one_more(gap_topic, coordinator)
        assert coordinator.status()["entriesLost"] == 20
