"""Many topic partitions that come and go: all advance, and deleted ones are forgotten."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence

import pytest

from keyshard.config.source import SourceConfig
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.consumers.receiver import RangeConsumer
from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.position.checkpoint import Checkpoint, named
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.assignment import assign, slot_owners
from keyshard.core.topic_segments import SegmentOrder
from keyshard.core.window.admission import Budget
from keyshard.core.window.partition_window import PartitionWindow
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.core.window.window import Window

START = Checkpoint("c", "s", 4)
DEFAULTS = Budget(200_000, 256 * 1024 * 1024)


def block(ledger: int, entry: int) -> EntryBlock:
    """An entry of one message, without content."""
    return EntryBlock(
        EntryId(ledger, entry), batch_size=1, batched=False, indices=range(1), slot=0,
        mixed_slots=None, publish_ms=1_000, payload_bytes=10, content=None, start=0,
    )  # fmt: skip


def partitions(count: int) -> list[TopicPartition]:
    return [TopicPartition("persistent://public/default/orders", i) for i in range(count)]


def window_of(where: Iterable[TopicPartition], budget: Budget = DEFAULTS) -> Window:
    window = Window(START, 4, budget)
    for one in where:
        window.add_partition(one)
    return window


def give(window: Window, where: TopicPartition, *entries: int) -> None:
    for entry in entries:
        window.receive(where, 0, [block(1, entry)])


def taken(window: Window) -> dict[TopicPartition, list[EntryId]]:
    result: dict[TopicPartition, list[EntryId]] = {}
    while some := window.take(10_000):
        for where, _, one in some:
            result.setdefault(where, []).append(one.id)
    return result


@pytest.mark.parametrize(
    ("count", "budget"),
    [
        (14, Budget(200_000, 10**9, checkpoint_bytes_max=4_096)),
        (1_000, DEFAULTS),
        (5_000, DEFAULTS),
        (5_000, Budget(200_000, 10**9, checkpoint_bytes_max=4_096)),
    ],
)
def test_every_topic_partition_advances_however_many_there_are(count: int, budget: Budget) -> None:
    where = partitions(count)
    window = window_of(where, budget)
    for entry in range(3):
        for one in where:
            give(window, one, entry)
        completed = taken(window)
        assert window.plan_completed(completed) == {}, "handled entries are not committed"
        assert window.release_completed() == completed
        for one in where:
            give(window, one, entry + 100)
        end = window.cut()
        assert end is not None, "received entries are in no batch"
        assert window.release(end) == {one: [EntryId(1, entry + 100)] for one in where}
    window.validate()
    assert window.tight == set()
    assert window.rows == 0
    assert Checkpoint.from_json(window.newest.to_json()) == window.newest


def test_entries_of_following_ledgers_are_committed_in_every_topic_partition() -> None:
    where = partitions(5_000)
    window = window_of(where)
    for ledger in (1, 5, 9):
        for one in where:
            window.receive(one, 0, [block(ledger, 0)])
        assert window.plan_completed(taken(window)) == {}


def test_a_topic_partition_may_use_the_checkpoint_room_that_others_leave() -> None:
    first, *others = partitions(100)
    budget = Budget(400_000, 10**9, checkpoint_bytes_max=64 * 1024)
    window = window_of([first, *others], budget)
    give(window, first, *range(0, 200_000, 2))
    left = window.plan_completed(taken(window))
    size = len(window.newest.to_json())
    assert budget.checkpoint_bytes_max / 4 < size < budget.checkpoint_bytes_max
    assert window.tight == {first}
    for one in others:
        give(window, one, *range(50))
    assert window.plan_completed(taken(window)) == {}, "the others go on"
    give(window, first, *range(1, 200_000, 2))
    completed = taken(window)
    completed[first] += left[first]
    assert window.plan_completed(completed) == {}, "what fills the holes always fits"
    assert window.tight == set()
    window.validate()


def test_a_commit_looks_only_at_changed_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    where = partitions(2_000)
    window = window_of(where)
    for one in where:
        give(window, one, 0)
    window.plan_completed(taken(window))
    window.plan_completed({})
    give(window, where[7], 1)
    window.plan_completed(taken(window))
    window.release_completed()
    looked: list[PartitionWindow] = []
    advance = PartitionWindow.advance

    def noted(self: PartitionWindow, blocks: list[object]) -> int:
        looked.append(self)
        return advance(self, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(PartitionWindow, "advance", noted)
    give(window, where[9], 1)
    window.prove(where[11], GapEvidence(base=EntryId(1, 0)))
    window.plan_completed(taken(window))
    assert len(looked) == 3, "one ends its batch, one has a new one, one is resolved further"
    assert window.newest.partitions[where[11]].floor == EntryId(1, 0)
    assert not window.newest.partitions[where[7]].batch


def test_topic_partitions_that_are_gone_leave_the_checkpoint_and_the_memory() -> None:
    stays = partitions(1)[0]
    window = window_of([stays])

    def come_and_go(number: int) -> None:
        where = TopicPartition(f"persistent://public/default/short-{number}", 0)
        window.add_partition(where)
        give(window, where, 0, 1, 2)
        give(window, stays, number)
        completed = taken(window)
        if number % 3 == 1:  # It goes while a handler works on it.
            window.drop_partition(where, gone=True)
        window.plan_completed(completed)
        if number % 3 == 2:  # It goes before its batch is released.
            window.drop_partition(where, gone=True)
        window.release_completed()
        if number % 3 == 0:
            window.drop_partition(where, gone=True)

    for number in range(200):
        come_and_go(number)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(200, 10_200):
        come_and_go(number)
    named.cache_clear()  # It has a limit of its own.
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    window.validate()
    assert after - before < 200_000, "something is kept of each"
    assert len(json.loads(window.newest.to_json())["partitions"]) <= 2
    assert len(window.newest.to_json()) < 1_000


def test_a_gone_topic_partition_without_any_row_is_forgotten_at_once() -> None:
    window = window_of(partitions(1))
    for number in range(1_000):
        where = TopicPartition(f"persistent://public/default/empty-{number}", 0)
        window.add_partition(where)
        window.drop_partition(where, gone=True)
    window.validate()
    assert len(window.known) == 1


def test_a_batch_of_any_size_costs_as_much_as_its_runs() -> None:
    where = partitions(1)[0]
    delivered = EntrySet.parse("7:0-999999999")
    text = json.dumps({
        "cluster": "c", "ranges": 4, "subscription": "s", "version": 1,
        "partitions": {where.name: {
            "batch": str(delivered), "delivered": str(delivered), "published": 1_000,
        }},
    })  # fmt: skip
    checkpoint = Checkpoint.from_json(text)
    tracemalloc.start()
    window = Window(checkpoint, 4, DEFAULTS)
    window.expect(checkpoint)
    window.plan(checkpoint, {where: [block(7, 0)]})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert window.counters.entries_lost == 999_999_999
    window.validate()


def test_a_reassignment_walks_the_ring_once_however_many_topic_partitions() -> None:
    walks = 0

    class Owners(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal walks
            walks += 1
            return super().__iter__()

    window = window_of(partitions(100))
    window.reassign(Owners(slot_owners(assign(3))), DEFAULTS)
    assert walks == 1
    assert window.ranges == 3


def test_consumers_that_begin_replace_the_list_of_a_topic_partition_once() -> None:
    class Lists(dict[TopicPartition, list[RangeConsumer]]):
        replaced = 0

        def __setitem__(self, where: TopicPartition, consumers: list[RangeConsumer]) -> None:
            self.replaced += 1
            super().__setitem__(where, consumers)

    class Served:
        range_consumers = 0

        def add(self, range_consumers: Sequence[RangeConsumer]) -> None:
            self.range_consumers += len(range_consumers)

    config = SourceConfig(topics="orders", subscription="s", receive_threads=1)
    consumers = RangeConsumers(None, None, config, assign(50), SegmentOrder())  # type: ignore[arg-type]
    served = Served()
    consumers.receivers = [served]  # type: ignore[list-item]
    lists = consumers.by_partition = Lists()
    consumers.serve([
        RangeConsumer(one, None, ReceiverQueueSize(1, 1))  # type: ignore[arg-type]
        for one in consumers.owned_ranges(partitions(4), assign(50))
    ])  # fmt: skip
    assert served.range_consumers == len(consumers.owned) == 4 * 50
    assert lists.replaced == 4
