"""Settling, pausing and the audit in the running source, on the in-memory broker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from helpers import commit, config, key_in, received, rows_of, running, wait_until
from keyshard.broker.memory import (
    LookAhead,
    MemoryBroker,
    MemoryCluster,
    MemoryConsumer,
    MemoryReader,
    Message,
)
from keyshard.broker.memory.admin import MemoryAdmin
from keyshard.broker.port import StartPosition
from keyshard.config.source import SourceConfig
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.holes.broker_state import BrokerState
from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.hash_range import HashRange, split_ring
from keyshard.errors import BrokerUnavailableError, DataLossAckedElsewhereError, TopicRecreatedError

FAST, SLOW = split_ring(2)
FAST_KEY, SLOW_KEY = key_in(FAST), key_in(SLOW)


class Place:
    """A topic of one partition and what is done to it."""

    def __init__(self, *, entries_per_ledger: int = 50_000) -> None:
        self.cluster = MemoryCluster(
            entries_per_ledger=entries_per_ledger, look_ahead=LookAhead(100_000, 100_000)
        )
        self.topic = self.cluster.create_topic("orders", partitions=1)
        (self.where,) = self.cluster.partitions(self.topic)
        self.admin = MemoryAdmin(self.cluster)

    def publish(self, *keys: str, publish_ms: int = 1_000) -> list[EntryId]:
        messages = [Message(b"m", key=key) for key in keys]
        made = self.cluster.publish(self.where, *messages, publish_ms=publish_ms)
        return [entry_id for _, entry_id in made]

    def source(self, **changes: object) -> SourceConfig:
        return config(self.topic, **{"parallelism": 2, "settle_after_ms": 20} | changes)

    def acknowledge(self, entries: Sequence[EntryId]) -> None:
        self.cluster.acknowledge(self.where, "unit", entries)

    def earlier_owner(self) -> tuple[MemoryBroker, MemoryConsumer]:
        """Somebody who owns the whole ring of the subscription before the source begins."""
        broker = MemoryBroker(self.cluster)
        return broker, broker.subscribe(
            self.where,
            "unit",
            split_ring(1)[0],
            start=StartPosition.EARLIEST,
            consumer_name="earlier",
            receiver_queue_size=100,
        )

    def backlog(self) -> int:
        return self.cluster.backlog(self.where, "unit")


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.cluster.validate()


def settled_by_batches(place: Place, coordinator: Coordinator) -> PartitionCheckpoint:
    """Publish single entries, each its own batch, until holes are settled."""
    state = PartitionCheckpoint()

    def settled() -> bool:
        nonlocal state
        place.publish(FAST_KEY)
        coordinator.batches.wait_for_rows(5)
        if coordinator.status()["windowRows"]:
            state = commit(coordinator).partitions[place.where]
        return coordinator.status()["ackHoles"] == 0

    wait_until(settled)
    return state


@pytest.mark.parametrize("with_admin", [False, True])
def test_ten_thousand_markers_leave_a_checkpoint_under_four_kilobytes(
    place: Place, with_admin: bool
) -> None:
    for _ in range(10_000):
        place.publish(FAST_KEY)
        place.cluster.publish_marker(place.where)
    with running(
        place.cluster, place.source(), admin=place.admin if with_admin else None
    ) as coordinator:
        received(coordinator, 10_000)
        first = commit(coordinator)
        assert coordinator.status()["ackHoles"] == 9_999
        assert len(first.to_json()) > 60_000
        settled_by_batches(place, coordinator)
        assert coordinator.status()["holesSettled"] >= 9_999
        assert len(coordinator.newest.to_json()) < 4_096
        assert coordinator.newest.partitions[place.where].floor is not None


def test_late_entries_are_delivered_however_long_they_were_holes(place: Place) -> None:
    """A hole in front of entries that are merely not yet delivered is never settled."""
    entries = [entry for _ in range(50) for entry in place.publish(FAST_KEY, SLOW_KEY)]
    gate = Gate()
    with running_gated(place, place.source(), gate) as coordinator:
        received(coordinator, 50)
        rounds = gate.readers
        state = commit(coordinator).partitions[place.where]
        assert len(state.delivered) == 50
        wait_until(lambda: gate.readers >= rounds + 1)
        for _ in range(3):
            place.publish(FAST_KEY)
            wait_until(lambda: coordinator.status()["windowRows"] > 0)
            state = commit(coordinator).partitions[place.where]
        assert not any(map(state.settled, entries[1::2]))
        gate.open()
        received(coordinator, 103)
        state = commit(coordinator).partitions[place.where]
        assert str(state.batch) == str(EntrySet.of(entries[1::2]))
        wait_until(lambda: place.backlog() == 0)


def test_entries_on_their_way_are_not_read_where_the_broker_says_so(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow range's entries are holes for long; a Reader over them would read everything twice."""

    class Counting(MemoryAdmin):
        rounds = 0

        def broker_state(self, *args: Any) -> BrokerState | None:
            self.rounds += 1
            return super().broker_state(*args)

    monkeypatch.setattr("keyshard.coordinator.settler.HOLE_AGE_MS", 20)
    monkeypatch.setattr("keyshard.coordinator.settler.ROUND_S", 0.02)
    admin, gate = Counting(place.cluster), Gate()
    source = place.source(settle_after_ms=300_000)
    entries = [entry for _ in range(50) for entry in place.publish(FAST_KEY, SLOW_KEY)]
    coordinator = Coordinator(source, lambda: GatedBroker(place.cluster, gate), admin)
    coordinator.start()
    try:
        received(coordinator, 50)
        commit(coordinator)
        assert coordinator.status()["ackHoles"] >= 49
        rounds = admin.rounds
        wait_until(lambda: admin.rounds >= rounds + 10)
        assert gate.readers == 0
        place.acknowledge(entries[1:9:2])
        wait_until(lambda: gate.readers)
    finally:
        coordinator.stop()


