"""The window: deliveries, the cut over several topic partitions, and release."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.position.checkpoint import Checkpoint, PartitionCheckpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.ring.assignment import assign, slot_owners
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.admission import Budget
from keyshard.core.window.partition_window import ReceiveResult
from keyshard.core.window.window import Window
from keyshard.errors import BatchReleasedError, TopicRecreatedError
from tests.helpers import P0, P1, P2, block, ids, key_in

START = Checkpoint("c", "s", 4)


def window_of(
    *partitions: TopicPartition,
    rows_max: int = 1_000,
    bytes_max: int = 10**9,
    checkpoint: Checkpoint = START,
    ranges: int = 4,
) -> Window:
    window = Window(checkpoint, ranges, Budget(rows_max, bytes_max))
    for topic_partition in partitions or (P0,):
        window.add_partition(topic_partition)
    return window


def give(window: Window, *entries: int, where: TopicPartition = P0, index: int = 0) -> None:
    for entry in entries:
        assert window.receive(where, index, [block(1, entry)]) == [ReceiveResult.ACCEPTED]
    window.validate()


def cut(window: Window, rows_max: int | None = None, payload_max: int | None = None) -> Checkpoint:
    end = window.cut(rows_max, payload_max)
    window.validate()
    assert end is not None
    return end


def taken(window: Window, end: Checkpoint) -> dict[TopicPartition, list[tuple[int, int]]]:
    return {tp: ids(blocks) for tp, blocks in window.batches[end.batch_id].entries.items()}


def test_without_rows_there_is_no_batch() -> None:
    window = window_of()
    assert window.cut() is None
    assert window.newest == START


def test_a_cut_takes_received_entries_and_names_them_in_the_checkpoint() -> None:
    window = window_of(P0, P1)
    give(window, 2, 0, 1)
    end = cut(window)
    batch = EntrySet.parse("1:0-2")
    assert end == Checkpoint(
        "c", "s", 4, {P0: PartitionCheckpoint(None, batch, batch, published_ms=1_000)}, merged=1
    )
    assert window.newest == end
    assert taken(window, end) == {P0: [(1, 0), (1, 1), (1, 2)]}
    assert window.batches[end.batch_id].rows == 3
    assert (window.rows, window.received_rows) == (3, 0)
    assert window.cut() is None


def test_a_checkpoint_has_all_delivered_entries_and_only_the_batch_of_its_cut() -> None:
    window = window_of(P0, P1)
    give(window, 0, 1)
    give(window, 0, where=P1)
    cut(window)
    give(window, 2, 5)
    second = cut(window)
    assert str(second.partitions[P0].delivered) == "1:0-2,5"
    assert str(second.partitions[P0].batch) == "1:2,5"
    assert str(second.partitions[P1].delivered) == "1:0"
    assert str(second.partitions[P1].batch) == ""


def test_the_checkpoint_keeps_the_highest_publish_time_of_each_partition() -> None:
    window = window_of()
    window.receive(P0, 0, [block(1, 0, publish_ms=50)])
    window.receive(P0, 0, [block(1, 1, publish_ms=40)])
    assert cut(window).partitions[P0].published_ms == 50
    window.receive(P0, 0, [block(1, 2, publish_ms=45)])
    assert cut(window).partitions[P0].published_ms == 50


def test_the_checkpoint_names_the_indices_of_partial_entries() -> None:
    window = window_of()
    window.receive(P0, 0, [block(1, 0, "a", "b", of=4, indices=[0, 2])])
    window.receive(P0, 0, [block(1, 1, "a", "b")])
    assert cut(window).partitions[P0].partial == {EntryId(1, 0): frozenset({0, 2})}


def test_the_number_of_ranges_in_the_checkpoint_is_that_of_this_run() -> None:
    window = window_of(ranges=7)
    give(window, 0)
    assert cut(window).ranges == 7


def test_the_row_limit_is_split_in_proportion_over_partitions() -> None:
    window = window_of(P0, P1)
    give(window, *range(80))
    give(window, *range(20), where=P1)
    entries = taken(window, cut(window, 10))
    assert {tp: len(found) for tp, found in entries.items()} == {P0: 8, P1: 2}


def test_a_cut_takes_at_most_half_of_the_budget() -> None:
    window = window_of(rows_max=10)
    give(window, *range(10))
    assert window.batches[cut(window).batch_id].rows == 5
    assert window.batches[cut(window, 100).batch_id].rows == 5


def test_a_cut_takes_at_most_half_of_the_bytes() -> None:
    window = window_of(bytes_max=8 * block(1, 0).memory_bytes)
    give(window, *range(8))
    assert window.batches[cut(window).batch_id].rows == 4


def test_an_entry_larger_than_the_limit_makes_a_batch_of_its_own() -> None:
    window = window_of(rows_max=4)
    window.receive(P0, 0, [block(1, 0, *("k" for _ in range(9)))])
    give(window, 1)
    assert taken(window, cut(window, 1)) == {P0: [(1, 0)]}
    assert taken(window, cut(window, 1)) == {P0: [(1, 1)]}


def test_no_partition_with_data_is_left_out_of_two_cuts_in_a_row() -> None:
    window = window_of(P0, P1, P2)
    for topic_partition in (P0, P1, P2):
        give(window, *range(4), where=topic_partition)
    turns = [set(taken(window, cut(window, 1))) for _ in range(4)]
    assert turns[0] == {P0}
    assert all(first | second == {P0, P1, P2} for first, second in pairwise(turns))


def test_a_range_left_out_of_one_cut_has_a_part_in_the_next() -> None:
    window = window_of()
    give(window, *range(10), index=0)
    give(window, 50, 51, index=1)
    give(window, 60, index=2)
    assert taken(window, cut(window, 3)) == {P0: [(1, 0), (1, 1), (1, 2)]}
    assert taken(window, cut(window, 3)) == {P0: [(1, 3), (1, 4), (1, 5), (1, 50), (1, 60)]}
    assert taken(window, cut(window, 3)) == {P0: [(1, 6), (1, 7), (1, 8)]}
    assert taken(window, cut(window, 3)) == {P0: [(1, 9), (1, 51)]}


def test_no_range_of_a_partition_that_was_left_out_is_left_out_again() -> None:
    window = window_of(P0, P1)
    for topic_partition in (P0, P1):
        give(window, *range(4), where=topic_partition, index=0)
        give(window, 10, 11, where=topic_partition, index=1)
    assert taken(window, cut(window, 1)) == {P0: [(1, 0)]}
    assert taken(window, cut(window, 1)) == {P0: [(1, 1), (1, 10)], P1: [(1, 0), (1, 10)]}


def test_a_redelivery_of_a_held_entry_is_dropped_and_not_acknowledged() -> None:
    window = window_of()
    give(window, 0)
    assert window.receive(P0, 1, [block(1, 0)]) == [ReceiveResult.HELD]
    end = cut(window)
    assert window.receive(P0, 0, [block(1, 0)]) == [ReceiveResult.HELD]
    assert window.counters.duplicates_dropped == 2
    assert window.counters.rows_received == 1
    assert taken(window, end) == {P0: [(1, 0)]}
    assert window.cut() is None
    window.validate()


def test_a_redelivery_of_a_committed_entry_is_dropped_and_acknowledged_again() -> None:
    window = window_of()
    give(window, 0)
    window.release(cut(window))
    assert window.receive(P0, 0, [block(1, 0)]) == [ReceiveResult.COMMITTED]
    assert window.counters.duplicates_dropped == 1
    assert window.cut() is None
    window.validate()


def test_resolved_entries_of_a_checkpoint_are_dropped_after_a_restart() -> None:
    state = PartitionCheckpoint(EntryId(1, 4), EntrySet.parse("1:6"), published_ms=1_000)
    window = window_of(checkpoint=Checkpoint("c", "s", 4, {P0: state}))
    receipts = window.receive(P0, 0, [block(1, entry) for entry in (0, 4, 5, 6, 7)])
    new, resolved = ReceiveResult.ACCEPTED, ReceiveResult.COMMITTED
    assert receipts == [resolved, resolved, new, resolved, new]
    end = cut(window)
    assert end.partitions[P0].floor == EntryId(1, 4)
    assert str(end.partitions[P0].delivered) == "1:5-7"


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(0, 12), st.data())
@settings(deadline=None, max_examples=200)
def test_a_delivery_has_the_same_result_as_its_entries_one_by_one(
    committed: list[int], floor: int, data: st.DataObject
) -> None:
    """Entries come again, late, resolved, and more than once in one delivery."""
    delivered = PartitionCheckpoint(
        floor=EntryId(1, floor) if floor % 2 else None,
        delivered=EntrySet.of(EntryId(1, entry) for entry in committed if entry > floor),
        published_ms=1_000,
    )
    start = replace(START, partitions={P0: delivered})
    whole, single = window_of(checkpoint=start), window_of(checkpoint=start)
    for index in range(data.draw(st.integers(1, 3))):
        numbers = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
        keys = ["a", "b"] if index else ["a"]
        found = whole.receive(P0, index, [block(1, entry, *keys) for entry in numbers])
        one_by_one = [single.receive(P0, index, [block(1, entry, *keys)]) for entry in numbers]
        assert found == [outcome for (outcome,) in one_by_one]
        assert state_of(whole) == state_of(single)
        whole.validate()
        if data.draw(st.booleans()):
            ends = [window.cut() for window in (whole, single)]
            assert ends[0] is ends[1] is None or states(ends[0]) == states(ends[1])


def states(end: Checkpoint | None) -> object:
    assert end is not None
    return end.partitions


def state_of(window: Window) -> object:
    known = window.known[P0]
    return (
        ids(known.received), known.held, known.late, known.range_rows, known.rows, known.bytes,
        known.received_sizes, known.waiting_rows, window.counters, window.received_rows,
    )  # fmt: skip


def test_a_redelivery_of_an_expected_batch_is_held_before_and_after_it_was_read_again() -> None:
    before = window_of()
    give(before, 0, 1)
    committed = cut(before)
    before.release(committed)
    give(before, 2, 3)
    planned = cut(before)

    window = window_of(checkpoint=planned)
    window.expect(planned)
    window.validate()
    assert window.receive(P0, 0, [block(1, 2)]) == [ReceiveResult.HELD]
    assert window.receive(P0, 0, [block(1, 0)]) == [ReceiveResult.COMMITTED]
    window.validate()
    assert window.cut() is None
    window.plan(planned, {P0: [block(1, 2), block(1, 3)]})
    window.validate()
    assert window.receive(P0, 0, [block(1, 3)]) == [ReceiveResult.HELD]
    assert window.rows == 2
    assert window.release(planned) == {P0: [(1, 2), (1, 3)]}
    assert window.receive(P0, 0, [block(1, 3)]) == [ReceiveResult.COMMITTED]
    assert window.rows == 0
    window.validate()


def test_entries_received_during_a_replay_go_into_the_next_batch() -> None:
    before = window_of()
    give(before, 0)
    planned = cut(before)
    window = window_of(checkpoint=planned)
    window.expect(planned)
    give(window, 1)
    window.plan(planned, {P0: [block(1, 0)]})
    end = cut(window)
    assert taken(window, end) == {P0: [(1, 1)]}
    assert str(end.partitions[P0].delivered) == "1:0-1"


def test_an_id_that_is_handed_out_a_second_time_stops_the_source() -> None:
    window = window_of()
    give(window, 0)
    window.release(cut(window))
    with pytest.raises(TopicRecreatedError, match="published 1 ms after") as caught:
        window.receive(P0, 0, [block(1, 0, "a", publish_ms=1_001)])
    assert caught.value.facts == {"topic_partition": P0.name}
    assert window.receive(P0, 0, [block(1, 0, "a", publish_ms=1_000)]) == [ReceiveResult.COMMITTED]


def test_release_returns_the_entries_once() -> None:
    window = window_of(P0, P1)
    give(window, 0, 1)
    give(window, 7, where=P1)
    end = cut(window)
    assert window.release(end) == {P0: [(1, 0), (1, 1)], P1: [(1, 7)]}
    assert window.release(end) == {}
    with pytest.raises(BatchReleasedError, match=end.batch_id):
        window.batches[end.batch_id]
    window.validate()


def test_releasing_a_batch_releases_the_older_ones_with_it_and_no_later_one() -> None:
    window = window_of()
    ends = []
    for entry in range(3):
        give(window, entry)
        ends.append(cut(window))
    assert window.release(ends[1]) == {P0: [(1, 0), (1, 1)]}
    assert list(window.batches) == [ends[2].batch_id]
    assert window.release(ends[0]) == {}
    assert window.release(ends[2]) == {P0: [(1, 2)]}
    window.validate()


def test_releasing_an_unknown_checkpoint_releases_nothing() -> None:
    window = window_of()
    give(window, 0)
    end = cut(window)
    assert window.release(START) == {}
    assert list(window.batches) == [end.batch_id]


def test_a_partition_is_full_at_its_share_of_the_rows() -> None:
    window = window_of(P0, P1, rows_max=10)
    give(window, 0, 1, 2, 3)
    assert not window.pauses.is_full(P0)
    give(window, 4)
    assert window.pauses.is_full(P0)
    assert not window.pauses.is_full(P1)
    assert window.pauses.fill() == 1.0
    end = cut(window)
    assert window.pauses.is_full(P0), "planned rows are held too"
    window.release(end)
    assert not window.pauses.is_full(P0)
    assert window.pauses.fill() == 0.0


def test_a_partition_is_full_at_its_share_of_the_bytes() -> None:
    window = window_of(P0, P1, bytes_max=4 * block(1, 0).memory_bytes)
    give(window, 0)
    assert not window.pauses.is_full(P0)
    give(window, 1)
    assert window.pauses.is_full(P0)
    assert not window.pauses.is_full(P1)


@pytest.mark.parametrize(
    "large",
    [
        {"values": [b"x" * 100_000]},
        {"properties": {"p": "x" * 100_000}},
        {"properties": {"x" * 100_000: ""}},
        {"ordering_key": "x" * 100_000},
    ],
    ids=lambda large: next(iter(large)),
)
def test_everything_that_a_message_has_counts_and_is_given_back(large: dict[str, Any]) -> None:
    window = window_of(P0, bytes_max=300_000)
    window.receive(P0, 0, [block(1, 0, **large)])
    window.receive(P0, 0, [block(1, 1, "k" * 100_000, ordering_key="o")])
    assert not window.pauses.is_full(P0)
    window.receive(P0, 0, [block(1, 2, **large)])
    assert window.pauses.is_full(P0)
    assert window.known[P0].bytes >= 300_000
    window.release(cut(window))
    window.release(cut(window))
    assert window.known[P0].bytes == window.known[P0].received_bytes
    window.drop_partition(P0, gone=False)
    assert window.known[P0].bytes == 0


def test_a_new_partition_makes_the_shares_smaller() -> None:
    window = window_of(P0, rows_max=4)
    give(window, 0, 1)
    assert not window.pauses.is_full(P0)
    window.add_partition(P1)
    window.add_partition(P1)
    assert window.pauses.is_full(P0)
    assert window.partitions == (P0, P1)


def test_memory_accounting_is_back_at_zero_after_release() -> None:
    window = window_of(P0, P1)
    for entry in range(10):
        keys = ["k"] * (entry % 3 + 1)
        window.receive(P0, 0, [block(1, entry, *keys)])
        window.receive(P1, 0, [block(2, entry, *keys)])
        window.receive(P1, 0, [block(2, entry, *keys)])
    while (end := window.cut(4)) is not None:
        window.validate()
        window.release(end)
    assert window.rows == window.received_rows == 0
    assert window.pauses.fill() == 0.0
    assert not window.batches


def test_a_window_starts_with_the_partitions_of_its_checkpoint() -> None:
    state = PartitionCheckpoint(delivered=EntrySet.parse("1:0"), published_ms=1)
    window = Window(Checkpoint("c", "s", 4, {P1: state}), 4, Budget(10, 10**6))
    assert window.partitions == (P1,)


def test_a_partition_without_new_entries_keeps_its_state_in_the_next_checkpoint() -> None:
    state = PartitionCheckpoint(delivered=EntrySet.parse("9:0"), published_ms=3)
    window = window_of(P0, P1, checkpoint=Checkpoint("c", "s", 4, {P1: state}))
    give(window, 0)
    assert cut(window).partitions[P1] == state


def test_validate_notices_an_entry_that_is_received_twice() -> None:
    window = window_of()
    give(window, 0)
    partition = window.known[P0]
    partition.received.append(partition.received[0])
    with pytest.raises(AssertionError, match="received twice"):
        window.validate()


def test_blocks_of_a_batch_are_the_received_ones() -> None:
    window = window_of()
    entry: EntryBlock = block(1, 0, "a", "b")
    window.receive(P0, 0, [entry])
    assert window.batches[cut(window).batch_id].entries == {P0: [entry]}


def test_a_dropped_partition_forgets_received_entries_and_keeps_planned_ones() -> None:
    window = window_of(P0, P1)
    give(window, 0, 1)
    give(window, 5, where=P1)
    end = cut(window)
    give(window, 2, 3)
    window.drop_partition(P0, gone=True)
    window.validate()
    assert window.partitions == (P1,)
    assert window.received_rows == 0
    assert taken(window, end) == {P0: [(1, 0), (1, 1)], P1: [(1, 5)]}
    assert set(window.release(end)) == {P0, P1}
    assert window.rows == 0
    give(window, 6, where=P1)
    assert set(cut(window).partitions) == {P1}, "what is gone leaves the checkpoint"


def test_a_deleted_partition_whose_planned_batch_is_lost_is_forgotten_before_its_release() -> None:
    """Found by the simulation, seed 606234080.

    1. a planned batch runs again, and a topic partition of it was deleted
    2. its entries are left out, because failOnDataLoss is false
    3. the next cut leaves it out of the checkpoint, and then the first batch is released
    """
    before = window_of(P0, P1)
    give(before, 0)
    give(before, 5, where=P1)
    end = cut(before)
    window = window_of(checkpoint=end)
    window.expect(end)
    window.drop_partition(P0, gone=True)
    window.plan(end, {P0: [], P1: [block(1, 5)]})
    give(window, 6, where=P1)
    cut(window)
    assert window.release(end) == {P1: [EntryId(1, 5)]}
    window.validate()


def test_a_partition_that_is_only_not_consumed_any_more_stays_in_the_checkpoint() -> None:
    window = window_of(P0, P1)
    give(window, 0)
    window.release(cut(window))
    window.drop_partition(P0, gone=False)
    give(window, 1, where=P1)
    assert set(cut(window).partitions) == {P0, P1}


def test_a_dropped_partition_that_is_added_again_knows_its_delivered_set() -> None:
    window = window_of(P0, P1)
    give(window, 0)
    window.release(cut(window))
    give(window, 1)
    planned = cut(window)
    window.drop_partition(P0, gone=True)
    window.add_partition(P0)
    assert window.receive(P0, 0, [block(1, 0)]) == [ReceiveResult.COMMITTED]
    assert window.receive(P0, 0, [block(1, 1)]) == [ReceiveResult.HELD]
    give(window, 2)
    window.release(planned)
    window.validate()


def test_the_budget_is_shared_by_the_partitions_that_are_consumed() -> None:
    window = window_of(P0, P1, rows_max=8)
    give(window, 0, 1, 2, 3)
    assert window.pauses.is_full(P0)
    assert window.pauses.fill() == 1
    window.drop_partition(P1, gone=True)
    assert not window.pauses.is_full(P0)
    assert window.pauses.fill() == 0.5
    window.add_partition(P2)
    assert window.pauses.is_full(P0)


def test_a_cut_is_limited_by_payload() -> None:
    window = window_of(P0)
    give(window, 0, 1, 2, 3)
    size = sum(b.payload_bytes for b in window.known[P0].received)
    first = cut(window, None, size // 2)
    assert taken(window, first) == {P0: [(1, 0), (1, 1)]}


def test_the_oldest_row_held_is_received_or_planned() -> None:
    window = window_of(P0)
    assert window.oldest_published_ms() == {}
    give(window, 0)
    assert window.oldest_published_ms() == {P0: 1_000}
    end = cut(window)
    assert window.oldest_published_ms() == {P0: 1_000}
    window.release(end)
    assert window.oldest_published_ms() == {}


def test_another_number_of_ranges_counts_from_the_next_cut_on() -> None:
    window = window_of(rows_max=1_000)
    give(window, 0)
    before = cut(window)
    give(window, 1)
    window.reassign(slot_owners(assign(7)), Budget(1_000, 10**9))
    after = cut(window)
    assert (before.ranges, after.ranges) == (4, 7)
    assert window.batches[before.batch_id].checkpoint.ranges == 4


def test_the_new_owner_of_an_entry_is_left_out_instead_of_the_old_one() -> None:
    window = window_of()
    low, high = (key_in(part) for part in split_ring(2))
    for entry, key in enumerate([low, low, high]):
        window.receive(P0, 3 if key == high else 0, [block(1, entry, key)])
    assert taken(window, cut(window, 1)) == {P0: [(1, 0)]}
    # Number 3 has no owner any more; range 1 has its slots, and its part in the next cut.
    window.reassign(slot_owners(assign(2)), Budget(1_000, 10**9))
    assert taken(window, cut(window, 1)) == {P0: [(1, 1), (1, 2)]}


def test_keyless_entries_stay_in_a_range_that_is_there() -> None:
    window = window_of()
    window.receive(P0, 3, [block(1, 0, None)])
    window.reassign(slot_owners(assign(2)), Budget(1_000, 10**9))
    window.validate()
    assert [index for _, index, _ in window.take()] == [1]


def test_handlers_take_the_oldest_entries_of_every_topic_partition() -> None:
    window = window_of(P0, P1)
    give(window, *range(10))
    for entry in range(10):
        window.receive(P1, 0, [block(1, entry, "a", "b", "c")])
    left = {P0: list(range(10)), P1: list(range(10))}
    while window.received_rows:
        of_each = {P0: 4, P1: 2}  # Of 8 rows, 4 are of each: the second entry crosses the limit.
        if not left[P0] or not left[P1]:
            of_each = {P0: 8, P1: 3}
        for where, _, one in window.take(8):
            assert one.id.entry == left[where].pop(0)
            of_each[where] -= 1
            assert of_each[where] >= 0
        window.validate()
    assert left == {P0: [], P1: []}


def test_a_smaller_budget_counts_at_once() -> None:
    window = window_of()
    give(window, *range(10))
    assert not window.pauses.is_full(P0)
    window.reassign(slot_owners(assign(4)), Budget(10, 10**9))
    assert window.pauses.is_full(P0)


def test_entries_of_a_segment_are_handled_in_the_range_of_their_slot() -> None:
    segment = TopicPartition("segment://t/n/a/0000-ffff-0")
    window = window_of(segment)
    keys = [key_in(hash_range) for hash_range in split_ring(4)]
    for entry, key in enumerate([*keys, *[None] * 40]):
        window.receive(segment, 0, [block(1, entry, key)])
    window.reassign(slot_owners(assign(4)), Budget(1_000, 10**9))
    window.validate()
    found = [index for _, index, _ in window.take()]
    assert found[:4] == [0, 1, 2, 3]
    assert set(found[4:]) == {0, 1, 2, 3}, "those without a key are spread"
