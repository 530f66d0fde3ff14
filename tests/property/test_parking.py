"""Parked keys: whatever is parked, crashes and is replayed, nothing is lost and order holds."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import COMMITTED
from keyshard.core.dead_letter.parked import Parked
from keyshard.core.dead_letter.parking import State
from tests.property.parking_world import World

KEYS = "ab"
MESSAGES = 8

EXAMPLES = 400

STEP = st.tuples(
    st.sampled_from(
        ["step"] * 14 + ["unpark", "unpark", "ack", "write", "save", "trim", "crash", "stop"]
        + ["heal", "arrive"]
    ),
    st.sampled_from(KEYS),
    st.integers(0, 7),
)  # fmt: skip
BAD = st.frozensets(st.tuples(st.sampled_from(KEYS), st.integers(0, MESSAGES - 1)), max_size=8)


def happen(world: World, what: str, key: str, how: int) -> None:
    if what == "step":
        world.step(key, twice=how == 7)
    elif what == "unpark":
        world.parking.unpark(key)
    elif what == "ack":
        world.acknowledge()
    elif what == "write":
        world.write()
    elif what == "save":
        world.save()
    elif what == "trim":
        # What a checkpoint needs is trimmed only when the next one is stored.
        if not world.saved:
            world.trim()
    elif what == "arrive":
        world.arrive(key)
    elif what == "heal":
        world.bad.discard((key, how))
    else:
        if what == "stop":
            world.stop()
        saved = world.saved[-1 - how // 4 % len(world.saved)] if world.saved and how % 4 else None
        late = how % 3 if how % 3 < 2 else None
        world.crash(forget=how % 2 == 0, checkpoint=saved, late=late)


def finish(world: World) -> None:
    """Handlers succeed from now on, and every key is let out."""
    world.bad.clear()
    for key in KEYS:
        world.arrive(key)
    for _ in range(40 * MESSAGES):
        if all(at_rest(world, key) for key in KEYS):
            break
        for key in KEYS:
            world.parking.unpark(key)
            world.step(key)
            world.validate()
    assert all(at_rest(world, key) for key in KEYS)
    world.validate_end()


def at_rest(world: World, key: str) -> bool:
    """Whether nothing can happen with a key any more."""
    return world.idle(key) and world.parking.state(key) is None


# A letter is stored twice, and its second copy is known: an earlier checkpoint begins there, while
# what a process wrote that folded the whole topic claims the first copy.
@example(
    [("step", "a", 7), ("step", "a", 0), ("save", "a", 0), ("crash", "a", 0), ("step", "b", 0),
     ("crash", "a", 1)],
    frozenset([("a", 0), ("b", 0)]),
)  # fmt: skip
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=120), BAD)
def test_whatever_happens_every_message_is_handled_in_order_or_rests(
    steps: list[tuple[str, str, int]], bad: frozenset[tuple[str, int]]
) -> None:
    world = World(KEYS, MESSAGES, bad)
    for step in steps:
        happen(world, *step)
        world.validate()
    finish(world)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=80), BAD)
def test_a_checkpoint_says_the_same_as_the_topic(
    steps: list[tuple[str, str, int]], bad: frozenset[tuple[str, int]]
) -> None:
    world = World(KEYS, MESSAGES, bad)
    for step in steps:
        happen(world, *step)
    saved = json.loads(json.dumps(world.parking.parked.to_dict(COMMITTED)))
    assert Parked.from_dict(saved).begin == world.parking.parked.begin
    world.crash(forget=False, checkpoint=saved)
    from_checkpoint = world.resting(world.parking.parked)
    world.crash(forget=False)
    assert from_checkpoint == world.resting(world.parking.parked)


def test_a_parked_key_takes_all_later_messages_and_gives_them_back_in_order() -> None:
    world = World("a", 5, [("a", 1)])
    while not world.idle("a"):
        world.step("a")
    assert world.handled["a"] == [0]
    assert world.resting(world.parking.parked) == {"a": {1, 2, 3, 4}}
    world.bad.clear()
    assert world.parking.unpark("a")
    assert not world.parking.unpark("a")
    while world.parking.state("a"):
        world.step("a")
    assert world.handled["a"] == [0, 1, 2, 3, 4]


def test_a_letter_that_fails_again_parks_the_key_with_the_rest() -> None:
    world = World("a", 4, [("a", 0), ("a", 1)])
    while not world.idle("a"):
        world.step("a")
    world.bad.discard(("a", 0))
    world.parking.unpark("a")
    for _ in range(4):
        world.step("a")
    assert world.handled["a"] == [0]
    assert world.parking.state("a") is State.PARKED
    assert world.resting(world.parking.parked) == {"a": {1, 2, 3}}


def test_what_was_handled_before_the_first_letter_runs_again_before_it() -> None:
    world = World("a", 7, [("a", 6)])
    while not world.idle("a"):
        world.step("a")
    world.stop()
    world.crash(forget=True)
    while not world.idle("a"):
        world.step("a")
    world.bad.clear()
    world.parking.unpark("a")
    while world.parking.state("a"):
        world.step("a")
    again = world.handled["a"][6:]
    assert world.handled["a"][:6] == [0, 1, 2, 3, 4, 5]
    assert [seq for seq in again if seq % 2 == 0] == [0, 2, 4, 6]
    assert [seq for seq in again if seq % 2 == 1] == [1, 3, 5], "they waited with their key"
