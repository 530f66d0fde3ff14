"""Limits of the in-memory broker, with the values of a Pulsar 4.0 broker.

Private to :mod:`keyshard.broker.memory`, which documents the whole and re-exports the public names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How many entries of one topic partition may wait for their owner before all ranges stop."""

    per_consumer: int = 2_000
    """Entries for each connected consumer."""
    per_subscription: int = 20_000
    """Entries at most, whatever the number of consumers."""

    def limit(self, consumers: int) -> int:
        """Entries allowed with this many consumers."""
        return min(self.per_consumer * consumers, self.per_subscription)


@dataclass(frozen=True, slots=True)
class UnackedLimits:
    """How many messages of one topic partition may be unacknowledged; 0 for no limit."""

    per_consumer: int = 50_000
    """At this many a consumer gets no more; what it asks for then counts again from the half on."""
    per_subscription: int = 200_000
    """At this many nobody gets anything new; it goes on below the half."""
