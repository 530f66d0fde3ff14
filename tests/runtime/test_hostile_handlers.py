"""A run survives each error or result of handlers, policies and observers, or names its error."""

# ruff: noqa: ARG002, ARG005, PLW0108, RSE102 - that is what users write

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import tenacity

from keyshard import Message, Reject, RetryLater, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.errors import ConfigError
from tests.helpers import present, wait_until
from tests.support.handled_topic import AT_ONCE, HandledTopic


class MuteError(Exception):
    """An error whose text raises."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


class LyingError(Exception):
    """An error without a hash; its comparison, class and truth value raise."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")

    @property
    def __class__(self) -> Any:
        raise ValueError("no class")

    @__class__.setter
    def __class__(self, _: object) -> None:
        raise ValueError("no class")

    def __bool__(self) -> bool:
        raise ValueError("no truth")


class BareReject(Reject):
    def __init__(self) -> None:
        """Without the reason."""


class BareLater(RetryLater):
    def __init__(self) -> None:
        """Without the time."""


def cyclic() -> Exception:
    error, cause = ValueError("a"), ValueError("b")
    error.__cause__, cause.__cause__ = cause, error
    return error


def later(after_s: Any) -> Exception:
    error = RetryLater(0.0)
    error.after_s = after_s
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "no text": MuteError,
    "no class": LyingError,
    "reject an error": lambda: Reject(ValueError("why")),  # type: ignore[arg-type]
    "reject an error without text": lambda: Reject(MuteError()),  # type: ignore[arg-type]
    "reject bytes": lambda: Reject(b"why \xff"),  # type: ignore[arg-type]
    "reject without a reason": BareReject,
    "retry without a time": BareLater,
    "retry after nan": lambda: later(math.nan),
    "retry after inf": lambda: later(math.inf),
    "retry before now": lambda: later(-1.0),
    "retry after text": lambda: later("soon"),
    "a surrogate": lambda: ValueError("\ud800 and \x00"),
    "a cycle": cyclic,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "generator exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "stop": StopIteration,
    "a group": lambda: ValueError(MuteError()),
}
"""The error of a handler."""


def run_to_the_end(orders: HandledTopic, handle: Callable[..., Any], **options: Any) -> None:
    """Two bad messages of two keys among good ones: the good ones are handled."""
    for n in range(5):
        orders.cluster.publish(orders.topic, *[Stored(b"%d" % n, key=f"key-{k}") for k in range(4)])
    orders.cluster.publish(orders.topic, Stored(b"bad", key="bad-1"), Stored(b"bad", key="bad-2"))
    with orders.running(orders.source(), handle, **({"retry": AT_ONCE} | options)) as run:
        wait_until(lambda: orders.errors or (orders.backlog() == 0 and orders.count == 20))
        assert not orders.errors, orders.errors
        assert run.source.status()["counters"]["deadLettered"] == 2


@pytest.mark.parametrize("executor", ["threads", "async"])
@pytest.mark.parametrize("raised", HOSTILE)
def test_an_error_of_a_handler_concerns_its_message_only(
    orders: HandledTopic, raised: str, executor: str
) -> None:
    def handle(message: Message) -> None:
        if message.value == b"bad":
            raise HOSTILE[raised]()
        orders.note(message)

    async def coroutine(message: Message) -> None:
        handle(message)

    run_to_the_end(orders, handle if executor == "threads" else coroutine)


RETURNED: dict[str, Callable[[], object]] = HOSTILE | {
    "retry later": lambda: RetryLater(0.0),
    "the class Reject": lambda: Reject,
    "the class RetryLater": lambda: RetryLater,
}
"""Exceptions that a handler returns instead of raising them."""


@pytest.mark.parametrize("executor", ["threads", "async", "awaitable"])
@pytest.mark.parametrize("returned", RETURNED)
def test_an_exception_that_a_handler_returns_counts_as_raised(
    orders: HandledTopic, returned: str, executor: str
) -> None:
    """Issue: a handler returned Reject(...), and its message was acknowledged as handled."""

    def handle(message: Message) -> object:
        if message.value == b"bad":
            return RETURNED[returned]()
        orders.note(message)
        return None

    async def coroutine(message: Message) -> object:
        return handle(message)

    made = {"threads": handle, "async": coroutine, "awaitable": lambda m: coroutine(m)}
    run_to_the_end(orders, made[executor])


def broken(_: object) -> Any:
    raise SystemExit("the policy is broken")


