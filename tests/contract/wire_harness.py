"""A real broker under the contract, spoken to without pulsar-client."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from keyshard.broker.port import Broker
from keyshard.broker.schemas import schema_of
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.core.topic_schema import TopicSchema
from keyshard.testing.devbroker import DevCluster
from tests.contract.pulsar_harness import BreakablePulsarHarness, PulsarHarness
from tests.helpers import wait_until
from tests.support.deadlines import DeadlineError, deadline
from tests.support.lone_bookie import frozen_bookie, revived, wait_for_loss

WRITE_S = math.ceil(deadline(5))
"""Time after which the broker of the failing harness gives up a write to its bookie, seconds.

A case has so long to send and ask while writes are held."""
SHUTS_DOWN_S = deadline(5)
"""Time within which a bookie shuts down that will."""


class WireHarness(PulsarHarness):
    """All cases hold for entries that come whole."""

    whole_entries = True
    empty_keys = True
    publishes_entries = True
    reports_topics = True
    not_handed_out: Collection[str] = ("__brokerPublishTime",)

    def broker(self) -> Broker:
        self._brokers.append(WireBroker(Connection(self._service_url)))
        return self._brokers[-1]

    def create_scalable(self, segments: int) -> str:
        topic = f"topic://public/default/contract-{uuid.uuid4().hex}"
        self._put(_scalable(topic), params={"numInitialSegments": segments})
        return topic

    def split(self, topic: str, number: int) -> None:
        self._admin.post(f"{_scalable(topic)}/split/{number}").raise_for_status()

    def merge(self, topic: str, lower: int, upper: int) -> None:
        self._admin.post(f"{_scalable(topic)}/merge/{lower}/{upper}").raise_for_status()

    def roll_segments(self, topic: str) -> None:
        self._put(
            f"/admin/v2/namespaces/{topic.removeprefix('topic://').rpartition('/')[0]}/unload"
        )

    def create_again_scalable(self, topic: str) -> None:
        self._put(_scalable(topic))

    def delete_scalable(self, topic: str) -> None:
        self.close_producers()
        self._admin.delete(_scalable(topic), params={"force": "true"}).raise_for_status()

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        return schema_of(Connection(self._service_url), topic, version)


def _scalable(topic: str) -> str:
    return topic.replace("topic://", "/admin/v2/scalable/")


class BreakableWireHarness(WireHarness, BreakablePulsarHarness):
    """The same with its own broker."""

    not_handed_out: Collection[str] = ()


class FailingWireHarness(WireHarness):
    """A broker with one bookie."""

    def __init__(self, cluster: DevCluster) -> None:
        super().__init__(cluster.service_url, cluster.admin_url)
        self._own_cluster = cluster

    @contextmanager
    def held_writes(
        self,
        topic_partition: TopicPartition,  # noqa: ARG002 - the bookie stores all of them
    ) -> Iterator[Callable[[], None]]:
        bookie, failed = self._own_cluster.bookies[0], False

        def fail() -> None:
            nonlocal failed
            wait_for_loss(watch, WRITE_S)
            failed = True

        with frozen_bookie(self._own_cluster) as watch:
            yield fail
        if failed:
            # Its session has expired. Some bookies shut down then, and others go on.
            with suppress(DeadlineError):
                wait_until(lambda: bookie.has_shut_down, SHUTS_DOWN_S)
            revived(self._own_cluster)
