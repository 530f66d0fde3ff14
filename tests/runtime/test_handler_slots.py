"""Slots for handlers in the status: used and free, by process, for each executor."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import get_type_hints

import pytest

from keyshard import Message
from keyshard.broker.memory import Message as Stored
from keyshard.cli import main
from keyshard.core.lanes.lane_status import HandlerSlots
from keyshard.errors import NotRunningError
from keyshard.handlers.executors import shared_slots
from tests.helpers import wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic
from tests.support.memory_topic import Run
from tests.support.process_handlers import waits_for_file
from tests.support.statuses import status

pytestmark = pytest.mark.usefixtures("control_folder")

HERE = {"pid": os.getpid(), "host": socket.gethostname()}


def slots(run: Run) -> list[HandlerSlots]:
    try:
        return run.source.status()["handlerSlots"]
    except NotRunningError:
        return []


def test_threads_share_slots_and_show_how_many_are_used(orders: HandledTopic) -> None:
    release = threading.Event()

    def handle(_: Message) -> None:
        assert release.wait(deadline(60))

    with orders.running(orders.source(), handle, workers=2) as run:
        wait_until(lambda: slots(run))
        free = shared_slots(2, 0)
        assert slots(run) == free
        assert (free[0]["state"], free[0]["pid"], free[0]["host"]) == ("free", *HERE.values())
        orders.cluster.publish(orders.topic, Stored(b"", key="a"))
        wait_until(lambda: slots(run)[0]["used"] == 1)
        assert slots(run)[0]["state"] == "free"
        orders.cluster.publish(orders.topic, Stored(b"", key="b"), Stored(b"", key="c"))
        wait_until(lambda: slots(run)[0]["used"] == 2)
        assert (slots(run)[0]["state"], slots(run)[0]["inFlight"]) == ("busy", 2)
        release.set()
        wait_until(lambda: slots(run) == free)


@pytest.mark.parametrize("workers", [None, 1])
def test_coroutines_share_slots_which_only_workers_limits(
    orders: HandledTopic, workers: int | None
) -> None:
    released = threading.Event()

    async def handle(_: Message) -> None:
        while not released.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)

    orders.publish(keys=3, per_key=1)
    with orders.running(orders.source(), handle, workers=workers) as run:
        wait_until(lambda: slots(run) and slots(run)[0]["used"] == (workers or 3))
        (one,) = slots(run)
        assert (one["total"], one["state"]) == (workers, "busy" if workers else "free")
        released.set()
        wait_until(lambda: slots(run)[0]["used"] == 0)


def test_each_process_shows_its_work(
    orders: HandledTopic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pid"
    with orders.running(
        orders.source(), waits_for_file, executor="processes", workers=2, retry=AT_ONCE
    ) as run:
        wait_until(lambda: len(slots(run)) == 2)
        assert {(one["state"], one["total"], one["used"]) for one in slots(run)} == {("free", 1, 0)}
        orders.cluster.publish(orders.topic, Stored(str(path).encode(), key="k"))
        wait_until(lambda: path.exists() and path.read_text())
        (busy,) = [one for one in slots(run) if one["state"] == "busy"]
        assert (busy["pid"], busy["host"]) == (int(path.read_text()), HERE["host"])
        assert (busy["used"], busy["inFlight"], busy["handled"]) == (1, 1, 0)
        assert busy["runningSeconds"] is not None
        with pytest.raises(SystemExit) as end:
            main(["status", "keyshard"])
        assert end.value.code == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{busy['pid']} on" in shown
        assert "busy" in shown
        path.with_suffix(".go").touch()
        wait_until(lambda: orders.errors or orders.backlog() == 0)
        assert not orders.errors, orders.errors
        assert sum(one["handled"] or 0 for one in slots(run)) == 1
        assert {(one["state"], one["runningSeconds"]) for one in slots(run)} == {("free", None)}


def test_a_process_that_was_replaced_shows_its_restarts(
    orders: HandledTopic, tmp_path: Path
) -> None:
    (tmp_path / "a.go").touch()
    (tmp_path / "b.go").touch()
    with orders.running(
        orders.source(), waits_for_file, executor="processes", workers=1, retry=AT_ONCE
    ) as run:
        for name, restarts in (("a", 0), ("b", 1)):
            path = tmp_path / name
            orders.cluster.publish(orders.topic, Stored(str(path).encode(), key="k"))
            wait_until(lambda: orders.errors or orders.backlog() == 0)
            assert not orders.errors, orders.errors
            (one,) = slots(run)
            assert (one["pid"], one["restarts"]) == (int(path.read_text()), restarts)
            assert one["handled"] == 1 + restarts
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_a_source_without_handlers_has_no_slots(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    source = orders.source()
    batches = source.batches()
    next(batches)
    assert source.status()["handlerSlots"] == []
    batches.close()


def test_each_field_of_slots_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
    table = page.partition("Fields of each of the `handlerSlots`")[2].partition("`job.status()`")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in row.replace("`", "").replace(" ", "").split(",")]
    assert documented == list(get_type_hints(HandlerSlots))


def test_the_slots_of_threads_are_a_line_of_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console  # noqa: PLC0415

    from keyshard.cli.status_text import status_view  # noqa: PLC0415

    Console(width=200).print(
        status_view(status(handlerSlots=shared_slots(160, 3)), None, all_ranges=None)
    )
    assert "handler slots used: 3 of 160" in capsys.readouterr().out
