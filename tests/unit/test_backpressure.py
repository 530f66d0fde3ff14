"""Pauses: ranges of a full topic partition, or ranges that wait for room in a checkpoint."""

from __future__ import annotations

from keyshard.core.ack_gaps import GapEvidence
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.window.admission import Budget
from keyshard.core.window.window import Window
from tests.helpers import block

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
            self.window.receive(where, index, [block(1, entry)])
            self.pauses.received(where, index)

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


def test_a_checkpoint_without_room_pauses_only_ranges_that_wait_for_it() -> None:
    source = Followed(Budget(8, 10**9, checkpoint_bytes_max=100), P0)
    source.give(P0, 0)
    source.release(source.cut())
    source.give(P0, 2, 4, 6, 8, 10, 12, 14, 16, index=1)
    assert source.paused(P0) == [0, 1, 2, 3]
    end = source.cut()
    assert source.pauses.any_full
    assert source.paused(P0) == [], "the window is full, and any range may bring what is missing"
    assert all(source.pauses.late_only(P0, index) for index in range(RANGES))
    source.window.prove(P0, GapEvidence(), frozenset({0}))
    assert source.paused(P0) == [1, 2, 3], "range 0 owes what is missing"
    source.give(P0, 1)
    assert source.paused(P0) == [0, 1, 2, 3], "what is missing has come"
    assert source.pauses.for_checkpoint == 2
    ack_gaps = EntrySet.parse("1:1,3,5,7,9,11,13,15")
    source.window.prove(P0, GapEvidence(resolved=ack_gaps))
    while end is not None:
        source.release(end)
        end = source.cut()
    assert source.window.rows == 0
    assert source.paused(P0) == []
    assert source.pauses.for_checkpoint == 0


def test_a_range_pauses_alone_before_the_limit_of_its_consumer() -> None:
    source = Followed(Budget(100, 10**9, range_rows_max=3), P0, P1)
    source.give(P0, 0, 1, index=2)
    source.give(P0, 10, 11, 12, index=1)
    source.give(P1, 0, 1, index=1)
    assert source.pauses.any_full
    assert (source.paused(P0), source.paused(P1)) == ([1], [])
    end = source.cut()
    assert source.paused(P0) == [1], "what is planned is unacknowledged too"
    source.release(end)
    assert not source.pauses.any_full
    assert source.paused(P0) == []


def test_the_consumer_of_a_segment_that_owes_an_entry_goes_on_without_room() -> None:
    """It received everything that waits, so it has used up the part of a range."""
    segment = TopicPartition("segment://t/n/a/0000-ffff-0")
    source = Followed(Budget(20, 10**9, checkpoint_bytes_max=100), segment)
    source.give(segment, 0)
    source.release(source.cut())
    source.give(segment, 2, 4, 6, 8, 10, 12, 14, 16)
    source.cut()
    assert not source.pauses.include(segment, 0), "half of the window is free for missing entries"
    source.give(segment, 18, 20, 22, 24)
    source.cut()
    assert source.pauses.include(segment, 0)
    source.window.prove(segment, GapEvidence(), frozenset({3}))
    assert not source.pauses.include(segment, 0), "it may owe the entry, whatever the slot"
    assert source.pauses.late_only(segment, 0)
