"""The layout: a pure function of the number of ranges and the entries of a batch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.window.admission import Budget
from keyshard.core.window.layout import Located, home_range, lay_out, own
from keyshard.core.window.window import Window
from tests.helpers import P0, P1, block, key_in, present

Entries = dict[TopicPartition, list[EntryBlock]]


def entries() -> Entries:
    keys: list[str | None] = [f"key-{i % 17}" for i in range(60)]
    keys[::7] = [None] * len(keys[::7])
    return {tp: [block(1 + i // 40, i % 40, key) for i, key in enumerate(keys)] for tp in (P1, P0)}


def places(layout: Mapping[int, Sequence[Located]]) -> dict[int, list[object]]:
    """Return the entries of each partition, in their order."""
    return {
        index: [(where, block.id, block.values) for where, block in located]
        for index, located in layout.items()
    }


@pytest.mark.parametrize("ranges", [1, 3, 10, 1_000])
def test_every_entry_is_in_exactly_one_partition_in_position_order(ranges: int) -> None:
    layout = lay_out(entries(), ranges)
    assert list(layout) == sorted(layout)
    assert all(0 <= index < ranges for index in layout)
    placed = [(tp, b.id) for located in layout.values() for tp, b in located]
    assert sorted(placed) == sorted((tp, b.id) for tp, blocks in entries().items() for b in blocks)
    for located in layout.values():
        assert located
        order = [(tp, b.id) for tp, b in located]
        assert order == sorted(order)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    arriving = [(tp, entry) for tp, blocks in entries().items() for entry in blocks]
    random.Random(seed).shuffle(arriving)
    window = Window(Checkpoint("", "s", 10), 10, Budget(10_000, 10**9))
    for topic_partition in dict(arriving):
        window.add_partition(topic_partition)
    for topic_partition, entry in arriving:
        window.receive(topic_partition, 0, [entry])
    end = window.cut()
    assert end is not None
    laid_out = window.batches[end.batch_id].layout
    assert places(laid_out) == places(lay_out(entries(), 10, end.merged))


def test_the_range_that_received_an_entry_does_not_matter() -> None:
    def layout_of(receiving_range: int) -> object:
        window = Window(Checkpoint("", "s", 10), 10, Budget(1_000, 10**9))
        window.add_partition(P0)
        for entry in entries()[P0]:
            window.receive(P0, receiving_range, [entry])
        end = window.cut()
        assert end is not None
        return places(lay_out(window.batches[end.batch_id].entries, end.ranges))

    assert layout_of(0) == layout_of(9)


@pytest.mark.parametrize("ranges", [2, 10, 37])
def test_a_key_is_always_in_one_partition_that_of_its_slot(ranges: int) -> None:
    homes: dict[str, set[int]] = {}
    for index, located in lay_out(entries(), ranges).items():
        for _, entry in located:
            if entry.partition_keys[0] is not None:
                homes.setdefault(entry.partition_keys[0], set()).add(index)
                assert present(entry.slot) in split_ring(ranges)[index]
    assert len(homes) == 17
    assert all(len(found) == 1 for found in homes.values())


def test_another_number_of_ranges_gives_another_layout() -> None:
    assert len(lay_out(entries(), 1)) == 1
    assert len(lay_out(entries(), 10)) == 10


def test_the_ordering_key_decides_the_partition() -> None:
    low, high = split_ring(2)
    entry = block(1, 0, key_in(low), ordering_key=key_in(high))
    assert list(lay_out({P0: [entry]}, 2)) == [1]


def test_the_first_key_decides_where_a_mixed_batch_goes() -> None:
    low, high = split_ring(2)
    entry = block(1, 0, key_in(high), key_in(low), key_in(low))
    assert list(lay_out({P0: [entry]}, 2)) == [1]


def test_keyless_entries_are_spread_by_their_position_alone() -> None:
    homes = [home_range(P0, EntryId(1, entry), None, 10) for entry in range(200)]
    assert set(homes) == set(range(10))
    assert homes == [home_range(P0, EntryId(1, entry), None, 10) for entry in range(200)]
    assert homes != [home_range(P1, EntryId(1, entry), None, 10) for entry in range(200)]
    assert homes != [home_range(P0, EntryId(2, entry), None, 10) for entry in range(200)]


def test_the_home_of_a_keyless_entry_is_pinned_because_stored_batches_depend_on_it() -> None:
    found = [home_range(P0, EntryId(7, entry), None, 65_536) for entry in range(4)]
    assert found == [33_068, 53_807, 60_096, 29_439]


def test_an_empty_batch_has_no_partitions() -> None:
    assert lay_out({}, 10) == {}
    assert lay_out({P0: []}, 10) == {}


SEGMENT = TopicPartition("segment://public/default/orders/0000-ffff-0")


def divided(
    laid_out: Mapping[int, Sequence[Located]], ranges: int, partitions: int | None = None
) -> dict[int, list[tuple[EntryId, int]]]:
    """Return the messages of each partition, as entry and batch index."""
    return {
        index: [
            (entry.id, entry.indices[row])
            for one in located
            for entry in one[1:]
            for row in own(one, index, ranges, partitions) or range(entry.rows)
        ]
        for index, located in laid_out.items()
    }


@pytest.mark.parametrize(("ranges", "partitions"), [(1, None), (3, None), (10, 4), (10, 1)])
def test_entries_of_segments_are_divided_by_slot(ranges: int, partitions: int | None) -> None:
    drawn, keys = random.Random(ranges), [*(f"key-{i}" for i in range(40)), None]
    entries = [block(1, i, *(drawn.choice(keys) for _ in range(1 + i % 7))) for i in range(60)]
    found = divided(lay_out({SEGMENT: entries}, ranges, partitions), ranges, partitions)
    placed = [place for places in found.values() for place in places]
    assert sorted(placed) == [(one.id, index) for one in entries for index in one.indices]
    key_of = {(one.id, i): key for one in entries for i, key in enumerate(one.partition_keys)}
    homes: dict[str | None, set[int]] = {}
    for index, places in found.items():
        assert places == sorted(places)
        for place in places:
            homes.setdefault(key_of[place], set()).add(index)
    assert all(len(homes[key]) == 1 for key in homes if key is not None)
    assert len(found) == min(ranges, partitions or ranges)


def test_messages_of_a_segment_without_a_key_go_where_their_entry_would_go() -> None:
    low, high = split_ring(2)
    for number in range(20):
        entry = block(7, number, key_in(low), None, key_in(high), None)
        found = divided(lay_out({SEGMENT: [entry]}, 2), 2)
        keyless = found[home_range(SEGMENT, entry.id, None, 2)]
        assert {(entry.id, 1), (entry.id, 3)} < set(keyless)


def test_a_key_of_bytes_in_a_segment_is_placed_by_its_text() -> None:
    """A batch that runs again is read by a Reader, which does not show every key of bytes."""
    read = block(1, 0, "a2V5", "b", "c")
    received = replace(read, keys_of_bytes=True, slot=5, mixed_slots=[5, *read.slots[1:]])
    for ranges in (3, 10, 1_000):
        again, first = (
            divided(lay_out({SEGMENT: [one]}, ranges), ranges) for one in (read, received)
        )
        assert again == first
