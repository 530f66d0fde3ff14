"""The fold over a dead-letter topic, its part in a checkpoint, and the states of a key."""

from __future__ import annotations

import json
from heapq import heappop

import pytest

from keyshard.core.message import MessageId
from keyshard.core.position.checkpoint import PartitionCheckpoint
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.position.entry_set import EntrySet
from keyshard.dead_letters import topic_state
from keyshard.dead_letters.parking import TRANSITIONS, Action, Parking, ParkingEvent, ParkingState
from keyshard.dead_letters.topic_state import TopicState
from keyshard.errors import CheckpointError
from tests.helpers import COMMITTED, P0, P1


def at(entry: int) -> EntryId:
    return EntryId(5, entry)


def original(number: int) -> MessageId:
    return MessageId(1, number, 0)


def folded(*dead_letters: tuple[int, str, int]) -> TopicState:
    """Fold dead letters, each as (position, key, number of its original)."""
    parked = TopicState()
    for position, key, number in dead_letters:
        parked.dead_letter(at(position), key, P0, original(number))
        parked.validate()
    return parked


def resting(parked: TopicState) -> dict[str, list[EntryId]]:
    return {key: one.in_order() for key, one in parked.keys.items()}


def test_a_key_is_parked_until_all_its_dead_letters_are_done() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (2, "a", 3))
    assert resting(parked) == {"a": [at(0), at(2)], "b": [at(1)]}
    parked.replayed(at(3), "a", P0, original(1))
    assert resting(parked)["a"] == [at(2)]
    parked.replayed(at(4), "a", P0, original(3))
    assert parked.keys.keys() == {"b"}
    parked.replayed(at(5), "nobody", P0, original(3))
    parked.replayed(at(6), "b", P1, original(2))
    assert resting(parked) == {"b": [at(1)]}
    parked.validate()


def test_the_first_dead_letter_of_an_original_counts_and_its_marker_covers_the_others() -> None:
    parked = folded((0, "a", 1), (1, "a", 2))
    assert not parked.dead_letter(at(2), "a", P0, original(1))
    assert parked.dead_letter(at(3), "a", P1, original(1)), "another topic partition"
    assert resting(parked) == {"a": [at(0), at(1), at(3)]}
    parked.replayed(at(4), "a", P0, original(1))
    assert resting(parked) == {"a": [at(1), at(3)]}
    parked.validate()


def test_dead_letters_of_a_parent_are_replayed_before_those_of_its_children() -> None:
    parent, child, other = (
        TopicPartition(f"segment://public/default/{name}")
        for name in ("orders/0000-ffff-9", "orders/0000-7fff-10", "bills/0000-ffff-11")
    )
    parked = TopicState()
    written = ((child, 1), (other, 1), (child, 2), (parent, 8), (parent, 7))
    for position, (where, number) in enumerate(written):
        parked.dead_letter(at(position), "a", where, original(number))
        parked.validate()
    assert resting(parked) == {"a": [at(4), at(1), at(3), at(0), at(2)]}
    parked.replayed(at(5), "a", parent, original(7))
    parked.validate()
    assert resting(parked) == {"a": [at(3), at(1), at(0), at(2)]}
    key = parked.keys["a"]
    assert key.begins_after(parent, original(7))
    assert not key.begins_after(parent, original(8))
    assert not key.begins_after(child, original(0)), "it waits for those of the parent"
    parked.replayed(at(6), "a", parent, original(8))
    assert key.begins_after(child, original(0))
    assert not key.begins_after(child, original(1))
    assert key.begins_after(parent, original(9)), "it is older than all of the children"


