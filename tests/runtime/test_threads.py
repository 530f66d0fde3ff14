"""An unexpected error in any thread of a source ends the source, whose error names it."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from keyshard import KeyShardSource, Message, SourceStream, control
from keyshard.consumers import reconnector
from keyshard.errors import UnexpectedError
from keyshard.observe import broker_poll, monitor
from tests.helpers import keyshard_threads, wait_until
from tests.support.handled_topic import AT_ONCE, HandledTopic
from tests.support.thread_faults import Calls, Step

STEPS = [
    Step("keyshard-ack", "keyshard.consumers.acknowledger.Acknowledger._hand_over"),
    Step("keyshard-audit", "keyshard.broker.retry.retry_until"),
    Step("keyshard-broker-facts", "keyshard.observe.broker_poll.BrokerPoll._round"),
    Step("keyshard-control", "keyshard.control._of_another_user"),
    Step("keyshard-control-answer", "keyshard.control.ControlServer._answer"),
    Step("keyshard-control-answer", "keyshard.control._send"),
    Step("keyshard-discovery", "keyshard.coordinator.discovery.Discovery._attempt"),
    Step("keyshard-existing", "keyshard.broker.memory.admin.MemoryAdmin.subscription"),
    Step(
        "keyshard-dead-letter-redelivery",
        "keyshard.dead_letters.acknowledging.DeadLetterRedelivery._round",
    ),
    Step(
        "keyshard-dead-letters",
        "keyshard.handlers.failed_messages.FailedMessages._write.<locals>.<lambda>",
    ),
    Step("keyshard-properties", "keyshard.broker.retry.retry_until"),
    Step("keyshard-receive", "keyshard.consumers.receiver.Receiver._round"),
    Step("keyshard-reconnect", "keyshard.consumers.reconnector.Reconnector._look"),
    Step("keyshard-gap-resolver", "keyshard.coordinator.gap_resolver.GapResolver._ack_gap_views"),
    Step("keyshard-gap-resolver", "keyshard.coordinator.gap_resolver.GapResolver._look_at"),
    Step("keyshard-subscribe", "keyshard.broker.retry.retry_until"),
    Step("keyshard-watchdog", "keyshard.observe.broker_poll.name_stalls"),
    Step("keyshard-watchdog", "keyshard.observe.status.StatusView.watch"),
    Step("keyshard-work", "keyshard.handlers.dispatcher.Dispatcher.finish"),
    Step("keyshard-work", "keyshard.handlers.dispatcher.Dispatcher.judge"),
    Step("keyshard-work", "keyshard.handlers.dispatcher.Dispatcher.next"),
]
"""A thread, and the calls of its function. The caller gets the error of a thread of a pool."""
ASYNC_DEPTH = 8
"""Calls of asyncio and of coroutines lie between."""
ASYNC_STEPS = [
    Step("keyshard-work-async", "keyshard.handlers.dispatcher.Dispatcher.next"),
    Step("keyshard-work-async", "keyshard.handlers.dispatcher.Dispatcher.finish"),
]


class EveryThread:
    """A source with all its threads: handlers, parking, discovery, ack gaps, status."""

    def __init__(self, calls: Calls, *, asynchronous: bool = False) -> None:
        self.orders = HandledTopic()
        self._calls = calls
        self._async = asynchronous

    def run(self, until: Callable[[], bool], deadline_s: float = 10.0) -> BaseException | None:
        """Run until something holds or the source ends; return the error that ended it."""
        orders = self.orders
        source = orders.source(
            admin_url=orders.url, discovery_interval_ms=10, settle_after_ms=100, parallelism=2
        )

        def handle(message: Message) -> None:
            if message.routing_key == "key-1":
                raise ValueError("it is broken")
            orders.note(message)

        async def handle_async(message: Message) -> None:
            handle(message)

        handler: Any = handle_async if self._async else handle
        with (
            self._calls.watched(),
            orders.running(
                source, handler, retry=AT_ONCE, metrics_port=0, drain_timeout_s=0.5
            ) as run,
        ):
            end_s = time.monotonic() + deadline_s
            number = 0
            while time.monotonic() < end_s and run.thread.is_alive() and not until():
                orders.publish(4, 2)
                number += 1
                time.sleep(0.01)
                self._look(source, number)
        return orders.errors[0] if orders.errors else None

    def _look(self, source: KeyShardSource, number: int) -> None:
        """Read the status by the control socket and by metrics, as operators do."""
        run = source.__dict__.get("_running")
        if run is None or number % 5:
            return
        try:
            port = run._monitor.metrics_port
            httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2)
            control.running_source(pid=None, service_url=self.orders.url).ask(
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
    monkeypatch.setattr(broker_poll, "FACTS_ROUND_S", 0.02)


@pytest.mark.parametrize("step", [*STEPS, *ASYNC_STEPS], ids=":".join)
def test_an_unexpected_error_in_a_thread_ends_the_source_and_is_in_its_error(step: Step) -> None:
    calls = Calls(ASYNC_DEPTH if step in ASYNC_STEPS else 1, step)
    error = EveryThread(calls, asynchronous=step in ASYNC_STEPS).run(lambda: False)
    assert calls.raised.is_set(), "the thread does not come by there"
    assert isinstance(error, UnexpectedError)
    assert f"InjectedError('{step.function}')" in error.message


def test_every_thread_of_an_in_memory_source_is_in_the_list_of_steps() -> None:
    calls = Calls(1)
    assert (
        EveryThread(calls).run(lambda: {step.thread for step in STEPS} <= _threads(calls)) is None
    )
    assert _threads(calls) - {"keyshard-metrics-answer"} == {step.thread for step in STEPS}


def _threads(calls: Calls) -> set[str]:
    return {step.thread for step in list(calls.steps)}


def test_a_stream_without_references_ends_its_threads() -> None:
    orders = HandledTopic()
    before = keyshard_threads()
    stream = orders.source().open()
    orders.publish(2, 2)
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
    orders.source().open().close()


def test_a_forked_child_leaves_a_stream_to_its_parent() -> None:
    """Issue: it closed its copy, and with that the consumers that its parent has."""
    stopped, output = os.pipe()

    class Parents:
        def stop(self) -> None:
            os.write(output, b"stopped")

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
    os.close(output)
    os.close(stopped)
