"""A scalable topic on a real broker: a producer that follows its segments, splits and merges."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress

import httpx

from keyshard.broker.port import Producer, PublishOptions
from keyshard.broker.reports import SegmentWatch
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import BrokerError
from keyshard.testing.devbroker import DevBroker
from tests.support.deadlines import deadline, in_time

SEND_MS = int(deadline(20) * 1_000)
"""Longest wait for a message to be stored, milliseconds."""


class ScalableTopic:
    """A topic with messages ``key:number``; the numbers of each key ascend.

    Args:
        broker: A broker of Pulsar 5.
        segments: Number of its first segments.
        keys: Number of keys.
        partitions: If given, the topic is first a persistent one of that many partitions; see
            :meth:`migrate`.
        prefix: Beginning of its name, if it has a new one.
        name: Its name; default: a new one.
    """

    def __init__(
        self,
        broker: DevBroker,
        segments: int = 1,
        keys: int = 40,
        partitions: int = 0,
        *,
        prefix: str = "scalable",
        name: str = "",
    ) -> None:
        self._broker = broker
        self._http = httpx.Client(base_url=broker.admin_url, timeout=deadline(30))
        self._keys = keys
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self.name = name or f"topic://public/default/{prefix}-{uuid.uuid4().hex[:12]}"
        self._path = self.name.replace("topic://", "/admin/v2/scalable/")
        self.sent: list[str] = []
        """Values that the broker has stored, in this order."""
        self.changes: list[str] = []
        """Splits and merges."""
        self.migrated_from = ""
        """The persistent topic that it was, or still is."""
        if partitions:
            self.migrated_from = self.name.replace("topic://", "persistent://")
            path = self._path.replace("scalable", "persistent", 1)
            self._http.put(f"{path}/partitions", json=partitions).raise_for_status()
            self._partitions = partitions
        else:
            self._http.put(self._path, params={"numInitialSegments": segments}).raise_for_status()

    def publish_before(self, count: int) -> None:
        """Publish messages to the persistent topic; its partitions are chosen by key."""
        wheres = [TopicPartition(self.migrated_from, number) for number in range(self._partitions)]
        with closing(WireBroker(Connection(self._broker.service_url))) as client:
            producers = [client.producer(where, send_timeout_ms=SEND_MS) for where in wheres]
            for key, value in self._next(count):
                producers[int(key[1:]) % self._partitions].send(value.encode(), key=key)
                self.sent.append(value)

    def migrate(self) -> None:
        """Make a scalable topic of the persistent one, though clients are connected."""
        self._http.post(f"{self._path}/migrate", params={"force": "true"}).raise_for_status()
        self.changes.append("migrate")

    def keep(self) -> None:
        """Keep all messages; a broker deletes sealed segments that no subscription needs."""
        kept = {"type": "QUEUE"}
        self._http.put(f"{self._path}/subscriptions/kept", params=kept).raise_for_status()

    def split(self, number: int) -> None:
        self._http.post(f"{self._path}/split/{number}").raise_for_status()
        self.changes.append(f"split {number}")

    def merge(self, lower: int, upper: int) -> None:
        self._http.post(f"{self._path}/merge/{lower}/{upper}").raise_for_status()
        self.changes.append(f"merge {lower} {upper}")

    def change(self, draw: random.Random) -> None:
        """Split a drawn open segment, or merge two adjacent ones."""
        with closing(WireBroker(Connection(self._broker.service_url))) as client:
            graph = client.watch_segments(self.name, lambda: None).graph
        open_ones = sorted(
            (one for one in graph.segments.values() if not one.is_sealed),
            key=lambda one: one.first_hash,
        )
        if len(open_ones) > 1 and draw.random() < len(open_ones) / 8:
            at = draw.randrange(len(open_ones) - 1)
            self.merge(open_ones[at].number, open_ones[at + 1].number)
        else:
            self.split(draw.choice(open_ones).number)

    def publish(self, count: int) -> None:
        """Publish messages, each to the segment that has its key now."""
        with closing(WireBroker(Connection(self._broker.service_url))) as client:
            sender = _Sender(client, self.name)
            for key, value in self._next(count):
                sender.send(key, value)
                self.sent.append(value)

    def publish_mixed(self, count: int, per_entry: int) -> None:
        """Publish entries of several keys, as Java's producer does. No segment changes meanwhile.

        Args:
            count: Number of messages.
            per_entry: Most messages of an entry.
        """
        waiting: dict[TopicPartition, list[OutgoingMessage]] = {}
        with closing(WireBroker(Connection(self._broker.service_url))) as client:
            graph = client.watch_segments(self.name, lambda: None).graph
            for key, value in self._next(count):
                where = graph.partition(graph.segment_of(key).number)
                one = OutgoingMessage(value.encode(), key, None, None, None)
                waiting.setdefault(where, []).append(one)
                self.sent.append(value)
            for where, messages in waiting.items():
                with closing(client.entry_producer(where, PublishOptions())) as producer:
                    for first in range(0, len(messages), per_entry):
                        entry = messages[first : first + per_entry]
                        producer.publish(entry, first).result(deadline(20))

    def _next(self, count: int) -> Iterator[tuple[str, str]]:
        """Yield keys and values of the next messages."""
        first = len(self.sent)
        for number in range(first, first + count):
            key = f"k{number % self._keys}"
            yield key, f"{key}:{number}"

    def check(self, got: list[str], count: int | None = None) -> None:
        """Check that each message came once, and those of each key in their order.

        Args:
            got: Values in the order in which they came.
            count: How many of the first messages came; default: all.
        """
        sent = set(self.sent[:count])
        missing, others = sent - set(got), set(got) - sent
        assert not others, f"{len(others)} too many, such as {min(others)}; {self.changes}"
        assert not missing, f"{len(missing)} lost, such as {min(missing)}; {self.changes}"
        assert len(got) == len(set(got)), f"{len(got) - len(set(got))} twice; {self.changes}"
        last: dict[str, int] = {}
        for value in got:
            key, _, number = value.partition(":")
            assert last.get(key, -1) < int(number), f"{value} out of order; {self.changes}"
            last[key] = int(number)

    def delete(self) -> None:
        """Delete the topic, though clients are connected."""
        self._http.delete(self._path, params={"force": "true"}).raise_for_status()

    @property
    def path(self) -> str:
        """Path of its administration."""
        return self._path

    def close(self) -> None:
        self._http.close()


class _Sender:
    """Sends each message to the open segment of its key; an own rule gives keys to segments."""

    def __init__(self, client: WireBroker, topic: str) -> None:
        self._client = client
        self._watch: SegmentWatch = client.watch_segments(topic, lambda: None)
        self._producers: dict[TopicPartition, Producer] = {}

    def send(self, key: str, value: str) -> None:
        end_s = time.monotonic() + deadline(60)
        while True:
            graph = self._watch.graph
            where = graph.partition(graph.segment_of(key).number)
            try:
                if where not in self._producers:
                    self._producers[where] = self._client.producer(where, send_timeout_ms=SEND_MS)
                self._producers[where].send(value.encode(), key=key)
                return
            except BrokerError as exc:
                if "Terminated" not in str(exc):
                    raise
            # Sealed: the next graph names the successor.
            with suppress(BrokerError):
                self._producers.pop(where).close() if where in self._producers else None
            in_time(end_s, f"no open segment took {value}")
            time.sleep(0.02)
