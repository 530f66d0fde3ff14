"""Finds topic partitions whose entries the broker does not deliver.

There are two rules, over the broker's statistics of a subscription (``GET .../stats``). Each
applies only if ``msgOutCounter`` has not changed for a while:

- The replay queue is at the look-ahead limit (PIP-379), so the broker reads no new entry for any
  range. The rule applies only if a range asks for messages and has none.
- Stored entries are due, no consumer has an unacknowledged message, and every slot has a consumer
  with permits. Only an open transaction, a dispatch rate or a fault of the broker can then keep
  the broker from delivering them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keyshard.core import range_watchdog
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import REMIND_S, StallKind
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState

UNDELIVERED_S = 90.0
"""Time after which entries that every range asks for count as undelivered, seconds. It is longer
than a transaction lasts by default, 60 s, and than a usual period of a dispatch rate."""


@dataclass(frozen=True, slots=True)
class PartitionStall:
    """A topic partition of which the broker delivers nothing."""

    topic_partition: TopicPartition
    since_s: float
    """Time of the first look at which it was so, by the clock of the caller."""
    kind: StallKind
    reason: str

    @property
    def name(self) -> str:
        """Name of the topic partition."""
        return str(self.topic_partition)


@dataclass(frozen=True, slots=True)
class _Still:
    """A topic partition without a delivery since the look at ``since_s``."""

    kind: StallKind
    delivered: int | None
    since_s: float


class PartitionWatchdog:
    """Follows the broker's deliveries. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._still: dict[TopicPartition, _Still] = {}
        self._named_s: dict[TopicPartition, float] = {}
        self.stalls: dict[TopicPartition, PartitionStall] = {}
        """Topic partitions that are stalled now. Replaced as a whole by each look."""

    def look(
        self,
        now_s: float,
        states: Mapping[TopicPartition, SubscriptionState],
        limits: BrokerLimits,
        asked: Collection[TopicPartition],
        unknown: Collection[TopicPartition] = (),
    ) -> list[PartitionStall]:
        """Take the states of all topic partitions; return the stalls to report, the longest first.

        A stall is reported when it is found, and each topic partition at most every ``REMIND_S``.

        Args:
            now_s: Time of the clock.
            states: The subscription of the source on each topic partition.
            limits: Limits of the broker.
            asked: Topic partitions of which a range asks for messages and holds none.
            unknown: Topic partitions whose state is unknown. They are not stalled now. If the next
                known state has the same count of deliveries, the time without a delivery includes
                the time in which the state was unknown.
        """
        still = {where: self._still[where] for where in unknown if where in self._still}
        for where, state in states.items():
            kind = _hindered(state, limits, asked=where in asked)
            if kind is None:
                continue
            known = self._still.get(where)
            if known is None or (known.kind, known.delivered) != (kind, state.delivered):
                known = _Still(kind, state.delivered, now_s)
            still[where] = known
        self._still = still
        after_s = {
            StallKind.LOOK_AHEAD: range_watchdog.STALL_S,
            StallKind.UNDELIVERED: UNDELIVERED_S,
        }
        self.stalls = {
            where: PartitionStall(
                where, known.since_s, known.kind, _reason(known.kind, states[where], limits)
            )
            for where, known in still.items()
            if where in states and now_s - known.since_s >= after_s[known.kind]
        }
        self._named_s = {
            where: named_s for where, named_s in self._named_s.items() if now_s - named_s < REMIND_S
        }
        due = [stall for where, stall in self.stalls.items() if where not in self._named_s]
        self._named_s |= dict.fromkeys((stall.topic_partition for stall in due), now_s)
        return sorted(due, key=lambda one: one.since_s)


def _hindered(state: SubscriptionState, limits: BrokerLimits, *, asked: bool) -> StallKind | None:
    """Return why the broker may deliver nothing at this moment; ``None`` if there is no sign."""
    if state.delivered is None:
        return None  # of a segment, the broker does not report it
    if 0 < limits.replay(len(state.consumers)) <= (state.in_replay or 0):
        return StallKind.LOOK_AHEAD if asked else None
    delayed = state.delayed or 0
    due = state.backlog > delayed and not 0 < limits.delayed <= delayed
    if not due or state.unacknowledged:
        return None
    all_ask = all(consumer.permits > 0 for consumer in state.consumers) and not state.gaps
    return StallKind.UNDELIVERED if all_ask else None


def _reason(kind: StallKind, state: SubscriptionState, limits: BrokerLimits) -> str:
    if kind is StallKind.LOOK_AHEAD:
        return (
            f"the broker reads no new entries: {state.in_replay} entries wait for ranges that do "
            f"not receive them, and its look-ahead limit is {limits.replay(len(state.consumers))}"
        )
    due = state.backlog - (state.delayed or 0)
    return f"the broker delivers none of {due} entries, though every range asks for messages"
