"""A real broker under the contract, spoken to without pulsar-client."""

from __future__ import annotations

from collections.abc import Collection

from keyshard.broker.port import Broker
from keyshard.broker.schemas import schema_of
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.topic_schema import TopicSchema
from tests.contract.pulsar_harness import BreakablePulsarHarness, PulsarHarness


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

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        return schema_of(Connection(self._service_url), topic, version)


class BreakableWireHarness(WireHarness, BreakablePulsarHarness):
    """The same with its own broker."""

    not_handed_out = ()
