"""A light future behaves as one of the standard library, whenever its base class is initialised."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotDoneError
from functools import partial

import pytest

from keyshard.broker.light_future import LightFuture
from keyshard.threads import begin
from tests.support.deadlines import deadline

KINDS: list[type[Future[int]]] = [LightFuture, Future]
kinds = pytest.mark.parametrize("kind", KINDS)
looks = pytest.mark.parametrize("look", [lambda _: None, Future.running], ids=["light", "made"])
Look = Callable[[Future[int]], object]


@kinds
@looks
def test_a_result_is_kept(kind: type[Future[int]], look: Look) -> None:
    one, called = kind(), []
    look(one)
    assert not one.done()
    one.add_done_callback(lambda done: called.append(done.result()))
    one.add_done_callback(lambda done: called.append(done.result()))
    one.set_result(5)
    assert called == [5, 5]
    assert one.done()
    assert (one.result(0), one.exception(0), one.cancelled()) == (5, None, False)
    assert one.result(0) == 5
    one.add_done_callback(lambda done: called.append(done.result()))
    assert called == [5, 5, 5]
    with pytest.raises(InvalidStateError):
        one.set_result(6)
    assert one.result() == 5


@kinds
@looks
def test_an_error_is_kept(kind: type[Future[int]], look: Look) -> None:
    one, called, error = kind(), [], ValueError("wrong")
    one.add_done_callback(lambda done: called.append(done.exception()))
    look(one)
    one.set_exception(error)
    assert called == [error]
    assert one.exception() is error
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            one.result(0)
        assert not one.cancelled()


@kinds
def test_a_cancelled_one_takes_no_result(kind: type[Future[int]]) -> None:
    one, called = kind(), []
    one.add_done_callback(lambda done: called.append(done.cancelled()))
    assert one.cancel()
    assert called == [True]
    assert one.done()
    with pytest.raises(InvalidStateError):
        one.set_result(5)
    resolved = kind()
    resolved.set_result(5)
    assert not resolved.cancel()


@kinds
def test_an_unresolved_one_is_waited_for(kind: type[Future[int]]) -> None:
    some = [kind() for _ in range(3)]
    with pytest.raises(NotDoneError):
        some[0].result(0.001)
    some[1].set_result(1)

    def resolve() -> None:
        for number in (0, 2):
            some[number].set_result(number)

    begin("resolve", resolve)
    done, missing = futures.wait(some, timeout=deadline(10))
    assert (len(done), missing) == (3, set())
    assert [one.result() for one in some] == [0, 1, 2]
    assert asyncio.run(awaited(some[1])) == 1


async def awaited(one: Future[int]) -> int:
    return await asyncio.wrap_future(one)


@kinds
def test_a_callback_that_fails_does_not_reach_the_thread_that_resolves(
    kind: type[Future[int]], caplog: pytest.LogCaptureFixture
) -> None:
    one = kind()
    one.add_done_callback(lambda _: 1 / 0)
    one.set_result(5)
    assert one.result() == 5
    assert "ZeroDivisionError" in caplog.text


def test_threads_that_wait_and_resolve_at_once_agree() -> None:
    for _ in range(200):
        one = LightFuture[int]()
        found: list[int] = []
        start = threading.Barrier(3)

        def wait(one: LightFuture[int], found: list[int], start: threading.Barrier) -> None:
            start.wait(deadline(10))
            found.append(one.result(deadline(10)))

        threads = [begin("waits", wait, one, found, start) for _ in range(2)]
        one.add_done_callback(partial(note, found))
        start.wait(deadline(10))
        one.set_result(7)
        for thread in threads:
            thread.join(deadline(10))
        assert found == [7, 7, 7]


def note(found: list[int], done: Future[int]) -> None:
    found.append(done.result())
