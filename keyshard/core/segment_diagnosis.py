"""Checks of a scalable topic: its segments, and what the broker keeps for a subscription."""

from __future__ import annotations

from urllib.parse import quote

from keyshard.core.diagnosis import Finding, Level, States
from keyshard.core.topic_segments import HASHES, SCALABLE, SegmentGraph
from keyshard.redaction import listed


def judge_segments(graph: SegmentGraph) -> list[Finding]:
    """Count the segments, and name the facts that no broker reports about them."""
    sealed = sum(one.is_sealed for one in graph.segments.values())
    return [
        Finding(
            Level.OK,
            "segments",
            f"{graph.topic} has {len(graph.segments)} segment(s), {sealed} of them sealed.",
        ),
        Finding(
            Level.OK,
            "not examined",
            "The broker reports no ledgers, ack gaps and replay queues of segments. So these, the "
            "batching of producers, and the ranges of consumers are not examined.",
        ),
    ]


def equal_segments(graph: SegmentGraph) -> int:
    """Return how many segments there would be if all had as many hashes as the widest open one."""
    widths = (one.last_hash - one.first_hash + 1 for one in graph.segments.values()
              if not one.is_sealed)  # fmt: skip
    return HASHES // max(widths)


def judge_registration(
    graph: SegmentGraph, states: States, subscription: str, retention_min: int | None
) -> list[Finding]:
    """Check whether sealed segments are kept for a subscription.

    The broker does not report which subscriptions are registered. But a registered one exists in
    each open segment.

    Args:
        graph: The segments.
        states: Every subscription of each segment.
        subscription: Name of the subscription.
        retention_min: Time for which sealed segments are kept for subscriptions that are not
            registered, minutes; -1 for no limit, ``None`` if it is unknown.
    """
    about = "registration"
    open_ones = [
        where
        for number, one in sorted(graph.segments.items())
        if not one.is_sealed and (where := graph.partition(number)) in states
    ]
    missing = [where for where in open_ones if subscription not in states[where]]
    if all(subscription not in one for one in states.values()):
        return []
    if missing and retention_min != -1:
        return [
            Finding(
                Level.PROBLEM,
                about,
                f"{subscription!r} is not registered with {graph.topic}: it does not exist on "
                f"{listed(missing)}. The broker deletes sealed segments {_after(retention_min)}, "
                "even if this subscription has not acknowledged their messages.",
                "Start the source: it registers the subscription.",
            )
        ]
    return _unconsumed(graph.topic, states, subscription) or [
        Finding(
            Level.OK,
            about,
            f"{subscription!r} exists on {listed(open_ones)}. The broker does not report whether "
            "it is registered; each start of a source registers it.",
        )
    ]


def _after(retention_min: int | None) -> str:
    if retention_min is None:
        return "after the retention time, which this role may not read"
    if retention_min == 0:
        return "within a minute, because there is no retention time"
    return f"after the retention time of {retention_min} minutes"


def _unconsumed(topic: str, states: States, subscription: str) -> list[Finding]:
    """Find a backlog that nobody consumes, which a registered subscription keeps for ever."""
    found = {where: one[subscription] for where, one in states.items() if subscription in one}
    backlog = sum(state.backlog for state in found.values())
    if not backlog or any(state.consumers for state in found.values()):
        return []
    return [
        Finding(
            Level.WARNING,
            "registration",
            f"{subscription!r} has a backlog of {backlog} entries and no consumer. If it is "
            "registered, the broker keeps them for ever.",
            f"Start the source, or delete the subscription: {unregister(topic, subscription)}",
        )
    ]


def unregister(topic: str, subscription: str) -> str:
    """Return the command that deletes a subscription of a scalable topic from all segments."""
    path = f"{topic.removeprefix(SCALABLE)}/subscriptions/{quote(subscription, safe='')}"
    return f"curl -L -X DELETE ADMIN_URL/admin/v2/scalable/{path}"
