"""What the broker's statistics say of one subscription of one topic partition, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from keyshard.core.ring.hash_range import HashRange, gaps

KEY_SHARED = "Key_Shared"
"""Type of a subscription that keyshard can use."""


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits of a broker, with the values of Pulsar 4.0; 0 means no limit."""

    unacked_per_consumer: int = 50_000
    """Messages that one consumer may leave unacknowledged before it gets no more."""
    unacked_per_subscription: int = 200_000
    """Messages of one topic partition before nobody gets anything new."""
    replay_per_consumer: int = 2_000
    """Entries that may wait for their owner for each connected consumer, in one topic partition."""
    replay_per_subscription: int = 20_000
    """Such entries at most, whatever the number of consumers."""
    ack_holes: int = 10_000
    """Stretches of acknowledged entries that a cursor keeps; what is beyond is forgotten when a
    broker restarts, and comes again."""
    message_bytes: int = 5 * 1024 * 1024
    """Largest message, bytes."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> BrokerLimits:
        """Read the broker's configuration; what it does not tell has the default."""
        told = {
            field: int(settings[name])
            for field, name in _SETTINGS.items()
            if str(settings.get(name, "")).isdigit()
        }
        return cls(**told)

    def with_unacknowledged(self, per_consumer: int, per_subscription: int) -> BrokerLimits:
        """The same with the limits on unacknowledged messages that a topic has."""
        return replace(
            self,
            unacked_per_consumer=per_consumer,
            unacked_per_subscription=per_subscription,
        )

    def replay(self, consumers: int) -> int:
        """Entries of one topic partition that may wait for their owner; then all ranges stop."""
        return min(self.replay_per_consumer * consumers, self.replay_per_subscription)


_SETTINGS = {
    "unacked_per_consumer": "maxUnackedMessagesPerConsumer",
    "unacked_per_subscription": "maxUnackedMessagesPerSubscription",
    "replay_per_consumer": "keySharedLookAheadMsgInReplayThresholdPerConsumer",
    "replay_per_subscription": "keySharedLookAheadMsgInReplayThresholdPerSubscription",
    "ack_holes": "managedLedgerMaxUnackedRangesToPersist",
    "message_bytes": "maxMessageSize",
}


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """One connected consumer."""

    name: str
    address: str
    ranges: tuple[HashRange, ...]
    unacknowledged: int = 0
    """Messages."""
    blocked: bool = False
    """Whether it has as many unacknowledged messages as it may have."""


@dataclass(frozen=True, slots=True)
class SubscriptionState:
    """One subscription of one topic partition, as of one moment."""

    kind: str
    """``Key_Shared``, ``Shared``, ``Exclusive``, ``Failover``, or what the broker says;
    empty where it does not know: nobody was connected since it loaded the topic."""
    sticky: bool
    """Whether the consumers name their ranges themselves."""
    out_of_order: bool
    """Whether its consumers allow messages of one key to overtake each other."""
    durable: bool
    """Whether it holds data back; that of a Reader does not."""
    backlog: int
    """Entries that the broker holds unacknowledged."""
    in_replay: int
    """Entries that wait for their owner."""
    ack_holes: int
    """Stretches of acknowledged entries behind one that is not."""
    blocked: bool
    """Whether it has as many unacknowledged messages as it may have."""
    consumers: tuple[ConsumerState, ...]

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> SubscriptionState:
        """Read the admin interface's statistics of a subscription.

        Raises:
            ValueError: The broker writes things otherwise.
        """
        try:
            return cls(
                # A subscription without consumers since the broker loaded the topic is "None".
                kind="" if stats.get("type") in (None, "None") else str(stats["type"]),
                sticky=stats.get("keySharedMode") == "STICKY",
                out_of_order=bool(stats.get("allowOutOfOrderDelivery")),
                durable=bool(stats.get("isDurable", True)),
                backlog=int(stats["msgBacklog"]),
                in_replay=int(stats.get("msgInReplay", 0)),
                ack_holes=int(stats.get("nonContiguousDeletedMessagesRanges", 0)),
                blocked=bool(stats.get("blockedSubscriptionOnUnackedMsgs")),
                consumers=tuple(map(_consumer, stats.get("consumers", ()))),
            )
        except (AttributeError, KeyError, OverflowError, TypeError) as exc:
            raise ValueError(f"statistics of a subscription lack something: {exc!r}") from exc

    @property
    def gaps(self) -> tuple[HashRange, ...]:
        """Parts of the ring that no connected consumer owns."""
        return gaps(owned for consumer in self.consumers for owned in consumer.ranges)


def _consumer(stats: Mapping[str, Any]) -> ConsumerState:
    arrays = stats.get("keyHashRangeArrays")
    if arrays is None:
        # Brokers before 4.0 write each range as the text "[0, 6553]".
        texts = stats.get("keyHashRanges") or ()
        arrays = [[int(number) for number in text.strip("[]").split(",")] for text in texts]
    return ConsumerState(
        str(stats.get("consumerName", "")),
        str(stats.get("address", "?")),
        tuple(HashRange(int(start), int(end)) for start, end in arrays),
        int(stats.get("unackedMessages", 0)),
        bool(stats.get("blockedConsumerOnUnackedMsgs")),
    )
