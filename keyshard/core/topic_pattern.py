"""A regular expression over the topics of one namespace."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from keyshard.core.position.entry import TopicPartition, is_system_topic
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import shown

_NAME = re.compile(r"^[-=:.\w]+$")
DEAD_LETTERS = "-DLQ"
"""End of the name of a dead-letter topic, unless its user named it."""


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics of one namespace whose name matches as a whole.

    The name is that of the topic, never of one of its partitions. System topics (``__...``),
    non-persistent ones and dead-letter topics (``...-DLQ``, of any source) never match: sources
    that consume each other's dead letters would never end.
    """

    tenant: str
    namespace: str
    regex: str
    """Of the topic's own name, without tenant and namespace."""
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            with warnings.catch_warnings():
                # Python warns of syntax that it will read differently. Pulsar does so already.
                warnings.simplefilter("error", FutureWarning)
                compiled = re.compile(self.regex)
        except (re.error, FutureWarning, OverflowError, RecursionError) as exc:
            raise ConfigError(
                f"topics_pattern has {shown(self.regex)}, which is no regular expression: {exc}. "
                "Escape characters that stand for themselves, such as \\[."
            ) from None
        object.__setattr__(self, "_compiled", compiled)

    @classmethod
    def parse(cls, text: str) -> TopicPattern:
        """Read ``regex``, ``tenant/namespace/regex`` or ``persistent://tenant/namespace/regex``.

        Raises:
            NonPersistentTopicError: It asks for non-persistent topics.
            ConfigError: It has none of the forms, or is no regular expression.
        """
        domain, scheme, rest = text.strip().partition("://")
        if not scheme:
            domain, rest = "persistent", text.strip()
        if domain == "non-persistent":
            raise NonPersistentTopicError(
                f"Pattern {text!r} is of non-persistent topics: their messages have no position, "
                "so they cannot be acknowledged on checkpoint. Use persistent topics.",
                topic=text,
            )
        if not scheme and "/" not in rest:
            rest = f"public/default/{rest}"
        parts = rest.split("/", 2)
        if (
            domain != "persistent"
            or len(parts) != 3
            or not parts[2]
            or not all(map(_NAME.fullmatch, parts[:2]))
        ):
            raise ConfigError(
                f"topics_pattern is {shown(text)}. Write 'regex', 'tenant/namespace/regex' or "
                "'persistent://tenant/namespace/regex'; tenant and namespace are plain names."
            )
        return cls(*parts)

    @property
    def text(self) -> str:
        """The full form; :meth:`parse` reads it."""
        return f"persistent://{self.tenant}/{self.namespace}/{self.regex}"

    def matches(self, topic: str) -> bool:
        """Whether a full topic name is one of these topics."""
        prefix = f"persistent://{self.tenant}/{self.namespace}/"
        name = topic.removeprefix(prefix)
        return (
            name != topic
            and not is_system_topic(name)
            and not name.endswith(DEAD_LETTERS)
            and TopicPartition.parse(name).partition < 0
            and self._compiled.fullmatch(name) is not None
        )