def test_dead_letters_of_a_deleted_topic_are_replayed_before_those_of_the_next_one() -> None:
    """Found by the simulation ``handlers-segments``, seed 825: segments have the same number."""
    deleted, again = (
        TopicPartition(f"segment://public/default/orders/{hashes}-0")
        for hashes in ("8000-ffff", "0000-ffff")
    )
    parked = TopicState()
    for position, (where, number) in enumerate(((again, 5), (deleted, 1))):
        parked.dead_letter(at(position), "a", where, original(number))
        parked.validate()
    assert resting(parked) == {"a": [at(1), at(0)]}
    key = parked.keys["a"]
    assert not key.begins_after(again, original(4)), "it waits for those of the deleted topic"
    assert key.begins_after(deleted, original(0))


def test_dead_letters_are_replayed_in_the_order_of_their_originals_per_topic_partition() -> None:
    parked = folded((0, "a", 7), (3, "a", 2), (4, "a", 5))
    parked.dead_letter(at(1), "a", P1, original(9))
    parked.dead_letter(at(2), "a", P1, original(8))
    # In the order of writing, except for newer ones of the same topic partition.
    assert resting(parked) == {"a": [at(3), at(2), at(1), at(4), at(0)]}
    assert parked.keys["a"].first_in_order() == at(3)
    assert parked.keys["a"].begins_after(P0, original(1))
    assert not parked.keys["a"].begins_after(P0, original(2))
    parked.replayed(at(5), "a", P0, original(2))
    assert parked.keys["a"].begins_after(P0, original(4))
    assert not parked.keys["a"].begins_after(P0, original(5))
    parked.validate()


def test_a_sweep_calls_all_dead_letters_of_a_key_done_up_to_its_position() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (2, "a", 3), (4, "a", 5))
    parked.swept(at(5), "a", at(2))
    parked.apply_sweeps()
    assert resting(parked) == {"a": [at(4)], "b": [at(1)]}
    parked.swept(at(6), "a", at(4))
    assert parked.keys.keys() == {"b"}
    parked.swept(at(7), "nobody", at(4))
    parked.validate()


def test_a_later_marker_of_the_key_applies_a_postponed_sweep() -> None:
    parked = folded((0, "a", 1), (1, "a", 2), (2, "a", 3))
    parked.swept(at(3), "a", at(0))
    parked.swept(at(4), "a", at(1))
    parked.replayed(at(5), "a", P0, original(3))
    assert not parked.keys


def test_a_replayed_message_that_comes_again_is_known_until_an_older_one_runs() -> None:
    parked = folded((0, "a", 1), (1, "a", 2))
    assert not parked.done.has("a", P0, original(1)), "it rests"
    assert not parked.done
    parked.replayed(at(2), "a", P0, original(1))
    assert parked.done
    assert parked.done.has("a", P0, original(1))
    assert not parked.done.has("a", P1, original(1))
    assert not parked.done.has("b", P0, original(1))
    parked.done.runs("b", P0, original(0))
    parked.done.runs("a", P1, original(0))
    parked.done.runs("a", P0, original(3))
    assert parked.done.has("a", P0, original(1))
    parked.done.runs("a", P0, original(0))
    assert not parked.done.has("a", P0, original(1)), "it has to run after the other one"
    parked.validate()


def test_a_replayed_message_of_a_segment_is_known_until_an_older_one_of_a_parent_runs() -> None:
    parent, child = (
        TopicPartition(f"segment://public/default/orders/{name}")
        for name in ("0000-ffff-9", "0000-7fff-10")
    )
    parked = TopicState()
    parked.dead_letter(at(0), "a", child, original(1))
    assert Parking(parked).start("a", parent, original(7)) is Action.HANDLE, "it is older"
    parked.replayed(at(1), "a", child, original(1))
    assert parked.done.has("a", child, original(1))
    assert not parked.done.has("a", parent, original(1))
    assert Parking(parked).start("a", parent, original(7)) is Action.HANDLE_AGAIN
    parked.run_again(at(2), "a", parent, original(7))
    assert not parked.done.has("a", child, original(1)), "it has to run after the other one"
    parked.validate()


