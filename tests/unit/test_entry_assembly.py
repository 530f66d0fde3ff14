"""Assembly: parts become entries, and an early end is asked about once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keyshard.columns.content import gather
from keyshard.core.position import entry_assembly
from keyshard.core.position.entry import EntryBlock, EntryId
from keyshard.core.position.entry_assembly import EntryAssembly, RedeliveryNeeded
from keyshard.core.ring.key_slot import key_slot
from tests.helpers import block, event_ms, ids, part, present


def feed(assembly: EntryAssembly, *blocks: EntryBlock) -> list[EntryBlock]:
    return [entry for part in blocks for entry in assembly.add(part)]


def test_a_whole_entry_is_complete_at_once() -> None:
    assembly = EntryAssembly()
    assert ids(feed(assembly, block(1, 0), block(1, 1, "a", "b"))) == [(1, 0), (1, 1)]
    assert assembly.open is None


def test_parts_are_joined_in_every_column() -> None:
    assembly = EntryAssembly()
    first = block(1, 0, "a", "b", of=4, event_ms=2, properties={"p": "1"})
    second = block(1, 0, "c", of=4, first=2, event_ms=4)
    third = block(1, 0, None, of=4, first=3, ordering_key="o")
    assert feed(assembly, first, second) == []
    (entry,) = assembly.add(third)
    assert entry.whole
    assert entry.indices == [0, 1, 2, 3]
    assert entry.values == [b"1:0:0", b"1:0:1", b"1:0:2", b"1:0:3"]
    assert entry.partition_keys == ["a", "b", "c", None]
    assert entry.slots == [key_slot(key) for key in ("a", "b", "c", "o")]
    assert event_ms([entry]) == [2, 2, 4, None]
    properties = gather([entry], ["__properties"])["__properties"]
    assert properties.to_pylist() == [[("p", "1")], [("p", "1")], [], []]
    assert entry.payload_bytes == 20


@pytest.mark.parametrize("again", [[0], [0, 1], [1], [0, 1, 2]])
def test_an_entry_that_starts_again_replaces_its_held_part(again: list[int]) -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=4), part(0, *again, of=4))
    last = part(0, *range(again[-1] + 1, 4), of=4)
    (entry,) = assembly.add(last)
    assert entry.indices == list(range(again[0], 4))
    assert entry.payload_bytes == sum(len(present(value)) for value in entry.values)


def test_an_early_end_asks_for_redelivery_and_takes_nothing() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded) as caught:
        assembly.add(block(1, 1))
    assert caught.value.entry_id == EntryId(1, 0)
    assert assembly.open is None


def test_a_half_received_entry_that_comes_again_whole_is_not_lost() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.add(block(1, 1))
    entries = feed(assembly, part(0, 0, 1, of=3), part(0, 2, of=3), block(1, 1))
    assert ids(entries) == [(1, 0), (1, 1)]
    assert all(entry.whole for entry in entries)
    assert not assembly.doubted


def test_an_entry_that_ends_early_twice_alike_is_partial() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.add(block(1, 1))
    entries = feed(assembly, part(0, 0, 1, of=3), block(1, 1))
    assert ids(entries) == [(1, 0), (1, 1)]
    assert entries[0].indices == [0, 1]
    assert not entries[0].whole


def test_an_entry_that_ends_early_with_other_indices_is_asked_for_again() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=4))
    with pytest.raises(RedeliveryNeeded):
        assembly.end_early()
    feed(assembly, part(0, 0, 1, 2, of=4))
    with pytest.raises(RedeliveryNeeded):
        assembly.end_early()
    feed(assembly, part(0, 0, 1, 2, of=4))
    assert assembly.end_early().indices == [0, 1, 2]


def test_connections_that_break_twice_at_the_same_index_prove_nothing() -> None:
    assembly = EntryAssembly()
    for _ in range(3):
        feed(assembly, part(0, 0, 1, of=3))
        with pytest.raises(RedeliveryNeeded):
            assembly.add(block(1, 1), after_gap=True)
    entries = feed(assembly, part(0, 0, 1, of=3), part(0, 2, of=3), block(1, 1))
    assert ids(entries) == [(1, 0), (1, 1)]
    assert entries[0].whole


def test_a_connection_that_broke_and_a_silence_at_the_same_index_prove_nothing() -> None:
    """If a broker delays its redelivery, the rest of an entry is still to come."""
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.add(block(1, 1), after_gap=True)
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.end_early()
    feed(assembly, part(0, 0, 1, of=3))
    assert assembly.end_early().indices == [0, 1]


def test_an_entry_that_ends_early_at_the_same_index_often_enough_is_partial() -> None:
    """A reconnect can explain each single end (``after_gap``)."""
    assembly = EntryAssembly()
    for _ in range(entry_assembly.UNSURE_ENDS_ALIKE - 1):
        feed(assembly, part(0, 0, 1, of=3))
        with pytest.raises(RedeliveryNeeded):
            assembly.add(block(1, 1), after_gap=True)
    feed(assembly, part(0, 0, 1, of=3))
    partial, whole = assembly.add(block(1, 1), after_gap=True)
    assert (partial.indices, whole.id) == ([0, 1], EntryId(1, 1))


def test_an_entry_that_was_proved_partial_stays_so_however_it_comes() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, 1, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.add(block(1, 1))
    feed(assembly, part(0, 0, 1, of=3), block(1, 1), part(0, 0, 1, of=3))
    partial, _ = assembly.add(block(1, 1), after_gap=True)
    assert partial.indices == [0, 1]


def test_missing_indices_before_the_last_need_no_question() -> None:
    assembly = EntryAssembly()
    (entry,) = assembly.add(part(0, 0, 2, of=3))
    assert entry.indices == [0, 2]
    assert not entry.whole


def test_a_complete_entry_without_its_last_index_needs_no_question() -> None:
    assembly = EntryAssembly()
    feed(assembly, part(0, 0, of=3))
    with pytest.raises(RedeliveryNeeded):
        assembly.end_early()
    assert not assembly.is_empty
    (entry,) = assembly.add(replace(part(0, 0, of=3), complete=True))
    assert entry.indices == [0]
    assert assembly.is_empty, "its early end is forgotten"


def test_an_early_end_may_show_as_silence() -> None:
    assembly = EntryAssembly()
    for _ in range(2):
        feed(assembly, part(0, 1, of=3))
        if not assembly.doubted:
            with pytest.raises(RedeliveryNeeded):
                assembly.end_early()
    assert assembly.end_early().indices == [1]


def test_each_of_many_partial_entries_is_asked_about_once() -> None:
    """Everything unacknowledged comes again at each question, the partial entries too."""
    assembly = EntryAssembly()
    backlog = [part(entry, 0, of=2) for entry in range(12)] + [block(1, 99)]
    questions = 0
    while True:
        try:
            got = feed(assembly, *backlog)
            break
        except RedeliveryNeeded:
            questions += 1
            assert questions <= 12, "an entry is asked about again and again"
    assert ids(got) == ids(backlog)


def test_facts_about_early_ends_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_assembly, "DOUBTED_MAX", 3)
    assembly = EntryAssembly()
    for entry in range(6):
        feed(assembly, part(entry, 0, of=2))
        with pytest.raises(RedeliveryNeeded):
            assembly.end_early()
    assert list(assembly.doubted) == [EntryId(1, entry) for entry in (3, 4, 5)]
