"""Consumers behind workers: encoded deliveries, repeated requests, and permission to ask."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight

import keyshard
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.broker.port import SubscriptionSpec
from keyshard.broker.unreadable_entries import corrupt_entry
from keyshard.columns.content import entry_block
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.hash_range import split_ring
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ChunkedMessageError,
    CorruptEntryError,
    KeyShardError,
    RangeConflictError,
    WorkerEnvironmentError,
    WorkerUnreachableError,
)
from keyshard.workers import authentication
from keyshard.workers import host as hosted_host
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.encoding import (
    NOTHING,
    DeliveredTotals,
    WorkerDelivery,
    decode_deliveries,
    decode_error,
    encode_deliveries,
    encode_error,
    keys_of,
)
from keyshard.workers.host import ConsumerHost
from keyshard.workers.server import LOOPBACK, Lease, WorkerServer, WorkerSetup, at, start_server
from keyshard.workers.worker import Worker
from tests.helpers import DEADLINE_S, wait_until
from tests.support.deadlines import deadline
from tests.support.worker_servers import worker_server

QUEUE = 2
TEXTS = [None, "", "k", "é漢", "a\x00b", "😀"]


def block_of(chosen: Random) -> EntryBlock:
    """An entry, or a part of one, with every field of messages."""
    size = chosen.randint(1, 5)
    indices = sorted(chosen.sample(range(size), chosen.randint(1, size)))

    def each(what: Callable[[], object]) -> list[Any]:
        return [what() for _ in indices]

    block = entry_block(
        EntryId(chosen.getrandbits(chosen.choice([1, 63])), chosen.getrandbits(63)),
        batch_size=size,
        batched=chosen.random() < 0.5,
        indices=indices,
        values=each(lambda: chosen.randbytes(chosen.randint(0, 5))),
        partition_keys=each(lambda: chosen.choice(TEXTS)),
        ordering_keys=each(lambda: chosen.choice(TEXTS)),
        publish_ms=chosen.getrandbits(chosen.choice([1, 40, 63])),
        event_ms=each(lambda: chosen.getrandbits(chosen.choice([1, 40, 63]))),
        properties=each(lambda: {"p": "v"} if chosen.random() < 0.3 else {}),
        schema_version=chosen.choice([None, 0, 7, 2**63 - 1]),
    )
    block.redelivered = chosen.random() < 0.5
    block.complete |= chosen.random() < 0.5
    return block


def content_of(block: EntryBlock) -> list[list[object]]:
    columns = ("value", "__key", "__orderingKey", "__eventTime", "__properties")
    return [block.column(name) for name in columns]


@given(st.integers(0, 2**64))
def test_delivered_entries_equal_received_ones(seed: int) -> None:
    chosen = Random(seed)
    sent = [
        (number, [block_of(chosen) for _ in range(chosen.randint(0, 3))])
        for number in range(chosen.randint(0, 4))
    ]
    listed, content = encode_deliveries(WorkerDelivery(number, entries) for number, entries in sent)
    came = decode_deliveries(json.loads(json.dumps(listed)), content)
    assert [one.consumer for one in came] == [number for number, _ in sent]
    for delivery, (_, entries) in zip(came, sent, strict=True):
        assert len(delivery.blocks) == len(entries)
        for after, before in zip(delivery.blocks, entries, strict=True):
            assert list(after.indices) == list(before.indices)
            for name in EntryBlock.__struct_fields__:
                if name not in ("content", "start", "indices"):
                    assert getattr(after, name) == getattr(before, name), name
            assert content_of(after) == content_of(before)


@pytest.mark.parametrize(
    "error",
    [
        RangeConflictError("somebody has it"),
        ChunkedMessageError("too long", topic_partition=TopicPartition("persistent://a/b/c", 3)),
        BrokerUnavailableError("away"),
    ],
)
def test_an_error_keeps_its_class_across_processes(error: KeyShardError) -> None:
    after = decode_error(json.loads(json.dumps(encode_error(error))))
    assert type(after) is type(error)
    assert (after.message, after.retriable) == (error.message, error.retriable)
    assert after.facts == {name: str(fact) for name, fact in error.facts.items()} or after.facts


def test_the_stored_bytes_of_an_unreadable_entry_travel_with_the_error() -> None:
    error = corrupt_entry(TopicPartition("t"), EntryId(1, 2), "it is wrong", b"\x00\xff")
    after = decode_error(json.loads(json.dumps(encode_error(error))))
    assert isinstance(after, CorruptEntryError)
    assert after.stored == b"\x00\xff"


class HostedSource:
    """A host over an in-memory cluster, with one consumer."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.topic = self.cluster.create_topic("orders")
        self.broker = MemoryBroker(self.cluster)
        self.host = ConsumerHost(self.broker)
        self.subscribe(1)

    def subscribe(self, number: int, queue: int = QUEUE, queue_bytes: int | None = None) -> None:
        self.host.subscribe(
            number=number, topic=self.topic, partition=-1, subscription="s", start=0, end=65_535,
            position="earliest", consumer_name="c", receiver_queue_size=queue,
            receiver_queue_bytes=queue_bytes,
        )  # fmt: skip

    def publish(self, count: int) -> None:
        self.cluster.publish(self.topic, *(Message(b"%d" % i, key="k") for i in range(count)))


