"""Lanes: replayed dead letters run before other messages of their key; failed keys wait."""

from __future__ import annotations

from datetime import datetime, timezone

from keyshard.core.dead_letter import DeadLetter, DeadLetterKind, StoredDeadLetter
from keyshard.core.lanes.key_queue import Arrival
from keyshard.core.lanes.lanes import KEYS_READY_MIN, Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import range_index, split_ring
from keyshard.core.ring.key_slot import key_slot
from tests.helpers import key_in, present

WHERE = TopicPartition("persistent://public/default/orders", 0)
NOW = datetime(2024, 5, 1, tzinfo=timezone.utc)
RANGES = 3


def message(number: int, key: str = "k") -> Message:
    return Message(
        b"%d" % number, key, None, MessageId(1, number, 0), WHERE.topic, 0, NOW, None, {},
        key_slot(key), redelivered=False,
    )  # fmt: skip


def resting(number: int, key: str = "k") -> StoredDeadLetter:
    dead_letter = DeadLetter(message(number, key), "keyshard", DeadLetterKind.PARKED, 1, "broken")
    return StoredDeadLetter(EntryId(9, number), dead_letter)


def lanes_with(*numbers: int) -> Lanes:
    lanes = Lanes(RANGES, 2, lambda slot: range_index(slot, RANGES))
    for number in numbers:
        lanes.add(WHERE, 0, EntryId(1, number), [message(number)])
    return lanes


def run(lanes: Lanes) -> bytes:
    """Handle the next message."""
    work = lanes.next(0.0)
    assert work is not None
    assert lanes.next(0.0) is None, "one message of a key at a time"
    lanes.validate()
    lanes.completed(work)
    lanes.validate()
    return present(work.message.value)


def test_an_inserted_dead_letter_is_next_and_completes_no_entry() -> None:
    for numbers in ([], [5, 6]):
        lanes = lanes_with(*numbers)
        lanes.insert(resting(1))
        lanes.validate()
        assert run(lanes) == b"1"
        assert lanes.pop_completed() == {}
        assert [run(lanes) for _ in numbers] == [b"%d" % number for number in numbers]
        assert lanes.pop_completed() == (
            {WHERE: [EntryId(1, n) for n in numbers]} if numbers else {}
        )
        assert lanes.next(0.0) is None
        assert lanes.waiting == 0


def test_a_dead_letter_is_replaced_by_the_next_one_before_newer_messages() -> None:
    lanes = lanes_with()
    lanes.insert(resting(1))
    work = lanes.next(0.0)
    assert work is not None
    lanes.add(WHERE, 0, EntryId(1, 7), [message(7)])
    lanes.replace(work, resting(2))
    lanes.validate()
    assert run(lanes) == b"2"
    assert run(lanes) == b"7"


def test_attempts_begin_at_zero_for_each_dead_letter() -> None:
    lanes = lanes_with()
    lanes.insert(resting(1))
    work = lanes.next(0.0)
    assert work is not None
    lanes.again(work, 0.0, "broken")
    work = lanes.next(0.0)
    assert work is not None
    assert work.queue.attempts == 1
    lanes.replace(work, resting(2))
    again = lanes.next(0.0)
    assert again is not None
    assert again.resting == resting(2)
    assert (again.queue.attempts, again.queue.reason) == (0, None)


def test_a_replay_does_not_run_while_its_range_is_held() -> None:
    lanes = lanes_with(5)
    lanes.insert(resting(1))
    work = lanes.next(0.0)
    assert work is not None
    lanes.hold(split_ring(1))
    assert lanes.blocking() == [work]
    lanes.replace(work, resting(2))
    assert lanes.next(0.0) is None
    assert lanes.blocking() == []
    lanes.reassign(2, lambda slot: range_index(slot, 2))
    lanes.resume()
    lanes.validate()
    assert [run(lanes), run(lanes)] == [b"2", b"5"]


def test_replayed_keys_leave_room_for_keys_that_are_not_parked() -> None:
    lanes = Lanes(1, 1, lambda _: 0)
    keys = [f"parked-{number}" for number in range(KEYS_READY_MIN)]
    for number, key in enumerate(keys):
        lanes.insert(resting(number, key))
        lanes.validate()
        assert lanes.hungry, "a replayed key is no reason to receive nothing"
    for number, key in enumerate(keys):
        lanes.add(WHERE, 0, EntryId(1, number), [message(number, f"other-{key}")])
    assert not lanes.hungry
    lanes.reassign(1, lambda _: 0)
    lanes.validate()
    assert not lanes.hungry
    work = lanes.next(0.0)
    assert work is not None
    lanes.again(work, 0.0, "broken")
    lanes.validate()


