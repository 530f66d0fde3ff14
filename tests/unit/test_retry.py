"""Retries end: by success, by a final error, by time, or by a stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from keyshard.broker.retry import retry_until
from keyshard.errors import BrokerError, BrokerUnavailableError, RangeConflictError
from tests.support.deadlines import deadline


def failing(*errors: BaseException) -> tuple[Callable[[], str], list[int]]:
    """An action that raises these errors one after the other, then returns ``"done"``."""
    calls: list[int] = []

    def action() -> str:
        calls.append(len(calls))
        if len(calls) <= len(errors):
            raise errors[len(calls) - 1]
        return "done"

    return action, calls


def test_a_success_is_returned_at_once() -> None:
    action, calls = failing()
    assert retry_until(action, 0.0) == "done"
    assert calls == [0]


def test_retriable_errors_are_tried_again() -> None:
    action, calls = failing(BrokerUnavailableError("a"), RangeConflictError("b"))
    assert retry_until(action, 10.0) == "done"
    assert len(calls) == 3


@pytest.mark.parametrize("error", [BrokerError("no"), ValueError("bug")])
def test_other_errors_are_raised_at_once(error: Exception) -> None:
    action, calls = failing(error)
    with pytest.raises(type(error)) as caught:
        retry_until(action, 10.0)
    assert caught.value is error
    assert len(calls) == 1


def test_the_last_error_is_raised_when_time_is_up() -> None:
    errors = [BrokerUnavailableError(str(i)) for i in range(1_000)]
    action, calls = failing(*errors)
    began = time.monotonic()
    with pytest.raises(BrokerUnavailableError) as caught:
        retry_until(action, 0.5)
    assert 0.5 <= time.monotonic() - began < deadline(20)
    assert caught.value is errors[calls[-1]]
    assert 1 < len(calls) < 100, "waits grow"


def test_without_time_there_is_one_attempt() -> None:
    action, calls = failing(BrokerUnavailableError("a"))
    with pytest.raises(BrokerUnavailableError):
        retry_until(action, 0.0)
    assert len(calls) == 1


def test_a_stop_before_the_first_attempt_does_not_prevent_it() -> None:
    stop = threading.Event()
    stop.set()
    action, calls = failing(BrokerUnavailableError("a"))
    with pytest.raises(BrokerUnavailableError):
        retry_until(action, 60.0, stop=stop)
    assert len(calls) == 1


def test_a_stop_ends_the_retries_early() -> None:
    stop = threading.Event()
    calls: list[int] = []

    def action() -> None:
        calls.append(1)
        if len(calls) == 3:
            stop.set()
        raise BrokerUnavailableError("away")

    with pytest.raises(BrokerUnavailableError):
        retry_until(action, 600.0, stop=stop)
    assert len(calls) == 3
