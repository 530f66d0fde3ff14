"""The page over plain HTTP: what it serves, what it refuses, and hostile or slow clients."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from keyshard import KeyShardSource
from keyshard.broker.memory import Message
from keyshard.cli import main
from keyshard.control import ANY, SINK, WORKER, ControlServer, sockets
from keyshard.core.range_watchdog import StallKind
from keyshard.errors import ConfigError, UnexpectedError
from keyshard.observe.page import app, guard, server, status_watcher
from keyshard.observe.page.options import PageOptions, serve_page
from keyshard.observe.page.server import PageServer
from keyshard.version import VERSION
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic
from tests.support.statuses import range_status, sink_status, status, worker_status

pytestmark = pytest.mark.usefixtures("control_folder")
TOKEN = "0123456789abcdef-secret"
EVERY = "0.0.0.0"  # noqa: S104 - refused


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine is no process that hangs."""
    waits(monkeypatch, 10.0)


def waits(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the longest wait of pages for an answer, seconds of a fast machine."""
    for module in (app, status_watcher):
        monkeypatch.setattr(module, "STATUS_S", deadline(seconds))


class Shown:
    """A source with answers of the test; it records the requests."""

    def __init__(self, name: str = "billing", **changes: Any) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.status = status(name=name, subscription=name, **changes)
        self.server = ControlServer(
            name, "pulsar://a", "t",
            {"status": lambda _: self.status, "rescale": self.answer, "secret": self.answer},
        )  # fmt: skip

    def answer(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        if request.get("ranges") == 0:
            raise ConfigError("The number of ranges is 0; it must be at least 1.")
        return {"moved": 1}

    @property
    def id(self) -> str:
        return self.server.path.name


@contextmanager
def other(kind: str, told: Any, name: str = "bills") -> Iterator[ControlServer]:
    """A sink or worker whose status is ``told``, or what it returns."""
    answer = told if callable(told) else lambda _: told
    made = ControlServer(name, "pulsar://a", "t", {"status": answer}, kind=kind)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def silent(shown: Shown, *names: str) -> Iterator[dict[Path, socket.socket]]:
    """Control sockets of processes that accept nothing; then these are killed."""
    with ExitStack() as stack:
        made = {}
        for name in names:
            path = shown.server.path.with_name(name)
            made[path] = stack.enter_context(socket.socket(socket.AF_UNIX))
            made[path].bind(str(path))
            made[path].listen()
        yield made


def accepted(silent: socket.socket) -> int:
    """Accept the connections that wait at a socket; return their number."""
    silent.settimeout(0)
    count = 0
    with suppress(BlockingIOError):
        while True:
            silent.accept()[0].close()
            count += 1
    return count


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    yield made
    made.server.close()


@contextmanager
def served(host: str = "127.0.0.1", token: str | None = None) -> Iterator[PageServer]:
    made = serve_page(PageOptions(host, 0, token), lambda: sockets(ANY))
    try:
        yield made
    finally:
        made.close()
    assert not made.serving


@pytest.fixture
def page() -> Iterator[PageServer]:
    with served() as made:
        yield made


def get(page: PageServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{page.port}{path}", headers=headers, timeout=deadline(20))


def ask(page: PageServer, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{page.port}/api/ask", timeout=deadline(20),
        content=body if isinstance(body, bytes) else json.dumps(body),
        headers={"Content-Type": "application/json"} | headers,
    )  # fmt: skip


@contextmanager
def connection(page: PageServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", page.port), timeout=deadline(20)) as made:
        yield made


def ended(one: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    one.settimeout(0.05)
    try:
        while one.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def events(page: PageServer, query: str = "", **headers: str) -> Iterator[dict[str, Any]]:
    url = f"http://127.0.0.1:{page.port}/api/events{query}"
    with httpx.stream("GET", url, headers=headers, timeout=deadline(20)) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line[6:])


def test_files_and_statuses_are_served_with_strict_headers(page: PageServer, shown: Shown) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/c"),
    ):
        answer = get(page, path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "").replace(
            "persistent:\\/\\/", ""
        ), "nothing comes from elsewhere"
    (one,) = get(page, "/api/status").json()["sources"]
    assert one == shown.status
    assert get(page, f"/api/status?source={shown.id}").json() == shown.status
    assert get(page, "/api/status?source=other").status_code == 404


def test_the_section_of_each_stall_is_served_as_text_without_a_token() -> None:
    with served(token=TOKEN) as page:
        for kind in StallKind:
            answer = get(page, f"/runbook/{kind.runbook.partition('#')[2]}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain")
            assert answer.text.startswith(f"{kind.alert}\n")
            assert "\n#" not in answer.text, "no other section"
        missing = get(page, "/runbook/keyshardstalledother")
        assert (missing.status_code, "docs/runbook.md" in missing.text) == (404, True)


def test_an_installed_runbook_is_found_and_a_missing_one_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "__file__", str(tmp_path / "a" / "b" / "c" / "app.py"))
    text = "# Runbook\n\n### KeyshardDown\n\nRestart it.\n"
    (tmp_path / "runbook.md").write_text(text)
    name = "../../../share/doc/keyshard/docs/runbook.md"
    installed = [
        SimpleNamespace(match=PurePosixPath(one).match, locate=lambda: tmp_path / "runbook.md")
        for one in ("keyshard/__init__.py", name)
    ]
    monkeypatch.setattr(metadata, "files", lambda _name: installed[1:])
    assert app._runbook_text() == text
    monkeypatch.setattr(metadata, "files", lambda _name: installed[:1])
    assert app._runbook_text() == ""

    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", unknown)
    assert app._runbook_text() == ""


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/page.js", "/api", "/api/x", "//"],
)
def test_other_paths_are_not_found(page: PageServer, path: str) -> None:
    with connection(page) as one:
        one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert one.recv(100).startswith(b"HTTP/1.1 404")


def test_events_show_the_chosen_source_until_it_ends(page: PageServer, shown: Shown) -> None:
    reports = Shown("reports", ranges=[range_status(0)])
    try:
        stream = events(page, f"?source={reports.id}")
        first = next(stream)
        assert first["chosen"] == reports.id
        assert first["status"]["name"] == "reports"
        assert sorted(one["name"] for one in first["sources"]) == ["billing", "reports"]
        assert "ranges" not in first["sources"][0]
    finally:
        reports.server.close()
    last = next(look for look in stream if look["chosen"] == shown.id)
    assert [one["name"] for one in last["sources"]] == ["billing"]
    shown.server.close()
    last = next(look for look in stream if look["chosen"] is None)
    assert (last["sources"], last["status"]) == ([], None)


def test_a_source_of_another_release_is_listed_with_its_error(
    page: PageServer, shown: Shown
) -> None:
    del shown.status["lag"]  # type: ignore[misc]
    look = next(events(page))
    assert "cannot be understood" in look["sources"][0]["error"]
    assert look["status"] is None


def test_sinks_and_workers_are_listed_beside_sources(page: PageServer, shown: Shown) -> None:
    sink_told, worker_told = sink_status(), worker_status()
    with other(SINK, sink_told) as sink, other(WORKER, worker_told, "billing") as worker:
        told = get(page, "/api/status").json()
        assert told["sources"] == [shown.status]
        assert (told["sinks"], told["workers"]) == ([sink_told], [worker_told])
        assert told["error"] == ""
        assert told["running"] == [
            {
                "id": made.path.name, "pid": os.getpid(), "kind": kind, "name": name,
                "subscription": of, "release": VERSION, "error": "", "topics": "t",
                "serviceUrl": "pulsar://a",
            }
            for made, kind, name, of in (
                (shown.server, "handlers", "billing", "billing"), (sink, "sink", "bills", None),
                (worker, "worker", "billing", "billing"),
            )
        ]  # fmt: skip
        assert get(page, f"/api/status?source={sink.path.name}").json() == sink_told
        look = next(events(page, f"?source={worker.path.name}"))
        assert (look["chosen"], look["status"]) == (worker.path.name, worker_told)
        assert [one["name"] for one in look["sources"]] == ["billing"]
        (of_sink,), (of_worker,) = look["sinks"], look["workers"]
        assert (of_sink["id"], of_sink["unconfirmed"]) == (sink.path.name, sink_told["unconfirmed"])
        assert of_worker["source"] == worker_told["source"]
        assert "consumers" not in of_worker
        assert next(events(page))["chosen"] == shown.id, "a source is the first"
    assert get(page, f"/api/status?source={sink.path.name}").status_code == 404


@pytest.mark.parametrize(
    "told",
    [
        None, [], "x", {}, {"name": "bills"}, sink_status(state=float("nan")),
        {name: value for name, value in sink_status().items() if name != "rates"},
        sink_status(topics=["x" * 5_000_000]),
    ],
    ids=["null", "list", "text", "empty", "name", "nan", "other-release", "huge"],
)  # fmt: skip
def test_a_malformed_status_of_a_sink_is_an_error_of_this_sink_only(
    page: PageServer, shown: Shown, told: Any
) -> None:
    with other(SINK, told) as sink:
        look = next(events(page, f"?source={sink.path.name}"))
        (of_sink,) = look["sinks"]
        assert "cannot be understood" in of_sink["error"] or "at most" in of_sink["error"]
        assert (look["chosen"], look["status"]) == (shown.id, shown.status)
        answer = get(page, "/api/status").json()
        assert (answer["sources"], answer["sinks"]) == ([shown.status], [])
        assert [one["error"] for one in answer["running"]] == ["", of_sink["error"]]
        one = get(page, f"/api/status?source={sink.path.name}")
        assert (one.status_code, one.text) == (502, of_sink["error"] + "\n")


def test_sinks_and_workers_that_do_not_answer_hold_nothing_up(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, release = threading.Barrier(3), threading.Event()

    def hang(_request: Mapping[str, Any]) -> None:
        together.wait(deadline(20))  # all are asked at the same time
        release.wait(deadline(60))

    waits(monkeypatch, 1.0)
    with ExitStack() as stack:
        stack.callback(release.set)
        for kind in (SINK, SINK, WORKER):
            stack.enter_context(other(kind, hang))
        look = next(events(page))
        assert look["status"] == shown.status
        errors = [one["error"] for one in look["sinks"] + look["workers"]]
        assert [("does not answer" in one) for one in errors] == [True] * 3


def test_a_process_that_accepts_no_request_is_named(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 1.0)
    with silent(shown, "0-0-77-ab.worker") as (path,):
        told = get(page, "/api/status").json()
        assert told["sources"] == [shown.status]
        assert "Process 77 has a control socket, but does not answer" in told["error"]
        one = get(page, f"/api/status?source={path.name}")
        assert (one.status_code, "Process 77" in one.text) == (502, True)


def test_ninety_processes_that_hang_delay_one_look_once(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: they were asked 16 at a time, so a look at 90 of them took 12 s."""
    waits(monkeypatch, 2.0)
    names = [f"0-0-{number}-ab.sink" for number in range(1_000, 1_090)]
    with silent(shown, *names) as paths:
        took_s = []
        for _ in range(3):
            began_s = time.monotonic()
            told = get(page, "/api/status").json()
            took_s.append(time.monotonic() - began_s)
            threads = threading.active_count()
            assert told["sources"] == [shown.status]
            assert told["error"].count("has a control socket, but does not answer") == 90
        assert took_s[0] < deadline(4.0)
        assert max(took_s[1:]) < deadline(2.0)
        assert threading.active_count() <= threads, "no thread waits for them"
        assert [accepted(one) for one in paths.values()] == [2] * 90, "none was asked again"
        assert get(page, f"/api/status?source={shown.id}").json() == shown.status
        assert ask(page, {"source": shown.id, "do": "rescale", "ranges": 2}).json()["ok"]


def test_a_late_answer_is_shown_by_a_later_look_and_was_asked_for_once(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, asked = threading.Event(), []

    def late(_request: Mapping[str, Any]) -> Any:
        asked.append(1)
        assert release.wait(deadline(60))
        return sink_status()

    with other(SINK, late):
        waits(monkeypatch, 0.5)
        for _ in range(2):
            (told,) = [
                one for one in get(page, "/api/status").json()["running"] if one["kind"] == SINK
            ]
            assert told["error"].startswith("The sink 'bills' with pid")
            assert "does not answer: its request has waited for" in told["error"]
        release.set()
        wait_until(lambda: get(page, "/api/status").json()["sinks"] == [sink_status()])
        assert len(asked) == 1


def test_a_process_that_hangs_is_named_in_every_answer_about_its_source(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue: its source was "not running" to who looked for it."""
    waits(monkeypatch, 0.5)
    with silent(shown, "0-0-77-ab") as (path,):
        found = f"source={path.name}"
        for answer in (
            get(page, f"/api/status?{found}"), get(page, f"/api/rescales?{found}"),
            get(page, "/api/rescales"), ask(page, {"source": path.name, "do": "pause"}),
        ):  # fmt: skip
            assert answer.status_code == 502
            assert "Process 77 has a control socket, but does not answer" in answer.text
    for answer in (
        get(page, f"/api/status?{found}"), get(page, f"/api/rescales?{found}"),
        ask(page, {"source": path.name, "do": "pause"}),
    ):  # fmt: skip
        assert answer.status_code == 404, "it was killed"
    assert not path.exists()


def test_a_source_that_has_answered_once_keeps_its_name_when_it_hangs(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get(page, "/api/status").json()["sources"] == [shown.status]
    release = threading.Event()
    hang = lambda _request: release.wait(deadline(60))  # noqa: E731
    shown.server._handlers.update(status=hang, who=hang)
    waits(monkeypatch, 0.5)
    try:
        (one,) = get(page, "/api/status").json()["running"]
        named = f"The source of 'billing' with pid {os.getpid()} does not answer"
        assert (one["name"], one["error"].startswith(named)) == ("billing", True)
        for answer in (
            get(page, f"/api/status?source={shown.id}"),
            ask(page, {"source": shown.id, "do": "pause"}),
        ):
            assert (answer.status_code, named in answer.text) == (502, True)
    finally:
        release.set()


def test_releases_that_differ_are_named_in_errors_of_statuses_and_commands(
    page: PageServer, shown: Shown
) -> None:
    shown.server._who["release"] = "9.9.9"
    del shown.status["lag"]  # type: ignore[misc]
    both = f"It runs keyshard 9.9.9, and this process runs keyshard {VERSION}."
    look = next(events(page))
    assert look["release"] == VERSION
    (one,) = look["sources"]
    assert (one["release"], both in one["error"]) == ("9.9.9", True)
    assert "Use the same release of keyshard as the source." in one["error"]
    refused = ask(page, {"source": shown.id, "do": "pause"})
    assert (refused.status_code, both in refused.text) == (422, True)
    unknown = ask(page, {"source": shown.id, "do": "secret"})
    assert f"is not known to the page of keyshard {VERSION}" in unknown.text


def test_sources_come_first_if_more_runs_than_is_shown(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_watcher, "SHOWN_MAX", 2)
    with ExitStack() as stack:
        stack.enter_context(other(WORKER, worker_status()))
        for _ in range(2):
            stack.enter_context(other(SINK, sink_status()))
        source = Shown()
        stack.callback(source.server.close)
        look = next(events(page))
    counts = [len(look[group]) for group in ("sources", "sinks", "workers")]
    assert counts == [1, 1, 0]
    assert look["error"] == "2 more sources, sinks and workers are not shown."


def test_the_rescales_of_a_source_are_served(page: PageServer, shown: Shown) -> None:
    history = present(shown.status["history"])
    wanted = {name: history[name] for name in ("rescaling", "rescales", "rescaleSummary")}  # type: ignore[literal-required]
    assert get(page, "/api/rescales").json() == wanted
    assert get(page, f"/api/rescales?source={shown.id}").json() == wanted
    assert get(page, "/api/rescales?source=gone").status_code == 404
    with other(SINK, sink_status()) as sink:
        assert get(page, "/api/rescales").json() == wanted, "it is the only source"
        refused = get(page, f"/api/rescales?source={sink.path.name}")
        assert (refused.status_code, refused.text) == (
            400, "A sink has no rescales. Name a source.\n",
        )  # fmt: skip
    reports = Shown("reports", history=None)
    try:
        several = get(page, "/api/rescales")
        assert (several.status_code, "Several sources run" in several.text) == (400, True)
        starting = get(page, f"/api/rescales?source={reports.id}")
        assert (starting.status_code, "still starting" in starting.text) == (503, True)
    finally:
        reports.server.close()
    shown.status["history"] = {}  # type: ignore[typeddict-item]
    malformed = get(page, "/api/rescales")
    assert (malformed.status_code, "cannot be understood" in malformed.text) == (502, True)
    shown.server.close()
    assert get(page, "/api/rescales").status_code == 404


def test_rescales_have_the_guards_of_the_status(shown: Shown) -> None:
    with served(token=TOKEN) as page:
        known = {"Authorization": f"Bearer {TOKEN}"}
        assert get(page, "/api/rescales").status_code == 401
        assert get(page, "/api/rescales", **known).status_code == 200
        assert get(page, "/api/rescales", Host="evil.example", **known).status_code == 421
        elsewhere = known | {"Sec-Fetch-Site": "cross-site"}
        assert get(page, "/api/rescales", **elsewhere).status_code == 403


def test_nothing_is_asked_while_no_page_is_open(
    page: PageServer, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_watcher, "LOOK_S", 0.05)
    asked = threading.Event()
    shown.server._handlers["status"] = lambda _: asked.set() or shown.status  # type: ignore[func-returns-value]
    next(events(page))
    assert asked.is_set()
    wait_until(lambda: page._app._watchers == 0)
    wait_until(lambda: not page._app._status_watcher._wanted.is_set())
    asked.clear()
    asked.wait(0.5)  # a look that had begun
    asked.clear()
    assert not asked.wait(0.5)


def test_requests_go_to_the_control_socket(page: PageServer, shown: Shown) -> None:
    answer = ask(page, {"source": shown.id, "do": "rescale", "ranges": 16})
    assert answer.json() == {"ok": True, "result": {"moved": 1}}
    assert shown.requests == [{"do": "rescale", "ranges": 16}]
    refused = ask(page, {"source": shown.id, "do": "rescale", "ranges": 0})
    assert refused.status_code == 422
    assert refused.json()["code"] == "KEYSHARD_BAD_OPTION"
    gone = ask(page, {"source": "none", "do": "rescale"})
    assert (gone.status_code, "does not run any more" in gone.json()["error"]) == (404, True)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"7", b'{"do": "rescale"}', b"[" * 60_000, b"\xff", b'"' + b"x" * 70_000,
        b'{"source": 1, "do": {"a": 1}}', b'{"source": "x", "do": "secret"}',
        b'{"source": "x", "do": "who"}',
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(page: PageServer, shown: Shown, body: bytes) -> None:
    assert ask(page, body).status_code == 400
    assert shown.requests == []
    assert get(page, "/").status_code == 200


def test_fields_that_no_request_has_are_refused(page: PageServer, shown: Shown) -> None:
    answer = ask(page, {"source": shown.id, "do": "rescale", "timeout_s": 9, "path": "x"})
    assert answer.status_code == 422
    assert shown.requests == []


def test_other_sites_and_rebound_names_get_nothing(page: PageServer, shown: Shown) -> None:
    wanted = {"source": shown.id, "do": "rescale", "ranges": 2}
    assert ask(page, wanted, Origin="http://evil.example").status_code == 403
    assert ask(page, wanted, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert ask(page, wanted, **{"Content-Type": "text/plain"}).status_code == 415
    assert ask(page, wanted, Host="evil.example").status_code == 421
    assert get(page, "/api/events", Host="evil.example").status_code == 421
    assert shown.requests == []
    assert ask(page, wanted, Origin=f"http://127.0.0.1:{page.port}").status_code == 200


def test_a_token_is_required_and_the_command_gives_it(
    shown: Shown, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with pytest.raises(ConfigError, match="needs a token"):
        serve_page(PageOptions(EVERY, 0), list)
    with served(token=TOKEN) as page:
        assert get(page, "/api/status").status_code == 401
        assert get(page, "/api/events", Authorization="Bearer no").status_code == 401
        assert get(page, "/api/status", Authorization=f"Bearer {TOKEN}").status_code == 200

        def run(*arguments: str) -> tuple[int | None, str, str]:
            with pytest.raises(SystemExit) as caught:
                main(["status", "--url", f"http://127.0.0.1:{page.port}", *arguments])
            read = capsys.readouterr()
            return caught.value.code, read.out, read.err  # type: ignore[return-value]

        code, out, _ = run("--token-file", str(file), "--json")
        assert code in (None, 0)
        assert json.loads(out) == shown.status
        code, out, _ = run("billing", "--token-file", str(file))
        assert "running: 'billing' on" in out
        assert "needs its token" in run()[2]
        assert "no such source" in run("reports", "--token-file", str(file))[2]
        assert "Leave out --service-url" in run("--service-url", "pulsar://a")[2]
        page.close()
        assert "does not answer" in run()[2]


def test_wrong_tokens_are_limited_with_a_time_to_wait(shown: Shown) -> None:
    with served(token=TOKEN) as page:
        for _ in range(guard.WRONG_TOKENS_MAX):
            assert get(page, "/api/status", Authorization="Bearer no").status_code == 401
        refused = get(page, "/api/status", Authorization=f"Bearer {TOKEN}")
        assert refused.status_code == 429
        assert 0 < int(refused.headers["retry-after"]) <= guard.WRONG_TOKENS_S
        assert refused.text.startswith("Too many wrong tokens came from this address. Try again in")
        assert get(page, "/api/status").status_code == 401, "no token is no guess"
        assert get(page, "/").status_code == 200


def test_requests_for_the_status_at_once_share_one_look(
    monkeypatch: pytest.MonkeyPatch, page: PageServer, shown: Shown
) -> None:
    waits(monkeypatch, 20)
    release, looks = threading.Event(), []

    def slow(_request: Mapping[str, Any]) -> Any:
        looks.append(1)
        assert release.wait(deadline(20))
        return shown.status

    shown.server._handlers["status"] = slow
    request = b"GET /api/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    count = app.ASKED_MAX + 4
    with ExitStack() as stack:
        with connection(page) as leaving:
            leaving.sendall(request)
            wait_until(lambda: looks)
        clients = [stack.enter_context(connection(page)) for _ in range(count)]
        for one in clients:
            one.sendall(request)
        wait_until(lambda: sum(one.answers for one in list(page._connections._open)) == count)
        release.set()
        for one in clients:
            answer = b"".join(iter(lambda: one.recv(65_536), b""))  # noqa: B023
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), answer
            assert json.loads(body)["sources"] == [shown.status]
    assert len(looks) == 1
    assert get(page, "/api/status").status_code == 200
    assert len(looks) == 2, "a later request gets a new look"


def test_two_hundred_pages_get_events_at_once_and_more_are_refused(
    page: PageServer, shown: Shown
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connection(page)) for _ in range(app.WATCHERS_MAX)]
        for one in clients:
            one.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: page._app._watchers == app.WATCHERS_MAX)
        assert get(page, "/api/events").status_code == 503
        for one in clients:
            received = b""
            while b"data: " not in received:
                received += one.recv(65_536)
            assert received.startswith(b"HTTP/1.1 200")
        assert get(page, "/api/status").status_code == 200
    wait_until(lambda: page._app._watchers == 0)


def test_a_page_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, page: PageServer, shown: Shown
) -> None:
    monkeypatch.setattr(app, "SEND_S", 0.3)
    shown.status["serviceUrl"] = "x" * 3_000_000
    with connection(page) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        one.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: page._app._watchers == 1)
        wait_until(lambda: page._app._watchers == 0)
        wait_until(lambda: not page._connections._open)
    assert get(page, "/").status_code == 200


def test_connections_without_a_request_are_closed_and_bounded(
    monkeypatch: pytest.MonkeyPatch, page: PageServer
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 8)
    with ExitStack() as stack:
        idle = [stack.enter_context(connection(page)) for _ in range(8)]
        idle[0].sendall(b"GET / HT")
        wait_until(lambda: len(page._connections._open) == 8)
        with connection(page) as further:
            wait_until(lambda: ended(further))
        monkeypatch.setattr(server, "REQUEST_S", 0.2)
        wait_until(lambda: all(map(ended, idle)))
    assert get(page, "/").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00", b"GET / HTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 70_000,
        b"POST /api/ask HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)  # fmt: skip
def test_a_malformed_request_is_answered_with_an_error(page: PageServer, sent: bytes) -> None:
    with connection(page) as one:
        one.sendall(sent)
        assert one.recv(100).startswith(b"HTTP/1.1 400")
    assert get(page, "/").status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(
    monkeypatch: pytest.MonkeyPatch, page: PageServer
) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.2)
    with connection(page) as one:
        one.sendall(
            b"POST /api/ask HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n{"
        )
        assert one.recv(100).startswith(b"HTTP/1.1 408")


def test_too_many_requests_to_sources_are_refused(
    monkeypatch: pytest.MonkeyPatch, page: PageServer, shown: Shown
) -> None:
    monkeypatch.setattr(app, "ASKED_MAX", 1)
    release, asked = threading.Event(), threading.Event()

    def hang(_request: Mapping[str, Any]) -> Any:
        asked.set()
        return release.wait(deadline(20))

    shown.server._handlers["rescale"] = hang
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, page, {"source": shown.id, "do": "rescale"})
        assert asked.wait(deadline(20))
        assert get(page, "/api/status").status_code == 503
        release.set()
        assert first.result().status_code == 200


def test_a_port_in_use_is_refused_before_anything_starts(page: PageServer) -> None:
    with pytest.raises(ConfigError, match="Set another port"):
        serve_page(PageOptions("127.0.0.1", page.port), list)


def test_a_run_serves_its_own_page_until_it_ends() -> None:
    topic = MemoryTopic()
    source = topic.source(subscription="jobs", parallelism=2)
    release, begun = threading.Event(), threading.Event()

    def handle(_message: Message) -> None:
        begun.set()
        assert release.wait(deadline(60))

    topic.cluster.publish(topic.topic, Message(b"1", key="order-17"))
    thread = threading.Thread(target=source.run, args=(handle,), kwargs={"ui_port": 0})
    thread.start()
    assert begun.wait(deadline(30))
    port = source._active()._monitor.page_port
    elsewhere = Shown("elsewhere")
    try:
        with other(SINK, sink_status()):
            told = httpx.get(f"http://127.0.0.1:{port}/api/status", timeout=deadline(20)).json()
        assert [one["name"] for one in told["sources"]] == ["jobs"], "only its own source"
        assert (told["sinks"], told["workers"]) == ([], [])
        (run,) = source._active()._monitor._runs({})["runs"]
        assert (run["key"], run["state"], run["attempts"]) == ("order-17", "running", 0)
        assert run["topic"] == topic.topic
        assert run["range"] in (0, 1)
    finally:
        elsewhere.server.close()
        release.set()
        source.stop()
        thread.join(deadline(30))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_a_run_without_a_token_on_a_public_address_is_refused_at_once() -> None:
    source = KeyShardSource("t", subscription="s", service_url="memory://none")
    with pytest.raises(ConfigError, match="needs a token"):
        source.run(print, ui_port=0, ui_host=EVERY)


def test_an_error_of_the_page_ends_the_page_alone(
    page: PageServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(page._app._status_watcher, "look", broken)
    page._app._status_watcher.watched(by=1)
    wait_until(lambda: not page.serving)
    assert "has ended" in caplog.text
    with pytest.raises(UnexpectedError):
        page.wait(1)
