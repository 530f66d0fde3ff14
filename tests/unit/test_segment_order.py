"""A window hands out nothing of a segment before all that it has of the ancestors."""

from __future__ import annotations

from collections.abc import Sequence

from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.topic_segments import SegmentOrder, reading_order
from keyshard.core.window.admission import Budget
from keyshard.core.window.layout import lay_out
from keyshard.core.window.partition_window import ReceiveResult
from keyshard.core.window.window import Window
from tests.helpers import P0, block, ids

PARENT, CHILD, OTHER, GRANDCHILD = (
    TopicPartition(f"segment://public/default/orders/{name}")
    for name in ("0000-ffff-0", "0000-7fff-1", "8000-ffff-2", "0000-3fff-3")
)
PARENTS = {
    CHILD: frozenset([PARENT]), OTHER: frozenset([PARENT]), GRANDCHILD: frozenset([CHILD]),
}  # fmt: skip


def window_of(rows_max: int = 1_000, checkpoint_bytes_max: int = 1 << 20) -> Window:
    budget = Budget(rows_max, 10**9, checkpoint_bytes_max=checkpoint_bytes_max)
    window = Window(Checkpoint("c", "s", 4), 4, budget)
    for where in (PARENT, CHILD, OTHER, GRANDCHILD):
        window.add_partition(where)
    window.order.parents = PARENTS
    return window


def give(window: Window, where: TopicPartition, entries: Sequence[int]) -> None:
    blocks = [block(1, entry) for entry in entries]
    assert set(window.receive(where, 0, blocks)) == {ReceiveResult.ACCEPTED}
    window.validate()


def cut(window: Window, rows_max: int | None = None) -> dict[TopicPartition, int]:
    """Cut a batch, and return how many entries of each topic partition it has."""
    end = window.cut(rows_max)
    window.validate()
    assert end is not None
    return {where: len(of) for where, of in window.batches[end.batch_id].entries.items()}


def test_a_batch_has_entries_of_a_segment_only_with_all_of_its_ancestors() -> None:
    window = window_of()
    give(window, GRANDCHILD, range(10))  # its parent is empty
    give(window, PARENT, range(25))
    give(window, OTHER, range(10))
    assert [cut(window, 10) for _ in range(3)] == [{PARENT: 10}, {PARENT: 10}, {PARENT: 5}]
    assert cut(window, 10).keys() == {OTHER, GRANDCHILD}


def test_what_fits_into_one_batch_is_in_it() -> None:
    window = window_of()
    give(window, GRANDCHILD, range(10))
    give(window, PARENT, range(25))
    assert cut(window) == {PARENT: 25, GRANDCHILD: 10}


def test_an_entry_without_room_in_the_checkpoint_holds_its_descendants_back() -> None:
    window = window_of(checkpoint_bytes_max=200)
    give(window, PARENT, range(0, 2_000, 2))
    give(window, CHILD, [0])
    while (end := window.cut()) is not None:
        assert CHILD not in window.batches[end.batch_id].entries
    assert PARENT in window.tight
    assert window.known[PARENT].received


def test_handlers_get_entries_of_a_segment_after_those_of_its_ancestors() -> None:
    window = window_of()
    give(window, GRANDCHILD, range(4))
    give(window, PARENT, range(6))
    give(window, OTHER, range(4))
    got: list[TopicPartition] = []
    while taken := window.take(4):
        window.validate()
        got += [where for where, _, _ in taken]
    assert got[:6] == [PARENT] * 6
    assert sorted(got[6:]) == [GRANDCHILD] * 4 + [OTHER] * 4


def test_completed_entries_stay_out_of_a_checkpoint_that_lacks_some_of_an_ancestor() -> None:
    """A restart would repeat those of the ancestor after newer messages of their keys."""
    window = window_of(checkpoint_bytes_max=200)
    give(window, PARENT, range(0, 2_000, 2))
    while window.take():
        pass
    give(window, CHILD, range(3))
    window.take()
    of_parent = [EntryId(1, entry) for entry in range(0, 2_000, 2)]
    of_child = [EntryId(1, entry) for entry in range(3)]
    left = window.plan_completed({CHILD: of_child, PARENT: of_parent})
    assert left[PARENT]
    assert left[CHILD] == of_child
    left = window.plan_completed({CHILD: of_child})
    assert not left, "nothing of the parent is left out"


def test_rows_of_a_segment_come_after_those_of_its_ancestors() -> None:
    one = [block(1, 0, "k")]
    layout = lay_out({CHILD: one, PARENT: one, GRANDCHILD: one, P0: one}, 1)
    assert [where for where, _ in layout[0]] == [P0, PARENT, CHILD, GRANDCHILD]
    assert ids([block for _, block in layout[0]]) == [(1, 0)] * 4


def test_old_partitions_of_a_migrated_topic_come_first() -> None:
    name = "persistent://public/default/orders"
    old = [TopicPartition(name, number) for number in (2, 10)]
    assert sorted([CHILD, PARENT, *reversed(old)], key=reading_order) == [*old, PARENT, CHILD]


def test_ancestors_are_parents_and_theirs() -> None:
    order = SegmentOrder()
    assert order.ancestors(CHILD) == set()
    order.parents = PARENTS | {GRANDCHILD: frozenset([CHILD, OTHER])}
    assert order.ancestors(GRANDCHILD) == {CHILD, OTHER, PARENT}
    assert order.ancestors(PARENT) == set()


def test_a_segment_is_received_when_the_window_holds_its_backlog() -> None:
    window = window_of()
    of = window.known[PARENT]
    give(window, PARENT, range(3))
    assert not of.has_rest(4), "an entry is still to come"
    assert of.has_rest(3)
    (end,) = [window.cut()]
    assert end is not None
    assert of.has_rest(3), "it is planned"
    window.release(end)
    assert not of.has_rest(3), "acknowledgements are under way"
    window.expect(end)
    assert not of.has_rest(0), "a planned batch is not read again yet"
