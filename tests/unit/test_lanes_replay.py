"""Dead letters run in the lane of their key, before its other messages."""

from __future__ import annotations

from datetime import datetime, timezone

from keyshard.core.dead_letter.letters import Letter, LetterKind, Resting
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.ring.hash_range import range_index, split_ring
from keyshard.core.ring.key_slot import key_slot

WHERE = TopicPartition("persistent://public/default/orders", 0)
NOW = datetime(2024, 5, 1, tzinfo=timezone.utc)
RANGES = 3


def message(number: int, key: str = "k") -> Message:
    return Message(
        b"%d" % number, key, None, MessageId(1, number, 0), WHERE.topic, 0, NOW, None, {},
        key_slot(key), redelivered=False,
    )  # fmt: skip


def resting(number: int, key: str = "k") -> Resting:
    letter = Letter(message(number, key), "keyshard", LetterKind.PARKED, 1, "broken")
    return Resting(EntryId(9, number), letter)


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
    return work.message.value


def test_an_inserted_letter_is_next_and_completes_no_entry() -> None:
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


def test_a_letter_is_replaced_by_the_next_one_before_newer_messages() -> None:
    lanes = lanes_with()
    lanes.insert(resting(1))
    work = lanes.next(0.0)
    assert work is not None
    lanes.add(WHERE, 0, EntryId(1, 7), [message(7)])
    lanes.replace(work, resting(2))
    lanes.validate()
    assert run(lanes) == b"2"
    assert run(lanes) == b"7"


def test_attempts_count_anew_for_each_letter() -> None:
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
