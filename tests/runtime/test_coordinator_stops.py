"""Ends of the embedded runtime: by a call, and by an error of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from keyshard.broker.memory import MemoryBroker
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import BrokerError, BrokerUnavailableError, RuntimeStoppedError
from tests.helpers import DEADLINE_S, config, running, started, wait_until
from tests.support.coordinated_topic import CoordinatedTopic
from tests.support.faulty_broker import ScriptedCall, faulty, giving


def test_an_error_in_a_receive_thread_surfaces_at_the_next_call(
    coordinated: CoordinatedTopic,
) -> None:
    error = BrokerError("The consumer is broken.")
    broker = MemoryBroker(coordinated.cluster)
    faulty(broker, subscribe=giving(receive=ScriptedCall(raises=error)))
    coordinator = Coordinator(coordinated.source, lambda: broker)
    with started(coordinator):
        for call in (lambda: coordinator.batches.wait_for_rows(10), coordinator.batches.cut):
            with pytest.raises(BrokerError) as caught:
                call()
            assert caught.value is error
        wait_until(
            lambda: (
                not any(
                    r._thread.is_alive() for r in coordinator.consumers.range_consumers.receivers
                )
            )
        )


def test_a_stopped_source_is_named_and_stops_once(coordinated: CoordinatedTopic) -> None:
    with running(coordinated.cluster, coordinated.source) as coordinator:
        coordinator.stop()
        coordinator.stop()
        calls: list[Callable[[], object]] = [
            coordinator.batches.cut,
            lambda: coordinator.batches.wait_for_rows(0),
            lambda: coordinator.batches.plan(Checkpoint("", "unit", 4)),
        ]
        for call in calls:
            with pytest.raises(RuntimeStoppedError):
                call()


def test_stopping_wakes_a_host_that_waits_for_rows(coordinated: CoordinatedTopic) -> None:
    with running(coordinated.cluster, coordinated.source) as coordinator:
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(RuntimeStoppedError):
                coordinator.batches.wait_for_rows(60)
            ended.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        coordinator.stop()
        assert ended.wait(DEADLINE_S)


def test_stopping_gives_the_ranges_back_and_leaves_no_thread(coordinated: CoordinatedTopic) -> None:
    before = set(threading.enumerate())
    with running(coordinated.cluster, coordinated.source):
        assert set(threading.enumerate()) > before
    wait_until(lambda: set(threading.enumerate()) <= before)
    with running(coordinated.cluster, config(coordinated.topic, subscribe_timeout_ms=1)):
        pass


def test_an_outage_at_the_end_is_no_error_of_the_run(
    coordinated: CoordinatedTopic, caplog: pytest.LogCaptureFixture
) -> None:
    """1. A source stops while connections stall. 2. The client's close times out."""
    error = BrokerUnavailableError("Could not disconnect.")
    broker = faulty(MemoryBroker(coordinated.cluster), close=ScriptedCall(error, answer_lost=True))
    coordinator = Coordinator(coordinated.source, lambda: broker)
    coordinator.start()
    coordinator.stop()
    assert "Could not disconnect" in caplog.text


def test_the_threads_of_a_source_are_daemons(coordinated: CoordinatedTopic) -> None:
    before = set(threading.enumerate())
    with running(coordinated.cluster, coordinated.source):
        own = set(threading.enumerate()) - before
        assert own
        assert all(thread.daemon for thread in own)
