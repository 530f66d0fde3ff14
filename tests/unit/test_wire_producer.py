"""Producers of the wire transport give their names back, against a scripted broker."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pyarrow as pa
import pytest

from keyshard.broker.auth.credentials import Credentials
from keyshard.broker.port import Compression, PublishOptions
from keyshard.broker.retry import Retrier, Steps
from keyshard.broker.unconfirmed import ENTRY_MEMORY, AcceptedLostError
from keyshard.broker.wire.connection_pool import ConnectionPool
from keyshard.broker.wire.errors import order_broken
from keyshard.broker.wire.frames import api
from keyshard.broker.wire.producer import WireProducer
from keyshard.broker.wire.reconnect import Shared
from keyshard.columns.outgoing import OutgoingMessage, outgoing_from
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId, TopicPartition
from keyshard.errors import (
    BrokerUnavailableError,
    MessageTooLargeError,
    ProducerBusyError,
    ProducerFencedError,
)
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.frame_broker.server import FrameServer, SocketSession

UNKNOWN, BUSY, NOT_ALLOWED = 0, 16, 22
DEADLINE_S = deadline(10)
WHERE = TopicPartition("persistent://public/default/t")
ROWS = [OutgoingMessage(b"v", "k")]


class Session(SocketSession):
    broker: NamingBroker

    def __init__(self, broker: NamingBroker, stream: socket.socket) -> None:
        super().__init__(broker, stream)
        self.held: list[Any] = []

    def _producer(self, asked: Any) -> None:
        if self.broker.late:
            self.held.append(asked)
            return
        holder = self.broker.holders.setdefault(asked.producer_name, asked.producer_id)
        if holder != asked.producer_id:
            self.refuse(asked, BUSY)
        elif not self.broker.silent:
            self.open_producer(asked, asked.producer_name, self.broker.last)

    def _send(self, sent: Any) -> None:
        if self.broker.stalled:
            return
        self.broker.last = sent.sequence_id
        self.receipt(sent.producer_id, sent.sequence_id, 7, 0)

    def _close_producer(self, asked: Any) -> None:
        holders = self.broker.holders
        names = [one for one, holder in holders.items() if holder == asked.producer_id]
        if names:
            for name in names:
                del holders[name]
            self.succeed(asked)
        else:
            self.refuse(asked, UNKNOWN, b"Producer was not registered on the connection")
        self.broker.late, held, self.held = False, self.held, []
        for one in held:
            self._producer(one)


class NamingBroker(FrameServer):
    """Lets one producer have a name at a time."""

    session = Session

    def __init__(self) -> None:
        self.holders: dict[bytes, int] = {}
        """Producer ids by the names that they hold."""
        self.last = -1
        self.silent = False
        """Whether it opens producers without an answer."""
        self.late = False
        """Whether it opens producers only after the next request to close one."""
        self.stalled = False
        """Whether it takes entries without a receipt."""
        super().__init__()


class HeldRetrier(Retrier):
    """Holds attempts back; the test runs them step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Callable[[], Any]] = []
        self.came = threading.Event()

    def until_true(self, attempt: Callable[[], Any], wait_s: float = 0.0) -> None:  # noqa: ARG002
        self.held.append(attempt)
        self.came.set()


@pytest.fixture
def broker() -> Iterator[NamingBroker]:
    with closing(NamingBroker()) as made:
        yield made


@pytest.fixture
def shared(broker: NamingBroker) -> Iterator[Shared]:
    connection = Connection(broker.url, operation_timeout_ms=10_000)
    credentials = Credentials(connection)
    made = Shared(
        ConnectionPool(connection, credentials),
        HeldRetrier(),
        HeldRetrier(),
        credentials,
        DEADLINE_S,
    )
    yield made
    made.pool.close(DEADLINE_S)


def opened(shared: Shared) -> WireProducer:
    made = WireProducer(shared, WHERE, PublishOptions("name"))
    made.open()
    return made


def reopening(shared: Shared) -> Steps:
    """Wait for the attempt to open a producer again."""
    retrier = cast("HeldRetrier", shared.reconnects)
    assert retrier.came.wait(DEADLINE_S)
    return cast("Steps", retrier.held.pop()())


