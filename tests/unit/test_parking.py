"""The fold over a dead-letter topic, what a checkpoint keeps of it, and the states of a key."""

from __future__ import annotations

import json

import pytest

from helpers import P0, P1
from keyshard.core import parking
from keyshard.core.entry import EntryId
from keyshard.core.message import MessageId
from keyshard.core.parking import Parked, Parking, State
from keyshard.errors import CheckpointError

ROOM = 100_000


def at(entry: int) -> EntryId:
    return EntryId(5, entry)


def original(number: int) -> MessageId:
    return MessageId(1, number, 0)


def folded(*letters: tuple[int, str, int]) -> Parked:
    """(position, key, original) of each letter."""
    parked = Parked()
    for position, key, number in letters:
        parked.letter(at(position), key, P0, original(number))
        parked.validate()
    return parked


def test_a_key_is_parked_while_letters_of_it_rest() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (2, "a", 3))
    assert parked.keys["a"].resting == [at(0), at(2)]
    parked.replayed(at(3), "a", at(0))
    assert parked.keys["a"].resting == [at(2)]
    assert parked.keys["a"].start == at(0)
    parked.replayed(at(4), "a", at(2))
    assert parked.keys.keys() == {"b"}
    assert parked.folded == at(4)
    parked.replayed(at(5), "nobody", at(2))
    assert parked.folded == at(5)


def test_the_first_letter_of_an_original_counts() -> None:
    parked = folded((0, "a", 1), (1, "a", 2))
    assert not parked.letter(at(2), "a", P0, original(1))
    assert parked.letter(at(3), "a", P1, original(1)), "another topic partition"
    assert parked.keys["a"].resting == [at(0), at(1), at(3)]
    parked.validate()


def test_the_marker_of_the_last_letter_covers_repeated_ones_too() -> None:
    key = Parking(folded((0, "a", 1), (1, "a", 2), (2, "a", 1)))
    key.unpark("a")
    assert key.drained("a") == [at(0), at(1)]
    assert key.up_to("a", at(0)) == at(0)
    key.replayed(at(3), "a", at(0))
    assert key.up_to("a", at(1)) == at(2)
    key.replayed(at(4), "a", at(2))
    # A fold that begins behind the first two finds the repeated one done.
    later = folded((2, "a", 1))
    later.replayed(at(4), "a", at(2))
    assert not later.keys


def test_a_replayed_message_that_comes_again_is_known() -> None:
    parked = folded((0, "a", 1))
    assert not parked.is_replayed("a", P0, original(1)), "it rests"
    assert not parked.released
    parked.replayed(at(1), "a", at(0))
    assert parked.released
    assert parked.is_replayed("a", P0, original(1))
    assert not parked.is_replayed("a", P1, original(1))
    assert not parked.is_replayed("b", P0, original(1))


def test_only_so_many_replayed_messages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "RELEASED_IDS_MAX", 2)
    parked = folded((0, "a", 1), (1, "b", 2), (2, "b", 3), (3, "c", 4))
    for position, key in enumerate("abc", 4):
        parked.replayed(at(position), key, at(3))
    known = [
        parked.is_replayed(key, P0, original(n))
        for key, n in zip("abbc", (1, 2, 3, 4), strict=True)
    ]
    assert known == [False, False, False, True]
    parked.letter(at(7), "c", P0, original(5))
    parked.replayed(at(8), "c", at(7))
    assert parked.is_replayed("c", P0, original(5))


def test_what_was_trimmed_was_finished_with() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (2, "b", 3))
    parked.trimmed(at(2))
    assert {key: one.resting for key, one in parked.keys.items()} == {"b": [at(2)]}
    parked.trimmed(None)
    assert not parked.keys


def test_a_checkpoint_keeps_all_that_is_needed() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (4, "a", 3))
    parked.letter(at(5), "a", P1, MessageId(1, 7, 3))
    parked.replayed(at(6), "a", at(0))
    data = parked.to_dict(ROOM)
    assert data == {
        "folded": "5:6",
        "keys": {
            "a": {
                "ids": {P0.name: {"0": "1:1,3"}, P1.name: {"3": "1:7"}},
                "last": "5:5",
                "resting": "5:4-5",
                "start": "5:0",
            },
            "b": {
                "ids": {P0.name: {"0": "1:2"}},
                "last": "5:1",
                "resting": "5:1",
                "start": "5:1",
            },
        },
    }
    again = Parked.from_dict(json.loads(json.dumps(data)))
    assert again.to_dict(ROOM) == data
    assert not again.letter(at(7), "a", P0, original(1)), "replayed, and its key still parked"


def test_without_room_it_says_to_fold_from_the_first_letter_of_a_parked_key() -> None:
    parked = folded((1, "a", 1), (2, "a", 2), (3, "b", 3))
    parked.replayed(at(4), "a", at(1))
    assert parked.to_dict(10) == {"folded": "5:0", "keys": {}}
    parked.replayed(at(5), "a", at(2))
    assert parked.to_dict(10) == {"folded": "5:2", "keys": {}}
    assert folded((0, "a", 1)).to_dict(10) == {"folded": None, "keys": {}}


def test_what_is_on_its_way_holds_the_position_back() -> None:
    parked = Parked()
    assert parked.folded is None
    parked.sending("first")
    parked.passed(at(3))
    assert parked.folded is None
    parked.sent("first")
    assert parked.folded == at(3)
    parked.sending("slow")
    parked.sending("quick")
    parked.letter(at(5), "a", P0, original(1))
    parked.sent("quick")
    assert parked.folded == at(3), "it may lie at 4"
    assert parked.to_dict(10) == {"folded": "5:3", "keys": {}}, "and the letter at 5 comes later"
    parked.letter(at(4), "b", P0, original(2))
    parked.sent("slow")
    assert parked.folded == at(5)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"folded": "x", "keys": {}},
        {"folded": None, "keys": []},
        {"folded": "5:1", "keys": {"a": {}}},
        {"folded": "5:1", "keys": {"a": {"start": "5:1", "last": "5:1", "resting": "", "ids": {}}}},
        {
            "folded": "5:1",
            "keys": {"a": {"start": "5:1", "last": "5:1", "resting": "?", "ids": {}}},
        },
    ],
)
def test_what_cannot_be_read_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        Parked.from_dict(data)


def test_a_key_goes_through_its_states() -> None:
    keys = Parking(folded((0, "a", 1)))
    assert keys.states() == {"a": State.PARKED}
    assert keys.state("b") is keys.state(None) is None
    assert not keys.unpark("b")
    assert keys.unpark("a")
    assert not keys.unpark("a"), "it is on its way"
    assert keys.state("a") is State.DRAINING
    assert keys.drained("a") == [at(0)]
    assert keys.state("a") is State.REPLAYING
    keys.failed_again("a")
    assert keys.state("a") is State.PARKED
    keys.unpark("a")
    keys.drained("a")
    keys.replayed(at(1), "a", at(0))
    keys.validate()
    assert keys.states() == {}


def test_a_key_without_a_letter_is_let_out_at_once() -> None:
    keys = Parking(Parked())
    keys.park("a")
    assert keys.state("a") is State.PARKED
    assert keys.unpark("a")
    assert keys.drained("a") == []
    assert keys.state("a") is None