class Gate:
    """Holds back what consumers of one range receive, and counts readers."""

    def __init__(self, hash_range: HashRange = SLOW) -> None:
        self.hash_range = hash_range
        self.closed = True
        self.readers = 0

    def open(self) -> None:
        self.closed = False


class GatedBroker(MemoryBroker):
    def __init__(self, cluster: MemoryCluster, gate: Gate) -> None:
        super().__init__(cluster)
        self._gate = gate

    def subscribe(
        self, topic_partition: TopicPartition, *args: object, **kwargs: object
    ) -> MemoryConsumer:  # type: ignore[override]
        consumer = super().subscribe(topic_partition, *args, **kwargs)  # type: ignore[arg-type]
        take = consumer.receive
        consumer.receive = lambda timeout_ms: (  # type: ignore[method-assign]
            []
            if self._gate.closed and consumer.hash_range == self._gate.hash_range
            else take(timeout_ms)
        )
        return consumer

    def reader(self, *args: Any) -> MemoryReader:
        self._gate.readers += 1
        return super().reader(*args)


class running_gated:  # noqa: N801 - a context manager, like `running`
    def __init__(self, place: Place, source: SourceConfig, gate: Gate) -> None:
        self.coordinator = Coordinator(source, lambda: GatedBroker(place.cluster, gate))

    def __enter__(self) -> Coordinator:
        self.coordinator.start()
        return self.coordinator

    def __exit__(self, *_: object) -> None:
        self.coordinator.stop()