def test_a_replayed_message_may_become_a_dead_letter_again() -> None:
    parked = folded((0, "a", 1), (1, "a", 2))
    parked.replayed(at(2), "a", P0, original(1))
    assert parked.dead_letter(at(3), "a", P0, original(1))
    assert not parked.done.has("a", P0, original(1))
    assert resting(parked) == {"a": [at(3), at(1)]}
    parked.validate()


def test_only_so_many_replayed_messages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_state, "DONE_IDS_MAX", 2)
    parked = folded((0, "a", 1), (1, "b", 2), (2, "b", 3), (3, "c", 4))
    for position, (key, number) in enumerate([("a", 1), ("b", 2), ("b", 3), ("c", 4)], 4):
        parked.replayed(at(position), key, P0, original(number))
        parked.validate()
    begin = parked.to_dict({P0: PartitionCheckpoint()})["from"]
    assert begin == "5:2", "the letters of the oldest ones went"
    known = [
        parked.done.has(key, P0, original(n)) for key, n in zip("abbc", (1, 2, 3, 4), strict=True)
    ]
    assert known == [False, False, True, True], "the oldest ones went"
    parked.done.runs("b", P0, original(2))
    parked.validate()
    assert not parked.done.has("b", P0, original(3)), "it runs behind the one that went"
    assert parked.done.has("c", P0, original(4))


def test_a_checkpoint_has_the_position_of_the_next_fold() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (4, "a", 3))
    assert parked.to_dict(COMMITTED) == {"from": "5:0", "oldest": "5:0"}
    parked.replayed(at(6), "a", P0, original(1))
    assert parked.to_dict(COMMITTED) == {"from": "5:1", "oldest": "5:1"}
    again = TopicState.from_dict(json.loads(json.dumps(parked.to_dict(COMMITTED))))
    assert (again.begin, again.claimed) == (at(1), at(1))
    parked.replayed(at(7), "a", P0, original(3))
    parked.replayed(at(8), "b", P0, original(2))
    assert parked.to_dict(COMMITTED) == {"from": "5:9", "oldest": None}
    assert TopicState().to_dict(COMMITTED) == {"from": None, "oldest": None}
    assert TopicState.from_dict({"from": None, "oldest": None}).begin is None


def test_a_checkpoint_begins_before_a_done_dead_letter_whose_original_it_lacks() -> None:
    parked = folded((0, "a", 1), (1, "a", 2), (2, "b", 3))
    for position, (key, number) in enumerate([("a", 1), ("a", 2), ("b", 3)], 3):
        parked.replayed(at(position), key, P0, original(number))
        parked.validate()

    def start(*committed: int) -> object:
        delivered = EntrySet.of(EntryId(1, number) for number in committed)
        data = parked.to_dict({P0: PartitionCheckpoint(delivered=delivered)})
        assert data["oldest"] is None, "none of them rests"
        return data["from"]

    assert start() == "5:0", "nothing of their topic partition is committed"
    assert start(2) == "5:0"
    assert start(1, 2) == "5:2"
    assert start(1, 2, 3) == "5:6"
    parked.validate()


def test_a_discarded_dead_letter_is_known_until_its_original_is_committed() -> None:
    parked = folded((0, "a", 1))
    parked.swept(at(1), "a", at(0))
    assert parked.to_dict({P0: PartitionCheckpoint()})["from"] == "5:0"
    assert parked.to_dict(COMMITTED)["from"] == "5:2"


def test_a_dead_letter_whose_original_is_gone_with_its_topic_is_not_folded_again() -> None:
    parked = folded((0, "a", 1))
    parked.replayed(at(1), "a", P0, original(1))
    assert parked.to_dict({P1: PartitionCheckpoint()})["from"] == "5:2"


def test_a_checkpoint_that_held_all_parked_keys_is_read() -> None:
    key = {"ids": {}, "last": "5:5", "resting": "5:4-5", "start": "5:2"}
    old = {"folded": "5:6", "keys": {"a": key, "b": {**key, "start": "5:1"}}}
    assert TopicState.from_dict(old).begin == at(1)
    assert TopicState.from_dict({"folded": "5:6", "keys": {}}).begin == at(7)
    assert TopicState.from_dict({"folded": None, "keys": {}}).begin is None


