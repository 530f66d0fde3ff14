"""What lanes tell about their ranges and keys, as :mod:`keyshard.core.health` judges it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypedDict

from keyshard.core.health import KeyFacts, RangeFacts, most_blocking
from keyshard.core.lanes.lanes import Lanes
from keyshard.core.lanes.queues import KeyQueue
from keyshard.core.ring.hash_range import HashRange, overlap

RETRYING_MAX = 10_000
"""Keys that wait for a retry, and are looked at for what blocks their range."""


class LaneStatus(TypedDict):
    """What happens to a key, as plain JSON values."""

    state: str
    messageId: str | None
    attempts: int
    reason: str | None


def key_facts(queue: KeyQueue, now_s: float) -> KeyFacts:
    """A key with its first message, which there must be."""
    head = queue.work[0]
    return KeyFacts(
        queue.key,
        str(head.message.message_id),
        queue.attempts,
        running_s=max(0.0, now_s - head.started_s) if queue.running else None,
        retry_in_s=None if queue.running else max(0.0, queue.not_before_s - now_s),
        error=queue.reason or "",
        parking=queue.running and head.parking,
    )


def range_facts(
    lanes: Lanes,
    now_s: float,
    owned: Mapping[int, Sequence[HashRange]],
    disconnected: Mapping[int, Sequence[str]],
    paused: Collection[int],
) -> list[RangeFacts]:
    """What is known of every range now.

    Args:
        lanes: What waits and runs.
        now_s: Time of the clock that the lanes are given.
        owned: Hash ranges of each range.
        disconnected: Topic partitions to which a consumer of a range is not connected.
        paused: Ranges that receive nothing, because there is no room.
    """
    blocking: dict[int, KeyFacts] = {}
    for queue in _troubled(lanes):
        worst = most_blocking([key_facts(queue, now_s), *filter(None, [blocking.get(queue.owner)])])
        assert worst is not None
        blocking[queue.owner] = worst
    facts = []
    for index in range(lanes.ranges):
        counts = lanes.counts(index)
        facts.append(
            RangeFacts(
                index,
                waiting=counts.waiting,
                ready=counts.ready,
                in_flight=counts.running,
                handled=counts.done,
                blocking=blocking.get(index),
                paused=index in paused,
                draining=overlap(owned.get(index, ()), lanes.held),
                disconnected=tuple(disconnected.get(index, ())),
                oldest=counts.oldest,
            )
        )
    return facts


def lane_of(queue: KeyQueue | None, now_s: float) -> LaneStatus:
    """What happens to a key."""
    if queue is None:
        return {"state": "empty", "messageId": None, "attempts": 0, "reason": None}
    facts = key_facts(queue, now_s)
    waits = queue.attempts and queue.not_before_s > now_s
    busy = "parking" if facts.parking else "running"
    state = busy if queue.running else "retrying" if waits else "ready"
    return {
        "state": state,
        "messageId": facts.message_id,
        "attempts": facts.attempts,
        "reason": None if state == "ready" else facts.reason,
    }


def _troubled(lanes: Lanes) -> Iterator[KeyQueue]:
    """Keys that may hold their range back: they run, or wait for a retry."""
    yield from lanes.running
    yield from lanes.retrying(RETRYING_MAX)
