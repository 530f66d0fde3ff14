"""``keyshard status --url`` shows what a page shows, as the local command does."""

from __future__ import annotations

import importlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from keyshard import cli
from keyshard.control import ANY, ControlServer, sockets
from keyshard.observe.page import app, status_watcher
from keyshard.observe.page.client import Page
from keyshard.observe.page.options import PageOptions, serve_page
from keyshard.observe.page.server import PageServer
from keyshard.version import VERSION
from tests.support.deadlines import deadline
from tests.support.statuses import sink_status, status, worker_status

watching = importlib.import_module("keyshard.cli.status")  # its function has the same name
pytestmark = pytest.mark.usefixtures("control_folder")
Start = Callable[..., ControlServer]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    for module in (app, status_watcher):
        monkeypatch.setattr(module, "STATUS_S", deadline(5.0))
    made = serve_page(PageOptions("127.0.0.1", 0), lambda: sockets(ANY))
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a source, sink or worker that answers with a status."""
    servers: list[ControlServer] = []

    def started(told: Mapping[str, Any]) -> ControlServer:
        made = ControlServer(
            told.get("subscription") or told["name"], "pulsar://a", "t",
            {"status": lambda _: told}, kind=told["kind"], name=told["name"],
        )  # fmt: skip
        servers.append(made)
        return made

    yield started
    for one in servers:
        one.close()


class Command:
    """``keyshard status --url`` of a page."""

    def __init__(self, page: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
        self._page, self._capsys = page, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["status", "--url", self._page.url, *arguments])
        out, err = self._capsys.readouterr()
        return int(caught.value.code or 0), out, err


@pytest.fixture
def run(page: PageServer, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(page, capsys)


def test_sinks_and_workers_are_listed_below_the_only_source(run: Command, start: Start) -> None:
    for told in (status(), sink_status(), worker_status()):
        start(told)
    code, out, err = run()
    assert (code, err) == (0, "")
    for text in ("running: 's' on", "published/s", "bills", "worker of", "pid 2 on there"):
        assert text in out
    assert json.loads(run("--json")[1])["kind"] == "handlers"


def test_a_sink_or_worker_is_shown_by_its_name(run: Command, start: Start) -> None:
    sink, worker = sink_status(), worker_status(name="orders", subscription="orders")
    for told in (status(), sink, worker):
        start(told)
    code, out, _ = run("bills")
    assert (code, "running: sink 'bills' to" in out) == (0, True)
    assert json.loads(run("bills", "--json")[1]) == sink
    code, out, _ = run("orders")
    assert (code, "running: worker of 'orders' at" in out) == (0, True)
    assert json.loads(run("orders", "--json")[1]) == worker
    code, _, err = run("nothing")
    assert (code, "shows no such source" in err) == (1, True)


def test_several_sources_or_sinks_are_listed(run: Command, start: Start) -> None:
    start(sink_status())
    start(sink_status(name="other"))
    code, out, err = run()
    assert (code, "bills" in out, "other" in out) == (0, True, True)
    assert "keyshard status NAME" in err
    assert {one["name"] for one in json.loads(run("--json")[1])} == {"bills", "other"}
    code, _, err = run("--watch")
    assert (code, "2 sinks match" in err, "--service-url" in err) == (1, True, False)
    start(status())
    start(status(name="t", subscription="t"))
    _, out, err = run()
    assert "keyshard status SUBSCRIPTION" in err
    assert out.index("received/s") < out.index("published/s")


def test_json_has_the_reason_for_missing_ones_beside_it(
    run: Command, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(status())
    listed = Page.listed
    monkeypatch.setattr(Page, "listed", lambda page: (listed(page)[0], "Process 7 hangs."))
    _, out, err = run("--json")
    assert json.loads(out)["kind"] == "handlers"
    assert "Process 7 hangs." in err


def test_one_without_a_status_is_named_and_the_others_are_shown(run: Command, start: Start) -> None:
    start(sink_status(name="broken", rates=float("nan")))
    start(sink_status())
    code, out, _ = run()
    assert (code, "bills" in out, "cannot be understood" in out) == (0, True, True)
    code, out, err = run("--json")
    assert [one["name"] for one in json.loads(out)] == ["bills"]
    assert "cannot be understood" in err
    code, _, err = run("broken")
    assert (code, "cannot be understood" in err) == (1, True)


@pytest.mark.parametrize("told", [status(), sink_status(), worker_status()])
def test_a_watch_polls_each_second_until_what_it_shows_has_stopped(
    run: Command, start: Start, monkeypatch: pytest.MonkeyPatch, told: Mapping[str, Any]
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            watched.close()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: float(len(slept)))
    monkeypatch.setattr(watching, "time", clock)
    watched = start(told)
    start(status(name="another", subscription="another"))
    code, out, err = run(told["name"], "--watch", "--json")
    assert (code, slept) == (0, [1.0] * 3)
    assert [json.loads(line) for line in out.splitlines()] == [told] * 3
    assert err.endswith(f"pid {os.getpid()}, has stopped.\n")


def test_a_watch_names_what_does_not_answer_and_a_page_that_ends(
    run: Command, page: PageServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = start(sink_status())
    ends = [lambda: watched._handlers.update(status=lambda _: None), page.close]
    clock = SimpleNamespace(sleep=lambda _: ends.pop(0)(), monotonic=lambda: 0.0)
    monkeypatch.setattr(watching, "time", clock)
    code, out, err = run("--watch")
    assert (code, "running: sink 'bills'" in out) == (1, True)
    assert "cannot be understood" in err
    assert "Check that the process is running." in err
    watched._handlers["status"] = lambda _: sink_status()
    code, _, err = run("--watch")
    assert (code, "does not answer" in err) == (1, True)


@pytest.mark.parametrize(
    ("body", "release"),
    [
        (b'{"release": "9.9.9", "sources": {}}', "keyshard 9.9.9"),
        (b'{"sources": [], "error": ""}', "an unknown release of keyshard"),
    ],
)
def test_a_page_of_another_release_is_named_with_both_releases(
    body: bytes, release: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue: the command called it no page of keyshard."""
    err = error_of_server(body, capsys)
    assert "cannot be understood" in err
    assert f"It runs {release}, and this process runs keyshard {VERSION}." in err
    assert "Use the same release of keyshard for this command and for the page." in err


