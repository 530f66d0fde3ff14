"""Explains why the broker has no room for more consumers: its limits, and who is connected."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from keyshard.broker.admin.port import Admin
from keyshard.core.position.entry import TopicPartition
from keyshard.core.refused_limits import ConsumerLimits, limit_reached
from keyshard.errors import BrokerError, LimitReachedError, RangeConflictError

SUBSCRIPTIONS_NAMED = 5
"""Most subscriptions that an error names."""
ADDRESSES_NAMED = 3
"""Most addresses of one subscription that an error names."""

_Stats = Mapping[str, Mapping[str, Any]]
"""Statistics of each subscription of a topic partition, by its name."""


def with_connected(
    error: LimitReachedError, admin: Admin | None, where: TopicPartition, opens: int
) -> LimitReachedError:
    """Add the consumers that are connected to the error of a limit.

    Args:
        error: The refusal.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        where: The topic partition. The own consumers there are closed already.
        opens: Number of consumers that keyshard opens there.
    """
    text, counts = f"{error.problem} keyshard opens {opens} consumers of {where}", {}
    if admin is None:
        text += "; with admin_url, this error names the others."
    else:
        with suppress(BrokerError):
            stats = admin.subscriptions(where)
            counts = _counts(stats)
            text += f"; {_named(stats)}."
    return LimitReachedError(text, error.remedy, **error.facts, opens=opens, connected=counts)


def limit_behind(
    conflict: RangeConflictError,
    admin: Admin | None,
    subscription: str,
    opens: Mapping[TopicPartition, int],
) -> LimitReachedError | None:
    """Find the limit behind a conflict, if the client does not tell the two apart.

    Args:
        conflict: The refusal.
        admin: Admin REST interface; ``None`` without ``admin_url``.
        subscription: Name of the subscription.
        opens: Number of consumers that keyshard opens, by topic partition; all are closed already.

    Returns:
        The error of the limit; ``None`` if there is room, or if nothing is known.
    """
    if admin is None or not conflict.facts.get("or_limit"):
        return None
    with suppress(BrokerError):
        for where, count in opens.items():
            limits = ConsumerLimits(*admin.consumer_limits(where.topic))
            found = limits.exceeded(count, subscription, _counts(admin.subscriptions(where)))
            if found is not None:
                limit, most = found
                failed = f"Could not subscribe to {where}"
                error = limit_reached(limit, failed, where.topic, f"it is {most}")
                return with_connected(error, admin, where, count)
    return None


def _counts(stats: _Stats) -> dict[str, int]:
    return {name: len(_addresses(stats[name])) for name in sorted(stats)}


def _addresses(subscription: Mapping[str, Any]) -> list[str]:
    return sorted(str(one.get("address", "?")) for one in subscription.get("consumers", ()))


def _named(stats: _Stats) -> str:
    """Name the subscriptions and their consumers, those with the most consumers first."""
    order = sorted(stats, key=lambda name: (-len(_addresses(stats[name])), name))
    listed = []
    for name in order[:SUBSCRIPTIONS_NAMED]:
        addresses = _addresses(stats[name])
        at = f" ({', '.join(addresses[:ADDRESSES_NAMED])})" if addresses else ""
        listed.append(f"{len(addresses)} of subscription {name!r}{at}")
    more = len(order) - len(listed)
    also = f" and of {more} more subscriptions" if more > 0 else ""
    return f"other consumers there: {', '.join(listed) or 'none'}{also}"
