"""Filters of dead letters, and the effect of a replay or a discard on the dead letters of a key.

A discard takes exactly the dead letters that match: the others of the key keep their order. A
replay must hand out the dead letters of a key in order, and all of them before newer messages of
the key. So if one dead letter of a key matches, a replay takes all of the key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.position.entry import EntryId
from keyshard.core.topic_segments import received_topic_name, scalable_topic_of
from keyshard.errors import ConfigError
from keyshard.redaction import shown

SHOWN_KEYS_MAX = 100
"""Most keys that a plan names; the counts are of all."""


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Conditions; a dead letter matches if it fulfils each given one.

    Raises:
        ConfigError: A value has the wrong type, or is outside its limits.
    """

    key: str | None = None
    """Routing key of the original."""
    topic: str | None = None
    """Topic of the original; a scalable topic, or one of its segments."""
    error: str | None = None
    """Kind of its error, as :attr:`~keyshard.core.dead_letter.DeadLetter.error_kind` has it."""
    older_than_s: float | None = None
    """It was written longer ago than this, seconds."""
    newer_than_s: float | None = None
    """It was written more recently than this, seconds."""
    rejected: bool = False
    """It parks no key: it was rejected, or stored without its key waiting. Otherwise its key is
    parked."""

    def __post_init__(self) -> None:
        for name, wanted in (
            ("key", "the routing key of messages"),
            ("topic", "the name of a topic"),
            ("error", "the kind of an error, such as ValueError"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name} is {shown(value)}.", f"Write {wanted}, a text.")
        for name in ("older_than_s", "newer_than_s"):
            age = getattr(self, name)
            if age is not None and (type(age) not in (int, float) or not 0 <= age < math.inf):
                raise ConfigError(
                    f"{name} is {shown(age)}.", "Write a number of seconds, 0 or more."
                )
        if type(self.rejected) is not bool:
            raise ConfigError(f"rejected is {shown(self.rejected)}; it must be true or false.")
        if self.topic is not None:
            object.__setattr__(self, "topic", received_topic_name(self.topic))

    def checked(self, all: object) -> DeadLetterFilter:  # noqa: A002 - named as on the command line
        """Check that the filter of a replay or discard selects dead letters, and return it.

        Args:
            all: Whether every dead letter is meant.

        Raises:
            ConfigError: Neither a condition nor ``all`` is given, or ``all`` and a condition other
                than ``rejected``.
        """
        if type(all) is not bool:
            raise ConfigError(f"all is {shown(all)}; it must be true or false.")
        given = list(self.given())
        if all and given not in ([], ["rejected"]):
            raise ConfigError(
                f"all selects every dead letter, and there are conditions: {', '.join(given)}.",
                "Remove all, or the conditions.",
            )
        if not all and not given:
            raise ConfigError(
                "Nothing selects dead letters.",
                "Select them by key, topic, error or age; or select all.",
            )
        return self

    def given(self) -> dict[str, Any]:
        """Return the given conditions by their names."""
        each = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: value for name, value in each.items() if value is not None and value is not False
        }

    @property
    def is_of_a_key(self) -> bool:
        """Whether a key is the only condition."""
        return self.key is not None and self == DeadLetterFilter(self.key)

    @property
    def reads(self) -> bool:
        """Whether dead letters must be read: only key and topic are known without reading."""
        ages = (self.older_than_s, self.newer_than_s)
        return self.rejected or self.error is not None or ages != (None, None)

    def matches_place(self, key: str | None, topic: str) -> bool:
        """Whether key and topic of an original match."""
        return self.key in (None, key) and self.topic in (None, topic, scalable_topic_of(topic))

    def matches(self, dead_letter: DeadLetter, age_ms: int) -> bool:
        """Whether a dead letter matches.

        Args:
            dead_letter: The dead letter.
            age_ms: Time since it was written, milliseconds.
        """
        return (
            self.matches_place(dead_letter.key, dead_letter.message.topic)
            and self.rejected == (dead_letter.kind is not DeadLetterKind.PARKED)
            and self.error in (None, dead_letter.error_kind)
            and (self.older_than_s is None or age_ms > self.older_than_s * 1000)
            and (self.newer_than_s is None or age_ms < self.newer_than_s * 1000)
        )


# -- Effect of a command ---------------------------------------------------------------------------


class KeyPlan(NamedTuple):
    """Effect of a command on the dead letters of one key."""

    key: str | None
    dead_letters: int
    """Number of dead letters that it replays or discards."""
    matching: int
    """Number of dead letters that match the filter."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Effect of a replay or a discard: the expected one of a dry run, otherwise the actual one."""

    keys: int
    """Number of keys."""
    dead_letters: int
    """Number of dead letters that it replays or discards."""
    matching: int
    """Number of dead letters that match the filter."""
    first: tuple[KeyPlan, ...]
    """The first keys."""


def plan_of(each: Collection[KeyPlan]) -> Plan:
    """Return the plan of some keys."""
    return Plan(
        len(each),
        sum(one.dead_letters for one in each),
        sum(one.matching for one in each),
        tuple(one for one, _ in zip(each, range(SHOWN_KEYS_MAX), strict=False)),
    )


def replay_of(
    matching: Mapping[str, Collection[EntryId]], resting: Mapping[str, int]
) -> list[KeyPlan]:
    """Return the effect of a replay: it takes every resting dead letter of each matching key.

    Args:
        matching: Positions of matching dead letters, by key.
        resting: Numbers of resting dead letters, by key.
    """
    return [
        KeyPlan(key, resting[key], len(found))
        for key, found in matching.items()
        if found and resting.get(key)
    ]
