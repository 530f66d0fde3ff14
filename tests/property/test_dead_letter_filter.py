"""Filters of dead letters: conditions intersect, and no command changes the order of a key."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.dead_letter_filter import DeadLetterFilter, replay_of
from keyshard.core.message import MessageId
from keyshard.core.position.entry import EntryId
from keyshard.dead_letters.store import DeadLetterStore
from tests.helpers import present
from tests.support.dead_letter_topic import DeadLetterTopic, dead_letter, replay

EXAMPLES, STORED_EXAMPLES = 300, 40
KEYS, TOPICS = "abc", ("t0", "t1")
ERRORS = {"ValueError": "ValueError: no", "KeyError": "KeyError: 'k'", "waiting": "behind"}
FULL = "persistent://public/default/"


class Drawn(NamedTuple):
    """A dead letter; the number is its place in the order of its originals."""

    key: str
    topic: str
    error: str
    kind: DeadLetterKind
    age_ms: int

    def made(self, number: int) -> DeadLetter:
        one = dead_letter(number, self.key)
        message = one.message._replace(
            topic=FULL + self.topic, message_id=MessageId(7, number, 0), partition=-1
        )
        attempts = 0 if self.error == "waiting" else 2
        return DeadLetter(message, "unit", self.kind, attempts, ERRORS[self.error])


DRAWN = st.builds(
    Drawn,
    st.sampled_from(KEYS),
    st.sampled_from(TOPICS),
    st.sampled_from([*ERRORS]),
    st.sampled_from([DeadLetterKind.PARKED] * 4 + [*DeadLetterKind]),
    st.integers(0, 5_000),
)
SOME_OF_A_KEY = [Drawn("a", "t0", error, DeadLetterKind.PARKED, 0) for error in ERRORS]
CONDITIONS = st.fixed_dictionaries({}, optional={
    "key": st.sampled_from(KEYS),
    "topic": st.sampled_from(TOPICS),
    "error": st.sampled_from([*ERRORS, "rejected", "OSError"]),
    "older_than_s": st.sampled_from([0, 1, 2.5, 60]),
    "newer_than_s": st.sampled_from([0, 1, 2.5, 60]),
    "rejected": st.booleans(),
})  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(DRAWN, max_size=12), CONDITIONS)
def test_combined_conditions_select_the_common_dead_letters(
    drawn: list[Drawn], conditions: dict[str, Any]
) -> None:
    made = [(one.made(number), one.age_ms) for number, one in enumerate(drawn)]

    def selected(given: dict[str, Any]) -> set[int]:
        wanted = DeadLetterFilter(**given)
        assert set(wanted.given()) == {name for name, value in given.items() if value is not False}
        return {number for number, one in enumerate(made) if wanted.matches(*one)}

    rejected = {"rejected": conditions.get("rejected", False)}
    each = [
        selected(rejected | {one.name: conditions[one.name]})
        for one in fields(DeadLetterFilter)
        if one.name in conditions
    ]
    assert selected(conditions) == selected(rejected).intersection(*each)
    assert selected({"rejected": False}) | selected({"rejected": True}) == set(range(len(made)))
    assert not selected({"rejected": False}) & selected({"rejected": True})


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(DRAWN, max_size=12), CONDITIONS)
def test_a_replay_takes_each_key_as_a_whole_or_not_at_all(
    drawn: list[Drawn], conditions: dict[str, Any]
) -> None:
    wanted = DeadLetterFilter(**(conditions | {"rejected": False}))
    matching: dict[str, list[EntryId]] = {}
    resting: dict[str, int] = {}
    for number, one in enumerate(drawn):
        if one.kind is DeadLetterKind.PARKED:
            resting[one.key] = resting.get(one.key, 0) + 1
        if wanted.matches(one.made(number), one.age_ms):
            matching.setdefault(one.key, []).append(EntryId(1, number))
    for plan in (plans := replay_of(matching, resting)):
        assert plan.key is not None
        assert plan.dead_letters == resting[plan.key]
        assert 0 < plan.matching <= plan.dead_letters
    assert {plan.key for plan in plans} == set(matching)


@settings(max_examples=STORED_EXAMPLES, deadline=None)
@given(st.lists(DRAWN, max_size=10), CONDITIONS, st.booleans())
@example(drawn=SOME_OF_A_KEY, conditions={"error": "KeyError"}, dies=False)
def test_a_discard_removes_the_listed_dead_letters_and_the_others_keep_their_order(
    drawn: list[Drawn], conditions: dict[str, Any], dies: bool
) -> None:
    conditions = {name: value for name, value in conditions.items() if not name.endswith("_s")}
    wanted = DeadLetterFilter(**(conditions | {"rejected": False}))
    dlq = DeadLetterTopic()
    dead_letters = dlq.open()
    made = [one.made(number) for number, one in enumerate(drawn)]
    for one in made:
        dead_letters.send(one)
    expected = [number for number, one in enumerate(made) if wanted.matches(one, 0)]
    assert listed(dead_letters, wanted) == expected
    matching = dead_letters.browser.matching(wanted)
    assert sum(map(len, matching.values())) == len(expected)
    assert sum(one.dead_letters for one in dead_letters.discard(matching)) == len(expected)
    if dies:
        dlq.die()
        dead_letters = dlq.open()
    dead_letters.keys.parking.validate()
    assert listed(dead_letters, wanted) == []
    parked = [
        (present(one.key), number)
        for number, one in enumerate(made)
        if one.kind is DeadLetterKind.PARKED and number not in expected
    ]
    assert listed(dead_letters, DeadLetterFilter()) == [number for _, number in parked]
    for key in {key for key, _ in parked}:
        assert replay(dead_letters, key) == [number for of, number in parked if of == key]
    dlq.close()


def listed(dead_letters: DeadLetterStore, wanted: DeadLetterFilter) -> list[int]:
    return [int(present(one.message.value)) for one in dead_letters.browser.all(wanted)]