def test_unconfirmed_dead_letters_hold_the_position_back() -> None:
    parked = TopicState()
    assert parked.begin is None
    parked.sending("first")
    parked.passed(at(3))
    assert parked.begin is None
    parked.sent("first")
    assert parked.begin == at(4)
    parked.sending("slow")
    parked.sending("quick")
    parked.dead_letter(at(5), "a", P0, original(1))
    parked.sent("quick")
    assert parked.begin == at(4), "it may lie there"
    assert parked.to_dict(COMMITTED) == {"from": "5:4", "oldest": "5:5"}
    parked.dead_letter(at(4), "b", P0, original(2))
    parked.sent("slow")
    parked.replayed(at(6), "b", P0, original(2))
    assert parked.begin == at(5)


def test_a_sent_marker_claims_the_oldest_unmarked_dead_letter() -> None:
    parked = folded((0, "a", 1), (1, "b", 2), (2, "c", 3))
    assert parked.sending("letter") == at(0)
    assert parked.claims({at(0)})
    assert not parked.claims({at(1)})
    parked.marking({at(0), at(1)})
    assert parked.sending("marker") == at(2)
    parked.sent("letter")
    assert not parked.claims({at(0)})
    parked.replayed(at(3), "a", P0, original(1))
    parked.sent("marker", {at(0)})
    assert parked.sending("next") == at(2), "the marker of the second is still on its way"
    parked.sent("next", {at(1)})
    assert parked.sending("last") == at(1)
    parked.validate()


def test_a_message_that_is_sent_during_a_discard_examines_its_dead_letters_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    popped = 0

    def pop(heap: list[EntryId]) -> EntryId:
        nonlocal popped
        popped += 1
        return heappop(heap)

    monkeypatch.setattr(topic_state, "heappop", pop)
    parked = folded(*((number, "a", number) for number in range(100)), (100, "b", 100))
    discarded = {at(number) for number in range(100)}
    parked.marking(discarded)
    for number in range(50):
        assert parked.sending(number) == at(100)
        parked.sent(number)
        assert parked.oldest == at(0), "the markers are not confirmed"
        parked.validate()
    assert popped <= 200
    for number in range(99):
        parked.replayed(at(101 + number), "a", P0, original(number))
        parked.validate()
    parked.sending("discard")
    parked.sent("discard", discarded)
    parked.validate()
    assert parked.sending("next") == at(99), "it rests and is not marked any more"


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"from": "x", "oldest": None},
        {"from": None},
        {"from": 5, "oldest": None},
        {"from": "-5:1", "oldest": None},
        {"from": "5:-1", "oldest": None},
        {"from": "5: 1", "oldest": None},
        {"from": "05:1", "oldest": None},
        {"folded": "x", "keys": {}},
        {"folded": None, "keys": []},
        {"folded": "5:1", "keys": {"a": {}}},
        {"folded": "5:1", "keys": {"a": {"start": "?"}}},
    ],
)
def test_an_unreadable_value_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        TopicState.from_dict(data)


def test_each_outcome_of_a_message_has_its_action() -> None:
    parked = folded((0, "a", 3), (1, "a", 5))
    parked.replayed(at(2), "a", P0, original(3))
    keys = Parking(parked)
    courses = [keys.action("a", P0, original(number)) for number in (3, 4, 5, 6)]
    assert courses == [Action.DONE, Action.HANDLE, Action.DONE, Action.DEAD_LETTER]
    assert keys.action("a", P1, original(1)) is Action.DEAD_LETTER, "its key is parked"
    assert keys.action("b", P0, original(6)) is Action.HANDLE
    keys.park("b")
    assert keys.action("b", P0, original(6)) is Action.DEAD_LETTER, "none is confirmed yet"
    parked.done.runs("a", P0, original(2))
    assert keys.action("a", P0, original(3)) is Action.HANDLE


