"""A real broker under the contract."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import _pulsar
import httpx
import pulsar
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from keyshard.broker.admin.port import Admin
from keyshard.broker.admin.rest import PulsarAdmin
from keyshard.broker.client.broker import ClientBroker
from keyshard.broker.memory import Batching, Message
from keyshard.broker.memory.log import batches
from keyshard.broker.port import Broker, PublishOptions
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.metadata_columns import NOT_BY_CLIENT
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.core.publishing import NOTHING
from keyshard.core.releases import release_of
from keyshard.core.ring.hash_range import HashRange
from keyshard.core.topic_schema import TopicSchema
from keyshard.testing.devbroker import DevBroker
from tests.contract.contract_harness import (
    DEADLINE_S,
    SUBSCRIPTION,
    OtherClient,
    OtherProducer,
)
from tests.contract.other_processes import PulsarOtherClient, PulsarOtherProducer
from tests.contract.raw_protocol import RawConnection, RawEntry, entry_of
from tests.support.deadlines import deadline, in_time
from tests.support.tested_pulsar import PULSAR

NAMES_MAX = 10
"""Producer names that the broker of the breakable harness keeps for a topic partition."""


class PulsarHarness:
    """A real broker, reached with pulsar-client and the admin REST interface."""

    release = release_of(PULSAR)
    look_ahead_per_consumer = release.limits.replay_per_consumer
    idle_s = 0.8
    delay_ms = int(deadline(5) * 1_000)
    delayed_look_ahead = 50_000
    whole_entries = False
    empty_keys = False
    not_handed_out: Collection[str] = NOT_BY_CLIENT
    may_repeat = True
    publishes_entries = False
    reports_topics = False

    def __init__(self, service_url: str, admin_url: str) -> None:
        self._service_url = service_url
        self._admin = httpx.Client(base_url=admin_url, timeout=deadline(10), follow_redirects=True)
        self._own_admin = PulsarAdmin(Connection(service_url, admin_url))
        self._client = pulsar.Client(
            service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        self._producers: dict[tuple[str, Batching], pulsar.Producer] = {}
        self._brokers: list[Broker] = []
        self._others: list[PulsarOtherClient | PulsarOtherProducer] = []
        self._namespace = "public/default"

    def broker(self) -> Broker:
        self._brokers.append(ClientBroker(Connection(self._service_url)))
        return self._brokers[-1]

    def create_topic(self, partitions: int = 0) -> str:
        topic = f"persistent://{self._namespace}/contract-{uuid.uuid4().hex}"
        if partitions:
            self._put(f"{_path(topic)}/partitions", json=partitions)
        else:
            self._put(_path(topic))
        return topic

    def create_again(self, topic: str, partitions: int) -> None:
        self._put(f"{_path(topic)}/partitions", json=partitions)

    def deduplicate(self) -> None:
        # Without a subscription, a ledger of a restarted broker is deleted at once.
        path = self.keep_all()
        self._admin.post(f"{path}/deduplication", json=True).raise_for_status()

    def forget_name(self, topic_partition: TopicPartition, name: str) -> None:
        # Deduplication that is off for a moment forgets all names; a broker learns late of it.
        path = f"/admin/v2/namespaces/{self._namespace}/deduplication"
        end_s = time.monotonic() + DEADLINE_S
        while self._last_sequence_id(topic_partition, name) != NOTHING:
            in_time(end_s, f"the broker still knows the name {name!r}")
            for enabled in (False, True):
                self._admin.post(path, json=enabled).raise_for_status()
                self.unload(topic_partition)

    def _last_sequence_id(self, topic_partition: TopicPartition, name: str) -> int:
        with (
            closing(WireBroker(Connection(self._service_url))) as broker,
            closing(broker.entry_producer(topic_partition, PublishOptions(name))) as producer,
        ):
            return producer.last_sequence_id

    def publish(
        self, topic: str, messages: Sequence[Message], batching: Batching = Batching.NONE
    ) -> None:
        if any(message.key_is_base64 for message in messages):
            batched = batching is not Batching.NONE
            groups = batches(messages, batching, 10_000)
            self.publish_raw(topic, [entry_of(group, batched=batched) for group in groups])
            return
        producer = self._producer(topic, batching)
        failures: list[Any] = []

        def sent(result: Any, _message_id: Any) -> None:
            if result != pulsar.Result.Ok:
                failures.append(result)

        for message in messages:
            # The wrapper drops an empty key, so the extension's own builder is used.
            producer._producer.send_async(to_pulsar(message), sent)
        producer.flush()
        assert not failures

    def pass_time(self, until_ms: int) -> None:
        time.sleep(max(0.0, until_ms / 1_000 - time.time()))

    def publish_at(self, topic: str, times_ms: Sequence[int]) -> None:
        entries = [
            entry_of([Message(b"%d" % time_ms, key="k")], batched=False) for time_ms in times_ms
        ]
        timed = [
            (fields | {3: time_ms}, payload)
            for (fields, payload), time_ms in zip(entries, times_ms, strict=True)
        ]
        self.publish_raw(topic, timed)

    def publish_corrupt(self, topic: str) -> None:
        # The metadata declares LZ4, but the payload is not LZ4.
        self.publish_raw(topic, [({6: b"k", 8: 1, 9: 50}, b"garbage")])

    def publish_encrypted(self, topic: str, key: str, messages: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            producer = self._client.create_producer(
                topic,
                encryption_key="k",
                crypto_key_reader=_new_key(Path(folder)),
                batching_enabled=messages > 1,
                batching_max_publish_delay_ms=5_000,
            )
            for number in range(messages):
                producer.send_async(b"secret%d" % number, lambda *_: None, partition_key=key)
            producer.flush()
            producer.close()

    def backlog(self, topic_partition: TopicPartition, subscription: str = SUBSCRIPTION) -> int:
        answer = self._admin.get(
            f"{_path(topic_partition.name)}/stats", params={"getPreciseBacklog": "true"}
        )
        answer.raise_for_status()
        backlog = answer.json()["subscriptions"][subscription]["msgBacklog"]
        assert isinstance(backlog, int)
        return backlog

    def expire(self, topic_partition: TopicPartition, before_ms: int) -> None:
        age_s = int(time.time() - before_ms / 1_000)
        path = f"{_path(topic_partition.name)}/all_subscription/expireMessages/{age_s}"
        self._admin.post(path).raise_for_status()

    def drop_connections(self, topic_partition: TopicPartition) -> None:
        self._put(f"{_path(topic_partition.name)}/unload")

    def roll_ledger(self, topic_partition: TopicPartition) -> None:
        self._put(f"{_path(topic_partition.name)}/unload")

    def grow_topic(self, topic: str, partitions: int) -> None:
        self._admin.post(f"{_path(topic)}/partitions", json=partitions).raise_for_status()

    def delete_topic(self, topic: str) -> None:
        self.close_producers()
        partitioned = self._admin.get(f"{_path(topic)}/partitions").json()["partitions"] > 0
        path = f"{_path(topic)}/partitions" if partitioned else _path(topic)
        self._admin.delete(path, params={"force": "true"}).raise_for_status()

    def admin(self) -> Admin:
        return self._own_admin

    def add_schema(
        self, topic: str, kind: str, definition: str = "", properties: dict[str, str] | None = None
    ) -> None:
        body = {"type": kind, "schema": definition, "properties": properties or {}}
        path = f"/admin/v2/schemas/{topic.partition('://')[2]}/schema"
        self._admin.post(path, json=body).raise_for_status()

    def schema(self, topic: str, version: int | None = None) -> TopicSchema | None:
        return self._own_admin.schema(topic, version)

    def close_producers(self) -> None:
        for producer in self._producers.values():
            producer.close()
        self._producers.clear()

    def unload(self, topic_partition: TopicPartition) -> None:
        self._put(f"{_path(topic_partition.name)}/unload")

    def keep_all(self) -> str:
        """New topics keep their messages without a subscription.

        Returns the path of their namespace.
        """
        path = self._new_namespace()
        kept = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        self._admin.post(f"{path}/retention", json=kept).raise_for_status()
        return path

    def _new_namespace(self) -> str:
        """Topics that are created from now on are in a namespace of their own; its path."""
        self._namespace = f"public/{uuid.uuid4().hex}"
        path = f"/admin/v2/namespaces/{self._namespace}"
        self._put(path)
        return path

    def limit_unacked(self, per_consumer: int, per_subscription: int) -> None:
        path = self._new_namespace()
        for name, limit in (
            ("maxUnackedMessagesPerConsumer", per_consumer),
            ("maxUnackedMessagesPerSubscription", per_subscription),
        ):
            self._admin.post(f"{path}/{name}", json=limit).raise_for_status()

    def publish_chunked(self, topic: str, key: str) -> list[EntryId]:
        producer = self._client.create_producer(
            topic, batching_enabled=False, chunking_enabled=True, send_timeout_millis=30_000
        )
        sent = producer.send(b"x" * (6 * 1024 * 1024), partition_key=key)
        producer.close()
        return [EntryId(sent.ledger_id(), sent.entry_id() - 1 + part) for part in range(2)]

    def other_producer(self, topic_partition: TopicPartition, name: str) -> OtherProducer:
        other = PulsarOtherProducer(self._service_url, topic_partition, name)
        self._others.append(other)
        return other

    def other_client(self, topic_partition: TopicPartition, hash_range: HashRange) -> OtherClient:
        other = PulsarOtherClient(self._service_url, topic_partition, hash_range)
        self._others.append(other)
        return other

    def close(self) -> None:
        with ExitStack() as all_of_it:
            # One that does not close must not leave the others open, for a later test to trip over.
            for end in (self._admin.close, self._client.close, self._own_admin.close):
                all_of_it.callback(end)
            for broker in self._brokers:
                all_of_it.callback(broker.close)
            for other in self._others:
                all_of_it.callback(other.kill)

    def publish_raw(self, topic: str, entries: Sequence[RawEntry]) -> None:
        """Publish entries with given metadata."""
        # A topic belongs to a broker after the first look-up.
        path = topic.replace("://", "/")
        self._admin.get(f"/lookup/v2/topic/{path}").raise_for_status()
        found = self._admin.get(f"/lookup/v2/topic/{topic.replace('://', '/')}").raise_for_status()
        url = urlsplit(found.json()["brokerUrl"])
        with RawConnection(url.hostname or "", url.port or 0) as connection:
            connection.publish(topic, entries)

    def _producer(self, topic: str, batching: Batching) -> pulsar.Producer:
        if (topic, batching) not in self._producers:
            by_key = batching is Batching.BY_KEY
            self._producers[topic, batching] = self._client.create_producer(
                topic,
                block_if_queue_full=True,
                max_pending_messages=10_000,
                batching_enabled=batching is not Batching.NONE,
                batching_type=pulsar.BatchingType.KeyBased if by_key else _MIXED,
                batching_max_messages=10_000,
                batching_max_allowed_size_in_bytes=1024 * 1024,
                # Never reached: flush sends, so that a batch is one entry however slow the test is.
                batching_max_publish_delay_ms=5_000,
            )
        return self._producers[topic, batching]

    def _put(self, path: str, **body: Any) -> None:
        self._admin.put(path, **body).raise_for_status()


_MIXED = pulsar.BatchingType.Default


def to_pulsar(message: Message) -> Any:
    builder = _pulsar.MessageBuilder()
    if message.value is None:
        builder.set_null_value()
    else:
        builder.content(message.value)
    if message.key is not None:
        builder.partition_key(message.key)
    if message.ordering_key is not None:
        builder.ordering_key(message.ordering_key)
    for name, value in message.properties.items():
        builder.property(name, value)
    if message.event_ms:
        builder.event_timestamp(message.event_ms)
    if message.deliver_at_ms is not None:
        builder.deliver_at(message.deliver_at_ms)
    return builder.build()


def _new_key(folder: Path) -> pulsar.CryptoKeyReader:
    """A key pair in a folder."""
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    private, public = folder / "private.pem", folder / "public.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return pulsar.CryptoKeyReader(str(public), str(private))


def _path(topic: str) -> str:
    return f"/admin/v2/{topic.replace('://', '/')}"


class BreakablePulsarHarness(PulsarHarness):
    """The same with a broker of its own."""

    names_max = NAMES_MAX

    def __init__(self, dev_broker: DevBroker) -> None:
        super().__init__(dev_broker.service_url, dev_broker.admin_url)
        self._dev_broker = dev_broker

    def crash(self) -> None:
        self._dev_broker.kill()
        self._dev_broker.start()

    @contextmanager
    def away(self) -> Iterator[None]:
        self._dev_broker.kill()
        yield
        self._dev_broker.start()

    def wipe(self) -> None:
        self._dev_broker.kill()
        self._dev_broker.wipe()
        self._dev_broker.start()

    def transaction(self, topic_partition: TopicPartition, keys: Sequence[str]) -> None:
        # A coordinator starts after the first look-up.
        coordinator = "persistent/pulsar/system/transaction_coordinator_assign-partition-0"
        self._admin.get(f"/lookup/v2/topic/{coordinator}").raise_for_status()
        with RawConnection("127.0.0.1", self._dev_broker.port) as connection:
            connection.abort(topic_partition.name, keys)

    def exceed_quota(self, topic: str, *, exceeded: bool) -> None:
        tenant, namespace, _ = topic.partition("://")[2].split("/")
        quota = {"limitSize": 1 if exceeded else 1 << 30, "policy": "producer_request_hold"}
        path = f"/admin/v2/namespaces/{tenant}/{namespace}/backlogQuota"
        self._admin.post(path, json=quota).raise_for_status()
