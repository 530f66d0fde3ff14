"""Compares the consumers of a source with the broker's limits, before anything is subscribed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from keyshard.broker.admin.port import Admin
from keyshard.broker.retry import retry_until
from keyshard.core.position.entry import TopicPartition, namespace_of
from keyshard.core.refused_limits import ConsumerLimits, limit_reached
from keyshard.core.topic_segments import topic_of
from keyshard.errors import AdminError, AuthorizationError
from keyshard.redaction import listed

ASKED_MAX = 8
"""Topics of a namespace that are asked for until one has an answer."""

_log = logging.getLogger(__name__)


def check_consumer_limits(
    admin: Admin | None,
    topic_partitions: Iterable[TopicPartition],
    consumers: int,
    timeout_s: float,
) -> None:
    """Check that the broker has room for all consumers of a source, if nobody else is connected.

    One topic of each namespace counts; the broker itself refuses those with other limits.

    Args:
        admin: Admin REST interface; ``None``: the broker itself refuses later.
        topic_partitions: Topic partitions of the source.
        consumers: Number of consumers in each topic partition.
        timeout_s: Longest wait for an answer, seconds.

    Raises:
        LimitReachedError: A topic has a lower limit.
        BrokerUnavailableError: No answer in time.
    """
    if admin is None:
        return
    # A pattern may match thousands of topics, and few have limits of their own.
    by_namespace: dict[str, set[str]] = {}
    for one in topic_partitions:
        by_namespace.setdefault(namespace_of(one.topic), set()).add(topic_of(one))
    for _, topics in sorted(by_namespace.items()):
        answer = _first_limits(admin, sorted(topics), timeout_s)
        if answer is None:
            continue
        topic, limits = answer
        if limits.unknown:
            _log.info(
                "the role may not read %s of the broker for %s", listed(limits.unknown), topic
            )
        found = limits.exceeded(consumers)
        if found is not None:
            limit, most = found
            failed = f"Could not open {consumers} consumers in each topic partition of {topic}"
            raise limit_reached(limit, failed, topic, f"it is {most}")


def _first_limits(
    admin: Admin, topics: Sequence[str], timeout_s: float
) -> tuple[str, ConsumerLimits] | None:
    """Return the first topic whose limits are known, and them. Some may have been deleted."""
    for topic in topics[:ASKED_MAX]:
        try:
            found = retry_until(partial(admin.consumer_limits, topic), timeout_s)
        except (AdminError, AuthorizationError) as exc:  # noqa: PERF203 - it may be deleted
            _log.info("the limits of consumers are unknown: %s", exc.summary)
            if isinstance(exc, AuthorizationError):
                break
        else:
            return topic, ConsumerLimits(*found)
    return None
