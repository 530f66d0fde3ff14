"""``rate_limit``: handlers begin no faster, and in order, with every executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import tenacity

from keyshard import Message, RetryPolicy
from keyshard.core.lanes.rate_limit import RateLimitStatus
from keyshard.core.range_watchdog import STALL_S
from keyshard.testing import run_until_idle
from tests.helpers import present, wait_until
from tests.support.handled_topic import HandledTopic, ended


class Starts:
    """Times at which handlers began."""

    def __init__(self, orders: HandledTopic) -> None:
        self._orders = orders
        self.times: list[float] = []

    def handle(self, message: Message) -> None:
        self.times.append(time.monotonic())
        self._orders.note(message)

    async def handle_async(self, message: Message) -> None:
        self.handle(message)

    def check(self, per_s: float, burst: int, threads: int) -> None:
        """Check that no time had more than it may; each thread may begin a little late."""
        times = sorted(self.times)
        for first, since_s in enumerate(times):
            for count, until_s in enumerate(times[first:], 1):
                assert count <= burst + threads + per_s * (until_s - since_s) + 1


@pytest.mark.parametrize("way", ["threads", "async", "async for"])
def test_handlers_begin_no_faster_than_the_limit(orders: HandledTopic, way: str) -> None:
    count = orders.publish(keys=10, per_key=10)
    starts = Starts(orders)
    options: dict[str, Any] = {"rate_limit": 100, "rate_burst": 5, "workers": 4}
    source = orders.source()

    async def iterate() -> None:
        async for message in source.messages(**options):
            starts.handle(message)
            await message.done()
            if orders.count == count:
                source.stop()

    began_s = time.monotonic()
    if way == "async for":
        asyncio.run(iterate())
    else:
        handle: Callable[..., Any] = starts.handle if way == "threads" else starts.handle_async
        run_until_idle(source, handle, **options)
    assert time.monotonic() - began_s >= 0.9, "(100 - 5) messages at 100 per second"
    starts.check(100, 5, threads=4)
    assert all(seen == [b"%d" % n for n in range(10)] for seen in orders.seen.values())
    assert orders.backlog() == 0


def test_retries_count_against_the_rate_limit(orders: HandledTopic) -> None:
    starts = Starts(orders)
    orders.publish(keys=3, per_key=1)

    def handle(message: Message) -> None:
        starts.handle(message)
        raise ValueError("broken")

    often = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(10))
    run_until_idle(
        orders.source(), handle, rate_limit=50, rate_burst=1, retry=often, on_failure="dead_letter"
    )
    assert len(starts.times) == 30
    assert starts.times[-1] - starts.times[0] >= 0.5
    starts.check(50, 1, threads=3)


def test_the_status_says_that_the_limit_holds_back_and_no_range_stalls(
    orders: HandledTopic,
) -> None:
    orders.publish(keys=20, per_key=1)
    source = orders.source()

    def limit() -> RateLimitStatus:
        return present(source.status()["rateLimit"])

    with source.running(orders.note, rate_limit=0.001, drain_timeout_s=3_600):
        wait_until(lambda: limit()["heldBackSeconds"] > 0.5)
        found = limit()
        assert (found["perSecond"], found["burst"], found["holdsBack"]) == (0.001, 1, True)
        wait_until(lambda: limit()["heldBackSeconds"] > STALL_S + 1.5)
        ranges = source.status()["ranges"]
        assert not [one for one in ranges if one["stalled"]]
        assert "rate_limit holds handlers back" in {one["reason"] for one in ranges}
        source.stop()
        # A stop does not wait for the limit, which lets the next handler begin after 1,000 s.
        wait_until(lambda: ended(source))
    assert orders.count == 1
    assert orders.backlog() == 19, "messages whose handlers did not begin come again"


def test_a_limit_that_is_not_reached_holds_nothing_back(orders: HandledTopic) -> None:
    orders.publish(keys=5, per_key=2)
    status = run_until_idle(orders.source(), orders.note, rate_limit=100_000)
    assert status["rateLimit"] == {
        "perSecond": 100_000, "burst": 10_000, "holdsBack": False, "heldBackSeconds": 0.0,
    }  # fmt: skip
    assert run_until_idle(orders.source(), orders.note)["rateLimit"] is None
