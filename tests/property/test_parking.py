"""Parked keys: whatever is parked, crashes and is replayed, nothing is lost and order holds."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from keyshard.core.parking import Parked, State
from tests.property.parking_world import World

KEYS = "ab"
MESSAGES = 7
CHARS = (60, 150, 10_000)
"""Room for the parked keys in a checkpoint: for none, for one, for all."""

EXAMPLES = 400

STEP = st.tuples(
    st.sampled_from(["step"] * 12 + ["unpark", "unpark", "ack", "write", "save", "trim", "crash"]),
    st.sampled_from(KEYS),
    st.integers(0, 7),
)


def happen(world: World, what: str, key: str, how: int) -> None:
    if what == "step":
        world.step(key, succeeds=how % 3 > 0, twice=how == 7)
    elif what == "unpark":
        world.parking.unpark(key)
    elif what == "ack":
        world.acknowledge()
    elif what == "write":
        world.write()
    elif what == "save":
        world.saved.append(world.parking.parked.to_dict(CHARS[how % 3]))
    elif what == "trim":
        world.trim()
    else:
        saved = world.saved[-1 - how // 4 % len(world.saved)] if world.saved and how % 4 else None
        world.crash(forget=how % 2 == 0, checkpoint=saved)


def finish(world: World) -> None:
    """Handlers succeed from now on, and every key is let out."""
    for key in KEYS:
        for _ in range(20 * MESSAGES):
            world.parking.unpark(key)
            world.step(key, succeeds=True)
            world.validate()
        assert world.idle(key)
        assert world.parking.state(key) is None


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_whatever_happens_every_message_is_handled_in_order_or_rests(
    steps: list[tuple[str, str, int]],
) -> None:
    world = World(KEYS, MESSAGES)
    for step in steps:
        happen(world, *step)
        world.validate()
    finish(world)
    for key in KEYS:
        assert list(dict.fromkeys(world.handled[key])) == list(range(MESSAGES))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=80))
def test_a_checkpoint_says_the_same_as_the_topic(steps: list[tuple[str, str, int]]) -> None:
    world = World(KEYS, MESSAGES)
    for step in steps:
        happen(world, *step)
    for chars_max in CHARS:
        parked = world.parking.parked
        saved = parked.to_dict(chars_max)
        again = Parked.from_dict(json.loads(json.dumps(saved)))
        assert again.folded == parked.folded or not again.keys
        if again.keys:
            assert again.to_dict(chars_max) == saved
        world.crash(forget=False, checkpoint=saved)
        from_checkpoint = world.resting(world.parking.parked)
        world.crash(forget=False)
        assert from_checkpoint == world.resting(world.parking.parked)


def test_a_parked_key_takes_all_later_messages_and_gives_them_back_in_order() -> None:
    world = World("a", 5)
    world.step("a", succeeds=True)
    while not world.idle("a"):
        world.step("a", succeeds=False)
    assert world.handled["a"] == [0]
    assert world.resting(world.parking.parked) == {"a": [1, 2, 3, 4]}
    assert world.parking.unpark("a")
    assert not world.parking.unpark("a")
    while world.parking.state("a"):
        world.step("a", succeeds=True)
    assert world.handled["a"] == [0, 1, 2, 3, 4]


def test_a_letter_that_fails_again_parks_the_key_with_the_rest() -> None:
    world = World("a", 4)
    while not world.idle("a"):
        world.step("a", succeeds=False)
    world.parking.unpark("a")
    for outcome in (True, True, True, False):
        world.step("a", succeeds=outcome)
    assert world.handled["a"] == [0]
    assert world.parking.state("a") is State.PARKED
    assert world.resting(world.parking.parked) == {"a": [1, 2, 3]}