@pytest.mark.parametrize("steps", range(4))
def test_a_producer_that_is_closed_while_it_is_reopened_gives_its_name_back(
    broker: NamingBroker, shared: Shared, steps: int
) -> None:
    """The attempt has taken ``steps`` steps when the producer is closed.

    1. The first entry of an unknown name is confirmed. The producer is opened again, which shows
       whether the broker deduplicates.
    2. The attempt waits for a thread of the broker's lane.
    3. The program closes the producer.
    4. The attempt goes on, and finds the producer closed.

    No step may forget the id under which the broker still holds the name.
    """
    producer = opened(shared)
    producer.publish(ROWS, 0).result(DEADLINE_S)
    attempt = reopening(shared)
    for _ in range(steps):
        next(attempt)
    producer.close()
    for _ in attempt:
        pass
    assert broker.holders == {}
    opened(shared).close()


@pytest.mark.parametrize("how", ["silent", "late"])
def test_a_request_without_an_answer_gives_its_name_back(
    broker: NamingBroker, shared: Shared, how: str
) -> None:
    """A broker that was frozen may close a producer before it has opened it, and then open it."""
    setattr(broker, how, True)
    waiting = WireProducer(
        Shared(shared.pool, shared.reconnects, shared.nudges, shared.credentials, 0.3),
        WHERE, PublishOptions("name"),
    )  # fmt: skip
    with pytest.raises((BrokerUnavailableError, ProducerBusyError)):
        waiting.open()
    broker.silent = False
    end_s = time.monotonic() + DEADLINE_S
    while broker.holders:
        assert time.monotonic() < end_s, "the broker still holds the name"
        time.sleep(0.005)
    opened(shared).close()


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_an_unconfirmed_entry_is_kept_once(
    broker: NamingBroker, shared: Shared, compression: Compression
) -> None:
    """Its encoded bytes are enough to send it again, also in part."""
    broker.stalled = True
    producer = WireProducer(shared, WHERE, PublishOptions("name", compression=compression))
    producer.open()
    rows = [OutgoingMessage(b"%d" % number * 5_000, f"k{number // 5}") for number in range(20)]
    gc.collect()
    before = pa.total_allocated_bytes()
    producer.publish_all(outgoing_from(rows), [5, 10, 15, 20], 0)
    producer.publish(rows, 20)
    gc.collect()
    assert pa.total_allocated_bytes() == before
    queue = producer._queue
    assert queue.messages == 40
    assert queue.bytes == sum(len(one.data) + ENTRY_MEMORY for one in queue._entries)
    assert [row for one in queue._entries for row in one.rows] == rows + rows
    assert list(queue._entries[1].rows[2:]) == rows[7:10]
    producer.close()


def test_rows_of_an_earlier_attempt_that_the_broker_has_lost_end_the_producer_at_once(
    broker: NamingBroker, shared: Shared
) -> None:
    """Only a writer that begins again can publish them; see ``AcceptedLostError``."""
    broker.last, broker.stalled = 9, True
    producer = opened(shared)
    assert producer.last_sequence_id == 9
    probe = producer.publish(ROWS, 9)
    broker.last = 4  # a write failed
    broker.cut_all()
    attempt = reopening(shared)
    broker.holders.clear()
    for _ in attempt:
        pass
    assert isinstance(probe.exception(0), AcceptedLostError)
    with pytest.raises(AcceptedLostError, match="Repeat the call"):
        producer.publish(ROWS, 10)


def test_a_flush_returns_when_every_future_is_resolved(
    broker: NamingBroker, shared: Shared
) -> None:
    """The queue is empty while a receipt for two entries is at the callback of the first one."""
    broker.stalled = True
    producer = WireProducer(shared, WHERE, PublishOptions())
    producer.open()
    first, second = (producer.publish(ROWS, number) for number in range(2))
    reached, go_on, flushed = threading.Event(), threading.Event(), threading.Event()

    def hold(_: object) -> None:
        reached.set()
        assert go_on.wait(DEADLINE_S)

    first.add_done_callback(hold)
    receipts = [
        api.SendReceipt(
            producer_id=producer._id,
            sequence_id=number,
            message_id=api.MessageId(ledger=7, entry=number),
        )
        for number in range(2)
    ]

    def flush() -> None:
        producer.flush()
        assert second.exception(0) is None
        flushed.set()

    threads = [threading.Thread(target=producer.receipts, args=(receipts,))]
    threads[0].start()
    assert reached.wait(DEADLINE_S)
    threads.append(threading.Thread(target=flush))
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert flushed.is_set()