def test_a_status_of_another_release_is_named_with_both_releases(
    run: Command, start: Start
) -> None:
    told = status()
    del told["handlerSlots"]  # type: ignore[misc]
    start(told)._who["release"] = "9.9.9"
    code, _, err = run()
    both = f"It runs keyshard 9.9.9, and this process runs keyshard {VERSION}."
    assert (code, both in err, "Use the same release" in err) == (1, True, True)


def test_a_name_that_may_be_of_a_process_that_hangs_is_answered_so(
    run: Command, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = start(status()).path.with_name("0-0-77-ab")
    monkeypatch.setattr(status_watcher, "STATUS_S", deadline(0.5))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        _, _, err = run("billing")
    assert "shows no such source. It may be one that does not answer: Process 77" in err


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"sources": []}',
        b'{"sources": [], "sinks": [], "workers": [], "running": 7, "error": ""}',
        b'{"sources": [], "sinks": [], "workers": [], "running": [{"error": ""}], "error": ""}',
    ],
)  # fmt: skip
def test_a_server_that_is_no_page_is_named(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a page of keyshard" in error_of_server(body, capsys)


def error_of_server(body: bytes, capsys: pytest.CaptureFixture[str]) -> str:
    """The error of the command for a server that answers with a body."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(SystemExit) as caught:
            cli.main(["status", "--url", f"http://127.0.0.1:{server.server_port}"])
        thread.join(deadline(20))
    assert caught.value.code == 1
    return capsys.readouterr().err
