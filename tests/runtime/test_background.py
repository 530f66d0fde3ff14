"""Runs in the background: ``running()``, ``wait_ready()`` and ``run_until_idle()``."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import tenacity

from keyshard import Message, Reject, RetryPolicy
from keyshard.errors import (
    AvailableNowTimeoutError,
    ConfigError,
    HandlerFailedError,
    NotRunningError,
    TopicNotFoundError,
)
from keyshard.testing import run_until_idle
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic


def test_a_block_begins_with_a_ready_source_and_stops_the_source_at_its_end(
    orders: HandledTopic,
) -> None:
    source = orders.source()
    with source.running(orders.note, lanes=2) as running:
        assert running is source
        assert source.status()["state"] == "running"
        count = orders.publish(keys=5, per_key=10)
        wait_until(lambda: orders.count == count)
    assert orders.backlog() == 0
    with pytest.raises(NotRunningError):
        source.status()
    with source.running(orders.note):  # and again
        pass


def test_the_end_of_a_block_waits_for_running_handlers(orders: HandledTopic) -> None:
    began, may_end = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        began.set()
        assert may_end.wait(deadline(30))
        orders.note(message)

    orders.publish(keys=1, per_key=1)
    with orders.source().running(handle):
        assert began.wait(deadline(30))
        threading.Timer(0.05, may_end.set).start()
    assert (orders.count, orders.backlog()) == (1, 0)


def test_an_exception_of_the_block_stops_the_source(orders: HandledTopic) -> None:
    source = orders.source()
    with pytest.raises(ZeroDivisionError), source.running(orders.note):
        raise ZeroDivisionError
    with pytest.raises(NotRunningError):
        source.status()


def test_the_error_of_the_run_is_raised_at_the_end_of_the_block(orders: HandledTopic) -> None:
    def handle(message: Message) -> None:
        raise ValueError("broken")

    orders.publish(keys=1, per_key=1)
    source = orders.source()

    def ended() -> bool:
        return source.__dict__.get("_running") is None

    with (
        pytest.raises(HandlerFailedError, match="broken"),
        source.running(handle, retry=AT_ONCE, on_failure="stop"),
    ):
        wait_until(ended)

    def ask() -> None:
        wait_until(ended)
        source.status()  # its error says less than that of the run

    with (
        pytest.raises(HandlerFailedError, match="broken"),
        source.running(handle, retry=AT_ONCE, on_failure="stop"),
    ):
        ask()
    assert orders.backlog() == 1


def test_a_source_that_does_not_start_raises_its_own_error(orders: HandledTopic) -> None:
    source = orders.source(topics="missing")
    began_s = time.monotonic()
    with pytest.raises(TopicNotFoundError), source.running(orders.note):
        pytest.fail("it is not ready")
    assert time.monotonic() - began_s < deadline(30)


def test_wait_ready_waits_for_a_run_that_begins_later(orders: HandledTopic) -> None:
    source = orders.source()
    with pytest.raises(NotRunningError, match=r"within 0.05 s. The source is not running"):
        source.wait_ready(0.05)
    run = orders.running(source, orders.note)
    threading.Timer(0.05, run.thread.start).start()
    source.wait_ready()
    assert source.status()["state"] == "running"
    run.end()
    with pytest.raises(ConfigError, match="timeout_s"):
        source.wait_ready(-1)


def test_wait_ready_names_the_state_of_the_source(orders: HandledTopic) -> None:
    source = orders.source()
    held = orders.source().open()  # it owns the ranges
    try:
        with (
            pytest.raises(NotRunningError, match=r"within 0.1 s. The source is starting"),
            source.running(orders.note, ready_timeout_s=0.1),
        ):
            pytest.fail("it is not ready")
    finally:
        held.close()


def test_everything_is_handled_until_the_source_is_idle(orders: HandledTopic) -> None:
    count = orders.publish(keys=20, per_key=50)
    status = run_until_idle(orders.source(), orders.note)
    assert (orders.count, orders.backlog()) == (count, 0)
    assert status["counters"]["completed"] == count
    assert run_until_idle(orders.source(), orders.note)["counters"]["completed"] == 0


def test_a_run_until_idle_waits_for_retries_and_dead_letters(orders: HandledTopic) -> None:
    attempts: list[bytes | None] = []

    def handle(message: Message) -> None:
        attempts.append(message.value)
        if message.routing_key == "key-1" and len(attempts) < 5:
            raise ValueError("not yet")
        if message.routing_key == "key-2":
            raise Reject("never")
        orders.note(message)

    orders.publish(keys=3, per_key=1)
    slowly = RetryPolicy(wait=tenacity.wait_fixed(0.2), stop=tenacity.stop_after_attempt(9))
    status = run_until_idle(orders.source(), handle, retry=slowly)
    assert status["counters"]["deadLettered"] == 1
    assert (orders.count, orders.backlog()) == (2, 0)


def test_a_handler_that_does_not_return_is_named(orders: HandledTopic) -> None:
    may_end = threading.Event()
    orders.publish(keys=1, per_key=1)
    run = partial(run_until_idle, orders.source(), lambda _message: may_end.wait(deadline(30)))
    with pytest.raises(
        AvailableNowTimeoutError, match=r"1 messages are not acknowledged.*Key 'key-0'"
    ):
        run(timeout_s=1.5, drain_timeout_s=0.1)
    may_end.set()
    assert orders.backlog() == 1


def test_idleness_needs_the_admin_interface(orders: HandledTopic) -> None:
    source = orders.source(service_url="pulsar://127.0.0.1:1")
    with pytest.raises(ConfigError, match="Set admin_url"):
        run_until_idle(source, orders.note)