def test_a_slow_range_keeps_the_checkpoint_small_and_stops_nothing_for_good(place: Place) -> None:
    """The fast range pauses; when the slow one comes back, everything is delivered once."""
    count = 10_000
    limit = 8_192
    keys = [FAST_KEY, SLOW_KEY] * count
    entries = place.publish(*keys)
    gate = Gate()
    source = place.source(
        checkpoint_bytes_max=limit, window_rows_max=4_000, settle_after_ms=300_000
    )
    got: list[EntryId] = []
    sizes: list[int] = []

    def step() -> None:
        end = coordinator.batches.cut()
        if end is not None:
            sizes.append(len(end.to_json()))
            got.extend(end.partitions[place.where].batch)
            coordinator.batches.release(end)

    with running_gated(place, source, gate) as coordinator:

        def fast_pauses() -> bool:
            step()
            return bool(coordinator.status()["rangesPaused"])

        wait_until(fast_pauses)
        held = coordinator.status()["windowRows"]
        assert held < 4_000
        # Every second entry is a run of its own, of at least four characters.
        assert len(got) <= limit // 4 < count / 4, "the fast range stopped long before its end"
        gate.open()

        def all_came() -> bool:
            coordinator.batches.wait_for_rows(0.1)
            step()
            return len(got) == 2 * count

        wait_until(all_came, 60)
        assert sorted(got) == sorted(entries)
        assert max(sizes) <= limit, max(sizes)
        assert coordinator.status()["rangesPaused"] == 0
        wait_until(lambda: place.backlog() == 0)


def late_entries_acknowledged(place: Place, coordinator: Coordinator) -> list[EntryId]:
    """Somebody else acknowledges what waits for a slow range; returns all entries."""
    entries = place.publish(*[FAST_KEY, SLOW_KEY] * 20)
    coordinator.start()
    received(coordinator, 20)
    commit(coordinator)
    place.acknowledge(entries[1::2])
    return entries


def test_what_somebody_else_acknowledged_while_it_runs_ends_the_source(place: Place) -> None:
    """Found by the simulation, seed 7324: it was settled in silence, and no restart named it.

    1. entries wait for a slow range
    2. somebody else acknowledges them, and they stay acknowledged for ``settle_after_ms``
    """
    coordinator = Coordinator(
        place.source(), lambda: GatedBroker(place.cluster, Gate()), place.admin
    )
    try:
        late_entries_acknowledged(place, coordinator)

        def ended() -> bool:
            place.publish(FAST_KEY)
            coordinator.batches.wait_for_rows(5)
            return coordinator.batches.cut() is None

        with pytest.raises(DataLossAckedElsewhereError, match=r"20 entries of .*, first 1:1,3"):
            wait_until(ended)
    finally:
        coordinator.stop()


def test_what_somebody_else_acknowledged_is_settled_where_loss_is_accepted(place: Place) -> None:
    source = place.source(fail_on_data_loss=False)
    coordinator = Coordinator(source, lambda: GatedBroker(place.cluster, Gate()), place.admin)
    try:
        entries = late_entries_acknowledged(place, coordinator)
        state = settled_by_batches(place, coordinator)
        # The newest may be left between the floor and a single run, which costs nothing; or the
        # mark-delete passes it, which does not count entries.
        assert all(map(state.settled, entries[:-1]))
        assert coordinator.status()["holesSettled"] >= 19
        assert coordinator.status()["entriesLost"] == 20
    finally:
        coordinator.stop()


def test_the_floor_moves_over_ledgers(place: Place) -> None:
    for with_admin in (False, True):
        place = Place(entries_per_ledger=10)
        with running(
            place.cluster, place.source(), admin=place.admin if with_admin else None
        ) as coordinator:
            for _ in range(5):
                place.publish(*[FAST_KEY] * 10)
            received(coordinator, 50)
            commit(coordinator)
            state = settled_by_batches(place, coordinator)
            assert state.floor is not None
            assert state.floor.ledger >= 5
            assert state.delivered.run_count <= 1


def test_errors_of_the_broker_are_shown_and_tried_again(place: Place) -> None:
    class Failing(MemoryAdmin):
        fails = False

        def broker_state(self, *args: Any) -> BrokerState | None:
            if self.fails:
                raise BrokerUnavailableError("away")
            return super().broker_state(*args)

    admin = Failing(place.cluster)
    place.publish(FAST_KEY)
    place.cluster.publish_marker(place.where)
    place.publish(FAST_KEY)
    with running(place.cluster, place.source(), admin=admin) as coordinator:
        admin.fails = True
        received(coordinator, 2)
        commit(coordinator)
        wait_until(lambda: "away" in coordinator.status()["settlingError"])
        admin.fails = False
        settled_by_batches(place, coordinator)
        wait_until(lambda: coordinator.status()["settlingError"] == "")


