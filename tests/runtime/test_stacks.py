"""The stack of a running handler, of any executor, by the control socket."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.control import running_source
from keyshard.errors import ConfigError
from keyshard.handlers import stacks
from tests.helpers import until, wait_until
from tests.support.command_line import run as command
from tests.support.deadlines import deadline

pytestmark = pytest.mark.usefixtures("control_folder")

RELEASE = threading.Event()


def wait_in_a_thread(depth: int) -> None:
    if depth:
        wait_in_a_thread(depth - 1)
    elif not RELEASE.wait(deadline(60)):
        raise TimeoutError


def handle(message: Message) -> None:
    if message.value:
        wait_in_a_thread(int(message.value))


async def wait_in_a_coroutine() -> None:
    await until(RELEASE.is_set)


async def handle_async(message: Message) -> None:
    if message.value == b"blocking":
        wait_in_a_thread(0)
    await wait_in_a_coroutine()


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    RELEASE.clear()
    yield
    RELEASE.set()


def source_of(name: str, *values: bytes, key: str = "order-17") -> KeyShardSource:
    cluster = MemoryCluster.named(name)
    topic = cluster.create_topic("orders", partitions=1)
    cluster.publish(topic, *(Stored(value, key=key) for value in values))
    return KeyShardSource(
        topic, subscription="jobs", parallelism=1, service_url=f"memory://{name}",
        starting_position="earliest",
    )  # fmt: skip


def running() -> dict[str, Any]:
    """Return the message that hangs."""
    found: list[dict[str, Any]] = []

    def hangs() -> bool:
        found[:] = [
            one
            for one in running_source("jobs").ask("runs")["runs"]
            if one["state"] == "running" and one["runningSeconds"] >= 0.1
        ]
        return bool(found)

    wait_until(hangs)
    return found[0]


def stack_of(run: dict[str, Any]) -> list[str]:
    answer = running_source("jobs").ask(
        "stack", topic=run["topic"], partition=run["partition"], id=run["messageId"]
    )
    assert answer["key"] == "order-17"
    assert answer["runningSeconds"] >= 0
    found: list[str] = answer["stack"]
    return found


def calls(run: dict[str, Any], function: str) -> list[str]:
    """Wait until the stack has a function; return the functions of this file in it."""
    wait_until(lambda: any(function in line for line in stack_of(run)))
    found = [line for line in stack_of(run) if line.startswith("File") and __file__ in line]
    return [line.rpartition(" in ")[2] for line in found]


def test_the_stack_of_a_thread_ends_in_the_current_line_of_the_handler(
    request: pytest.FixtureRequest,
) -> None:
    with source_of(request.node.name, b"1").running(handle):
        run = running()
        assert calls(run, "wait_in_a_thread") == ["handle", "wait_in_a_thread", "wait_in_a_thread"]
        text = stack_of(run)
        assert "  wait_in_a_thread(int(message.value))" in text
        assert not any("executors.py" in line for line in text), "it begins after the executor"
        RELEASE.set()


def test_deep_stacks_and_long_lines_are_cut(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "CHARACTERS_MAX", 20)
    with source_of(request.node.name, b"300").running(handle):
        run = running()
        wait_until(lambda: stack_of(run)[:1] == ["..."])
        text = stack_of(run)
        assert len(text) <= 1 + 2 * stacks.FRAMES_MAX
        assert max(map(len, text)) <= 20 + len("...")
        RELEASE.set()


@pytest.mark.parametrize(
    ("value", "last"), [(b"waiting", "wait_in_a_coroutine"), (b"blocking", "wait_in_a_thread")]
)
def test_the_stack_of_a_coroutine_ends_where_it_waits_or_runs(
    request: pytest.FixtureRequest, value: bytes, last: str
) -> None:
    with source_of(f"{request.node.name}-{last}", value).running(handle_async):
        assert calls(running(), last) == ["handle_async", last]
        RELEASE.set()


def test_long_keys_are_cut(request: pytest.FixtureRequest) -> None:
    cut = "x" * 1_000 + "..."
    with source_of(request.node.name, b"0", key="x" * 5_000).running(handle):
        one, control = running(), running_source("jobs")
        assert one["key"] == cut
        assert control.ask("stack", id=one["messageId"])["key"] == cut

        def blocking() -> Any:
            return control.ask("status")["ranges"][0]["blockedBy"]

        wait_until(blocking)
        assert blocking()["key"] == cut
        assert control.ask("explain", key="x" * 5_000)["lane"]["state"] == "running"
        RELEASE.set()


def test_the_command_prints_the_stacks_of_running_handlers(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    with source_of(request.node.name, b"1").running(handle):
        found = running()
        calls(found, "wait_in_a_thread")
        code, out, _ = command(capsys, "stacks", "--subscription", "jobs")
        head, *lines = out.splitlines()
        assert code == 0
        message = f"message {found['messageId']} of {found['topic']}, partition"
        assert head.startswith(f"key 'order-17', {message} {found['partition']}, attempt 1, for ")
        assert "    wait_in_a_thread(int(message.value))" in lines
        assert any(line.endswith("in wait_in_a_thread") for line in lines)
        answer = json.loads(command(capsys, "stacks", "--json")[1])
        (one,) = answer["stacks"]
        assert (answer["running"], one["run"]["key"], one["problem"]) == (1, "order-17", None)
        assert [f"  {line}" for line in one["stack"]] == lines
        RELEASE.set()
        wait_until(lambda: not running_source("jobs").ask("runs")["runs"])
        assert command(capsys, "stacks")[1] == "No handler of 'jobs' runs.\n"


def test_the_caller_is_told_why_there_is_no_stack(request: pytest.FixtureRequest) -> None:
    with source_of(request.node.name, b"0").running(handle):
        run, source = running(), running_source("jobs")
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"id": "9:9:9"}, "No handler runs message 9:9:9"),
            ({"id": run["messageId"], "topic": "others"}, "No handler runs"),
            ({"id": run["messageId"], "partition": 7}, "No handler runs"),
            ({"id": "x"}, "message id"),
            ({}, "message id"),
            ({"id": run["messageId"], "topic": 7}, "topic is 7"),
            ({"id": run["messageId"], "partition": "0"}, "partition"),
        ]
        for fields, error in wrong:
            with pytest.raises(ConfigError, match=error):
                source.ask("stack", **fields)
        assert stack_of(run)
        RELEASE.set()
        wait_until(lambda: not source.ask("runs")["runs"])
        with pytest.raises(ConfigError, match="has returned"):
            stack_of(run)


def handle_in_a_process(message: Message) -> None:
    threading.Event().wait(2)


def test_a_handler_in_a_process_is_refused_by_name(request: pytest.FixtureRequest) -> None:
    processes: Callable[[Message], None] = handle_in_a_process
    with source_of(request.node.name, b"0").running(processes, executor="processes", workers=1):
        run = running()
        with pytest.raises(ConfigError, match="run in processes"):
            stack_of(run)


def test_batches_run_no_handler(request: pytest.FixtureRequest) -> None:
    batches = source_of(request.node.name, b"0").batches(max_wait_s=0.01)
    next(batches)
    with pytest.raises(ConfigError, match="No handler runs"):
        running_source("jobs").ask("stack", id="1:2:3")
    batches.close()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_interpreter_holds_its_list_of_threads(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    """It stopped a process for ever: 2 of 20 runs of this module beside others."""
    seen: list[bool] = []

    def frames() -> dict[int, FrameType]:
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", frames)
    (gc.enable if collects else gc.disable)()
    try:
        assert stacks.of_thread(threading.get_ident(), __file__) == []
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()
