"""Filters of dead letters: kinds of errors, conditions and their combinations, plans."""

from __future__ import annotations

import math
from typing import Any

import pytest

from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.dead_letter_filter import DeadLetterFilter, KeyPlan, plan_of, replay_of
from keyshard.core.position.entry import EntryId
from keyshard.errors import ConfigError
from tests.support.dead_letter_topic import dead_letter

PARKED, REJECTED = DeadLetterKind.PARKED, DeadLetterKind.REJECTED


@pytest.mark.parametrize(
    ("kind", "attempts", "error", "is_kind"),
    [
        (PARKED, 3, "ValueError: no: such", "ValueError"),
        (PARKED, 1, "retry after 5 s", "other"),
        (PARKED, 1, "RetryLater with a time that is not valid", "other"),
        (PARKED, 1, " (its text cannot be read: E): x", "other"),
        (PARKED, 0, "its key is parked behind message 1:2:0", "waiting"),
        (DeadLetterKind.DEAD_LETTER, 2, "KeyError: 'k'", "KeyError"),
        (REJECTED, 1, "ValueError: given as the reason", "rejected"),
        (REJECTED, 0, "it has no key", "rejected"),
    ],
)
def test_an_error_kind_is_a_class_name_or_waiting_rejected_or_other(
    kind: DeadLetterKind, attempts: int, error: str, is_kind: str
) -> None:
    message = dead_letter(0).message
    assert DeadLetter(message, "s", kind, attempts, error).error_kind == is_kind


@pytest.mark.parametrize(
    "given",
    [
        {"key": 1}, {"topic": b"t"}, {"error": 3}, {"older_than_s": -1}, {"older_than_s": True},
        {"newer_than_s": math.nan}, {"newer_than_s": "2h"}, {"rejected": 1}, {"topic": "a/b"},
    ],
)  # fmt: skip
def test_wrong_conditions_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        DeadLetterFilter(**given)


def test_a_scalable_topic_means_all_of_its_segments() -> None:
    base = "segment://public/default/orders"
    segments = (f"{base}/0000-7fff-3", f"{base}/8000-ffff-4")
    others = ("segment://public/default/other/0000-7fff-3", "persistent://public/default/orders")

    def found(topic: str) -> list[str]:
        wanted = DeadLetterFilter(topic=topic)
        return [one for one in (*segments, *others) if wanted.matches_place("k", one)]

    assert found("topic://public/default/orders") == list(segments)
    assert found(segments[0]) == [segments[0]]
    assert found("orders") == ["persistent://public/default/orders"]
    with pytest.raises(ConfigError, match="is not the name of a scalable topic"):
        DeadLetterFilter(topic="topic://orders")


def test_a_replay_or_discard_needs_either_a_condition_or_all() -> None:
    for wanted in (DeadLetterFilter("k"), DeadLetterFilter(rejected=True)):
        assert wanted.checked(all=False) is wanted
    for wanted in (DeadLetterFilter(), DeadLetterFilter(rejected=True)):
        assert wanted.checked(all=True) is wanted
    for wanted, every in (
        (DeadLetterFilter(), False), (DeadLetterFilter("k"), True),
        (DeadLetterFilter(older_than_s=0), True),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="select"):
            wanted.checked(all=every)
    with pytest.raises(ConfigError, match="all is 1"):
        DeadLetterFilter().checked(all=1)


def test_an_age_is_strictly_older_or_newer() -> None:
    one = dead_letter(0)
    for age_ms, older, newer in ((1_999, False, True), (2_000, False, False), (2_001, True, False)):
        assert DeadLetterFilter(older_than_s=2).matches(one, age_ms) is older
        assert DeadLetterFilter(newer_than_s=2).matches(one, age_ms) is newer


def test_a_plan_counts_all_keys_and_names_the_first() -> None:
    plan = plan_of([KeyPlan(f"k{number}", 3, 1) for number in range(150)])
    assert (plan.keys, plan.dead_letters, plan.matching) == (150, 450, 150)
    assert [one.key for one in plan.first] == [f"k{number}" for number in range(100)]


def test_a_replay_leaves_out_keys_whose_dead_letters_are_done() -> None:
    at = [EntryId(1, 1)]
    assert replay_of({"a": at, "b": at, "c": []}, {"a": 4, "c": 2}) == [KeyPlan("a", 4, 1)]
