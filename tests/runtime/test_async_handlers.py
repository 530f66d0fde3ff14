"""Coroutines as handlers: their limit, and the isolation of their context."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from typing import Any

import pytest

from keyshard import Message
from keyshard.core.lanes import bulk
from keyshard.core.lanes.key_queue import Work
from keyshard.handlers.dispatcher import Dispatcher
from tests.helpers import wait_until
from tests.support.handled_topic import AT_ONCE, HandledTopic

TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (3, 3), (None, 40)])
def test_workers_limits_the_coroutines_that_run_at_the_same_time(
    orders: HandledTopic, workers: int | None, most: int
) -> None:
    running, seen = 0, []

    async def handle(message: Message) -> None:
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        if message.routing_key == "key-7":
            raise ValueError("it is broken")
        orders.note(message)

    orders.publish(keys=40, per_key=3)
    with orders.running(orders.source(), handle, workers=workers, retry=AT_ONCE) as run:
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        assert run.source.status()["workersMax"] == workers
    assert not orders.errors
    assert orders.count == 39 * 3
    assert max(seen) == most if workers else max(seen) > 3


def test_a_message_sees_no_context_of_the_one_before(orders: HandledTopic) -> None:
    seen: list[str | None] = []

    async def handle(message: Message) -> None:
        seen.append(TENANT.get())
        TENANT.set(message.routing_key)
        await asyncio.sleep(0)
        assert TENANT.get() == message.routing_key
        task = asyncio.current_task()
        if message.value == b"1" and task is not None:
            task.cancel()
        orders.note(message)

    orders.publish(keys=5, per_key=10)
    with orders.running(orders.source(), handle, lanes=1):
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert not orders.errors
    assert seen == [None] * len(seen)
    assert orders.count == len(seen) == 50


def test_the_wait_for_the_event_loop_is_no_time_of_the_handler(
    orders: HandledTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    counted: list[float] = []
    finish = Dispatcher.finish

    def finished(self: Dispatcher, work: Work, *arguments: Any) -> None:
        counted.append(work.started_s)
        finish(self, work, *arguments)

    async def handle(_message: Message) -> None:
        began.append(time.monotonic())

    monkeypatch.setattr(bulk, "FAST_S", 0.0)
    monkeypatch.setattr(Dispatcher, "finish", finished)
    count = orders.publish(keys=40, per_key=3)
    with orders.running(orders.source(), handle):
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert len(counted) == count
    # None of them waits, so they run one after the other.
    assert all(before <= start for before, start in zip(began, counted[1:], strict=False))


def test_the_executor_keeps_the_task_of_a_retry_when_the_earlier_attempt_ends(
    orders: HandledTopic, caplog: pytest.LogCaptureFixture
) -> None:
    tried: set[object] = set()

    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        if message.message_id not in tried:
            tried.add(message.message_id)
            raise ValueError("not yet")
        orders.note(message)

    count = orders.publish(keys=5, per_key=10)
    with orders.running(orders.source(), handle, retry=AT_ONCE) as run:
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        assert run.source.__dict__["_running"]._executor._tasks == {}
    assert orders.count == count
    assert not [one for one in caplog.records if one.name == "asyncio"]