def test_a_key_goes_through_its_states() -> None:
    keys = Parking(folded((0, "a", 1)))
    assert keys.states() == {"a": ParkingState.PARKED}
    assert keys.state("b") is keys.state(None) is None
    assert not keys.unpark("b")
    assert keys.unpark("a")
    assert not keys.unpark("a"), "it is on its way"
    assert keys.state("a") is ParkingState.DRAINING
    assert keys.drained("a") == [at(0)]
    assert keys.state("a") is ParkingState.REPLAYING
    keys.failed_again("a")
    assert keys.state("a") is ParkingState.PARKED
    keys.unpark("a")
    keys.drained("a")
    keys.replayed(at(1), "a", P0, original(1))
    keys.validate()
    assert keys.states() == {}


def test_a_key_without_a_dead_letter_is_unparked_at_once() -> None:
    keys = Parking(TopicState())
    keys.park("a")
    assert keys.state("a") is ParkingState.PARKED
    assert keys.some(5) == [("a", 0)]
    assert keys.unpark("a")
    assert keys.drained("a") == []
    assert keys.state("a") is None


def test_a_key_with_discarded_dead_letters_is_unparked_when_none_is_in_flight() -> None:
    keys = Parking(folded((0, "a", 1), (1, "b", 2)))
    keys.emptied("a")
    assert keys.state("a") is ParkingState.PARKED
    keys.parked.swept(at(2), "a", at(0))
    keys.emptied("a")
    assert keys.states() == {"b": ParkingState.PARKED}


HAPPENS = {
    ParkingEvent.PARK: lambda keys: keys.park("a"),
    ParkingEvent.UNPARK: lambda keys: keys.unpark("a"),
    ParkingEvent.DRAINED: lambda keys: keys.drained("a"),
    ParkingEvent.FAILED_AGAIN: lambda keys: keys.failed_again("a"),
}


def in_state(state: ParkingState | None) -> Parking:
    """A key in a state, with a dead letter where it has one."""
    keys = Parking(folded() if state is None else folded((0, "a", 1)))
    if state in (ParkingState.DRAINING, ParkingState.REPLAYING):
        keys.unpark("a")
    if state is ParkingState.REPLAYING:
        keys.drained("a")
    assert keys.state("a") is state
    return keys


@pytest.mark.parametrize("event", HAPPENS)
@pytest.mark.parametrize("state", [None, *ParkingState])
def test_events_lead_to_the_states_of_the_table_and_no_other_occurs(
    event: ParkingEvent, state: ParkingState | None
) -> None:
    keys, leads = in_state(state), TRANSITIONS[event]
    if state in leads:
        HAPPENS[event](keys)
        assert keys.state("a") is leads[state]
    elif event is ParkingEvent.UNPARK:
        assert not keys.unpark("a"), "it is on its way, or not parked"
        assert keys.state("a") is state
    else:
        with pytest.raises(AssertionError):
            HAPPENS[event](keys)
        assert keys.state("a") is state


def test_a_key_without_dead_letters_leaves_every_parking_state() -> None:
    assert TRANSITIONS[ParkingEvent.RELEASED] == dict.fromkeys(ParkingState)
    replaying = in_state(ParkingState.REPLAYING)
    replaying.replayed(at(1), "a", P0, original(1))
    assert replaying.state("a") is None
    parked = in_state(ParkingState.PARKED)
    parked.parked.swept(at(1), "a", at(0))
    parked.emptied("a")
    assert parked.state("a") is None
    draining = in_state(ParkingState.DRAINING)
    draining.replayed(at(1), "a", P0, original(1))
    assert draining.state("a") is ParkingState.DRAINING, "letters may be on their way"
    assert draining.drained("a") == []
    assert draining.state("a") is None
