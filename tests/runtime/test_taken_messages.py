"""``async for message in source``: what is not done is not acknowledged; nothing waits for ever."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tenacity import stop_never

from keyshard import KeyShardSource, Message, Reject, RetryLater, RetryPolicy, TakenMessage
from keyshard.errors import (
    ConfigError,
    RuntimeStoppedError,
    TopicNotFoundError,
    UnfitHandlerError,
)
from tests.helpers import keyshard_threads, run_coroutine, until, wait_until
from tests.support import recorded_handler
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic, ended
from tests.support.recorded_handler import RecordedHandler
from tests.support.recorded_source import RecordedSource


async def rest(orders: HandledTopic, source: KeyShardSource) -> None:
    """Handle what is left, then stop."""
    async with source.messages() as messages:
        while orders.backlog():
            try:
                message = await asyncio.wait_for(anext(messages), 0.1)
            except asyncio.TimeoutError:
                continue
            orders.note(message)
            await message.done()


def test_all_messages_come_in_the_order_of_their_keys(orders: HandledTopic) -> None:
    count = orders.publish(keys=20, per_key=25)
    source = orders.source()

    async def main() -> None:
        async for message in source:
            assert isinstance(message, TakenMessage)
            assert message.data == message.value
            orders.note(message)
            await message.done()
            if orders.count == count:
                source.stop()

    run_coroutine(main())
    assert orders.backlog() == 0
    assert all(seen == [b"%d" % n for n in range(25)] for seen in orders.seen.values())
    wait_until(lambda: ended(source))


def test_messages_that_are_not_done_are_not_acknowledged(orders: HandledTopic) -> None:
    orders.publish(keys=10, per_key=1)
    source = orders.source()
    kept: list[TakenMessage] = []

    async def main() -> None:
        async for message in source:
            kept.append(message)
            if len(kept) in (3, 5):
                await message.done()
                await message.done()  # again has no effect
            if len(kept) == 7:
                break
        wait_until(lambda: ended(source))
        assert orders.backlog() == 8
        with pytest.raises(RuntimeStoppedError, match="is delivered again"):
            await kept[0].done()
        await kept[2].done()
        await rest(orders, source)

    run_coroutine(main())
    done = {kept[2].key, kept[4].key}
    assert set(orders.seen) == {f"key-{number}" for number in range(10)} - done


def test_an_exception_in_the_body_acknowledges_only_done_messages(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=10)
    source = orders.source()

    async def consume() -> None:
        async for message in source:
            if message.value == b"4":
                raise ZeroDivisionError
            await message.done()

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await consume()
        await rest(orders, source)  # also waits for the end of the first run

    run_coroutine(main())
    assert orders.seen == {"key-0": [b"%d" % number for number in range(4, 10)]}
    assert orders.backlog() == 0


def test_a_program_may_start_a_task_for_each_message(orders: HandledTopic) -> None:
    count = orders.publish(keys=30, per_key=10)
    source = orders.source()
    running: Counter[str | None] = Counter()
    most = 0

    async def work(message: TakenMessage) -> None:
        nonlocal most
        running[message.key] += 1
        assert running[message.key] == 1, "two messages of a key at a time"
        most = max(most, running.total())
        await asyncio.sleep(0.002)
        running[message.key] -= 1
        orders.note(message)
        await message.done()
        if orders.count == count - 20:
            source.stop()  # tasks that run are waited for

    async def main() -> None:
        messages = source.messages(workers=12)
        tasks = [asyncio.create_task(work(message)) async for message in messages]
        await asyncio.gather(*tasks)

    run_coroutine(main())
    assert 3 < most <= 12
    assert count - 20 <= orders.count <= count
    assert orders.backlog() == count - orders.count
    assert all(seen == [b"%d" % n for n in range(len(seen))] for seen in orders.seen.values())


def test_a_cancelled_task_ends_the_source(orders: HandledTopic) -> None:
    source = orders.source()
    orders.publish(keys=5, per_key=2)

    async def consume() -> None:
        async for message in source:
            orders.note(message)
            await message.done()

    async def main() -> None:
        task = asyncio.create_task(consume())
        await until(lambda: orders.count == 10)
        task.cancel()  # it waits for a message that never comes
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: ended(source))

    run_coroutine(main())
    assert orders.backlog() == 0


def test_a_cancellation_reaches_a_loop_that_always_has_messages(orders: HandledTopic) -> None:
    orders.publish(keys=50, per_key=40)
    source = orders.source()

    async def consume() -> None:
        async for message in source.messages(retry=RetryPolicy(stop=stop_never)):
            await message.failed(RetryLater(0.0))

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(consume(), 1.0))
    wait_until(lambda: ended(source))
    assert orders.backlog() == 2_000


def test_a_time_limit_for_the_next_message_loses_none(orders: HandledTopic) -> None:
    source = orders.source()

    async def main() -> None:
        async with source.messages() as messages:
            timeouts = published = 0
            while orders.count < 20:
                try:
                    message = await asyncio.wait_for(anext(messages), 0.05)
                except asyncio.TimeoutError:
                    timeouts += 1
                    if timeouts % 3 == 2 and published < 20:
                        published += orders.publish(keys=2, per_key=1)
                    continue
                orders.note(message)
                await message.done()
        assert ended(source)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)

    run_coroutine(main())
    assert orders.backlog() == 0
    assert orders.count == 20


def test_an_iterator_without_a_reference_ends_the_source(orders: HandledTopic) -> None:
    orders.publish(keys=2, per_key=1)
    source = orders.source()

    async def main() -> None:
        messages = aiter(source)
        message = await anext(messages)
        await message.done()
        del messages
        await until(lambda: ended(source))

    run_coroutine(main())
    assert orders.backlog() == 1


@pytest.mark.parametrize("kept", [False, True])
def test_an_event_loop_that_closes_ends_the_source(
    orders: HandledTopic, caplog: pytest.LogCaptureFixture, *, kept: bool
) -> None:
    orders.publish(keys=2, per_key=1)
    source = orders.source()
    loop = asyncio.new_event_loop()
    messages = aiter(source.messages(drain_timeout_s=3_600))
    message = loop.run_until_complete(anext(messages))
    assert not ended(source)
    loop.close()
    if not kept:
        del messages
    wait_until(lambda: ended(source))  # it does not wait for the message
    assert orders.backlog() == 2
    with pytest.raises(RuntimeStoppedError):
        asyncio.run(message.done())
    if kept:
        with pytest.raises(ConfigError, match="another event loop"):
            asyncio.run(anext(messages))
    del caplog


def test_a_program_that_ends_with_a_pending_task_ends_the_source(orders: HandledTopic) -> None:
    source = orders.source()
    orders.publish(keys=1, per_key=3)
    left: list[asyncio.Task[None]] = []

    async def consume() -> None:
        async for message in source:
            await message.done()

    async def main() -> None:
        left.append(asyncio.create_task(consume()))
        await until(lambda: orders.backlog() == 0)

    run_coroutine(main())
    wait_until(lambda: ended(source))
    assert orders.backlog() == 0


def test_a_message_that_is_dropped_is_an_error(orders: HandledTopic) -> None:
    orders.publish(keys=3, per_key=1)
    source = orders.source()

    async def main() -> None:
        async for _ in source:
            pass

    with pytest.raises(UnfitHandlerError, match=r"key 'key-\d', was dropped without done\(\)"):
        run_coroutine(main())
    wait_until(lambda: ended(source))
    assert orders.backlog() == 3


def test_a_failed_message_follows_the_retry_policy(orders: HandledTopic) -> None:
    orders.publish(keys=4, per_key=1)
    source = orders.source()
    tries: Counter[str | None] = Counter()

    async def main() -> None:
        async for message in source.messages(retry=AT_ONCE, on_failure="dead_letter"):
            tries[message.key] += 1
            if message.key == "key-0":
                await message.failed(ValueError("broken"))
            elif message.key == "key-1":
                await message.failed(Reject("never"))
            elif message.key == "key-2" and tries["key-2"] == 1:
                await message.failed(RetryLater(0.05))
            else:
                with pytest.raises(ConfigError, match="Give an exception"):
                    await message.failed("text")  # type: ignore[arg-type]
                await message.done()
            if tries.total() == 7:
                await until(lambda: orders.backlog() == 0)
                counters = source.status()["counters"]
                source.stop()
        assert (counters["completed"], counters["deadLettered"]) == (2, 2)

    run_coroutine(main())
    assert tries == {"key-0": 3, "key-1": 1, "key-2": 2, "key-3": 1}


def test_a_stop_waits_for_taken_messages_at_most_the_drain_timeout(
    orders: HandledTopic, caplog: pytest.LogCaptureFixture
) -> None:
    orders.publish(keys=1, per_key=2)
    source = orders.source()
    kept: list[TakenMessage] = []

    async def main() -> None:
        began_s = 0.0
        async for message in source.messages(drain_timeout_s=0.3):
            kept.append(message)
            source.stop()
            began_s = time.monotonic()
        assert time.monotonic() - began_s > 0.2

    run_coroutine(main())
    assert (len(kept), orders.backlog()) == (1, 2)
    assert "did not return within 0.3 s" in caplog.text


def test_a_message_may_be_done_in_another_thread_and_copies_may_not(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()

    async def main() -> None:
        async for message in source:
            assert isinstance(message, Message)
            copy = pickle.loads(pickle.dumps(message))
            assert copy == message
            assert type(copy) is Message
            with pytest.raises(ConfigError, match="is a copy"):
                await message._replace(partition=3).done()
            thread = threading.Thread(target=lambda m: asyncio.run(m.done()), args=(message,))
            thread.start()
            thread.join()
            source.stop()

    run_coroutine(main())
    assert orders.backlog() == 0


def test_bad_options_and_a_second_run_are_refused(orders: HandledTopic) -> None:
    source = orders.source()
    for options, said in (
        ({"executor": "threads"}, "body of an async for is the handler"),
        ({"telemetry": True}, "a span of each call"),
        ({"lanes": 0}, "lanes"),
        ({"lane": 1}, "Did you mean"),
        ({"observers": 3}, "observers"),
    ):
        with pytest.raises(ConfigError, match=said):
            source.messages(**options)
    with pytest.raises(ConfigError, match="subscription"):
        orders.source(subscription=None).messages()

    async def main() -> None:
        with source.running(orders.note), pytest.raises(ConfigError, match="already runs"):
            await anext(aiter(source))

    run_coroutine(main())


def test_the_error_of_the_source_is_raised_once(orders: HandledTopic) -> None:
    source = orders.source(topics="missing")

    async def leave() -> None:
        """Leave the block without waiting for a message: it raises the error."""
        async with source.messages() as messages:
            # While the lock is held, the source does not learn that its topic is missing.
            with orders.cluster.lock:
                task = asyncio.create_task(anext(messages))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            wait_until(lambda: ended(source))

    async def main() -> None:
        messages = aiter(source)
        with pytest.raises(TopicNotFoundError):
            await anext(messages)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)
        await messages.aclose()
        with pytest.raises(TopicNotFoundError):
            await leave()

    run_coroutine(main())


def test_no_thread_is_left(orders: HandledTopic) -> None:
    before = keyshard_threads()
    source = orders.source()
    orders.publish(keys=3, per_key=3)

    async def main() -> None:
        for _ in range(3):
            async for message in source:
                await message.done()
                break

    run_coroutine(main())
    wait_until(lambda: not keyshard_threads() - before, deadline(10))


class IteratedSource(RecordedSource):
    """A source whose ``run`` is an ``async for`` with a task for each message."""

    def run_coroutine(self, handle: Callable[[Message], Any], **options: Any) -> None:
        async def work(message: TakenMessage) -> None:
            try:
                await handle(message)
            except Exception as exc:  # noqa: BLE001 - the retry policy decides
                await message.failed(exc)
            else:
                await message.done()

        async def main() -> None:
            tasks = set()
            async for message in self.messages(**options):
                task = asyncio.create_task(work(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

        asyncio.run(main())


def test_the_history_of_an_iteration_holds_every_promise(
    make_recorded: Callable[..., RecordedHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_handler, "RecordedSource", IteratedSource)
    tries: Counter[bytes | None] = Counter()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.001)
        tries[message.value] += 1
        if tries[message.value] == 1 and (message.value or b"").endswith(b"7:"):
            raise ValueError("once")

    recorded = make_recorded(handle, options={"retry": AT_ONCE})
    recorded.keep_publishing()
    recorded.more(500)
    recorded.rescale(6)
    recorded.more(500)
    recorded.cluster.crash()
    recorded.more(500)
    recorded.check()
