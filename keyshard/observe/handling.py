"""What the status asks of a run about its messages, with lanes or without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from keyshard.core.health import RangeFacts
from keyshard.core.lanes.circuit import CircuitStatus
from keyshard.core.lanes.facts import LaneStatus
from keyshard.core.lanes.tally import Counters
from keyshard.core.lanes.timings import HandlerSeconds
from keyshard.core.position.entry import TopicPartition
from keyshard.core.ring.hash_range import HashRange, gaps
from keyshard.worker.receiver import OwnedRange


@dataclass(frozen=True, slots=True)
class Owned:
    """Who owns what, and is connected."""

    owned: Mapping[int, list[HashRange]]
    """Hash ranges of each range."""
    disconnected: Mapping[int, list[str]]
    """Topic partitions to which a consumer of a range is not connected."""
    paused: set[int]
    """Ranges that receive nothing, because there is no room."""
    gaps: Mapping[TopicPartition, tuple[HashRange, ...]]
    """Slots without a connected consumer."""

    @classmethod
    def of(cls, owned_ranges: Iterable[tuple[OwnedRange, bool, bool]]) -> Owned:
        """Gather what :meth:`Coordinator.owned_ranges` tells."""
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
    """What became of messages since the start."""

    counters: Counters
    timings: HandlerSeconds
    circuit: CircuitStatus


class KeyPlace(NamedTuple):
    """Where a key is."""

    owners: list[int]
    """Index of the range that owns each slot that was asked for."""
    lane: LaneStatus
    waiting: int
    """Messages of it that wait."""


class Handling(Protocol):
    """What a run does with messages; any thread may ask. Times are of the monotonic clock."""

    @property
    def lanes(self) -> int:
        """Keys worked on at the same time in a range."""

    def ranges(self, now_s: float, owned: Owned) -> list[RangeFacts]:
        """What is known of every range now."""

    def pace(self) -> tuple[float, str]:
        """What 99 of 100 attempts do not exceed, seconds; why all handlers pause, or nothing."""

    def totals(self, now_s: float) -> Totals:
        """Everything since the start."""

    def place(self, key: str, slots: Sequence[int], now_s: float) -> KeyPlace:
        """Where a key is that lies in one of some slots."""