@contextmanager
def hosted() -> Iterator[HostedSource]:
    made = HostedSource()
    try:
        yield made
    finally:
        made.host.close()


def test_a_repeated_request_has_the_same_answer_and_a_late_one_none() -> None:
    with hosted() as at:
        at.host.take(1, {}, 5.0)
        at.publish(1)
        first = at.host.take(2, {}, 5.0)
        assert rows_of(first[0]) == 1
        assert at.host.take(2, {}, 5.0) is first
        at.publish(1)
        assert rows_of(at.host.take(3, {1: (1, 1)}, 5.0)[0]) == 1
        for late in (2, 5):
            with pytest.raises(BrokerError, match="was requested after answer 3"):
                at.host.take(late, {}, 0.0)


def test_two_requests_at_once_get_one_answer() -> None:
    with hosted() as at:
        answers: list[object] = []
        asking = [
            threading.Thread(target=lambda: answers.append(at.host.take(1, {}, 5.0)))
            for _ in range(4)
        ]
        for one in asking:
            one.start()
        at.publish(1)
        for one in asking:
            one.join()
        assert len({id(answer) for answer in answers}) == 1


def rows_of(answer: dict[str, Any]) -> int:
    return sum(count for _, count, *_ in answer["deliveries"])


def test_no_consumer_receives_far_ahead_of_its_reader() -> None:
    with hosted() as at:
        at.publish(100)
        given = seq = 0
        for _ in range(30):
            seq += 1
            given += rows_of(at.host.take(seq, {}, 0.05)[0])
        assert QUEUE <= given < 2 * QUEUE
        seq += 1
        more = rows_of(at.host.take(seq, {1: (given, 0)}, 0.0)[0])
        while not more:
            seq += 1
            more += rows_of(at.host.take(seq, {}, 1.0)[0])


def test_received_bytes_never_exceed_the_memory_of_the_queue() -> None:
    with hosted() as at:
        at.host.close_consumer(number=1, for_another=True)
        at.subscribe(2, queue=10, queue_bytes=250_000)
        at.cluster.publish(at.topic, *(Message(bytes(100_000), key="k") for _ in range(60)))
        seq, taken = 0, DeliveredTotals()
        for _ in range(20):
            answer, content = at.host.take(seq := seq + 1, {}, 0.02)
            for one in decode_deliveries(answer["deliveries"], content):
                taken = taken.plus(one)
        assert 250_000 <= taken.size_bytes < 1_500_000, "one delivery more at most"
        before = taken.messages
        while taken.messages == before:
            answer, content = at.host.take(seq := seq + 1, {2: taken}, 1.0)
            for one in decode_deliveries(answer["deliveries"], content):
                taken = taken.plus(one)


