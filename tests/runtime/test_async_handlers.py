"""Coroutines as handlers: their limit, and what one message leaves to the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from handler_place import AT_ONCE, Place
from helpers import wait_until
from keyshard import Message

TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (3, 3), (None, 40)])
def test_workers_is_the_most_coroutines_at_the_same_time(
    place: Place, workers: int | None, most: int
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
        place.note(message)

    place.publish(keys=40, per_key=3)
    with place.running(place.source(), handle, workers=workers, retry=AT_ONCE) as run:
        wait_until(lambda: place.errors or place.backlog() == 0)
        assert run.source.status()["workersMax"] == workers
    assert not place.errors
    assert place.count == 39 * 3
    assert max(seen) == most if workers else max(seen) > 3


def test_a_message_sees_no_context_of_the_one_before(place: Place) -> None:
    seen: list[str | None] = []

    async def handle(message: Message) -> None:
        seen.append(TENANT.get())
        TENANT.set(message.routing_key)
        await asyncio.sleep(0)
        assert TENANT.get() == message.routing_key
        task = asyncio.current_task()
        if message.value == b"1" and task is not None:
            task.cancel()
        place.note(message)

    place.publish(keys=5, per_key=10)
    with place.running(place.source(), handle, lanes=1):
        wait_until(lambda: place.errors or place.backlog() == 0)
    assert not place.errors
    assert seen == [None] * len(seen)
    assert place.count == len(seen) == 50
