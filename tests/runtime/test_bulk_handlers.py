"""Handlers that return at once get messages in bulk; nothing that they may rely on changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import tenacity

from keyshard import Message, RetryPolicy
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.lanes import bulk
from keyshard.core.lanes.bulk import Arrivals, Bulk
from keyshard.core.message import MessageId
from keyshard.errors import HandlerFailedError
from keyshard.handlers import async_executor, dispatcher
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic

KEYS, PER_KEY = 50, 60
LAST = b"%d" % (PER_KEY - 1)
TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)


@pytest.fixture
def bulks(monkeypatch: pytest.MonkeyPatch) -> list[Bulk]:
    """All bulks that begin. Handlers count as fast from the first, whatever the machine does."""
    monkeypatch.setattr(bulk, "COUNTED_MIN", 0)
    monkeypatch.setattr(bulk, "FAST_S", deadline(1.0))
    monkeypatch.setattr(dispatcher, "HANGS_S", deadline(0.2))
    begun: list[Bulk] = []
    start = Arrivals.start

    def recorded(self: Arrivals, now_s: float) -> Bulk | None:
        started = start(self, now_s)
        begun.extend([] if started is None else [started])
        return started

    monkeypatch.setattr(Arrivals, "start", recorded)
    return begun


@pytest.fixture(params=["function", "coroutine"])
def form(request: pytest.FixtureRequest) -> Callable[[Callable[[Message], None]], Any]:
    """Makes a handler of a function."""

    def coroutine_of(handle: Callable[[Message], None]) -> Any:
        async def call(message: Message) -> None:
            handle(message)

        return call

    return coroutine_of if request.param == "coroutine" else lambda handle: handle


def publish(orders: HandledTopic) -> int:
    for start in range(0, PER_KEY, 4):
        orders.cluster.publish(
            orders.topic,
            *(Stored(b"%d" % n, key=f"k{k}") for n in range(start, start + 4) for k in range(KEYS)),
            batching=Batching.BY_KEY,
        )
    return KEYS * PER_KEY


def in_order(orders: HandledTopic) -> bool:
    wanted = [b"%d" % n for n in range(PER_KEY)]
    return all(orders.seen[f"k{k}"] == wanted for k in range(KEYS))


def test_messages_are_handled_in_bulk_in_order_and_acknowledged(
    orders: HandledTopic, bulks: list[Bulk], form: Callable[..., Any]
) -> None:
    count = publish(orders)
    source = orders.source(parallelism=3)
    with orders.running(source, form(orders.note)):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        wait_until(lambda: source.status()["counters"]["completed"] == count)
    assert bulks
    assert in_order(orders)


def test_a_message_that_fails_in_a_bulk_is_tried_again_before_newer_ones_of_its_key(
    orders: HandledTopic, bulks: list[Bulk], form: Callable[..., Any]
) -> None:
    count = publish(orders)
    failed: set[tuple[str | None, bytes | None]] = set()

    def handle(message: Message) -> None:
        name = message.key, message.value
        if bulks and len(failed) < 3 and name not in failed:
            failed.add(name)
            raise ValueError("not yet")
        orders.note(message)

    source = orders.source()
    with orders.running(source, form(handle), retry=AT_ONCE):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        assert source.status()["counters"]["failedAttempts"] == len(failed) == 3
    assert in_order(orders)


def test_a_handler_that_hangs_in_a_bulk_delays_no_other_key(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    go_on = threading.Event()
    hung: list[str | None] = []
    ids: list[MessageId] = []

    def handle(message: Message) -> None:
        if bulks and not hung:
            ids.append(message.message_id)
            hung.append(message.key)
            assert go_on.wait(deadline(30))
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: len(hung) == 1)
        others = [f"k{k}" for k in range(KEYS) if f"k{k}" != hung[0]]
        wait_until(lambda: all(orders.seen[key][-1:] == [LAST] for key in others))
        running = [one for one in source.status()["ranges"] if one["inFlight"]]
        assert len(running) == 1
        assert len(orders.seen[hung[0]]) < PER_KEY
        stack = source.__dict__["_running"]._subject.handling.stack(None, None, ids[0])
        assert "assert go_on.wait(deadline(30))" in "".join(stack["stack"])
        go_on.set()
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
    assert in_order(orders)


def test_a_stop_begins_no_entry_of_a_bulk_that_has_not_started(
    orders: HandledTopic, bulks: list[Bulk], form: Callable[..., Any]
) -> None:
    publish(orders)
    stopped: list[int] = []

    def handle(message: Message) -> None:
        orders.note(message)
        if bulks and not stopped:
            source.stop()
            stopped.append(orders.count)
            wait_until(lambda: bulks[-1].apart)

    source = orders.source()
    with orders.running(source, form(handle)):
        wait_until(lambda: bool(stopped))
    assert orders.count < stopped[0] + 4, "only the entry that runs is finished"
    assert present(bulks[-1]).apart


# -- Coroutines that wait in a bulk ----------------------------------------------------------------


def test_a_coroutine_that_waits_in_a_bulk_delays_no_other_key(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    waiting: list[tuple[str | None, MessageId, Callable[[], object]]] = []

    async def handle(message: Message) -> None:
        if bulks and not waiting:
            go_on, loop = asyncio.Event(), asyncio.get_running_loop()
            resume = partial(loop.call_soon_threadsafe, go_on.set)
            waiting.append((message.key, message.message_id, resume))
            await go_on.wait()
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: len(waiting) == 1)
        key, message_id, resume = waiting[0]
        others = [f"k{k}" for k in range(KEYS) if f"k{k}" != key]
        wait_until(lambda: all(orders.seen[key][-1:] == [LAST] for key in others))
        assert len(orders.seen[key]) < PER_KEY
        stack = source.__dict__["_running"]._subject.handling.stack(None, None, message_id)
        assert "await go_on.wait()" in "".join(stack["stack"])
        resume()
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
    assert in_order(orders)


def test_a_coroutine_that_began_in_a_bulk_learns_of_its_cancellation(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    count = publish(orders)
    cancelled: list[Message] = []

    async def handle(message: Message) -> None:
        task = asyncio.current_task()
        if bulks and task is not None and len(cancelled) < 3:
            asyncio.get_running_loop().call_later(0.01, task.cancel)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message)
                raise
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle, retry=AT_ONCE):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        assert source.status()["counters"]["failedAttempts"] == len(cancelled)
    assert len(cancelled) >= 3
    assert in_order(orders)


def test_coroutines_that_wait_get_few_bulks(orders: HandledTopic, bulks: list[Bulk]) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        orders.note(message)

    with orders.running(orders.source(), handle):
        for number in range(1, 51):
            orders.cluster.publish(orders.topic, Stored(b"", key="k"))
            wait_until(lambda: orders.count == number)  # noqa: B023 - it is called at once
    assert 0 < len(bulks) < 15, "each is followed by twice the time without one"


@pytest.mark.parametrize("use", ["cancels", "keeps"])
def test_messages_of_a_bulk_share_neither_context_nor_cancellation(
    orders: HandledTopic, bulks: list[Bulk], use: str
) -> None:
    count = publish(orders)
    seen: set[str | None] = set()
    used: list[asyncio.Task[Any] | None] = []

    async def handle(message: Message) -> None:
        seen.add(TENANT.get())
        TENANT.set(message.key)
        task = asyncio.current_task()
        assert task is not None
        if used and used[-1] is not None:
            used[-1].cancel()
        if len(bulks) > 3 * len(used) and message.value != LAST:
            used.append(task if use == "keeps" else None)
            if use == "cancels":
                task.cancel()
        elif used:
            await asyncio.sleep(0)
            assert TENANT.get() == message.key
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        assert source.status()["counters"]["failedAttempts"] == 0
    assert used
    assert seen == {None}
    assert in_order(orders)


def test_the_end_of_a_task_is_reported_soon_after_its_message(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    """A handler may return a connection to its pool then."""
    count = publish(orders)
    reserved, most = 0, 0

    def release(_: object) -> None:
        nonlocal reserved
        reserved -= 1

    async def handle(message: Message) -> None:
        nonlocal reserved, most
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(release)
        reserved += 1
        most = max(most, reserved)
        orders.note(message)

    with orders.running(orders.source(), handle):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
    assert bulks
    assert most <= 2 * KEYS
    assert in_order(orders)


@pytest.mark.parametrize("cancels", [False, True])
def test_other_tasks_run_between_messages_of_a_bulk_that_takes_long(
    orders: HandledTopic, bulks: list[Bulk], monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    monkeypatch.setattr(async_executor, "TURN_S", 0.0)
    count = publish(orders)
    turns = 0
    others: list[asyncio.Task[None]] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1
            for task in asyncio.all_tasks() if cancels and turns % 50 == 0 else ():
                if "_serve_bulk" in str(task.get_coro()):
                    task.cancel()

    seen: list[int] = []

    async def handle(message: Message) -> None:
        if not others:
            others.append(asyncio.create_task(count_turns()))
        if orders.count == count - 1:
            others[0].cancel()
        seen.append(turns)
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        wait_until(lambda: orders.count == count and orders.backlog() == 0)
        assert source.status()["counters"]["failedAttempts"] == 0
        wait_until(lambda: any(len(one.late) > 5 and (cancels or not one.apart) for one in bulks))
    assert in_order(orders)
    assert len(set(seen)) > sum(len(one.late) for one in bulks)


def test_a_failure_in_a_bulk_that_ends_the_source_lets_no_message_start(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    publish(orders)
    before: list[int] = []

    async def handle(message: Message) -> None:
        orders.note(message)
        if bulks:
            before.append(orders.count)
            raise ValueError("it is broken")

    stops = RetryPolicy(stop=tenacity.stop_after_attempt(1))
    with pytest.raises(HandlerFailedError):
        orders.source().run(handle, retry=stops, on_failure="stop")
    assert before == [orders.count]


def test_a_coroutine_that_a_forced_end_of_the_source_finds_in_a_bulk_is_cancelled(
    orders: HandledTopic, bulks: list[Bulk]
) -> None:
    publish(orders)
    ends: list[type[BaseException]] = []
    source = orders.source()

    async def handle(message: Message) -> None:
        if bulks and not ends:
            source.stop()
            executor = source.__dict__["_running"]._executor
            end_s = time.monotonic() + deadline(20)
            while not executor._closing and time.monotonic() < end_s:
                time.sleep(0.001)  # noqa: ASYNC251 - it blocks the event loop
            try:
                await asyncio.Event().wait()
            except BaseException as exc:
                ends.append(type(exc))
                raise
        orders.note(message)

    with orders.running(source, handle, drain_timeout_s=0.05):
        wait_until(lambda: bool(ends))
    assert ends == [asyncio.CancelledError]