def test_refused_entries_never_exceed_the_memory_of_the_queue() -> None:
    """The stored bytes of each wait with its error, while its range pauses."""
    with hosted() as at:
        at.host.close_consumer(number=1, for_another=True)
        at.subscribe(2, queue=10, queue_bytes=250_000)
        for _ in range(30):
            at.cluster.publish(at.topic, Message(bytes(100_000), key="k"), encrypted=True)
        seq, taken, refused = 0, DeliveredTotals(), 0
        for _ in range(20):
            answer, content = at.host.take(seq := seq + 1, {}, 0.02)
            for one in decode_deliveries(answer["deliveries"], content):
                taken, refused = taken.plus(one), refused + (one.error is not None)
        assert refused == 3
        while refused < 30:
            answer, content = at.host.take(seq := seq + 1, {2: taken}, 1.0)
            for one in decode_deliveries(answer["deliveries"], content):
                taken, refused = taken.plus(one), refused + (one.error is not None)


def test_a_late_report_takes_no_room_back() -> None:
    with hosted() as at:
        at.publish(3 * QUEUE)
        wait_until(lambda: at.host._full)
        at.host.take(1, {1: (2 * QUEUE, 0)}, 0.0)
        at.host.take(2, {1: (QUEUE, 0)}, 0.0)
        assert at.host._hosted[1].taken == DeliveredTotals(2 * QUEUE)


def test_a_consumer_with_room_again_does_not_wait_for_a_request() -> None:
    """While a consumer has no room, requests wait only briefly: the next may report room."""
    with hosted() as at:
        at.publish(100)
        seq = 0
        wait_until(lambda: at.host._full)
        while rows_of(at.host.take(seq := seq + 1, {}, 5.0)[0]):
            pass
        began = time.monotonic()
        at.host.take(seq + 1, {}, deadline(10.0))
        assert time.monotonic() - began < deadline(5)


