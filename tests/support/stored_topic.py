"""Topics that keep everything, and what is stored in them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from contextlib import closing

import httpx

from keyshard import Message
from keyshard.broker.port import Broker
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.messages import messages_of
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.testing.devbroker import DevBroker
from tests.support.deadlines import deadline, in_time

READ_S = deadline(30)
"""Longest time to read a topic partition, seconds."""


def admin_of(broker: DevBroker) -> httpx.Client:
    """Return a client of ``/admin/v2`` of a broker; close it."""
    return httpx.Client(base_url=f"{broker.admin_url}/admin/v2", timeout=deadline(20))


def keeping_namespace(admin: httpx.Client, name: str, *, deduplicate: bool = True) -> str:
    """Make a namespace that keeps everything; return its unique name.

    Args:
        admin: Client of ``/admin/v2``.
        name: Beginning of the name.
        deduplicate: Whether brokers deduplicate its topics.
    """
    namespace = f"public/{name}-{uuid.uuid4().hex[:8]}"
    path = f"/namespaces/{namespace}"
    admin.put(path).raise_for_status()
    admin.post(f"{path}/deduplication", json=deduplicate).raise_for_status()
    kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    admin.post(f"{path}/retention", json=kept).raise_for_status()
    return namespace


def messages_at(broker: Broker, partitions: Iterable[TopicPartition]) -> list[Message]:
    """All messages, by topic partition and in their order."""
    found: list[Message] = []
    for where in partitions:
        reader = broker.reader(where, EntryId(0, 0))
        end_s = time.monotonic() + READ_S
        while not reader.at_end():
            in_time(end_s, "the reader did not reach the end")
            for block in reader.read(100):
                found += messages_of(where, block)
    return found


def messages_of_topic(service_url: str, topic: str) -> list[Message]:
    """All messages of a topic of a real broker."""
    with closing(WireBroker(Connection(service_url))) as broker:
        return messages_at(broker, broker.partitions(topic))
