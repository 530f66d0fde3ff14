"""Which letters somebody means who lets keys out or gives letters up."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from keyshard.core.position.entry import full_topic_name
from keyshard.errors import ConfigError
from keyshard.redaction import shown


@dataclass(frozen=True, slots=True)
class Selection:
    """One key, all, or those of a topic and of an age.

    Raises:
        ConfigError: Nothing is selected, or a key and something else.
    """

    key: str | None = None
    all: bool = False
    topic: str | None = None
    """Only keys with letters of messages of this topic."""
    older_than_s: float | None = None
    """Only keys that have been parked for longer, seconds."""

    def __post_init__(self) -> None:
        if self.key is not None and not isinstance(self.key, str):
            raise ConfigError(
                f"key is {shown(self.key)}; give the routing key of messages, a text."
            )
        if type(self.all) is not bool:
            raise ConfigError(f"all is {shown(self.all)}; it must be true or false.")
        others = self.topic is not None or self.older_than_s is not None
        if (self.key is not None) + self.all + others != 1:
            raise ConfigError(
                f"key is {shown(self.key)}, all is {self.all}. Name one key, or all, or a topic "
                "and an age of those that are meant."
            )
        if self.topic is not None:
            if not isinstance(self.topic, str):
                raise ConfigError(f"topic is {shown(self.topic)}; give the name of a topic.")
            object.__setattr__(self, "topic", full_topic_name(self.topic))
        age = self.older_than_s
        if age is not None and (type(age) not in (int, float) or not 0 <= age < math.inf):
            raise ConfigError(f"older_than_s is {shown(age)}; give seconds, at least 0.")

    @classmethod
    def for_discard(
        cls,
        key: str | None,
        all: bool,  # noqa: A002 - named as on the command line
        topic: str | None,
        older_than_s: float | None,
        *,
        rejected: bool,
    ) -> Selection:
        """The same, except that ``rejected`` alone selects every rejected letter."""
        alone = key is None and all is False and topic is None and older_than_s is None
        return cls(key, True if rejected and alone else all, topic, older_than_s)

    def selects(self, key: str | None, topics: Collection[str], age_ms: int) -> bool:
        """Whether letters of a key are meant."""
        if self.key is not None:
            return key == self.key
        return (self.topic is None or self.topic in topics) and (
            self.older_than_s is None or age_ms > self.older_than_s * 1000
        )