def test_a_subscription_that_is_asked_for_twice_at_once_is_one() -> None:
    with hosted() as at:
        at.host.close_consumer(number=1, for_another=False)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                at.subscribe(2)
            except BaseException as exc:  # noqa: BLE001 - judged below
                errors.append(exc)

        asking = [threading.Thread(target=ask) for _ in range(8)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        assert not errors
        at.host.close_consumer(number=2, for_another=False)
        at.subscribe(2)  # late: it was closed meanwhile
        at.subscribe(3)


def test_subscribing_twice_under_a_number_is_subscribing_once() -> None:
    with hosted() as at:
        at.subscribe(1)
        with pytest.raises(RangeConflictError):
            at.subscribe(2)
        at.host.close_consumer(number=1, for_another=False)
        at.host.close_consumer(number=1, for_another=False)
        at.subscribe(2)
        with pytest.raises(BrokerError, match="has no consumer 1"):
            at.host.acknowledge(number=1, entries=[[0, 0]])


def test_a_request_for_a_missing_consumer_may_be_repeated() -> None:
    """Found by the simulation, seed 888100440 of workers: another worker is about to have it."""
    with hosted() as at:
        for _ in range(2):
            with pytest.raises(BrokerUnavailableError, match="subscribes consumer 2") as early:
                at.host.last_entry(number=2)
            assert early.value.retriable
        at.host.close_consumer(number=1, for_another=False)
        at.subscribe(2)
        assert at.host.last_entry(number=2) is None
        with pytest.raises(BrokerError, match="has no consumer 1, because it is closed") as late:
            at.host.last_entry(number=1)
        assert not late.value.retriable


def test_an_error_of_a_consumer_is_a_delivery() -> None:
    with hosted() as at:
        at.cluster.publish_chunked(TopicPartition(at.topic), Message(b"x" * 10, "k"), 2)
        seq = 0
        came: list[WorkerDelivery] = []
        while not any(one.error for one in came):
            came = decode_deliveries(at.host.take(seq := seq + 1, {}, 5.0)[0]["deliveries"], None)
        delivery = came[-1]
        assert isinstance(delivery.error, ChunkedMessageError)
        assert not delivery.blocks


class Ends:
    """The worker as its consumers see it; records acknowledgements."""

    def __init__(self) -> None:
        self.acknowledged: list[EntryId] = []
        self.closed: list[int] = []
        self.taken = DeliveredTotals()

    def acknowledge(self, number: int, entries: Sequence[EntryId]) -> None:
        assert number not in self.closed
        self.acknowledged += entries

    def last_entry(self, number: int) -> EntryId | None: ...

    def close_consumer(self, number: int, *, for_another: bool) -> None:
        assert not for_another
        self.closed.append(number)

    def took(self, number: int, taken: DeliveredTotals) -> None:
        self.taken = taken if number not in self.closed else DeliveredTotals()


def test_without_a_connection_nothing_is_given_that_came_before() -> None:
    """The entries come again on the next connection, and may be other entries by then."""
    ends = Ends()
    where = TopicPartition("persistent://a/b/c")
    wanted = SubscriptionSpec(where, "s", split_ring(1)[0], "c", 10)
    consumer = RemoteConsumer(wanted, ends, 1, EntryHolders())
    before, after = [block_of(Random(1))], [block_of(Random(2))]
    rows = before[0].rows
    consumer.arrived(WorkerDelivery(1, before))
    consumer.arrived(WorkerDelivery(1, (), connected=False))
    assert not consumer.is_connected()
    assert not consumer.receive(0)
    # The worker waits until all rows are taken, so dropped rows count.
    assert ends.taken.messages == rows
    consumer.arrived(WorkerDelivery(1, before))  # sent before the loss
    consumer.arrived(WorkerDelivery(1, (), BrokerUnavailableError("told all the same")))
    with pytest.raises(BrokerUnavailableError, match="told all the same"):
        consumer.receive(0)
    assert ends.taken == DeliveredTotals().plus(WorkerDelivery(1, before)).plus(
        WorkerDelivery(1, before)
    )
    assert ends.taken.messages == 2 * rows
    consumer.arrived(WorkerDelivery(1, (), connected=True))
    consumer.arrived(WorkerDelivery(1, after))
    assert consumer.receive(0) == after


def test_a_host_reports_a_lost_connection_between_the_entries_around_it() -> None:
    with hosted() as at:
        seq = 0
        came: list[WorkerDelivery] = []

        def asked(count: int) -> None:
            nonlocal seq
            end_s = time.monotonic() + deadline(10)
            while len(came) < count:
                assert time.monotonic() < end_s, came
                answer, content = at.host.take(seq := seq + 1, {}, 0.05)
                came.extend(decode_deliveries(answer["deliveries"], content))

        at.publish(1)
        asked(2)
        at.broker.drop()
        asked(3)
        at.broker.reconnect()
        asked(5)
        assert [len(one.blocks) if one.connected is None else one.connected for one in came] == [
            True, 1, False, True, 1,
        ]  # fmt: skip


def test_a_consumer_has_given_all_by_the_report_of_its_worker_not_by_silence() -> None:
    where = TopicPartition("persistent://a/b/c")
    consumer = RemoteConsumer(
        SubscriptionSpec(where, "s", split_ring(1)[0], "c", 10), Ends(), 1, EntryHolders()
    )
    half = WorkerDelivery(1, [block_of(Random(1))])
    said = encode_deliveries([WorkerDelivery(1, (), gave_all=True)])[0]
    (gave_all,) = decode_deliveries(json.loads(json.dumps(said)), NOTHING)
    after: list[Callable[[], object]] = [
        lambda: consumer.arrived(half),
        lambda: consumer.arrived(WorkerDelivery(1, (), connected=True)),
        consumer.lost,
        lambda: consumer.regaining(2),
    ]
    for what in after:
        consumer.arrived(WorkerDelivery(1, (), connected=True))
        assert consumer.is_connected()
        assert not consumer.has_given_all()
        consumer.arrived(gave_all)
        assert consumer.has_given_all(), "also on the other side"
        what()
        assert not consumer.has_given_all()
    consumer.arrived(gave_all)
    assert not consumer.receive(0), "there is nothing to receive of what was only told"


def test_a_host_reports_that_it_gave_all_if_an_entry_is_incomplete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report comes once a connection, and never for a whole entry."""
    monkeypatch.setattr(hosted_host, "QUIET_S", 0.02)
    monkeypatch.setattr(hosted_host, "LOOK_S", 0.0)
    seq = 0
    came: list[WorkerDelivery] = []
    with hosted() as at:

        def ask() -> bool:
            nonlocal seq
            taken = sum(block.rows for one in came for block in one.blocks)
            answer, content = at.host.take(seq := seq + 1, {1: (taken, 0)}, 0.01)
            new = decode_deliveries(answer["deliveries"], content)
            came.extend(new)
            return any(one.gave_all for one in new)

        at.publish(1)
        wait_until(lambda: not ask() and any(one.blocks for one in came))
        for _ in range(10):
            threading.Event().wait(0.01)
            assert not ask(), "of an entry that came whole there is nothing to say"
        ((_, half),) = at.cluster.publish(
            at.topic, Message(b"0", key="k"), Message(b"1", key="k"), batching=Batching.BY_KEY
        )
        at.cluster.acknowledge_indices(TopicPartition(at.topic, -1), "s", half, [1])
        at.broker.drop()
        at.broker.reconnect()
        wait_until(ask)
        last = came[-2].blocks[-1]
        assert (last.id, list(last.indices)) == (half, [0])
        assert not ask()
        at.broker.drop()
        wait_until(lambda: not ask() and came[-1].connected is False)
        at.broker.reconnect()
        wait_until(ask)
        assert sum(one.gave_all for one in came) == 2


class Broken(MemoryBroker):
    """Its consumer kept the end of an entry, of which the beginning is gone with a connection."""

    def __init__(self) -> None:
        super().__init__(MemoryCluster())
        self.kept: list[EntryBlock] = []
        self.connected = True
        self.back_meanwhile = False
        """Whether it gets a connection again while it is received from."""
        self.closed = False
        self.refused = 1
        """Times that it cannot be subscribed to again."""

    def subscribe(self, *_: Any, **__: Any) -> Any:
        if self.closed and self.refused:
            self.refused -= 1
            raise BrokerUnavailableError("not yet")
        self.closed = False
        return self

    def receive(self, _timeout_ms: int) -> list[EntryBlock]:
        kept, self.kept = self.kept, []
        self.connected |= bool(kept) and self.back_meanwhile
        return kept

    def when_ready(self, callback: Callable[[], None]) -> None:
        self.ring = callback

    topic_partition = TopicPartition("persistent://a/b/c")

    def is_connected(self) -> bool:
        return self.connected and not self.closed

    def problem(self) -> str:
        return ""

    def close(self, **_: Any) -> None:
        self.closed = True


@pytest.mark.parametrize("back_meanwhile", [False, True])
def test_the_end_of_an_entry_is_not_given_when_its_beginning_went_with_a_connection(
    back_meanwhile: bool,
) -> None:
    """Found by ``tests.proofs chaos --seed-start 10254 --subject handlers --workers processes:2``.

    1. A connection is lost between the first messages of an entry and its last ones.
    2. The first ones are let pass, because all of it comes again.
    3. The last ones are received, and the connection is there again before anybody looks.
    """
    broker = Broken()
    host = ConsumerHost(broker)
    host.subscribe(
        number=1, topic="persistent://a/b/c", partition=-1, subscription="s", start=0, end=65_535,
        position="earliest", consumer_name="c", receiver_queue_size=QUEUE,
    )  # fmt: skip
    came: list[WorkerDelivery] = []
    seq = 0

    def received(count: int) -> None:
        """Wait for a number of changes of the connection; reports of troubles may lie between."""
        nonlocal seq
        end_s = time.monotonic() + deadline(10)
        while len(list(groupby(one.connected for one in came))) < count:
            assert time.monotonic() < end_s, came
            answer, content = host.take(seq := seq + 1, {}, 0.05)
            came.extend(decode_deliveries(answer["deliveries"], content))

    received(1)
    wait_until(lambda: hasattr(broker, "ring"))
    broker.connected, broker.back_meanwhile = False, back_meanwhile
    broker.kept = [block_of(Random(1))]
    broker.ring()
    received(2)
    wait_until(lambda: not broker.kept)
    broker.connected = True
    received(3)
    assert not any(one.blocks for one in came)
    assert [connected for connected, _ in groupby(one.connected for one in came)] == [
        True, False, True,
    ]  # fmt: skip
    # If its connection is unknown, another consumer gets all of it.
    assert broker.refused == (0 if back_meanwhile else 1)
    host.close()


def test_an_acknowledgement_goes_through_the_worker_that_the_entry_came_by() -> None:
    """Entries that a worker loses come again only through its own consumers."""
    where, holders, one, other = (
        TopicPartition("persistent://a/b/c"),
        EntryHolders(),
        Ends(),
        Ends(),
    )
    low, high = (
        RemoteConsumer(SubscriptionSpec(where, "s", each, "c", 10), ends, number, holders)
        for number, (each, ends) in enumerate(zip(split_ring(2), (one, other), strict=True))
    )
    entries = [block_of(Random(seed)) for seed in range(5)]
    low.arrived(WorkerDelivery(0, entries[:3]))
    high.arrived(WorkerDelivery(1, entries[3:]))
    assert len(low.receive(0)) == 3
    assert len(high.receive(0)) == 2
    high.acknowledge([entry.id for entry in entries[1:]])
    assert one.acknowledged == [entry.id for entry in entries[1:3]]
    assert other.acknowledged == [entry.id for entry in entries[3:]]
    low.close()
    high.acknowledge([entries[0].id])  # no consumer has it: it comes again, or was acknowledged
    assert other.acknowledged[-1] == entries[0].id
    assert not holders._holders


def test_acknowledgements_that_a_dead_worker_did_not_take_go_the_way_their_entries_came() -> None:
    """Otherwise the broker waits for the consumer that has the entry, for ever."""
    where, holders, one, other, dead = (
        TopicPartition("persistent://a/b/c"), EntryHolders(), Ends(), Ends(), Ends()
    )  # fmt: skip
    dead.acknowledge = Mock(side_effect=BrokerUnavailableError("gone"))  # type: ignore[method-assign]
    first, second, third = (
        RemoteConsumer(SubscriptionSpec(where, "s", each, "c", 10), ends, number, holders)
        for number, (each, ends) in enumerate(zip(split_ring(3), (dead, one, other), strict=True))
    )
    entries = [block_of(Random(seed)) for seed in range(4)]
    for consumer, share in ((first, entries[:2]), (second, entries[2:])):
        consumer.arrived(WorkerDelivery(consumer.number, share))
        assert len(consumer.receive(0)) == 2
    ids = [entry.id for entry in entries]
    with pytest.raises(BrokerUnavailableError):
        first.acknowledge(ids)
    first.lost()
    third.acknowledge(ids)
    assert one.acknowledged == ids[2:]
    assert other.acknowledged == ids[:2]
    assert not holders._holders


def test_a_lease_that_has_ended_never_begins_again() -> None:
    now = [100.0]
    lease = Lease(4.0, lambda: now[0])
    now[0] += 3.9
    assert lease.renew()
    now[0] += 3.9
    assert lease.left_s() == pytest.approx(0.1)
    now[0] += 0.2
    assert not lease.renew()
    now[0] -= 1.0
    assert not lease.renew()
    assert lease.left_s() == 0


MUCH = b"[" + b"0," * 1_000_000 + b"0]"


@pytest.mark.parametrize(
    "credential",
    [
        b"guess\n", b"guess", b"", b"\n", b" \n", b"a 1 b\n", b"\xff \xff \xff\n",
        b"a " * 200 + b"\n",
        b"0" * 32 + b" 1 " + b"0" * 64 + b"\n",
    ],
)  # fmt: skip
def test_a_request_without_the_token_is_refused_unread_and_logged_once(
    credential: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The JSON of a stranger was parsed before its token was compared."""
    read: list[object] = []
    monkeypatch.setattr(authentication, "_read", read.append)
    with hosted() as at, worker_server(at.host) as (_, _, client):
        for body in (b"{}", b"[" * 9_000, MUCH):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("last_entry", credential + body)))
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_get(flight.Ticket(credential + body)))
    assert caplog.text.count("another token") == 1
    assert not read