def test_a_failed_key_is_among_the_oldest_as_soon_as_its_time_has_come() -> None:
    # The only key of a full window must be found, although no other call made it ready.
    lanes = lanes_with(1)
    work = lanes.next(0.0)
    assert work is not None
    lanes.again(work, 2.0, "broken")
    assert lanes.oldest_failed(3, 1.0) == []
    assert lanes.oldest_failed(3, 2.0) == [work.queue]
    lanes.validate()
    assert lanes.next_failed([work.queue], 2.0) is work


def test_messages_that_are_done_before_another_key_of_their_entry_are_kept() -> None:
    lanes = Lanes(RANGES, 2, lambda slot: range_index(slot, RANGES))
    entry = EntryId(1, 0)
    mixed = [
        message(number, key)._replace(message_id=MessageId(1, 0, number))
        for number, key in enumerate(["a", "b", "a"])
    ]
    lanes.add(WHERE, 0, entry, mixed)
    lanes.add(WHERE, 0, EntryId(1, 1), [message(1, "c"), message(1, "c")])
    done: list[str | None] = []
    while (work := lanes.next(0.0)) is not None:
        lanes.completed(work)
        done.append(work.message.key)
    kept, lanes.done_apart = lanes.done_apart, []
    assert sorted(done, key=str) == ["a", "a", "b", "c", "c"]
    assert len(kept) == 2, "the last message completes its entry"
    assert {(where, at) for where, at, _ in kept} == {(WHERE, entry)}, "others have one key"
    bulk = Arrival(WHERE, 0, EntryId(1, 2), mixed)
    lanes.adopt(bulk, None, done=2, started=True)
    assert lanes.done_apart == [(WHERE, EntryId(1, 2), 0), (WHERE, EntryId(1, 2), 1)]


def test_a_retry_comes_after_the_keys_that_wait_and_before_newer_ones() -> None:
    lanes = Lanes(1, 1, lambda _: 0)
    for number, key in enumerate("abc"):
        lanes.add(WHERE, 0, EntryId(1, number), [message(number, key)])
    lanes.again(present(lanes.next(0.0)), 0.0, "broken")
    lanes.add(WHERE, 0, EntryId(1, 3), [message(3, "d")])
    order = []
    while work := lanes.next(0.0):
        order.append(work.queue.key)
        lanes.completed(work)
        lanes.validate()
    assert order == ["b", "c", "a", "d"]


def test_a_key_that_waits_for_its_retry_leaves_its_lane_to_others() -> None:
    lanes = Lanes(1, 1, lambda _: 0)
    for number, key in enumerate("ab"):
        lanes.add(WHERE, 0, EntryId(1, number), [message(number, key)])
    lanes.again(present(lanes.next(0.0)), 60.0, "broken")
    other = present(lanes.next(1.0))
    assert other.queue.key == "b"
    lanes.completed(other)
    assert lanes.next(59.0) is None
    assert present(lanes.next(60.0)).queue.key == "a"
    lanes.validate()


def test_only_running_messages_of_held_slots_block_a_move() -> None:
    low, high = split_ring(2)
    lanes = Lanes(1, 2, lambda _: 0)
    for number, hash_range in enumerate((low, high)):
        lanes.add(WHERE, 0, EntryId(1, number), [message(number, key_in(hash_range))])
    running = [present(lanes.next(0.0)) for _ in range(2)]
    assert lanes.blocking() == []
    lanes.hold([high])
    (blocks,) = lanes.blocking()
    assert blocks is running[1]
    lanes.completed(blocks)
    assert lanes.blocking() == []


def test_a_drain_does_not_wait_for_the_retry_of_a_dead_letter_that_fails_meanwhile() -> None:
    lanes = lanes_with()
    lanes.insert(resting(1))
    work = lanes.next(0.0)
    assert work is not None
    lanes.drain()
    assert lanes.unfinished(30.0, held=False), "its handler runs"
    lanes.again(work, 20.0, "broken")
    lanes.validate()
    assert not lanes.unfinished(30.0, held=False), "it stays in the dead-letter topic"
