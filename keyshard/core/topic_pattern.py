"""A regular expression over the topics of one namespace."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from keyshard.core.position.entry import TopicPartition, is_system_topic
from keyshard.core.topic_segments import SCALABLE, UNESCAPED
from keyshard.errors import ConfigError, NonPersistentTopicError
from keyshard.redaction import shown

_NAME = re.compile(r"^[-=:.\w]+$")
_LITERAL = re.compile(r"[-\w]*(?![*?{])", re.ASCII)
"""The characters that a regular expression begins with and that stand for themselves."""
_SCALABLE_NAME = re.compile(rf"[-.~\w{re.escape(UNESCAPED)}]+", re.ASCII)
PERSISTENT = "persistent://"
"""Beginning of the name of a persistent topic."""
DEAD_LETTERS = "-DLQ"
"""Suffix of the default names of dead-letter topics."""


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Topics of one namespace whose whole name matches: persistent topics, or scalable topics.

    The name is that of the topic, without a partition suffix. Three kinds never match: system
    topics (``__...``), non-persistent topics, and dead-letter topics (``...-DLQ``) of any source.
    Otherwise, sources could consume each other's dead letters in an endless loop.
    """

    tenant: str
    namespace: str
    regex: str
    """Matches the topic's own name, without tenant and namespace."""
    scheme: str = PERSISTENT
    """Kind of the topics, as their names begin."""
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            with warnings.catch_warnings():
                # Python warns of set syntax whose meaning will change. Pulsar's regular expressions
                # already have the new meaning.
                warnings.simplefilter("error", FutureWarning)
                compiled = re.compile(self.regex)
        except (re.error, FutureWarning, OverflowError, RecursionError) as exc:
            raise ConfigError(
                f"topics_pattern contains {shown(self.regex)}, which is not a regular "
                f"expression: {exc}.",
                "Escape literal characters, such as \\[.",
            ) from None
        object.__setattr__(self, "_compiled", compiled)

    @classmethod
    def parse(cls, text: str) -> TopicPattern:
        """Parse a pattern of persistent topics, or ``topic://tenant/namespace/regex``.

        The former is ``regex``, ``tenant/namespace/regex`` or
        ``persistent://tenant/namespace/regex``.

        Raises:
            NonPersistentTopicError: The pattern asks for non-persistent topics.
            ConfigError: The text has none of these forms, or is no regular expression.
        """
        domain, scheme, rest = text.strip().partition("://")
        if not scheme:
            domain, rest = "persistent", text.strip()
        if domain == "non-persistent":
            raise NonPersistentTopicError(
                f"Pattern {text!r} matches non-persistent topics. Their messages have no position "
                "of their own, so they cannot be acknowledged after a checkpoint.",
                "Use persistent topics.",
                topic=text,
            )
        if not scheme and "/" not in rest:
            rest = f"public/default/{rest}"
        parts = rest.split("/", 2)
        if (
            f"{domain}://" not in (PERSISTENT, SCALABLE)
            or len(parts) != 3
            or not parts[2]
            or not all(map(_NAME.fullmatch, parts[:2]))
        ):
            raise ConfigError(
                f"topics_pattern is {shown(text)}.",
                "Write 'regex', 'tenant/namespace/regex' or "
                "'persistent://tenant/namespace/regex', with plain names of tenant and namespace. "
                "For scalable topics, write 'topic://tenant/namespace/regex'.",
            )
        tenant, namespace, regex = parts
        return cls(tenant, namespace, regex, f"{domain}://")

    @property
    def is_scalable(self) -> bool:
        """Whether it matches scalable topics, and no others."""
        return self.scheme == SCALABLE

    @property
    def text(self) -> str:
        """The full form; :meth:`parse` accepts it."""
        return f"{self._base}{self.regex}"

    @property
    def _base(self) -> str:
        return f"{self.scheme}{self.tenant}/{self.namespace}/"

    @property
    def prefix(self) -> str:
        """The beginning that all matching names have; at least that of the namespace."""
        found = None if "|" in self.regex else _LITERAL.match(self.regex)
        literal = "" if found is None else found.group()
        return f"{self._base}{literal}"

    def matches(self, topic: str) -> bool:
        """Return whether a full topic name matches."""
        name = topic.removeprefix(self._base)
        return (
            name != topic
            # 5.0.1 also lists other names, but registers no subscription of these topics.
            and not (self.is_scalable and _SCALABLE_NAME.fullmatch(name) is None)
            and not is_system_topic(name)
            and not name.endswith(DEAD_LETTERS)
            and TopicPartition.parse(name).partition < 0
            and self._compiled.fullmatch(name) is not None
        )
