"""Parked keys: nothing is lost and the order holds, through parking, crashes and replays."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyshard.dead_letters.topic_state import TopicState
from tests.helpers import COMMITTED
from tests.property.parking_model import ParkingModel

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


def happen(model: ParkingModel, what: str, key: str, how: int) -> None:
    if what == "step":
        model.step(key, twice=how == 7)
    elif what == "unpark":
        model.parking.unpark(key)
    elif what == "ack":
        model.acknowledge()
    elif what == "write":
        model.write()
    elif what == "save":
        model.save()
    elif what == "trim":
        # What a checkpoint needs is trimmed only when the next one is stored.
        if not model.saved:
            model.trim()
    elif what == "arrive":
        model.arrive(key)
    elif what == "heal":
        model.bad.discard((key, how))
    else:
        if what == "stop":
            model.stop()
        saved = model.saved[-1 - how // 4 % len(model.saved)] if model.saved and how % 4 else None
        late = how % 3 if how % 3 < 2 else None
        model.crash(forget=how % 2 == 0, checkpoint=saved, late=late)


def finish(model: ParkingModel) -> None:
    """Let all handlers succeed, and unpark every key."""
    model.bad.clear()
    for key in KEYS:
        model.arrive(key)
    for _ in range(40 * MESSAGES):
        if all(at_rest(model, key) for key in KEYS):
            break
        for key in KEYS:
            model.parking.unpark(key)
            model.step(key)
            model.validate()
    assert all(at_rest(model, key) for key in KEYS)
    model.validate_end()


def at_rest(model: ParkingModel, key: str) -> bool:
    """Whether nothing can happen with a key any more."""
    return model.idle(key) and model.parking.state(key) is None


# A dead letter is stored twice, and a checkpoint begins at the second copy. The next process reads
# the whole topic, so its dead letter claims the first copy. The one after it uses the checkpoint.
@example(
    [("step", "a", 7), ("step", "a", 0), ("save", "a", 0), ("crash", "a", 0), ("step", "b", 0),
     ("crash", "a", 1)],
    frozenset([("a", 0), ("b", 0)]),
)  # fmt: skip
# A handled message without acknowledgement comes again, before the first dead letter of its key.
@example([("step", "a", 0)] * 4 + [("crash", "a", 0), ("step", "a", 0)], frozenset([("a", 3)]))
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=120), BAD)
def test_every_message_is_handled_in_order_or_rests(
    steps: list[tuple[str, str, int]], bad: frozenset[tuple[str, int]]
) -> None:
    model = ParkingModel(KEYS, MESSAGES, bad)
    for step in steps:
        happen(model, *step)
        model.validate()
    finish(model)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(STEP, max_size=80), BAD)
def test_a_checkpoint_equals_the_state_of_the_topic(
    steps: list[tuple[str, str, int]], bad: frozenset[tuple[str, int]]
) -> None:
    model = ParkingModel(KEYS, MESSAGES, bad)
    for step in steps:
        happen(model, *step)
    saved = json.loads(json.dumps(model.parking.parked.to_dict(COMMITTED)))
    assert TopicState.from_dict(saved).begin == model.parking.parked.begin
    model.crash(forget=False, checkpoint=saved)
    from_checkpoint = model.resting(model.parking.parked)
    model.crash(forget=False)
    assert from_checkpoint == model.resting(model.parking.parked)
