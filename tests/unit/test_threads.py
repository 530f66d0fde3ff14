"""Threads and pools: errors go to the owner, and the caller works where no thread starts."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from keyshard.core.refusal_timer import RefusalTimer
from keyshard.errors import (
    AuthorizationError,
    ConfigError,
    KeyShardError,
    RuntimeStoppedError,
    ThreadStartError,
    UnexpectedError,
)
from keyshard.threads import Pool, begin, owned_by, owner
from tests.helpers import DEADLINE_S, wait_until


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyError("a bug"), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_an_error_of_a_thread_ends_its_owner_by_name(error: BaseException) -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        begin("keyshard-x", raises, error).join(DEADLINE_S)
    assert isinstance(errors[0], UnexpectedError)
    assert f"Thread keyshard-x ended unexpectedly: {error!r}" in errors[0].message
    assert errors[0].__cause__ is error


def test_a_known_error_reaches_the_owner_as_it_is_and_a_stop_does_not() -> None:
    errors: list[KeyShardError] = []
    with owned_by(errors.append):
        begin("keyshard-x", raises, ConfigError("wrong")).join(DEADLINE_S)
        begin("keyshard-x", raises, RuntimeStoppedError("stopped")).join(DEADLINE_S)
    assert [type(error) for error in errors] == [ConfigError]


def test_threads_of_threads_and_of_pools_have_the_same_owner() -> None:
    errors: list[KeyShardError] = []

    def first() -> None:
        with Pool(2, "keyshard-pool") as pool:
            pool.submit(lambda: begin("keyshard-y", raises, KeyError("deep")).join(DEADLINE_S))

    with owned_by(errors.append):
        begin("keyshard-x", first).join(DEADLINE_S)
    assert "Thread keyshard-y" in errors[0].message
    assert owner() is None


def test_a_pool_has_no_more_threads_than_it_may_and_gives_each_outcome_to_its_caller() -> None:
    names: set[str] = set()
    met = threading.Barrier(3)

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        if number < 3:
            met.wait(DEADLINE_S)
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


def test_a_pool_that_ends_cancels_calls_that_have_not_started() -> None:
    go_on = threading.Event()
    pool = Pool(1, "keyshard-pool")
    first, second = pool.submit(go_on.wait, 10), pool.submit(go_on.wait, 10)
    wait_until(first.running)
    pool.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled()
    go_on.set()
    assert first.result(DEADLINE_S)


def test_a_pool_without_threads_works_in_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Pool(3, "keyshard-pool") as pool:
        assert list(pool.map(lambda number: number + 1, range(3))) == [1, 2, 3]
    with pytest.raises(ThreadStartError, match="keyshard-x cannot be started: can't create"):
        begin("keyshard-x", print)


def test_after_an_error_a_pool_cancels_calls_that_have_not_started() -> None:
    """Each of thousands of requests to a server that is away would last as long as a time-out."""
    done: list[int] = []
    first_failed = threading.Event()

    def ask(number: int) -> None:
        if number == 0:
            raise KeyError("away")
        assert first_failed.wait(DEADLINE_S)
        done.append(number)

    with Pool(2, "keyshard-test") as pool:
        with pytest.raises(KeyError):
            list(pool.map(ask, range(1_000)))
        first_failed.set()
    assert len(done) <= 2


def test_a_success_between_two_steps_of_a_refusal_does_no_harm() -> None:
    """Issue: one thread reported a success while another reported a refusal. This raised."""
    refusals = RefusalTimer()

    def succeeds(*_: object) -> Any:
        refusals.succeeded()
        return succeeds

    sys.settrace(succeeds)
    try:
        for now_s in range(3):
            refusals.failed(AuthorizationError("no"), float(now_s))
    finally:
        sys.settrace(None)
