"""``await source.arun(handle)``: a run in the event loop of the program."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Any

import pytest

from keyshard import Message
from keyshard.errors import ConfigError, HandlerFailedError
from tests.helpers import run_coroutine, until, wait_until
from tests.runtime.test_program_ends import Program
from tests.support.handled_topic import AT_ONCE, HandledTopic, ended

TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)


def test_coroutines_run_in_the_loop_and_context_of_the_caller(orders: HandledTopic) -> None:
    count = orders.publish(keys=10, per_key=10)
    source = orders.source()
    loops = set()

    async def handle(message: Message) -> None:
        loops.add(asyncio.get_running_loop())
        assert TENANT.get() == "a"
        TENANT.set(message.key)
        await asyncio.sleep(0)
        assert message.data == message.value
        orders.note(message)
        if orders.count == count:
            source.stop()

    async def main() -> None:
        TENANT.set("a")
        await source.arun(handle, lanes=2)
        assert loops == {asyncio.get_running_loop()}

    run_coroutine(main())
    assert (orders.count, orders.backlog()) == (count, 0)


def begun_at_once(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """Start a task inside create_task(), as ``asyncio.eager_task_factory`` of Python 3.12 does."""
    steps: list[Any] = []
    made_loop: Any = loop
    call_soon = loop.call_soon
    made_loop.call_soon = lambda step, *_, **__: steps.append(step)
    try:
        task: asyncio.Task[Any] = vars(asyncio.tasks)["_PyTask"](coroutine, loop=loop, **options)
    finally:
        made_loop.call_soon = call_soon
    outer = asyncio.current_task(loop)
    if outer is not None:
        asyncio.tasks._leave_task(loop, outer)
    try:
        copy_context().run(*steps)
    finally:
        if outer is not None:
            asyncio.tasks._enter_task(loop, outer)
    return task


@pytest.mark.parametrize("waits", [False, True])
def test_a_loop_that_starts_tasks_at_once_runs_handlers(orders: HandledTopic, waits: bool) -> None:
    """The first handler ran before its task was known, which ended the source."""
    count = orders.publish(keys=10, per_key=100)
    source = orders.source()

    async def handle(message: Message) -> None:
        if waits:
            await asyncio.sleep(0)
        orders.note(message)
        if orders.count == count:
            source.stop()

    async def main() -> None:
        factory = getattr(asyncio, "eager_task_factory", begun_at_once)
        asyncio.get_running_loop().set_task_factory(factory)
        await source.arun(handle, lanes=2)

    run_coroutine(main())
    assert (orders.count, orders.backlog()) == (count, 0)


def test_plain_functions_run_in_threads(orders: HandledTopic) -> None:
    count = orders.publish(keys=10, per_key=3)
    source = orders.source()
    threads = set()

    def handle(message: Message) -> None:
        threads.add(threading.current_thread())
        orders.note(message)
        if orders.count == count:
            source.stop()

    run_coroutine(source.arun(handle))
    assert threading.main_thread() not in threads
    assert orders.backlog() == 0


def test_a_cancellation_lets_running_handlers_finish(orders: HandledTopic) -> None:
    orders.publish(keys=4, per_key=5)
    source = orders.source()
    began, may_end = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        began.set()
        await may_end.wait()
        orders.note(message)

    async def main() -> None:
        task = asyncio.create_task(source.arun(handle, workers=1))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended(source)

    run_coroutine(main())
    assert (orders.count, orders.backlog()) == (1, 19)


def test_a_second_cancellation_abandons_running_handlers(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(message: Message) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        task = asyncio.create_task(source.arun(handle))
        await began.wait()
        task.cancel()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await cancelled.wait()
        await until(lambda: ended(source))

    run_coroutine(main())
    assert orders.backlog() == 1


def test_a_loop_that_closes_ends_the_source(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()
    loop = asyncio.new_event_loop()
    began = asyncio.Event()
    events: list[str] = []
    loop.set_exception_handler(lambda _loop, context: events.append(context["message"]))

    async def handle(message: Message) -> None:
        began.set()
        await asyncio.Event().wait()

    task = loop.create_task(source.arun(handle, drain_timeout_s=3_600))
    loop.run_until_complete(began.wait())
    loop.close()
    wait_until(lambda: ended(source))  # it does not wait for the handler
    assert orders.backlog() == 1
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task


def test_the_error_of_the_source_is_that_of_arun(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()

    async def handle(message: Message) -> None:
        raise ValueError("broken")

    with pytest.raises(HandlerFailedError, match="broken"):
        run_coroutine(source.arun(handle, retry=AT_ONCE, on_failure="stop"))
    with pytest.raises(ConfigError, match="lanes"):
        run_coroutine(source.arun(handle, lanes=0))
    assert orders.backlog() == 1


@pytest.mark.parametrize(
    ("way", "number", "left"), [("arun", signal.SIGTERM, 4), ("async for", signal.SIGINT, 5)]
)
def test_after_a_signal_only_done_messages_are_acknowledged(
    tmp_path: Path, way: str, number: signal.Signals, left: int
) -> None:
    program = Program(
        tmp_path,
        f"""
import asyncio
cluster.publish(topic, *(Message(b"%d" % n, key="a") for n in range(5)))

async def handle(message):
    (folder / "began").touch()
    await asyncio.sleep(0.3)

async def iterate():
    async for message in source:
        await handle(message)
        await message.done()

async def main():
    await (source.arun(handle) if "{way}" == "arun" else iterate())

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
while source.__dict__.get("_running"):
    time.sleep(0.01)
print("left", sum(cluster.backlog(one, "keyshard") for one in cluster.partitions(topic)))
""",
    )
    program.reached("began")
    program.process.send_signal(number)
    output = program.end()
    assert ("interrupted" in output) == (number == signal.SIGINT)
    assert f"left {left}" in output, output
