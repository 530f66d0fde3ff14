"""The broker's statistics of one subscription of one topic partition, and the broker's limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote_plus

from keyshard.core.position.entry import EntryId
from keyshard.core.position.entry_set import EntrySet
from keyshard.core.position.ledger import last_written_of, ledgers_of
from keyshard.core.ring.hash_range import HashRange, gaps, overlap

KEY_SHARED = "Key_Shared"
"""Type of subscription that keyshard requires."""


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """Limits of a broker, by default those of Pulsar 4.0; 0 means no limit."""

    unacked_per_consumer: int = 50_000
    """Unacknowledged messages of one consumer from which it gets no more."""
    unacked_per_subscription: int = 200_000
    """Unacknowledged messages of one topic partition from which no consumer gets new ones."""
    replay_per_consumer: int = 2_000
    """Entries of one topic partition that may wait for their owner, per connected consumer."""
    replay_per_subscription: int = 20_000
    """Limit of these entries for any number of consumers."""
    delayed: int = 50_000
    """Entries that may wait for their time. At this limit, if their times ascend, the broker reads
    no further entries; 0 for no limit."""
    ack_gaps: int = 10_000
    """Runs of acknowledged entries that a cursor keeps. When a broker restarts, further ones are
    forgotten, and their entries are redelivered."""
    message_bytes: int = 5 * 1024 * 1024
    """Largest message, bytes."""
    assumed: bool = False
    """Whether they are defaults, because the role may not read the broker's configuration."""

    def with_settings(self, settings: Mapping[str, str] | None) -> BrokerLimits:
        """Return these limits with those that the broker's configuration names.

        Args:
            settings: The configuration; ``None`` if it cannot be read.
        """
        if settings is None:
            return replace(self, assumed=True)
        found: dict[str, Any] = {
            field: max(0, int(settings[name]))
            for field, name in _SETTINGS.items()
            if re.fullmatch(r"-?[0-9]+", str(settings.get(name, "")))
        }
        return replace(self, **found)

    def with_unacknowledged(self, per_consumer: int, per_subscription: int) -> BrokerLimits:
        """Return these limits with a topic's own limits of unacknowledged messages."""
        return replace(
            self,
            unacked_per_consumer=per_consumer,
            unacked_per_subscription=per_subscription,
        )

    def replay(self, consumers: int) -> int:
        """Return how many entries of one topic partition may wait for their owner.

        Beyond that, all ranges stop; 0 for no limit. If both replay limits are 0, the limits of
        unacknowledged messages apply instead, as in ``getEffectiveLookAheadLimit`` of Pulsar.
        """
        return _smaller(
            _java_int(self.replay_per_consumer * consumers), self.replay_per_subscription
        ) or _smaller(
            _java_int(self.unacked_per_consumer * consumers), self.unacked_per_subscription
        )


def _java_int(value: int) -> int:
    """Return a value wrapped to 32 bits, as in Java's ``int``; 0 if the result is negative."""
    return max(0, (value + 2**31) % 2**32 - 2**31)


def _smaller(one: int, other: int) -> int:
    """Return the smaller of two limits, where 0 means no limit."""
    return min(one, other) or max(one, other)


_SETTINGS = {
    "unacked_per_consumer": "maxUnackedMessagesPerConsumer",
    "unacked_per_subscription": "maxUnackedMessagesPerSubscription",
    "replay_per_consumer": "keySharedLookAheadMsgInReplayThresholdPerConsumer",
    "replay_per_subscription": "keySharedLookAheadMsgInReplayThresholdPerSubscription",
    "delayed": "delayedDeliveryFixedDelayDetectionLookahead",
    "ack_gaps": "managedLedgerMaxUnackedRangesToPersist",
    "message_bytes": "maxMessageSize",
}


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """One connected consumer."""

    name: str
    address: str
    ranges: tuple[HashRange, ...] | None
    """``None`` if the broker does not tell, as for a segment of a scalable topic."""
    unacknowledged: int = 0
    """Number of unacknowledged messages."""
    blocked: bool = False
    """Whether it has reached its limit of unacknowledged messages."""
    permits: int = 0
    """Messages that the broker may still send to it; batches may make it negative."""


