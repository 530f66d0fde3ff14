"""Threads and pools: errors go to the owner, and the caller works where no thread starts."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from helpers import wait_until
from keyshard.core.refusals import Refusals
from keyshard.errors import (
    AuthorizationError,
    ConfigError,
    KeyShardError,
    RuntimeStoppedError,
    ThreadStartError,
    UnexpectedError,
)
from keyshard.threads import Pool, begin, owned_by, owner


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyError("a bug"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_whatever_a_thread_raises_ends_its_owner_by_name(error: BaseException) -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        begin("keyshard-x", raises, error).join(10)
    assert isinstance(errors[0], UnexpectedError)
    assert f"Thread keyshard-x ended unexpectedly: {error!r}" in errors[0].message
    assert errors[0].__cause__ is error


def test_an_error_with_a_name_keeps_it_and_a_stop_is_none() -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        begin("keyshard-x", raises, ConfigError("wrong")).join(10)
        begin("keyshard-x", raises, RuntimeStoppedError("stopped")).join(10)
    assert [type(error) for error in errors] == [ConfigError]


def test_threads_of_threads_and_of_pools_have_the_same_owner() -> None:
    errors: list[KeyShardError] = []

    def first() -> None:
        with Pool(2, "keyshard-pool") as pool:
            pool.submit(lambda: begin("keyshard-y", raises, KeyError("deep")).join(10))

    with owned_by(errors.append):
        begin("keyshard-x", first).join(10)
    assert "Thread keyshard-y" in errors[0].message
    assert owner() is None


def test_a_pool_has_no_more_threads_than_it_may_and_gives_each_outcome_to_its_caller() -> None:
    names: set[str] = set()
    met = threading.Barrier(3)

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        if number < 3:
            met.wait(10)
        if number == 7:
            raise KeyError(number)
        return number

    with Pool(3, "keyshard-pool") as pool:
        futures = [pool.submit(work, number) for number in range(20)]
    assert names == {f"keyshard-pool-{number}" for number in range(3)}
    assert isinstance(futures[7].exception(), KeyError)
    assert [f.result() for f in futures if f is not futures[7]] == [*range(7), *range(8, 20)]
    assert all(not thread.is_alive() for thread in pool._threads)
    with pytest.raises(RuntimeStoppedError):
        pool.submit(work, 1)


def test_a_pool_that_ends_leaves_out_what_has_not_begun() -> None:
    go_on = threading.Event()
    pool = Pool(1, "keyshard-pool")
    first, second = pool.submit(go_on.wait, 10), pool.submit(go_on.wait, 10)
    wait_until(first.running)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go_on.set()
    assert first.result(10)


def test_where_no_thread_starts_a_pool_works_in_its_caller_and_begin_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Pool(3, "keyshard-pool") as pool:
        assert list(pool.map(lambda number: number + 1, range(3))) == [1, 2, 3]
    with pytest.raises(ThreadStartError, match="keyshard-x cannot be started: can't create"):
        begin("keyshard-x", print)


def test_after_an_error_a_pool_leaves_out_what_has_not_begun() -> None:
    """Each of thousands of requests to a server that is away would last as long as a time-out."""
    done: list[int] = []
    first_failed = threading.Event()

    def ask(number: int) -> None:
        if number == 0:
            raise KeyError("away")
        assert first_failed.wait(10)
        done.append(number)

    with Pool(2, "keyshard-test") as pool:
        with pytest.raises(KeyError):
            list(pool.map(ask, range(1_000)))
        first_failed.set()
    assert len(done) <= 2


def test_a_success_between_two_steps_of_a_refusal_does_no_harm() -> None:
    """Issue: one thread told of a success while another told of a refusal, which raised."""
    refusals = Refusals()

    def succeeds(*_: object) -> Any:
        refusals.succeeded()
        return succeeds

    sys.settrace(succeeds)
    try:
        for now_s in range(3):
            refusals.failed(AuthorizationError("no"), float(now_s))
    finally:
        sys.settrace(None)
