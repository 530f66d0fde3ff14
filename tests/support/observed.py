"""Observations of a broker and of worker processes from outside the source."""

from __future__ import annotations

from contextlib import closing

import psutil

from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.core.position.entry import TopicPartition, full_topic_name
from keyshard.testing.devbroker import DevBroker
from keyshard.workers import server


def is_live_worker(process: psutil.Process) -> bool:
    """Whether a process is a worker process that has not ended."""
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return not zombie and server.__name__ in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # It ended between the listing and this call.
        return False


def backlog(broker: DevBroker, topic: str, subscription: str, partitions: int) -> int:
    """Messages of the partitions of a topic that a subscription has not acknowledged."""
    with closing(PulsarAdmin(broker.connection)) as admin:
        stats = [
            admin.subscription(TopicPartition(full_topic_name(topic), number), subscription)
            for number in range(partitions)
        ]
    return sum(int(one["msgBacklog"]) for one in stats if one)