def test_a_worker_whose_lease_has_ended_neither_gives_nor_acknowledges() -> None:
    with hosted() as at, worker_server(at.host, lease_s=0.3) as served:
        server, setup, client = served
        at.publish(1)
        wait_until(lambda: at.host.take(1, {}, 0.1)[0]["deliveries"])
        wait_until(lambda: server.lease.left_s() == 0)
        prover = authentication.RequestSigner(setup.token, f"grpc://{LOOPBACK}:{server.port}")
        introduction = flight.Action(authentication.INTRODUCE, prover.introduction())
        (met,) = client.do_action(introduction)  # type: ignore[attr-defined]
        assert prover.meet(bytes(met.body))
        asked = {"arguments": {"number": 1, "entries": [[0, 0]]}}
        _, body = prover.request("acknowledge", asked)
        with pytest.raises(flight.FlightUnavailableError, match="lease"):
            list(client.do_action(flight.Action("acknowledge", body)))
        _, body = prover.request("take", {"seq": 1, "taken": {}, "wait_s": 0, "released": []})
        with pytest.raises(flight.FlightUnavailableError, match="lease"):
            list(client.do_get(flight.Ticket(body)))
        assert at.cluster.backlog(TopicPartition(at.topic), "s") == 1


def test_a_worker_of_another_version_is_refused_by_name() -> None:
    """The refusal comes before any content of the other version is read."""
    server, hello = start_server("0.0.9", "no setup of this version")
    assert server is None
    with pytest.raises(WorkerEnvironmentError) as caught:
        Asked(hello)
    for told_too in ("0.0.9", keyshard.__version__, socket.gethostname(), "same version"):
        assert told_too in caught.value.message