@pytest.mark.parametrize("kind", ["encrypted", "corrupt"])
def test_holes_are_settled_beside_unreadable_entries_that_a_handler_parks(
    place: Place, kind: str
) -> None:
    """Issue: an entry that was to be parked, and was on its way to a slow range, ended each look.

    1. The slow range is to receive entries that cannot be read. 2. A marker lies among them.
    """
    gate = Gate()
    for _ in range(3):
        place.publish(FAST_KEY)
        place.cluster.publish(place.where, Message(b"m", SLOW_KEY), **{kind: True})
        place.cluster.publish_marker(place.where)
    source = place.source(on_encrypted="park", on_corrupt="park")
    told: list[EntryId] = []
    coordinator = Coordinator(source, lambda: GatedBroker(place.cluster, gate))
    coordinator.unreadable = lambda _where, entry_id, _why: told.append(entry_id)
    coordinator.start()
    try:
        received(coordinator, 3)
        commit(coordinator)

        def settled() -> bool:
            place.publish(FAST_KEY)
            coordinator.batches.wait_for_rows(5)
            commit(coordinator)
            return coordinator.status()["holesSettled"] == 3

        wait_until(settled)
        assert not coordinator.status()["settlingError"]
        gate.open()
        wait_until(lambda: len(told) == 3)
    finally:
        coordinator.stop()


# -- the audit --------------------------------------------------------------------------------


def committed(place: Place, batches: int) -> list[Checkpoint]:
    """End checkpoints of batches of ten messages, all committed and acknowledged."""
    ends = []
    with running(place.cluster, place.source(), admin=place.admin) as coordinator:
        for number in range(batches):
            place.publish(*[FAST_KEY, SLOW_KEY] * 5)
            received(coordinator, 10 * (number + 1))
            ends.append(commit(coordinator))
        wait_until(lambda: place.backlog() == 0)
    return ends


def test_a_restored_older_checkpoint_is_data_loss_with_count_and_first_ids(place: Place) -> None:
    ends = committed(place, 3)
    with (
        pytest.raises(DataLossAckedElsewhereError, match=r"10 entries .* first 1:20-29") as caught,
        running(place.cluster, place.source(), ends[1], admin=place.admin),
    ):
        pass
    assert caught.value.facts["count"] == 10
    with running(place.cluster, place.source(), ends[2], admin=place.admin):
        pass


def test_where_loss_is_accepted_it_is_settled_and_counted(place: Place) -> None:
    ends = committed(place, 3)
    source = place.source(fail_on_data_loss=False)
    with running(place.cluster, source, ends[1], admin=place.admin) as coordinator:
        assert coordinator.status()["entriesLost"] == 10
        place.publish(FAST_KEY, FAST_KEY)
        received(coordinator, 2)
        commit(coordinator)
        state = settled_by_batches(place, coordinator)
        assert state.settled(EntryId(1, 25))


def test_markers_that_the_broker_acknowledged_are_no_loss(place: Place) -> None:
    with running(place.cluster, place.source(), admin=place.admin) as coordinator:
        place.publish(FAST_KEY)
        received(coordinator, 1)
        end = commit(coordinator)
        wait_until(lambda: place.backlog() == 0)
        for _ in range(5):
            place.cluster.publish_marker(place.where)
    with running(place.cluster, place.source(), end, admin=place.admin) as coordinator:
        place.publish(FAST_KEY)
        received(coordinator, 1)
        commit(coordinator)
        settled_by_batches(place, coordinator)


