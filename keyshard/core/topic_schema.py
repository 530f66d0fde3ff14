"""The schema of a topic, as the broker keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """One version of the schema of a topic."""

    type: str
    """Pulsar's name: ``AVRO``, ``JSON``, ``INT64``, ..."""
    definition: bytes = b""
    """Definition in the format of the type; empty for a primitive."""
    version: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)

    def says_the_same(self, other: TopicSchema) -> bool:
        """Return whether values of both schemas are decoded in the same way."""
        return (self.type, self.definition, dict(self.properties)) == (
            other.type,
            other.definition,
            dict(other.properties),
        )
