"""Run a handler over the backlog of a source, in a test."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keyshard.broker.connect import connect_admin
from keyshard.broker.preflight import ANSWER_S
from keyshard.broker.topics import matching
from keyshard.core.option_checks import check_seconds
from keyshard.core.position.entry import TopicPartition
from keyshard.core.subscription_state import SubscriptionState
from keyshard.core.topic_pattern import TopicPattern
from keyshard.errors import AvailableNowTimeoutError, ConfigError
from keyshard.observe.status_types import Status
from keyshard.source import READY_S, KeyShardSource

if TYPE_CHECKING:
    from keyshard.broker.admin.port import Admin
    from keyshard.handlers.handler_call import Handle

LOOK_S = 0.02
"""Interval at which the backlog is asked for, seconds."""


def run_until_idle(
    source: KeyShardSource, handle: Handle, *, timeout_s: float = READY_S, **options: Any
) -> Status:
    """Run a handler until every message of the source is acknowledged, then stop.

    ::

        status = run_until_idle(source, handle)
        assert status["counters"]["completed"] == 100

    A message is acknowledged when its handler returned, or when its dead letter is confirmed. The
    source needs ``admin_url``, except on an in-memory cluster.

    Args:
        source: The source.
        handle: The handler, as for :meth:`keyshard.KeyShardSource.run`.
        timeout_s: Longest wait for the source to be ready, and longest wait for the end of the
            backlog, seconds.
        **options: As for :meth:`keyshard.KeyShardSource.run`.

    Returns:
        The status at the end.

    Raises:
        ConfigError: The source has no ``admin_url``, or an option is wrong.
        AvailableNowTimeoutError: Messages are left after ``timeout_s``; the error names a blocked
            key.
        KeyShardError: The error that ended the source.
    """
    check_seconds("timeout_s", timeout_s, 86_400)
    connection = source.how_to_connect()
    if connection.in_memory:
        connection = replace(connection, admin_url=connection.service_url)
    elif connection.admin_url is None:
        raise ConfigError(
            "run_until_idle() asks the admin interface for the backlog.",
            "Set admin_url of the source.",
        )
    admin = connect_admin(connection, ANSWER_S)
    try:
        with source.running(handle, ready_timeout_s=timeout_s, **options):
            deadline_s = time.monotonic() + timeout_s
            while True:
                status = source.status()
                left = _backlog(admin, source, status)
                if not left:
                    return status
                if time.monotonic() >= deadline_s:
                    raise AvailableNowTimeoutError(
                        f"{left:,} messages are not acknowledged after {timeout_s:g} s. "
                        f"{_blocked(status)}",
                        "Correct the handler, or raise timeout_s.",
                    )
                time.sleep(LOOK_S)
    finally:
        admin.close()


def _backlog(admin: Admin, source: KeyShardSource, status: Status) -> int:
    """Return the number of unacknowledged messages.

    It is the larger of two counts: the broker's backlog, and the messages that wait for a handler
    or are in one, by the status.
    """
    held = sum((one["waiting"] or 0) + (one["inFlight"] or 0) for one in status["ranges"])
    backlog = 0
    asked = [TopicPartition(one["topic"], one["partition"]) for one in status["partitions"]]
    if source.is_scalable:
        # The status may not have the newest segments yet.
        pattern = source.topics_pattern
        topics = source.topics if pattern is None else matching(admin, TopicPattern.parse(pattern))
        asked = list(map(TopicPartition, topics))
    for where in asked:
        stats = admin.subscription(where, source.subscription)
        backlog += 0 if stats is None else SubscriptionState.from_stats(stats).backlog
    return max(held, backlog)


def _blocked(status: Status) -> str:
    for one in status["ranges"]:
        blocking = one["blockedBy"]
        if blocking is not None:
            return (
                f"Key {blocking['key']!r}, message {blocking['messageId']}: {blocking['reason']}."
            )
    return "No key is blocked."
