"""The page of a Ray job in a real headless Chromium: handlers run in other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import ray_adapter
from tests.helpers import present, wait_until
from tests.ray.ray_topic import RayTopic
from tests.ray.test_job_status import KEYS, Waits, publish, shown
from tests.support.browser import Tab, browser, needs_chromium
from tests.support.control_folder import own_control_folder

pytestmark = [pytest.mark.ray, needs_chromium]


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    """No control socket of another test is in the folder."""
    with own_control_folder():
        yield


def test_the_actors_of_a_job_are_seen_at_work_until_they_have_handled_messages(
    orders: RayTopic, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    source = orders.source(parallelism=2, name="scores", ui_port=0)
    with browser() as chromium, ray_adapter.run(source, partial(Waits, go), max_rows=1) as job:
        tab = Tab(chromium, present(present(job._run._monitor).page_port))
        tab.shows("#facts", "running", "ray")
        tab.shows("#arcs", "2 ranges")
        publish(orders, KEYS[1], 5)
        wait_until(lambda: shown()["handlerSlots"][1]["waiting"] == 4)
        pid, host = (shown()["handlerSlots"][1][name] for name in ("pid", "host"))  # type: ignore[literal-required]
        assert pid != os.getpid()
        tab.shows_row("#workers tbody tr", "handlers: ray", f"pid {pid} on {host}", "busy", "4")
        tab.shows_row("#owners tbody tr", "running", "4")
        go.touch()
        results = iter(job)
        orders.taken += [next(results) for _ in range(3)]
        handled = "#workers tbody tr:nth-child(2) td:nth-child(10)"
        wait_until(lambda: tab.text(handled) in {"3", "4", "5"})
        assert tab.errors() == []
        orders.take(results, job)
    orders.check_taken()
