"""Limits of the in-memory broker.

Private to :mod:`keyshard.broker.memory`, which documents the package and re-exports public names.
"""

from __future__ import annotations

from dataclasses import dataclass

from keyshard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How many entries of one topic partition may wait for their owner before all ranges stop."""

    per_consumer: int = 2_000
    """Entries per connected consumer."""
    per_subscription: int = 20_000
    """Maximum entries, whatever the number of consumers."""
    delayed: int = 50_000
    """Entries that may wait for their time before all ranges stop, if their times ascend: Pulsar's
    ``delayedDeliveryFixedDelayDetectionLookahead``."""

    def __post_init__(self) -> None:
        if min(self.per_consumer, self.per_subscription, self.delayed) < 1:
            raise ConfigError(f"{self} has a limit below 1.", "Use large limits instead of none.")

    def limit(self, consumers: int) -> int:
        """Return the limit for a number of consumers."""
        return min(self.per_consumer * consumers, self.per_subscription)


@dataclass(frozen=True, slots=True)
class UnackedLimits:
    """How many messages of one topic partition may be unacknowledged; 0 for no limit."""

    per_consumer: int = 50_000
    """At this limit a consumer gets no more messages. At half of it, its permits count again."""
    per_subscription: int = 200_000
    """At this limit no consumer gets new messages, until fewer than half are unacknowledged."""
