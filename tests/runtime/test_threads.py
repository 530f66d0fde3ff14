"""An unexpected error in any thread of a source ends the source by name."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from handler_place import AT_ONCE, Place
from helpers import keyshard_threads, wait_until
from keyshard import KeyShardSource, Message, SourceStream
from keyshard.errors import UnexpectedError
from keyshard.observe import broker_facts, control, monitor
from keyshard.worker import reconnector
from tests.thread_faults import Calls, Step

STEPS = [
    Step("keyshard-ack", "keyshard.worker.acknowledger.Acknowledger._hand_over"),
    Step("keyshard-audit", "keyshard.broker.retry.retry_until"),
    Step("keyshard-audit", "keyshard.core.holes.foreign_acks.before_the_start"),
    Step("keyshard-begin", "keyshard.broker.retry.retry_until"),
    Step("keyshard-broker-facts", "keyshard.broker.memory.admin.MemoryAdmin.settings"),
    Step("keyshard-broker-facts", "keyshard.observe.broker_facts.BrokerFacts._round"),
    Step("keyshard-control", "keyshard.observe.control._of_another_user"),
    Step("keyshard-control-answer", "keyshard.observe.control.ControlServer._answer"),
    Step("keyshard-control-answer", "keyshard.observe.control._send"),
    Step("keyshard-discovery", "keyshard.coordinator.discovery.Discovery._attempt"),
    Step("keyshard-existing", "keyshard.broker.memory.admin.MemoryAdmin.subscription"),
    Step("keyshard-letter-returns", "keyshard.dead_letter.returns.LetterReturns._round"),
    Step("keyshard-letters", "keyshard.handlers.parked_lanes.ParkedLanes._write.<locals>.<lambda>"),
    Step("keyshard-receive", "keyshard.worker.receiver.Receiver._round"),
    Step("keyshard-reconnect", "keyshard.worker.reconnector.Reconnector._look"),
    Step("keyshard-settle", "keyshard.coordinator.evidence.Evidence.holes_views"),
    Step("keyshard-settle", "keyshard.coordinator.settler.Settler._look_at"),
    Step("keyshard-subscribe", "keyshard.broker.retry.retry_until"),
    Step("keyshard-watchdog", "keyshard.observe.monitor._name"),
    Step("keyshard-watchdog", "keyshard.observe.status.StatusView.watch"),
    Step("keyshard-work", "keyshard.handlers.lane_desk.LaneDesk.finish"),
    Step("keyshard-work", "keyshard.handlers.lane_desk.LaneDesk.judge"),
    Step("keyshard-work", "keyshard.handlers.lane_desk.LaneDesk.next"),
]
"""A thread, and what its function calls. An error in a thread of a pool is that of the caller."""
ASYNC_DEPTH = 8
"""Calls of asyncio and of coroutines lie between."""
ASYNC_STEPS = [
    Step("keyshard-work-async", "keyshard.handlers.lane_desk.LaneDesk.next"),
    Step("keyshard-work-async", "keyshard.handlers.lane_desk.LaneDesk.finish"),
]


class World:
    """A source with all its threads: it handles, parks, discovers, settles, and is looked at."""

    def __init__(self, calls: Calls, *, asynchronous: bool = False) -> None:
        self.place = Place(f"threads-{time.monotonic_ns()}")
        self._calls = calls
        self._async = asynchronous

    def run(self, until: Callable[[], bool], deadline_s: float = 10.0) -> BaseException | None:
        """Run until something holds or the source ends; the error that ended it."""
        place = self.place
        source = place.source(
            admin_url=place.url, discovery_interval_ms=10, settle_after_ms=100, parallelism=2
        )

        def handle(message: Message) -> None:
            if message.routing_key == "key-1":
                raise ValueError("it is broken")
            place.note(message)

        async def handle_async(message: Message) -> None:
            handle(message)

        handler: Any = handle_async if self._async else handle
        with (
            self._calls.watched(),
            place.running(
                source, handler, retry=AT_ONCE, metrics_port=0, drain_timeout_s=0.5
            ) as run,
        ):
            end_s = time.monotonic() + deadline_s
            number = 0
            while time.monotonic() < end_s and run.thread.is_alive() and not until():
                place.publish(4, 2)
                number += 1
                time.sleep(0.01)
                self._look(source, number)
        return place.errors[0] if place.errors else None

    def _look(self, source: KeyShardSource, number: int) -> None:
        """As people do: by the control socket, and by metrics."""
        run = source.__dict__.get("_running")
        if run is None or number % 5:
            return
        try:
            port = run._monitor.metrics_port
            httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2)
            control.running_source(pid=None, service_url=self.place.url).ask(
                "status", timeout_s=1.0
            )
            if number % 10 == 0:
                source.unpark(all=True)
        except Exception:  # noqa: BLE001, S110 - it starts or ends
            pass


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 1.0)
    monkeypatch.setattr(monitor, "LOOK_S", 0.02)
    monkeypatch.setattr(reconnector, "LOOK_S", 0.02)
    monkeypatch.setattr(broker_facts, "ROUND_S", 0.02)


@pytest.mark.parametrize("step", [*STEPS, *ASYNC_STEPS], ids=":".join)
def test_an_error_that_nobody_expects_ends_the_source_by_name(step: Step) -> None:
    calls = Calls(ASYNC_DEPTH if step in ASYNC_STEPS else 1, step)
    error = World(calls, asynchronous=step in ASYNC_STEPS).run(lambda: False)
    assert calls.raised.is_set(), "the thread does not come by there"
    assert isinstance(error, UnexpectedError)
    assert f"InjectedError('{step.function}')" in error.message


def test_every_thread_that_a_source_has_is_in_the_table() -> None:
    calls = Calls(1)
    assert World(calls).run(lambda: {step.thread for step in STEPS} <= _threads(calls)) is None
    requests = {"keyshard-metrics-answer"}
    assert _threads(calls) - requests == {step.thread for step in STEPS}


def _threads(calls: Calls) -> set[str]:
    return {step.thread for step in list(calls.steps)}


def test_a_stream_that_nobody_has_any_more_ends_its_threads() -> None:
    place = Place(f"dropped-{time.monotonic_ns()}")
    before = keyshard_threads()
    stream = place.source().open()
    place.publish(2, 2)
    batch = stream.next_batch(10)
    stream.itself = stream  # type: ignore[attr-defined]  # only the collector ends it
    del stream
    gc.collect()
    assert batch is not None
    assert sum(rows.num_rows for rows in batch) > 0, "a batch keeps its stream"
    del batch
    with pytest.warns(ResourceWarning, match="SourceStream was not closed"):
        gc.collect()
    wait_until(lambda: not keyshard_threads() - before)
    place.source().open().close()


def test_a_forked_child_leaves_a_stream_to_its_parent() -> None:
    """Issue: it closed its copy, and with that the consumers that its parent has."""
    stopped, told = os.pipe()

    class Parents:
        def stop(self) -> None:
            os.write(told, b"stopped")

    stream = SourceStream(Parents())  # type: ignore[arg-type]
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")
        del stream
        time.sleep(0.2)
        os._exit(0)
    os.waitpid(child, 0)
    stream.close()
    assert os.read(stopped, 100) == b"stopped", "once, by the parent"
    os.close(told)
    os.close(stopped)