@pytest.mark.parametrize("wait", [broken, lambda _: math.nan, lambda _: -math.inf, lambda _: "x"])
@pytest.mark.parametrize("stop", [tenacity.stop_after_attempt(2), broken])
@pytest.mark.simulated
def test_a_policy_that_fails_is_replaced_by_the_default_and_named_once(
    orders: HandledTopic, wait: Any, stop: Any, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The default one takes 13 s for its attempts.
    monkeypatch.setattr("keyshard.core.lanes.retry_policy._DEFAULT", AT_ONCE)

    def handle(message: Message) -> None:
        if message.value == b"bad":
            raise ValueError("no")
        orders.note(message)

    with caplog.at_level(logging.WARNING, "keyshard"):
        run_to_the_end(orders, handle, retry=RetryPolicy(wait=wait, stop=stop))
    assert sum("retry policy" in record.message for record in caplog.records) == 1


class BrokenObserver:
    """Raises at every call."""

    def started(self, message: Message) -> None:
        raise ValueError("started")

    def completed(self, message: Message, seconds: float) -> None:
        raise SystemExit("completed")

    def failed(self, message: Message, seconds: float, error: BaseException) -> None:
        raise MuteError


@pytest.mark.parametrize("executor", ["threads", "async"])
def test_an_observer_that_raises_is_named_once_per_kind_and_changes_nothing(
    orders: HandledTopic, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[Message] = []

    def handle(message: Message) -> None:
        if message.value == b"3" and len(failed) < 2:
            failed.append(message)
            raise ValueError("once")
        orders.note(message)

    async def coroutine(message: Message) -> None:
        handle(message)

    count = orders.publish(keys=5, per_key=10)
    with (
        caplog.at_level(logging.WARNING, "keyshard"),
        orders.running(
            orders.source(), handle if executor == "threads" else coroutine,
            observers=[BrokenObserver()],
        ) as run,
    ):  # fmt: skip
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        counters = run.source.status()["counters"]
    assert not orders.errors
    assert orders.count == count, "each message is handled once"
    assert counters["deadLettered"] == 0
    assert counters["observerErrors"] == 2 * (count + 2)
    named = [record for record in caplog.records if "BrokenObserver" in record.message]
    assert len(named) == 3


# -- what handlers return -------------------------------------------------------------------------


async def into(seen: list[bytes], message: Message) -> None:
    await asyncio.sleep(0.001)
    seen.append(present(message.value))


class Awaiting:
    """An awaitable that is no coroutine."""

    def __init__(self, made: Awaitable[None]) -> None:
        self._made = made

    def __await__(self) -> Any:
        return self._made.__await__()


def decorated(handle: Callable[[Message], Any]) -> Callable[[Message], Any]:
    @functools.wraps(handle)
    def call(message: Message) -> Any:
        return handle(message)

    return call


LAZY: dict[str, Callable[[list[bytes]], Callable[[Message], Any]]] = {
    "lambda": lambda seen: lambda message: into(seen, message),
    "partial of a lambda": lambda seen: functools.partial(lambda s, m: into(s, m), seen),
    "decorated": lambda seen: decorated(functools.partial(into, seen)),
    "awaitable": lambda seen: lambda message: Awaiting(into(seen, message)),
    "partial": lambda seen: functools.partial(into, seen),
    "async of a coroutine": lambda seen: returning(seen),
}


def returning(seen: list[bytes]) -> Callable[[Message], Any]:
    async def handle(message: Message) -> Any:
        return into(seen, message)

    return handle


@pytest.mark.parametrize("kind", LAZY)
def test_a_returned_awaitable_runs_before_its_message_is_acknowledged(
    orders: HandledTopic, kind: str
) -> None:
    seen: list[bytes] = []
    count = orders.publish(keys=5, per_key=10)
    with orders.running(orders.source(), LAZY[kind](seen)):
        wait_until(lambda: orders.errors or orders.backlog() == 0)
    assert not orders.errors
    assert len(seen) == count


@pytest.mark.parametrize("raised", HOSTILE)
def test_an_error_of_an_awaitable_concerns_its_message_only(
    orders: HandledTopic, raised: str
) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        if message.value == b"bad":
            raise HOSTILE[raised]()
        orders.note(message)

    run_to_the_end(orders, lambda message: handle(message))


def generator(_: Message) -> Iterator[int]:
    yield 1


async def asynchronous(_: Message) -> AsyncIterator[int]:
    yield 1


async def coroutine_of_generator(message: Message) -> Any:
    return generator(message)


UNFIT: dict[str, Callable[[Message], Any]] = {
    "generator": generator,
    "async generator": asynchronous,
    "partial": functools.partial(generator),
    "lambda": lambda message: generator(message),
    "lambda, async": lambda message: asynchronous(message),
    "coroutine": coroutine_of_generator,
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_handler_that_makes_generators_is_refused_with_nothing_acknowledged(
    orders: HandledTopic, kind: str
) -> None:
    count = orders.publish(keys=5, per_key=1)
    with pytest.raises(ConfigError, match=r"generator.*(never run|not run)"):
        orders.source().run(UNFIT[kind])
    assert orders.backlog() in (count, -1)


@pytest.mark.parametrize(
    "handle",
    [
        lambda: None,
        lambda _a, _b: None,
        lambda *, message: None,
        functools.partial(generator, 1),  # type: ignore[arg-type]
    ],
)
def test_a_handler_that_takes_no_message_is_refused_before_anything_connects(
    orders: HandledTopic, handle: Any
) -> None:
    with pytest.raises(ConfigError, match=r"one argument|generator"):
        orders.source().run(handle)
    assert orders.backlog() == -1
