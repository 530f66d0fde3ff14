"""Handlers, policies and observers with unexpected errors and results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from random import Random
from typing import Any

import tenacity

from keyshard import KeyShardSource, Reject, RetryLater, RetryPolicy
from keyshard.broker.memory import Message
from keyshard.errors import ConfigError, KeyShardError
from tests.fuzz.promises import Cluster, Ended, promise, promise_in_time
from tests.fuzz.values import Hostile, value
from tests.support.deadlines import deadline

_WAIT_S = deadline(20)
PER_KEY = 4


class UnprintableError(Exception):
    """Neither str nor repr nor pickle works."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise ValueError("no pickle")


class OwnReject(Reject):
    """A subclass with arguments of its own."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code} {detail}")


class OwnRetry(RetryLater):
    def __init__(self, detail: str) -> None:
        super().__init__(0.0, detail)


def _circle() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def _raise(random: Random) -> Any:  # noqa: PLR0912 - one line for each kind
    """Raise something hostile, or return something hostile."""
    which = random.randrange(16)
    if which == 0:
        raise UnprintableError
    if which == 1:
        raise Reject(value(random))
    if which == 2:
        raise RetryLater(value(random))
    if which == 3:
        raise OwnReject(7, detail="x")
    if which == 4:
        raise OwnRetry("x")
    if which == 5:
        raise _circle()
    if which == 6:
        raise asyncio.CancelledError
    if which == 7:
        raise StopIteration(1)
    if which == 8:
        raise SystemExit(value(random))
    if which == 9:
        raise GeneratorExit
    if which == 10:
        raise ConfigError("an error of keyshard's own")
    if which == 11:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\ud800")
    if which == 12:
        raise RecursionError
    if which == 13:
        raise MemoryError
    if which == 14:
        raise type("", (Exception,), {"__module__": None})(Hostile())
    return value(random)


def _policy(random: Random) -> RetryPolicy:
    def hostile(_: Any) -> Any:
        if random.random() < 0.3:
            raise UnprintableError
        return value(random)

    return RetryPolicy(
        wait=random.choice((tenacity.wait_none(), tenacity.wait_fixed(0.01), hostile)),
        stop=random.choice(
            (tenacity.stop_after_attempt(2), tenacity.stop_after_attempt(1), hostile)
        ),
    )


class _Observer:
    def __init__(self, random: Random, share: float) -> None:
        self._random, self._share = random, share

    def _maybe(self, *_: Any, **__: Any) -> None:
        if self._random.random() < self._share:
            raise UnprintableError

    started = completed = failed = _maybe


def exceptions(random: Random, name: str) -> None:
    """Messages that never fail are handled once and in order, whatever the others do."""
    good, bad = [f"g{i}" for i in range(random.randint(1, 4))], ["b0", "b1"]
    draws = Random(random.random())
    with Cluster(name, partitions=random.choice((1, 2))) as cluster:
        expected = {(key, number) for key in good for number in range(PER_KEY)}
        handled: defaultdict[str, list[int]] = defaultdict(list)
        done = threading.Event()

        def handle(message: Any) -> Any:
            if message.key in bad:
                return _raise(draws)
            handled[message.key].append(int(message.value))
            if sum(map(len, handled.values())) >= len(expected):
                done.set()
            return None

        async def handle_async(message: Any) -> Any:
            return handle(message)

        for number in range(PER_KEY):
            for key in good + bad:
                cluster.memory.publish(cluster.topic, Message(b"%d" % number, key=key))
        source = KeyShardSource(
            "orders",
            subscription="keyshard",
            service_url=cluster.url,
            parallelism=2,
            starting_position="earliest",
        )
        chosen = random.choice((handle, handle_async))
        options: dict[str, Any] = {
            "retry": _policy(random),
            "on_failure": random.choice(("park", "park", "dead_letter")),
            "drain_timeout_s": 1.0,
        }
        observers = [_Observer(draws, 0.3)] if random.random() < 0.4 else []
        running = Ended(lambda: source.run(chosen, observers=observers, **options), "run")
        end = time.monotonic() + _WAIT_S
        while running.alive and not done.wait(0.01) and time.monotonic() < end:
            pass
        while running.alive and time.monotonic() < end and cluster.backlog() > len(bad) * PER_KEY:
            time.sleep(0.005)
        if running.alive:
            source.stop()
        ended = running.join()
        promise(
            not isinstance(ended, KeyShardError), f"hostile exceptions ended the source: {ended}"
        )
        for key in good:
            promise(
                handled[key] == list(range(len(handled[key]))),
                f"good key {key} was handled as {handled[key]}",
            )
        for key in good:
            promise_in_time(
                len(handled[key]) == PER_KEY,
                end,
                f"good key {key} was handled as {handled[key]}",
            )
        promise_in_time(
            cluster.backlog() <= len(bad) * PER_KEY,
            end,
            f"{cluster.backlog()} messages are left, {len(bad) * PER_KEY} of them bad at most",
        )
