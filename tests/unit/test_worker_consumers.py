"""Consumers that a worker hosts: repeated requests, limits of memory, and lost connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import groupby
from random import Random
from typing import Any

import pytest

from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster, Message
from keyshard.core.position.entry import EntryBlock, TopicPartition
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ChunkedMessageError,
    RangeConflictError,
)
from keyshard.workers import host as hosted_host
from keyshard.workers.encoding import DeliveredTotals, WorkerDelivery, decode_deliveries
from keyshard.workers.host import ConsumerHost
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.hosted_consumers import QUEUE, block_of, hosted


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
