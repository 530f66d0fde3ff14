"""Contract: consumers, Readers and producers that lose their connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pulsar
import pytest

from keyshard.broker.connect import connect
from keyshard.broker.memory import MemoryBroker, MemoryCluster, Message
from keyshard.broker.port import Broker, Reader
from keyshard.config.connection import Connection, Transport
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import BrokerUnavailableError
from tests.chaos.cluster import TOPIC, Cluster
from tests.contract.contract_harness import subscribe
from tests.helpers import wait_until

FIRST = EntryId(0, 0)
ENTRIES = 30
ASKS_FOR_THE_LAST = b"\x08\x1d\xea\x01"
"""How Pulsar's protocol writes the command GET_LAST_MESSAGE_ID."""
BACK_S = 0.15
"""Time for which nothing answers after a cut, seconds."""


class Line(Protocol):
    """A client, and the connection to its broker."""

    where: TopicPartition
    broker: Broker
    knows_its_end: bool
    """Whether a Reader remembers its entries after a lost connection."""

    def publish(self, count: int) -> list[EntryId]:
        """Publish entries of one message each, past the connection."""

    def cut(self) -> None:
        """Cut the connection; the client makes another."""

    def cut_while(self, asking: Callable[[], object]) -> object:
        """Cut it while a request for the last message is on its way, or behind the answer."""


class MemoryLine:
    knows_its_end = False

    def __init__(self) -> None:
        self._cluster = MemoryCluster(entries_per_ledger=1_000)
        self.where = TopicPartition(self._cluster.create_topic("cut"))
        self._memory = MemoryBroker(self._cluster)
        self.broker: Broker = self._memory

    def publish(self, count: int) -> list[EntryId]:
        messages = [Message(b"v", key="k")] * count
        return [entry_id for _, entry_id in self._cluster.publish(self.where, *messages)]

    def cut(self) -> None:
        self._memory.disconnect()

    def cut_while(self, asking: Callable[[], object]) -> object:
        self._memory.drop()
        try:
            return asking()
        finally:
            self._memory.reconnect()


class PulsarLine:
    def __init__(self, cluster: Cluster, number: int, transport: Transport = "client") -> None:
        self._proxy = cluster.proxy
        self.knows_its_end = transport == "wire"
        self.where = TopicPartition(f"{TOPIC}-cut-{number}")
        self._client = pulsar.Client(
            cluster.direct_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        )
        self._producer = self._client.create_producer(self.where.name, batching_enabled=False)
        self.broker = connect(
            Connection(cluster.proxied_url, operation_timeout_ms=10_000, transport=transport)
        )

    def publish(self, count: int) -> list[EntryId]:
        sent = [self._producer.send(b"v", partition_key="k") for _ in range(count)]
        return [EntryId(one.ledger_id(), one.entry_id()) for one in sent]

    def cut(self) -> None:
        assert self._proxy.cut()

    def cut_while(self, asking: Callable[[], object]) -> object:
        self._proxy.stall()
        answered = threading.Event()
        cut = threading.Thread(target=self._cut_when_asked, args=(answered,))
        cut.start()
        try:
            return asking()
        finally:
            answered.set()
            cut.join()

    def _cut_when_asked(self, answered: threading.Event) -> None:
        try:
            wait_until(lambda: answered.is_set() or self._proxy.holds(ASKS_FOR_THE_LAST))
        finally:
            self._proxy.cut()
            time.sleep(BACK_S)
            self._proxy.resume()

    def close(self) -> None:
        self.broker.close()
        self._client.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(Path(tmp_path_factory.mktemp("cut"))) as started:
        yield started


REAL = [pytest.param(transport, marks=pytest.mark.broker) for transport in ("client", "wire")]


@pytest.fixture(params=["memory", *REAL])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    if request.param == "memory":
        yield MemoryLine()
        return
    made = PulsarLine(request.getfixturevalue("cluster"), time.monotonic_ns(), request.param)
    yield made
    made.close()


@contextmanager
def opened(line: Line) -> Iterator[Reader]:
    reader = line.broker.reader(line.where, FIRST)
    yield reader
    reader.close()


def read_until(reader: Reader, last: EntryId) -> list[EntryId]:
    """Entries up to one, in the order they came."""
    found: list[EntryId] = []
    wait_until(
        lambda: found.extend(block.id for block in reader.read(50)) or last in found  # type: ignore[func-returns-value]
    )
    return found


def test_a_reader_reports_a_lost_connection_from_then_on_and_skips_nothing(line: Line) -> None:
    entries = line.publish(ENTRIES)
    with opened(line) as reader:
        assert reader.stayed_connected()
        line.cut()
        wait_until(lambda: not reader.stayed_connected())
        assert list(dict.fromkeys(read_until(reader, entries[-1]))) == entries
        assert not reader.stayed_connected()


def test_a_reader_that_is_cut_off_after_its_last_entry_gets_later_entries(line: Line) -> None:
    """Until the next entry is published, a client may say for ever that more is left.

    That answer does not promise that an entry comes.
    """
    last = line.publish(ENTRIES)[-1]
    with opened(line) as reader:
        read_until(reader, last)
        line.cut()
        wait_until(lambda: not reader.stayed_connected())
        wait_until(lambda: answers(reader))
        assert reader.at_end() == line.knows_its_end
        assert reader.read(50) == []
        (following,) = line.publish(1)
        assert read_until(reader, following)[-1] == following


def answers(reader: Reader) -> bool:
    try:
        reader.at_end()
    except BrokerUnavailableError:
        return False
    return True


def test_a_reader_that_answers_at_the_end_during_a_cut_also_reports_the_loss(line: Line) -> None:
    """The answer may be wrong. It counts only if the Reader stayed connected."""
    line.publish(ENTRIES)
    with opened(line) as reader:
        said = line.cut_while(lambda: answer_or_error(reader.at_end))
        if said is True or isinstance(said, BrokerUnavailableError):
            assert not reader.stayed_connected()


def test_a_consumer_without_connection_never_reports_an_empty_topic(line: Line) -> None:
    last = line.publish(ENTRIES)[-1]
    consumer = subscribe(line.broker, line.where)
    said = line.cut_while(lambda: answer_or_error(consumer.last_entry))
    assert said == last or isinstance(said, BrokerUnavailableError)
    consumer.close()


def answer_or_error(ask: Callable[[], object]) -> object:
    try:
        return ask()
    except BrokerUnavailableError as exc:
        return exc


@pytest.mark.broker
def test_blocking_calls_of_the_client_are_wrong_after_a_lost_connection(
    cluster: Cluster,
) -> None:
    """So the port asks by callback, and the in-memory Reader gives one wrong answer: see ADR 10."""
    line = PulsarLine(cluster, time.monotonic_ns())
    line.publish(ENTRIES)
    client = pulsar.Client(
        cluster.proxied_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    reader = client.create_reader(line.where.name, pulsar.MessageId.earliest)
    while reader.has_message_available():
        reader.read_next(5_000)
    consumer = client.subscribe(line.where.name, "lie")

    def published_and_asked() -> bool:
        line.publish(1)
        return bool(reader.has_message_available())

    assert line.cut_while(published_and_asked) is False
    wait_until(consumer.is_connected)
    assert line.cut_while(lambda: consumer.get_last_message_id().entry_id()) == -1
    wait_until(lambda: consumer.get_last_message_id().entry_id() == ENTRIES)
    client.close()
    line.close()