@dataclass(frozen=True, slots=True)
class SubscriptionState:
    """One subscription of one topic partition at one moment.

    A field is ``None`` if the broker does not report it. Of a segment of a scalable topic, it
    reports less than of other topic partitions.
    """

    kind: str
    """``Key_Shared``, ``Shared``, ``Exclusive``, ``Failover``, or another word of the broker.
    Empty if the broker does not know: no consumer has connected since it loaded the topic."""
    sticky: bool | None
    """Whether the consumers choose their ranges themselves."""
    out_of_order: bool
    """Whether its consumers allow messages of one key out of order."""
    durable: bool
    """Whether it retains data; the subscription of a Reader does not."""
    backlog: int
    """Entries that the broker holds unacknowledged."""
    in_replay: int | None
    """Entries that wait for their owner."""
    ack_gaps: int | None
    """Runs of acknowledged entries after an unacknowledged one."""
    blocked: bool
    """Whether it has reached its limit of unacknowledged messages."""
    consumers: tuple[ConsumerState, ...]
    delayed: int | None = 0
    """Entries that wait for their delivery time."""
    delivered: int | None = 0
    """Messages delivered since the broker loaded the topic."""
    oldest_ms: int | None = None
    """Time at which the first unacknowledged entry was published, milliseconds since the epoch;
    ``None`` if there is none or it was not asked for."""
    age_s: int | None = None
    """Age of the backlog, seconds, as the broker measured it at its newest check of quotas
    (PIP-492); ``None`` if it does not measure it."""

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> SubscriptionState:
        """Parse the admin interface's statistics of a subscription.

        Raises:
            ValueError: The broker's answer has another format.
        """
        try:
            oldest_ms = int(stats.get("earliestMsgPublishTimeInBacklog", 0))
            age_s = int(stats.get("oldestBacklogMessageAgeSeconds", -1))
            return cls(
                # The type is "None" if no consumer has connected since the broker loaded the topic.
                kind="" if stats.get("type") in (None, "None") else str(stats["type"]),
                sticky=None if (mode := stats.get("keySharedMode")) is None else mode == "STICKY",
                out_of_order=bool(stats.get("allowOutOfOrderDelivery")),
                durable=bool(stats.get("isDurable", True)),
                backlog=int(stats["msgBacklog"]),
                in_replay=_count(stats, "msgInReplay"),
                ack_gaps=_count(stats, "nonContiguousDeletedMessagesRanges"),
                blocked=bool(stats.get("blockedSubscriptionOnUnackedMsgs")),
                consumers=tuple(map(_consumer, stats.get("consumers", ()))),
                delayed=_count(stats, "msgDelayed"),
                delivered=_count(stats, "msgOutCounter"),
                oldest_ms=oldest_ms if oldest_ms > 0 else None,
                age_s=age_s if age_s >= 0 else None,
            )
        except (AttributeError, KeyError, OverflowError, TypeError) as exc:
            raise ValueError(f"the statistics of the subscription are incomplete: {exc!r}") from exc

    @property
    def gaps(self) -> tuple[HashRange, ...]:
        """Parts of the ring that no connected consumer owns, as far as their ranges are known."""
        return gaps(owned for consumer in self.consumers for owned in consumer.ranges or ())

    def lacks(self, hash_range: HashRange, name: str) -> bool:
        """Return whether a consumer is not connected, by its range, or by its name."""
        if any(consumer.ranges is None for consumer in self.consumers):
            return all(consumer.name != name for consumer in self.consumers)
        return overlap((hash_range,), self.gaps)

    @property
    def unacknowledged(self) -> int:
        """Number of messages that are delivered and unacknowledged."""
        return sum(consumer.unacknowledged for consumer in self.consumers)


def _count(stats: Mapping[str, Any], name: str) -> int | None:
    return int(stats[name]) if name in stats else None


def _consumer(stats: Mapping[str, Any]) -> ConsumerState:
    arrays = stats.get("keyHashRangeArrays")
    texts = stats.get("keyHashRanges")
    if arrays is None and texts is not None:
        # Brokers before 4.0 write each range as the text "[0, 6553]".
        arrays = [[int(number) for number in text.strip("[]").split(",")] for text in texts]
    return ConsumerState(
        str(stats.get("consumerName", "")),
        str(stats.get("address", "?")),
        None if arrays is None else tuple(HashRange(int(start), int(end)) for start, end in arrays),
        int(stats.get("unackedMessages", 0)),
        bool(stats.get("blockedConsumerOnUnackedMsgs")),
        int(stats.get("availablePermits", 0)),
    )


