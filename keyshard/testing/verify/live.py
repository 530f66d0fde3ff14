"""A check on a broker that somebody named: publish a load, consume it, record what happened."""

from __future__ import annotations

import logging
import uuid
from contextlib import closing
from dataclasses import dataclass, replace

import pulsar

from keyshard.broker.connect import connect
from keyshard.broker.port import Broker
from keyshard.broker.pulsar.admin import PulsarAdmin
from keyshard.broker.pulsar.client import client_of
from keyshard.broker.pulsar.client_log import close_client
from keyshard.config.connection import Connection
from keyshard.config.source import SourceConfig
from keyshard.core.option_checks import check_integer
from keyshard.core.position.entry import EntryId, full_topic_name
from keyshard.errors import ConfigError
from keyshard.testing.verify.live_run import LiveReport, Progress, consume
from keyshard.testing.verify.recorder import History
from keyshard.testing.verify.workloads import (
    PARTITIONS_MAX,
    Workload,
    create_partitioned_topic,
    produce,
)

BATCHES = 20
"""Batches that the load makes, about."""
PARTITIONS = 5
"""Partitions of a topic that is created, by default."""

_TIMEOUT_MS = 15_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveCheck:
    """A check on a broker that somebody named."""

    topic: str
    """Topic name, short or full."""
    connection: Connection
    """Without an admin interface a topic that is missing is created without partitions."""
    messages: int = 10_000
    keys: int = 100
    partitions: int | None = None
    """Partitions of a topic that is created; default 5."""
    parallelism: int = 10
    append: bool = False
    """Whether a topic that holds data is published to."""
    timeout_s: float = 120.0
    """Deadline for everything, seconds."""

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_s <= 86_400:
            raise ConfigError(f"timeout_s must be 1 to 86400, got {self.timeout_s:g}.")
        if self.partitions is not None:
            check_integer("partitions", self.partitions, 1, PARTITIONS_MAX)
            if self.connection.admin_url is None:
                raise ConfigError(
                    "A number of partitions needs the admin interface: give admin_url."
                )
        self.workload()
        self.source()

    def workload(self) -> Workload:
        """What is published."""
        return Workload(self.messages, self.keys)

    def source(self) -> SourceConfig:
        """How it is consumed: by a subscription of its own that begins now."""
        return SourceConfig(
            self.topic,
            subscription=f"keyshard-check-{uuid.uuid4().hex[:8]}",
            connection=self.connection,
            parallelism=self.parallelism,
            starting_position="latest",
            batch_rows_max=max(1, self.messages // BATCHES),
        )

    def prepare(self) -> None:
        """Create the topic when it is missing; refuse one that holds data, unless ``append``.

        Raises:
            ConfigError: It holds data.
            AdminError: It exists with another number of partitions.
            BrokerUnavailableError: The broker or its admin interface cannot be reached.
        """
        topic = full_topic_name(self.topic)
        if self.connection.admin_url is not None:
            with closing(PulsarAdmin(self.connection)) as admin:
                exists = admin.partition_count(topic) is not None
            if not exists or self.partitions is not None:
                create_partitioned_topic(self.connection, topic, self.partitions or PARTITIONS)
        if not self.append:
            with closing(self._connect()) as broker:
                require_empty(broker, topic)

    def run(self, history: History, progress: Progress) -> LiveReport:
        """Publish, consume, and write the history; the subscription is removed at the end.

        Raises:
            KeyShardError: Publishing or consuming failed.
        """
        source = self.source()
        topic = source.topics[0]
        try:
            return consume(
                source,
                self._connect,
                lambda: PulsarAdmin(self.connection) if self.connection.admin_url else None,
                lambda told: produce(self.workload(), self.connection, topic, told),
                history,
                timeout_s=self.timeout_s,
                progress=progress,
            )
        finally:
            remove_subscription(self.connection, topic, source.subscription)

    def _connect(self) -> Broker:
        return connect(replace(self.connection, operation_timeout_ms=_TIMEOUT_MS))


def require_empty(broker: Broker, topic: str) -> None:
    """Refuse a topic in which something is stored.

    Args:
        broker: A connection.
        topic: Full topic name.

    Raises:
        ConfigError: It holds data.
        BrokerError: The broker cannot be reached.
    """
    for topic_partition in broker.partitions(topic):
        reader = broker.reader(topic_partition, EntryId(0, 0))
        try:
            if not reader.at_end():
                raise ConfigError(
                    f"Topic {topic} holds data, and other consumers of it would get the messages "
                    "of this check. Name a topic that does not exist yet, or give --append to "
                    "publish into this one."
                )
        finally:
            reader.close()


def remove_subscription(connection: Connection, topic: str, subscription: str) -> None:
    """Leave no backlog behind: the broker forgets the subscription. A failure is only logged."""
    try:
        client = client_of(replace(connection, operation_timeout_ms=_TIMEOUT_MS))
        try:
            client.subscribe(topic, subscription, receiver_queue_size=1).unsubscribe()
        finally:
            close_client(client)
    except pulsar.PulsarException as exc:
        _log.warning("subscription %s of %s could not be removed: %s", subscription, topic, exc)