def test_what_was_acknowledged_before_the_first_start_is_settled_at_once(place: Place) -> None:
    """An existing subscription with 10,000 holes: the checkpoint never sees them."""
    broker, earlier = place.earlier_owner()
    entries = place.publish(*[FAST_KEY] * 20_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = place.source(settle_after_ms=86_400_000)
    with running(place.cluster, source, admin=place.admin) as coordinator:
        received(coordinator, 10_000)
        first = coordinator.batches.cut(100)
        assert first is not None
        coordinator.batches.release(first)
        commit(coordinator)
        place.publish(FAST_KEY)
        received(coordinator, 10_001)
        second = commit(coordinator)
        assert len(second.to_json()) < 4_096
        wait_until(lambda: place.backlog() == 0)
    with running(place.cluster, source, second, admin=place.admin):
        pass


def test_a_restart_after_the_first_batch_takes_nothing_of_before_for_a_loss(place: Place) -> None:
    """What was acknowledged before the first start is in the first checkpoint, wherever it lies."""
    broker, earlier = place.earlier_owner()
    entries = place.publish(*[FAST_KEY] * 100, publish_ms=5_000)
    earlier.acknowledge(entries[::2])
    broker.close()
    source = place.source(settle_after_ms=86_400_000)
    with running(place.cluster, source, admin=place.admin) as coordinator:
        received(coordinator, 50)
        end = coordinator.batches.cut(10)
        assert end is not None
        coordinator.batches.release(end)
        wait_until(lambda: place.backlog() == 40)
    with running(place.cluster, source, end, admin=place.admin) as coordinator:
        received(coordinator, 40)
        commit(coordinator)
        wait_until(lambda: place.backlog() == 0)


def test_a_checkpoint_that_knows_more_than_the_broker_is_of_another_topic(place: Place) -> None:
    (end,) = committed(place, 1)
    again = Place()
    again.publish(FAST_KEY)
    with pytest.raises(TopicRecreatedError, match="has 1 entries"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)
    state = end.partitions[place.where]
    later = dataclasses.replace(state, delivered=EntrySet.parse("9:0"), batch=EntrySet())
    end = dataclasses.replace(end, partitions={place.where: later})
    with pytest.raises(TopicRecreatedError, match="newest ledger there is 1"):
        Coordinator(again.source(), lambda: MemoryBroker(again.cluster), again.admin).start(end)


def test_markers_take_ids_and_are_shown_to_nobody(place: Place) -> None:
    broker = MemoryBroker(place.cluster)
    consumer = broker.subscribe(
        place.where,
        "unit",
        split_ring(1)[0],
        start=StartPosition.EARLIEST,
        consumer_name="c",
        receiver_queue_size=10,
    )
    first, *_ = place.publish(FAST_KEY)
    marker = place.cluster.publish_marker(place.where)
    last, *_ = place.publish(FAST_KEY)
    assert (first, marker, last) == (EntryId(1, 0), EntryId(1, 1), EntryId(1, 2))
    assert [block.id for block in consumer.receive(100)] == [first, last]
    reader = broker.reader(place.where, marker)
    assert [block.id for block in reader.read(100)] == [last]
    assert reader.at_end()
    consumer.acknowledge([first, last])
    assert place.backlog() == 0
    broker.close()


def test_trimmed_entries_of_a_planned_batch_are_left_out_where_loss_is_accepted(
    place: Place,
) -> None:
    place.publish(*[FAST_KEY] * 10)
    with running(place.cluster, place.source()) as coordinator:
        received(coordinator, 10)
        end = coordinator.batches.cut()
        assert end is not None
    place.cluster.trim(place.where, EntryId(1, 4))
    source = place.source(fail_on_data_loss=False)
    with running(place.cluster, source, end, planned=True) as coordinator:
        rows = rows_of(coordinator, end)
        assert [len(part) for part in rows.values()] == [6]
        assert coordinator.status()["entriesLost"] == 4
        coordinator.batches.release(end)
        wait_until(lambda: place.backlog() == 0)
        assert coordinator.status()["windowRows"] == 0
