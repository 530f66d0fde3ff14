"""The facts about messages that the status takes from a run, with lanes or without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from keyshard.consumers.receiver import OwnedRange
from keyshard.core.lanes.circuit_breaker import CircuitStatus
from keyshard.core.lanes.lane_status import (
    HandlerSeconds,
    HandlerSlots,
    LaneStatus,
    NewestError,
    OutcomeCounts,
    OutputsStatus,
    RunStatus,
)
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.message import MessageId
from keyshard.core.position.entry import TopicPartition
from keyshard.core.range_watchdog import Pause, RangeFacts
from keyshard.core.ring.hash_range import HashRange, gaps
from keyshard.observe.status_types import StackStatus


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owners of hash ranges, and their connections."""

    owned: Mapping[int, list[HashRange]]
    """Hash ranges of each range, by its index."""
    disconnected: Mapping[int, list[str]]
    """Topic partitions to which a consumer of a range is not connected."""
    paused: set[int]
    """Ranges that receive nothing: the window has no room, or the source is paused."""
    gaps: Mapping[TopicPartition, tuple[HashRange, ...]]
    """Slots without a connected consumer."""

    @classmethod
    def of(cls, owned_ranges: Iterable[tuple[OwnedRange, bool, bool]]) -> Ownership:
        """Build it from :meth:`Coordinator.owned_ranges`."""
        owned: dict[int, set[HashRange]] = {}
        disconnected: dict[int, list[str]] = {}
        covered: dict[TopicPartition, list[HashRange]] = {}
        receiving: set[int] = set()
        for owned_range, connected, paused in owned_ranges:
            owned.setdefault(owned_range.range_index, set()).add(owned_range.hash_range)
            covering = covered.setdefault(owned_range.topic_partition, [])
            if connected:
                covering.append(owned_range.hash_range)
            else:
                disconnected.setdefault(owned_range.range_index, []).append(
                    owned_range.topic_partition.name
                )
            if not paused:
                receiving.add(owned_range.range_index)
        return cls(
            {index: sorted(ranges) for index, ranges in owned.items()},
            disconnected,
            set(owned) - receiving,
            {where: gaps(ranges) for where, ranges in covered.items()},
        )


class Totals(NamedTuple):
    """Outcomes of messages since the start."""

    counters: OutcomeCounts
    timings: HandlerSeconds | None
    """``None`` without handlers."""
    circuit: CircuitStatus | None
    """``None`` without lanes, because only keys in lanes have a circuit breaker."""
    newest_error: NewestError | None = None


class KeyState(NamedTuple):
    """Range, lane and queue of a key."""

    owners: list[int]
    """Index of the range that owns each requested slot."""
    lane: LaneStatus | None
    """``None`` without handlers."""
    waiting: int | None
    """Waiting messages of the key."""


class HandlerView(Protocol):
    """Facts about the messages of a run; any thread may call it. Times are monotonic seconds."""

    @property
    def lanes(self) -> int:
        """Number of keys that a range can handle at the same time."""

    def ranges(self, now_s: float, owned: Ownership) -> list[RangeFacts]:
        """Return the facts about every range now."""

    def pace(self) -> tuple[float, Pause | None]:
        """Return the 99th percentile of attempts, seconds, and why handlers pause, if so."""

    def totals(self, now_s: float) -> Totals:
        """Return the totals since the start."""

    def rate_limit(self, now_s: float) -> RateLimitStatus | None:
        """Return the rate limit of the handler; ``None`` without one."""

    def handler_slots(self, now_s: float) -> list[HandlerSlots]:
        """Return the slots for handlers of a started run, by process or actor."""

    def outputs(self) -> OutputsStatus | None:
        """Return what handlers produced; ``None`` without a sink."""

    def runs(self, now_s: float, count_max: int) -> list[RunStatus]:
        """Return the messages in handlers, longest first, then those that wait for a retry."""

    def stack(
        self, topic: str | None, partition: int | None, message_id: MessageId
    ) -> StackStatus | None:
        """Return the stack of the handler that runs a message; ``None`` if none does.

        Args:
            topic: Full name of the topic; ``None``: any.
            partition: Number of the partition; ``None``: any.
            message_id: The message.

        Raises:
            ConfigError: Handlers run in other processes.
        """

    def key_state(self, key: str, slots: Sequence[int], now_s: float) -> KeyState:
        """Return the state of a key, and the owner of each slot that it may have.

        Args:
            key: The key.
            slots: The slot of the key as text; also that of its bytes, if producers may have set it
                as bytes.
            now_s: The time.
        """