# -- Ledgers of a topic partition, and the cursor of one subscription ------------------------------

_RANGE = re.compile(r"\((-?\d+):(-?\d+)\.\.(-?\d+):(-?\d+)\]")


@dataclass(frozen=True, slots=True)
class CursorState:
    """Ledgers and cursor at one moment."""

    ledgers: Mapping[int, int]
    """Number of entries of every stored ledger, ascending by ledger; the last is being written."""
    mark_delete: EntryId | None = None
    """Every entry up to this one is acknowledged; its entry may be -1. ``None`` without a
    cursor."""
    individually: EntrySet = field(default_factory=EntrySet)
    """Entries acknowledged after the mark-delete position."""
    last_written: EntryId | None = None
    """The last entry that was written, stored or not, as far as the broker knows it."""
    terminated: bool = False
    """Whether the topic is terminated: nothing can be published to it any more."""

    @classmethod
    def from_internal_stats(cls, stats: Mapping[str, Any], subscription: str) -> CursorState:
        """Parse the admin interface's ``internalStats``.

        Raises:
            KeyError, TypeError, ValueError: The broker's answer has another format.
        """
        ledgers = {ledger.id: ledger.entries for ledger in ledgers_of(stats)}
        cursor = stats.get("cursors", {}).get(_cursor_name(subscription))
        last, terminated = last_written_of(stats), stats.get("state") == "Terminated"
        if cursor is None:
            return cls(ledgers, last_written=last, terminated=terminated)
        ledger, _, entry = str(cursor["markDeletePosition"]).partition(":")
        individually = _parse_ranges(str(cursor.get("individuallyDeletedMessages", "")), ledgers)
        mark_delete = EntryId(int(ledger), int(entry))
        return cls(ledgers, mark_delete, individually, last, terminated)

    @property
    def newest_ledger(self) -> int:
        """The ledger that is being written; -1 if the broker has none."""
        return max(self.ledgers, default=-1)

    def acknowledged(self) -> EntrySet:
        """Return all stored entries that are acknowledged."""
        return self.marked() | self.individually

    def marked(self) -> EntrySet:
        """Return all stored entries up to the mark-delete position."""
        if self.mark_delete is None:
            return EntrySet()
        marked, entry = self.mark_delete
        runs: list[tuple[int, int, int]] = []
        for ledger, entries in self.ledgers.items():
            last = entries - 1 if ledger < marked else min(entry, entries - 1)
            if ledger <= marked and last >= 0:
                runs.append((ledger, 0, last))
        return EntrySet.of_runs(runs)

    def is_acknowledged(self, entry_id: EntryId) -> bool:
        """Whether an entry is acknowledged."""
        return (
            self.mark_delete is not None and entry_id <= self.mark_delete
        ) or entry_id in self.individually

    def lacks(self, entries: EntrySet) -> EntrySet:
        """Return those of the entries that are not acknowledged, stored or not."""
        above = entries if self.mark_delete is None else entries.above(self.mark_delete)
        return above - self.individually


def _cursor_name(subscription: str) -> str:
    """Return the name of a subscription's cursor in the broker's answer: form-encoded."""
    # The form encodings of Java and Python differ in two characters.
    return quote_plus(subscription, safe="*").replace("~", "%7E")


def _parse_ranges(text: str, ledgers: Mapping[int, int]) -> EntrySet:
    """Parse ``[(12:3..12:5],(12:8..13:0]]``; a range begins after its first id."""
    runs: list[tuple[int, int, int]] = []
    for match in _RANGE.finditer(text):
        from_ledger, from_entry, to_ledger, to_entry = map(int, match.groups())
        for ledger in {from_ledger, to_ledger, *ledgers}:
            if from_ledger <= ledger <= to_ledger:
                first = from_entry + 1 if ledger == from_ledger else 0
                last = to_entry if ledger == to_ledger else ledgers.get(ledger, 0) - 1
                if first <= last:
                    runs.append((ledger, first, last))
    return EntrySet.of_runs(runs)
