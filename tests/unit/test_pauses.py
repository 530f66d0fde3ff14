"""Which ranges pause: those of a full topic partition, or who waits for room in a checkpoint."""

from __future__ import annotations

from helpers import block
from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.window.budget import Budget
from keyshard.core.window.window import Window

P0, P1 = TopicPartition("persistent://t/n/a", 0), TopicPartition("persistent://t/n/a", 1)
RANGES = 4


class Followed:
    """A window of some topic partitions, and its pauses."""

    def __init__(self, budget: Budget, *partitions: TopicPartition) -> None:
        self.window = Window(Checkpoint("c", "s", RANGES), RANGES, budget)
        for topic_partition in partitions:
            self.window.add_partition(topic_partition)
        self.pauses = self.window.pauses

    def give(self, where: TopicPartition, *entries: int, index: int = 0) -> None:
        for entry in entries:
            self.window.receive(where, index, block(1, entry))
            self.pauses.received(where)

    def cut(self) -> Checkpoint | None:
        return self.window.cut()

    def release(self, end: Checkpoint | None) -> None:
        assert end is not None
        self.window.release(end)

    def paused(self, where: TopicPartition) -> list[int]:
        return [index for index in range(RANGES) if self.pauses.include(where, index)]


def test_a_full_topic_partition_pauses_as_a_whole_until_a_release() -> None:
    source = Followed(Budget(8, 10**9), P0, P1)
    source.give(P0, 0, 1, 2)
    source.give(P1, 0)
    assert not source.pauses.any_full
    source.give(P0, 3)
    assert source.pauses.any_full
    assert source.paused(P0) == [0, 1, 2, 3]
    assert source.paused(P1) == []
    end = source.cut()
    assert source.paused(P0) == [0, 1, 2, 3], "what is planned is held too"
    source.release(end)
    assert not source.pauses.any_full
    assert source.paused(P0) == []


def test_a_topic_partition_that_is_dropped_leaves_its_share_to_the_others() -> None:
    source = Followed(Budget(8, 10**9), P0, P1)
    source.give(P0, 0, 1, 2, 3)
    source.window.drop_partition(P1, gone=True)
    source.pauses.shared_anew()
    assert source.paused(P0) == []


def test_a_checkpoint_without_room_pauses_only_who_waits_for_it_even_when_all_is_full() -> None:
    source = Followed(Budget(8, 10**9, checkpoint_bytes_max=100), P0)
    source.give(P0, 0)
    source.release(source.cut())
    source.give(P0, 2, 4, 6, 8, 10, 12, 14, 16, index=1)
    assert source.paused(P0) == [0, 1, 2, 3]
    end = source.cut()
    assert source.pauses.any_full
    assert source.paused(P0) == [1], "range 0 may bring what lies in the holes"
    assert source.pauses.for_checkpoint == 1
    holes = EntrySet.parse("1:1,3,5,7,9,11,13,15")
    source.window.prove(P0, Proofs(settled=holes))
    while end is not None:
        source.release(end)
        end = source.cut()
    assert source.window.rows == 0
    assert source.paused(P0) == []
    assert source.pauses.for_checkpoint == 0
