"""Single messages of a sink, by threads and by coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import pytest

from keyshard import KeyShardSink, MessageId
from keyshard.broker.connect import connect
from keyshard.broker.port import Broker, PublishOptions
from keyshard.columns.outgoing import OutgoingMessage
from keyshard.config.connection import Connection
from keyshard.core.position.entry import EntryId
from keyshard.errors import (
    BrokerError,
    BrokerUnavailableError,
    ConfigError,
    MessageTooLargeError,
    NotRunningError,
)
from tests.helpers import wait_until
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline
from tests.support.sink_rows import expected


def test_sent_messages_are_stored_in_order_and_have_ids(world: SinkTopic) -> None:
    with world.sink(sink_id=None) as sink:
        sent = [sink.send(b"%d" % number, key=f"k{number % 5}") for number in range(500)]
        sink.flush()
        ids = [one.result(0) for one in sent]
    stored = world.stored()
    assert len(stored) == 500
    by_value = {one.value: (one.message_id, one.key) for one in stored}
    for number, message_id in enumerate(ids):
        assert by_value[b"%d" % number] == (message_id, f"k{number % 5}")
    assert world.by_key() == expected([(f"k{n % 5}", b"%d" % n) for n in range(500)])


def test_all_that_a_message_has_is_sent(world: SinkTopic) -> None:
    when = datetime(2026, 11, 24, 6, tzinfo=timezone.utc)
    with world.sink() as sink:
        sink.send(None, key="k", ordering_key="o", properties={"a": "b"}, event_time=when)
    (one,) = world.stored()
    assert (one.value, one.key, one.ordering_key, one.event_time) == (None, "k", "o", when)
    assert one.properties == {"a": "b"}


def test_a_message_is_published_without_a_flush(world: SinkTopic) -> None:
    sink = world.sink()
    assert isinstance(sink.send(b"x", key="k").result(deadline(5)), MessageId)


def test_coroutines_publish_in_the_order_in_which_they_start(world: SinkTopic) -> None:
    async def main() -> list[MessageId]:
        async with world.sink() as sink:
            sent = (sink.asend(b"%d" % number, key=f"k{number % 5}") for number in range(200))
            return await asyncio.gather(*sent)

    ids = asyncio.run(main())
    by_value = {one.value: one.message_id for one in world.stored()}
    assert by_value == {b"%d" % number: message_id for number, message_id in enumerate(ids)}
    assert world.by_key() == expected([(f"k{n % 5}", b"%d" % n) for n in range(200)])


def test_the_event_loop_goes_on_while_a_sink_connects(
    world: SinkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_connect = threading.Event()

    def late(connection: Connection) -> Broker:
        assert may_connect.wait(deadline(5)), "the event loop waits for the connection"
        return connect(connection)

    monkeypatch.setattr("keyshard.broker.connect.connect", late)

    async def main() -> None:
        sink = world.sink()
        sent = [asyncio.create_task(sink.asend(b"%d" % number, key="k")) for number in range(3)]
        await asyncio.sleep(0)
        may_connect.set()
        await asyncio.gather(*sent)

    asyncio.run(main())
    assert [one.value for one in world.stored()] == [b"0", b"1", b"2"]


def test_the_end_of_an_async_with_waits_for_calls_that_have_begun(world: SinkTopic) -> None:
    async def main() -> MessageId:
        async with world.sink() as sink:
            sent = asyncio.create_task(sink.asend(b"x", key="k"))
            await asyncio.sleep(0)
        with pytest.raises(BrokerError, match="is closed"):
            await sink.asend(b"late", key="k")
        return await sent

    assert asyncio.run(main()) == world.stored()[0].message_id
    assert len(world.stored()) == 1


def test_calls_that_waited_for_longer_than_a_message_may_are_not_made(
    world: SinkTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room, calls = threading.Event(), []

    def send(_: KeyShardSink, value: bytes, **_given: Any) -> Future[MessageId]:
        calls.append(value)
        assert has_room.wait(deadline(5))
        raise BrokerUnavailableError("no room")

    monkeypatch.setattr(KeyShardSink, "send", send)

    async def main() -> list[MessageId | BaseException]:
        sink = world.sink(send_timeout_ms=100)
        sent = [asyncio.create_task(sink.asend(b"%d" % number, key="k")) for number in range(9)]
        await asyncio.sleep(0.2)
        has_room.set()
        return await asyncio.gather(*sent, return_exceptions=True)

    errors = asyncio.run(main())
    assert calls == [b"0"]
    assert [str(error).count("waited for earlier ones") for error in errors] == [0] + [1] * 8


def test_a_sink_is_closed_although_the_wait_for_that_is_cancelled(world: SinkTopic) -> None:
    for where in world.cluster.partitions(world.topic):
        world.cluster.hold_writes(where)

    async def main() -> KeyShardSink:
        sink = world.sink()
        with suppress(asyncio.CancelledError):
            async with sink:
                sink.send(b"x", key="k")
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_later(0.05, task.cancel)
        return sink

    sink = asyncio.run(main())
    for where in world.cluster.partitions(world.topic):
        world.cluster.release_writes(where)

    def is_closed() -> bool:
        try:
            sink.status()
        except NotRunningError as exc:
            return "is closed" in str(exc)
        return False

    wait_until(is_closed)
    wait_until(lambda: not [one for one in threading.enumerate() if "sink-close" in one.name])


def test_a_coroutine_gets_the_error_of_its_message(world: SinkTopic) -> None:
    async def main() -> None:
        async with world.sink() as sink:
            with pytest.raises(MessageTooLargeError):
                await sink.asend(b"x" * 6_000_000, key="k")
            with pytest.raises(ConfigError, match="value"):
                await sink.asend(1, key="k")  # type: ignore[arg-type]
            await sink.asend(b"x", key="k")

    asyncio.run(main())
    assert [one.value for one in world.stored()] == [b"x"]


def test_a_failed_message_fails_its_future_and_the_next_flush(world: SinkTopic) -> None:
    sink = world.sink(send_timeout_ms=200)
    sink.send(b"before", key="k").result(deadline(5))
    for client in list(world.cluster._clients):
        client.drop()
    late: Future[MessageId] = sink.send(b"late", key="k")
    with pytest.raises(BrokerUnavailableError):
        sink.flush()
    assert isinstance(late.exception(0), BrokerUnavailableError)
    for client in list(world.cluster._clients):
        client.reconnect()
    sink.send(b"after", key="k")
    sink.close()
    assert [one.value for one in world.stored()] == [b"before", b"after"]


def test_a_producer_that_has_ended_is_opened_again(world: SinkTopic) -> None:
    sink = world.sink(linger_ms=200)
    sink.send(b"before", key="k").result(deadline(5))
    collected = sink.send(b"collected", key="k")
    (queue,) = sink._state.writer(sink)._queues.values()
    with world.cluster.lock:
        queue.producer._end(BrokerError("The topic is gone."))  # type: ignore[attr-defined]
    sink.send(b"after", key="k").result(deadline(5))
    with pytest.raises(BrokerError, match="gone"):
        collected.result(deadline(5))
    with pytest.raises(BrokerError, match="gone"):
        sink.flush()
    sink.close()
    assert [one.value for one in world.stored()] == [b"before", b"after"]


def test_a_producer_that_has_ended_takes_no_message_of_others_with_it(world: SinkTopic) -> None:
    sink, keys = world.sink(), "abcdefgh"
    for key in keys:
        sink.send(b"before", key=key).result(deadline(5))
    writer = sink._state.writer(sink)
    ended, *others = writer._queues
    assert others
    with world.cluster.lock:
        writer._queues[ended].producer._end(BrokerError("It is gone."))  # type: ignore[attr-defined]
    sink.flush()  # no message has failed
    again = [sink.send(b"again", key=key) for key in keys]
    sink.flush()
    assert [one.exception(0) for one in again] == [None] * len(keys)
    world.hold()
    sent = {key: sink.send(b"held", key=key) for key in keys}
    with world.cluster.lock:
        writer._queues[ended].producer._end(BrokerError("It is gone."))  # type: ignore[attr-defined]
    released = threading.Timer(0.2, world.release)
    released.start()
    with pytest.raises(BrokerError, match="gone"):
        sink.close()
    released.join()
    lost = {key for key, future in sent.items() if future.exception(0) is not None}
    assert lost == {key for key in keys if writer._partition_of(key) == ended}


@pytest.mark.simulated
def test_a_flush_waits_only_for_messages_that_were_sent_before() -> None:
    """Other threads send all the time, so some messages are always unconfirmed."""
    world, flushed = SinkTopic(), threading.Event()
    first, *_ = world.cluster.partitions(world.topic)
    world.cluster.hold_writes(first)
    producer = connect(Connection(world.url)).entry_producer(first, PublishOptions())
    before = producer.publish([OutgoingMessage(b"1", "k")], 0)

    def flush() -> None:
        producer.flush()
        flushed.set()

    flushing = threading.Thread(target=flush)
    flushing.start()
    time.sleep(1)
    later = producer.publish([OutgoingMessage(b"2", "k")], 1)
    assert not flushed.wait(1)
    producer._confirmed(1, 0, EntryId(0, 0))  # type: ignore[attr-defined]
    flushing.join(deadline(5))
    assert (before.done(), flushed.is_set(), later.done()) == (True, True, False)
    producer.close()
