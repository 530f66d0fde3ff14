"""Finds topic partitions whose entries the broker does not deliver.

Two rules, over the broker's statistics of a subscription (``GET .../stats``). Both need that
``msgOutCounter`` has not changed for a while:

- The replay queue is at the look-ahead limit (PIP-379): the broker reads no new entry, whichever
  range could take it.
- Entries are stored that do not wait for their time, none is unacknowledged at a consumer, and
  every slot has a consumer with permits. Nothing keeps the broker from delivering them, except an
  open transaction, a dispatch rate or a fault of the broker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keyshard.core import health
from keyshard.core.health import HeldUp, StallKind
from keyshard.core.position.entry import TopicPartition
from keyshard.core.subscription_state import BrokerLimits, SubscriptionState

UNDELIVERED_S = 90.0
"""Time after which entries that every range asks for count as undelivered, seconds. It is longer
than a transaction lasts by default, 60 s, and than a usual period of a dispatch rate."""


@dataclass(frozen=True, slots=True)
class _Still:
    """A topic partition of which nothing has been delivered since a look."""

    kind: StallKind
    delivered: int
    since_s: float


class Deliveries:
    """Follows what the broker delivers. Time is an argument, from any monotonic clock."""

    def __init__(self) -> None:
        self._still: dict[TopicPartition, _Still] = {}

    def look(
        self,
        now_s: float,
        states: Mapping[TopicPartition, SubscriptionState],
        limits: BrokerLimits,
        unknown: Collection[TopicPartition] = (),
    ) -> list[HeldUp]:
        """Take the states of all topic partitions; return those held up, the longest first.

        Args:
            now_s: Time of the clock.
            states: The subscription of the source on each topic partition.
            limits: Limits of the broker.
            unknown: Topic partitions whose state is unknown. They are not held up now. If the next
                state has the same count of deliveries, their time goes on.
        """
        still = {where: self._still[where] for where in unknown if where in self._still}
        for where, state in states.items():
            kind = _hindered(state, limits)
            if kind is None:
                continue
            known = self._still.get(where)
            if known is None or (known.kind, known.delivered) != (kind, state.delivered):
                known = _Still(kind, state.delivered, now_s)
            still[where] = known
        self._still = still
        after_s = {StallKind.LOOK_AHEAD: health.STALL_S, StallKind.UNDELIVERED: UNDELIVERED_S}
        found = [
            HeldUp(known.kind, known.since_s, _reason(known.kind, where, states[where], limits))
            for where, known in still.items()
            if where in states and now_s - known.since_s >= after_s[known.kind]
        ]
        return sorted(found, key=lambda one: one.since_s)


def _hindered(state: SubscriptionState, limits: BrokerLimits) -> StallKind | None:
    """Return why the broker may deliver nothing at this moment; ``None`` if there is no sign."""
    if 0 < limits.replay(len(state.consumers)) <= state.in_replay:
        return StallKind.LOOK_AHEAD
    due = state.backlog > state.delayed and not 0 < limits.delayed <= state.delayed
    if not due or state.unacknowledged:
        return None
    asked = all(consumer.permits > 0 for consumer in state.consumers) and not state.gaps
    return StallKind.UNDELIVERED if asked else None


def _reason(
    kind: StallKind, where: TopicPartition, state: SubscriptionState, limits: BrokerLimits
) -> str:
    if kind is StallKind.LOOK_AHEAD:
        return (
            f"the broker reads no new entries of {where}: {state.in_replay} entries wait for "
            f"ranges that do not receive them, and its look-ahead limit is "
            f"{limits.replay(len(state.consumers))}"
        )
    return (
        f"the broker delivers none of {state.backlog - state.delayed} entries of {where}, though "
        "every range asks for messages"
    )
