"""The schema of a topic, as the broker keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """One version of the schema of a topic."""

    type: str
    """``AVRO``, ``JSON``, ``INT64``, ...: Pulsar's name."""
    definition: bytes = b""
    """What describes it, by its type; empty for a primitive."""
    version: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)

    def says_the_same(self, other: TopicSchema) -> bool:
        """Whether values of both are decoded alike."""
        return (self.type, self.definition, dict(self.properties)) == (
            other.type,
            other.definition,
            dict(other.properties),
        )