def test_a_flush_waits_only_for_entries_that_were_published_before(
    broker: NamingBroker, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread publishes all the time, so the queue is never empty."""
    broker.stalled = True
    producer = WireProducer(shared, WHERE, PublishOptions())
    producer.open()
    began, flushed, wait = threading.Event(), threading.Event(), producer._changed.wait

    def waiting(timeout_s: float | None = None) -> bool:
        began.set()
        return wait(timeout_s)

    def flush() -> None:
        producer.flush()
        flushed.set()

    def confirm(*numbers: int) -> None:
        producer.receipts(
            [
                api.SendReceipt(
                    producer_id=producer._id,
                    sequence_id=number,
                    message_id=api.MessageId(ledger=7, entry=number),
                )
                for number in numbers
            ]
        )

    for number in range(3):
        producer.publish(ROWS, number)
    producer.next_frames()
    monkeypatch.setattr(producer._changed, "wait", waiting)
    thread = threading.Thread(target=flush)
    thread.start()
    assert began.wait(DEADLINE_S)
    later = producer.publish(ROWS, 3)
    producer.next_frames()
    confirm(1, 2)
    thread.join(0.1)
    assert not flushed.is_set(), "the first entry is unconfirmed"
    confirm(0)
    assert flushed.wait(DEADLINE_S)
    assert not later.done()
    producer.close()
    thread.join(DEADLINE_S)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_value_that_could_not_be_read_again_is_refused(
    broker: NamingBroker, shared: Shared, compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be small enough for the broker once it is compressed."""
    for module in ("compression", "encoding", "producer"):
        monkeypatch.setattr(f"keyshard.broker.wire.{module}.UNPACKED_BYTES_MAX", 100_000)
    producer = WireProducer(shared, WHERE, PublishOptions(compression=compression))
    producer.open()
    fits, large = (OutgoingMessage(b"." * size, "k") for size in (100_000, 100_001))
    assert producer.message_bytes_max <= 100_000, "writers check larger messages"
    producer.check(fits)
    producer.publish([fits], 0).result(DEADLINE_S)
    for refused in (lambda: producer.check(large), lambda: producer.publish([large], 1)):
        with pytest.raises(MessageTooLargeError, match=r"key 'k' to .*t have 100001 bytes before"):
            refused()
    producer.close()


def test_a_probe_that_is_refused_for_good_holds_up_no_later_entry(
    broker: NamingBroker, shared: Shared
) -> None:
    """Without a name, a refusal concerns only the entries that the probe asks about."""
    broker.stalled = True
    producer = WireProducer(shared, WHERE, PublishOptions())
    producer.open()
    first, second = producer.publish(ROWS, 0), producer.publish(ROWS * 2, 1)
    third = producer.publish(ROWS, 3)
    broker.last = 1
    broker.cut_all()
    attempt = reopening(shared)
    broker.holders.clear()
    for _ in attempt:
        pass
    wait_until(lambda: producer._queue.probing and not producer._queue.has_next)
    broker.stalled = False
    producer.refused(
        api.SendError(
            producer_id=producer._id, sequence_id=1, error=NOT_ALLOWED, message=b"not allowed"
        )
    )
    for one in (first, second):
        assert "not allowed" in str(one.exception(0))
    assert third.result(DEADLINE_S) == EntryId(7, 0)
    assert producer.publish(ROWS, 4).result(DEADLINE_S) == EntryId(7, 0)
    producer.flush()
    producer.close()


def test_the_remedy_of_a_broken_order_fits_single_messages(
    broker: NamingBroker, shared: Shared
) -> None:
    """They have no sink id: the next one opens another producer."""
    broker.stalled = True
    producer = WireProducer(shared, WHERE, PublishOptions())
    producer.open()
    sent = producer.publish(ROWS * 2, 0)
    broker.last = 1
    broker.cut_all()
    attempt = reopening(shared)
    broker.holders.clear()
    for _ in attempt:
        pass
    stored = api.SendReceipt(
        producer_id=producer._id, sequence_id=1, message_id=api.MessageId(ledger=7, entry=0)
    )
    producer.receipts([stored])
    error = sent.exception(0)
    assert isinstance(error, ProducerFencedError)
    assert error.remedy.startswith("Send the messages that failed again")
    assert "sink id" in order_broken(WHERE, "name", 1).remedy
    producer.close()