class Asked(Worker):
    """A worker that was not started."""

    def __init__(self, hello: str) -> None:
        super().__init__(hello, "token", "worker")


@pytest.mark.parametrize("hello", ["", "Welcome to Python!\n", "\0", "7", "[]", "{}", "[" * 10**5])
def test_an_invalid_hello_is_refused(hello: str) -> None:
    with pytest.raises(WorkerUnreachableError, match="not the output of a worker"):
        Asked(hello)


def test_a_silent_address_is_named_with_the_option() -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        endpoint = at(LOOPBACK, free.getsockname()[1])
    with pytest.raises(WorkerUnreachableError, match=f"{endpoint} within .* every worker"):
        Asked(json.dumps({"endpoint": endpoint, "pid": 7, "host": "there"}))


def test_a_worker_that_is_asked_to_leave_gives_its_ranges_back() -> None:
    with hosted() as at_place:
        setup = WorkerSetup(Connection("pulsar://nobody"), 60.0, level=30)
        server = WorkerServer(at_place.host, setup)
        gave_back: list[bool] = []
        main = threading.Thread(target=lambda: gave_back.append(server.serve_to_the_end()))
        main.start()
        hello = {"endpoint": at(LOOPBACK, server.port), "pid": 7, "host": "there"}
        worker = Worker(json.dumps(hello), setup.token, "worker")
        worker.leave()
        worker.end(5.0)
        worker.end(5.0)
        main.join(DEADLINE_S)
        server.shutdown()
        assert gave_back == [True]
        at_place.host = ConsumerHost(MemoryBroker(at_place.cluster))
        at_place.subscribe(1)  # the range is free


def test_keys_cross_where_the_layout_may_ask_for_them() -> None:
    def delivery(**changes: Any) -> WorkerDelivery:
        fields: dict[str, Any] = {"batch_size": 1, "batched": False, "indices": [0]} | changes
        block = entry_block(
            EntryId(1, 2), values=[b"v"], partition_keys=["k"], ordering_keys=[None],
            publish_ms=1, event_ms=[0], properties=[{}], **fields,
        )  # fmt: skip
        return WorkerDelivery(1, [block])

    def crossing(*deliveries: WorkerDelivery) -> list[object]:
        _, content = encode_deliveries(deliveries)
        keys = keys_of(deliveries, content)
        assert keys.schema.names == ["__key", "__orderingKey"]
        return keys.column("__key").to_pylist()

    part, of_bytes = delivery(batch_size=2, batched=True), delivery()
    of_bytes.blocks[0].keys_of_bytes = True
    assert crossing(delivery(), delivery()) == []
    assert crossing(delivery(), part) == ["k", "k"]
    assert crossing(of_bytes) == ["k"]
