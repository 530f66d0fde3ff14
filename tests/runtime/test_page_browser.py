"""The page in a real headless Chromium: what its users see and click."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import tenacity

from keyshard import Reject, RetryPolicy
from keyshard.broker.memory import Message as Stored
from keyshard.control import ANY, SINK, WORKER, ControlServer, sockets
from keyshard.core.message import Message
from keyshard.core.ring.hash_range import split_ring
from keyshard.core.topic_schema import TopicSchema
from keyshard.handlers.executors import shared_slots
from keyshard.observe.page import status_watcher
from keyshard.observe.page.options import PageOptions, serve_page
from keyshard.version import VERSION
from tests.helpers import key_in, wait_until
from tests.support.browser import Keys, Tab, browser, needs_chromium
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline
from tests.support.memory_topic import MemoryTopic, Run
from tests.support.statuses import (
    consumer_status,
    handler_slots,
    lag,
    partition_status,
    progress,
    range_status,
    sink_status,
    status,
    worker_status,
)

TOKEN = "0123456789abcdef-secret"
HOSTILE = "<img src=x onerror=document.title='gone'>"

pytestmark = [pytest.mark.usefixtures("control_folder"), needs_chromium]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as made:
        yield made


class ShownRun(Run):
    """A source with a page, running in a thread."""

    def __init__(self, **options: Any) -> None:
        self.topic = MemoryTopic(partitions=3)
        source = self.topic.source(subscription="billing", parallelism=8, admin_url=self.topic.url)
        self.release = threading.Event()
        plain = {"ui_port": 0, "drain_timeout_s": deadline(30), "retry": RetryPolicy()}
        super().__init__(source, self._handle, plain | options)

    def _handle(self, message: Message) -> None:
        if message.value == b"hang":
            message.note(HOSTILE)
            assert self.release.wait(deadline(60))
        if message.value == b"reject":
            raise Reject("no such order")
        if message.value == b"decline" and not self.release.is_set():
            raise ValueError("the card was declined")
        if message.value == b"fail" and not self.release.is_set():
            raise ValueError(HOSTILE)

    def publish(self, *values: tuple[str, bytes]) -> None:
        messages = (Stored(value, key=key) for key, value in values)
        self.topic.cluster.publish(self.topic.topic, *messages)

    def __enter__(self) -> ShownRun:
        super().__enter__()
        wait_until(lambda: self.source.__dict__.get("_running") and self.source.status()["ranges"])
        return self

    def __exit__(self, *details: object) -> None:
        self.release.set()
        super().__exit__(*details)
        assert self.error is None, self.error

    @property
    def port(self) -> int:
        found: int = self.source._active()._monitor.page_port
        return found


class Board:
    """The page of a source that has the status of the test."""

    def __init__(self, **changes: Any) -> None:
        self.status: dict[str, Any] = {**status(**changes)}
        self.source = ControlServer(
            "s", "pulsar://a", "t",
            {"status": lambda _: self.status, "runs": lambda _: {"runs": []}},
        )  # fmt: skip
        self.page = serve_page(PageOptions("127.0.0.1", 0), lambda: [self.source.path])
        self.port = self.page.port

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()
        self.source.close()


def test_a_hung_handler_a_failing_key_and_a_rescale_are_seen_live(chromium: Any) -> None:
    key = key_in(split_ring(8)[5])
    with ShownRun() as run:
        tab = Tab(chromium, run.port)
        tab.shows("#link", "live")
        tab.shows("#arcs", "8 ranges", "epoch 0")
        assert tab.count("#arcs path") == 8
        assert tab.count("#partitions tbody tr") == 3
        run.publish((key, b"hang"), (HOSTILE, b"fail"), *((f"k{n}", b"1") for n in range(500)))
        began_s = time.monotonic()
        # The range of the failing key may stall, too, and be the first row.
        tab.shows_row("#owners tbody tr", "stalled", "the handler has not returned", key)
        assert time.monotonic() - began_s < deadline(10)
        tab.shows("#runs", key, HOSTILE, "Runs for")
        tab.shows("#facts", "Newest error", HOSTILE)
        assert tab.count("img") == 0, "a key and an error are text"
        assert tab.browser.title == "billing - keyshard"
        wait_until(lambda: tab.count("#partitions polyline") == 3)
        tab.shows("#workers", "handlers: threads", f"pid {os.getpid()}")
        wait_until(lambda: tab.text("#workers tbody td:nth-child(3)") == "1")
        tab.click("#arcs path[data-range='5']")
        tab.shows("#arc", "Range 5", f"blocked by {key}", "stalled")
        tab.shot("page")
        rescale = threading.Thread(target=run.source.rescale, args=(12,))
        rescale.start()
        tab.shows("#rescaling", "from 8 to 12 ranges", "now in drain", "It waits at most", key)
        tab.shot("rescaling", "#history")
        run.release.set()
        rescale.join(deadline(60))
        tab.shows("#arcs", "12 ranges", "epoch 1")
        wait_until(lambda: "stalled" not in tab.text("#owners"))
        assert {f"{n}" for n in range(12)} == set(
            tab.browser.execute_script(
                "return [...document.querySelectorAll('#arcs path')]"
                ".map((one) => one.dataset.range)"
            )
        )
        assert tab.errors() == []
    tab.shows("#link", "not connected")


def test_the_stack_of_a_running_handler_is_shown_by_a_click(chromium: Any) -> None:
    with ShownRun() as run:
        tab = Tab(chromium, run.port)
        run.publish(("order-17", b"hang"))
        tab.shows("#runs", "order-17", f"{HOSTILE} (", " s ago)")
        assert tab.count("img") == 0, "a note is text"
        tab.click("#runs td button")
        tab.shows("#stack[open]", "order-17", "in _handle", "self.release.wait(deadline(60))")
        tab.click("#stack form button")
        run.release.set()
        tab.shows("#runs", "No handler runs")
        assert tab.errors() == []


def test_dead_letters_are_shown_replayed_and_discarded_by_clicks(chromium: Any) -> None:
    once = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))
    with ShownRun(retry=once) as run:
        run.publish((HOSTILE, b"fail"), (HOSTILE, b'{"total": 7}'), ("order-9", b"fail"))
        wait_until(lambda: run.source.status()["counters"]["deadLettered"] == 3)
        tab = Tab(chromium, run.port)
        tab.shows("#facts", "dead letters: 3")
        tab.shows("#parked", HOSTILE)
        assert tab.count("img") == 0
        tab.click("#filter button")
        tab.shows("#dead", HOSTILE, "order-9", "ValueError")
        tab.shows("#dead-note", "3 of 3")
        tab.type("#filter [name='key']", HOSTILE)
        tab.click("#filter button")
        tab.shows("#dead-note", "2 of")
        assert tab.count("#dead tbody tr") == 2
        tab.click("#dead tbody tr:nth-child(2) button")
        tab.shows("#letter", "Message", HOSTILE)
        tab.shows("#value", '{"total": 7}')
        run.topic.cluster.schemas[run.topic.topic] = [TopicSchema("STRING", b"", 0)]
        for form, shown in (
            ("hex", "7b 22 74"), ("JSON", '  "total": 7'),
            ("schema", 'STRING schema, version 0:\n"{\\"total\\": 7}"'),
        ):  # fmt: skip
            tab.select("#form", form)
            tab.shows("#value", shown)
        tab.click("#letter button")
        tab.click("#replay")
        tab.shows("#plan[open]", "Replay 2 dead letters of 1 keys")
        tab.click("#plan button[value='no']")
        tab.shows("#dead-note", "Nothing was changed")
        assert run.source.status()["parkedKeys"] == 2
        run.release.set()
        tab.click("#replay")
        tab.shows("#plan[open]", "Replay 2")
        tab.click("#yes")
        wait_until(lambda: run.source.status()["counters"]["completed"] == 2)
        tab.shows("#dead-note", "Replay: 2 dead letters of 1 keys")
        tab.type("#filter [name='key']", "")
        tab.click("#discard")
        tab.shows("#plan[open]", "Discard 1 dead letters of 1 keys", "order-9")
        tab.click("#yes")
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
        assert tab.count("img") == 0
        assert tab.errors() == []


def test_a_key_is_replayed_and_another_discarded_from_their_rows(chromium: Any) -> None:
    once = RetryPolicy(wait=tenacity.wait_none(), stop=tenacity.stop_after_attempt(1))
    with ShownRun(retry=once) as run:
        for key in ("order-7", "order-9"):
            run.publish((key, b"decline"), (key, b"2"))
        wait_until(lambda: run.source.status()["counters"]["deadLettered"] == 4)
        tab = Tab(chromium, run.port)
        tab.shows("#parked", "order-7", "order-9")
        tab.click("#filter button")
        tab.shows("#dead-note", "4 of")
        tab.shot("dead-letters", "#letters")
        tab.browser.refresh()
        tab.shows("#parked", "order-7", "order-9")
        run.release.set()
        # A parked key is replayed without a list of dead letters.
        tab.press_button("#parked", "Replay … key order-7")
        tab.shows("#plan[open]", "Replay 2 dead letters of 1 keys", "order-7: 2")
        tab.press(Keys.ESCAPE)
        tab.shows("#dead-note", "Nothing was changed")
        assert run.source.status()["parkedKeys"] == 2
        tab.press_button("#parked", "Replay … key order-7")
        tab.shows("#plan[open]", "Replay 2")
        tab.click("#yes")
        wait_until(lambda: run.source.status()["counters"]["completed"] == 2)
        tab.shows("#dead-note", "Replay: 2 dead letters of 1 keys")
        wait_until(lambda: tab.count("#parked tbody tr") == 1)
        tab.click("#filter button")
        tab.shows("#dead-note", "2 of")
        tab.press_button("#dead", "Discard … key order-9")
        tab.shows("#plan[open]", "Discard 2 dead letters of 1 keys", "cannot be undone", "order-9")
        tab.click("#yes")
        wait_until(lambda: run.source.status()["parkedKeys"] == 0)
        tab.shows("#dead", "No dead letter matches")
        wait_until(lambda: tab.count("#parked-keys[hidden]") == 1)
        assert tab.errors() == []


def test_a_rejected_message_is_discarded_from_its_row_and_cannot_be_replayed(
    chromium: Any,
) -> None:
    with ShownRun() as run:
        run.publish(("order-9", b"reject"), ("order-10", b"reject"))
        wait_until(lambda: run.source.status()["counters"]["deadLettered"] == 2)
        tab = Tab(chromium, run.port)
        tab.shows("#facts", "running")
        tab.click("#filter [name='rejected']")
        tab.click("#filter button")
        tab.shows("#dead-note", "2 of 2")
        assert "Replay" not in tab.text("#dead tbody")
        tab.press_button("#dead", "Discard … key order-9")
        tab.shows("#plan[open]", "Discard 1 dead letters of key order-9.")
        tab.click("#yes")
        tab.shows("#dead-note", "Discard: 1 dead letters of key order-9.")
        wait_until(lambda: tab.count("#dead tbody tr") == 1)
        assert "order-10" in tab.text("#dead tbody")
        assert tab.errors() == []


def test_a_balance_shows_the_spread_of_the_load_first(chromium: Any) -> None:
    keys = [key_in(part) for part in split_ring(64)[40:48]]  # all in range 5 of 8
    with ShownRun() as run:
        run.publish(*((keys[n % 8], b"1") for n in range(401)))
        tab = Tab(chromium, run.port)
        wait_until(lambda: run.source.status()["counters"]["completed"] == 401)
        tab.shows("#commits-text", "401 entries")
        tab.click("#balance")
        tab.shows("#plan[open]", "The moves depend on the load at that moment")
        tab.shows("#plan-text", "a range has handled 0 to 401 messages, 50 on average")
        tab.shot("balance", "#plan")
        tab.click("#plan button[value='no']")
        tab.shows("#moves-note", "Nothing was changed")
        assert run.source.status()["epoch"] == 0
        tab.click("#balance")
        tab.shows("#plan[open]", "equal loads")
        tab.click("#yes")
        tab.shows("#moves-note", "8 to 8 ranges", "of the ring moved", "was 8.00 times the mean")
        tab.shows("#arcs", "8 ranges", "epoch 1")
        tab.shows("#rescales", "balance", "moved")
        assert tab.errors() == []


def test_a_rescale_by_clicks_shows_its_plan_first(chromium: Any) -> None:
    with ShownRun() as run:
        tab = Tab(chromium, run.port)
        tab.shows("#arcs", "8 ranges")
        tab.type("#rescale [name='ranges']", "16")
        tab.click("#rescale button")
        tab.shows("#plan[open]", "From 8 to 16 ranges: 50.0 % of the ring moves")
        tab.shot("plan")
        tab.click("#plan button[value='no']")
        tab.shows("#moves-note", "Nothing was changed")
        tab.click("#rescale button")
        tab.shows("#plan[open]", "From 8 to 16")
        tab.click("#yes")
        tab.shows("#moves-note", "8 to 16 ranges in", "50.0 % of the ring moved")
        tab.shows("#arcs", "16 ranges", "epoch 1")
        tab.shows("#rescales", "16 ranges", "8 to 16", "moved", "50.0 % of the ring")
        tab.shows("#rescales", "check", "drain", "close", "subscribe", "adopt")
        assert tab.count("#rescales .phases rect") == 5
        tab.shows("#rescale-summary", "Rescales since the start: 1 moved", "longest pause")
        assert tab.count("#rescaling:empty") == 1
        run.publish(*((f"k{one}", b"1") for one in range(40)))
        tab.shows("#commits-text", "40 entries")
        tab.shows("#facts", "Hot keys", "2.5 % of messages")
        assert tab.count("#commits rect") >= 1
        tab.type("#rescale [name='ranges']", "70000")
        tab.click("#rescale button")
        assert tab.count("#rescale :invalid") == 1, "the browser refuses it"
        assert tab.errors() == []


def test_a_source_pauses_and_resumes_by_clicks(chromium: Any) -> None:
    with ShownRun() as run:
        tab = Tab(chromium, run.port)
        tab.shows("#facts", "running")
        tab.click("#pause")
        tab.shows("#plan[open]", "receives nothing until it is resumed")
        tab.click("#plan button[value='no']")
        tab.shows("#receiving-note", "Nothing was changed")
        tab.click("#pause")
        tab.shows("#plan[open]", "receives nothing")
        tab.click("#yes")
        tab.shows("#receiving-note", "The source is paused.")
        tab.shows("#facts", "paused")
        assert run.source.status()["state"] == "paused"
        tab.click("#resume")
        tab.shows("#plan[open]", "receives again at once")
        tab.click("#yes")
        tab.shows("#facts", "running")
        assert run.source.status()["state"] == "running"
        assert tab.errors() == []


@contextmanager
def page_of_all(*servers: ControlServer) -> Iterator[int]:
    """The port of a page as that of ``keyshard ui``; the servers end with it."""
    with ExitStack() as stack:
        for one in servers:
            stack.callback(one.close)
        served = serve_page(PageOptions("127.0.0.1", 0), lambda: sockets(ANY))
        stack.callback(served.close)
        yield served.port


def told_by(kind: str, told: Any, name: str = "s") -> ControlServer:
    answers = {"status": lambda _: told, "runs": lambda _: {"runs": []}}
    return ControlServer(name, "pulsar://a", "t", answers, kind=kind, name=name)


def test_a_sink_and_a_worker_are_seen_when_they_are_chosen(chromium: Any) -> None:
    consumers = [
        consumer_status("0-32767", messages=1_234),
        consumer_status("32768-65535", connected=False, problem=HOSTILE),
    ]
    waiting = {"entries": 9, "messages": 1_234, "bytes": 56_789}
    worker = worker_status(consumers=consumers, waiting=waiting)
    with (
        closing(SinkTopic()) as topic,
        topic.sink(sink_id=HOSTILE, linger_ms=0) as sink,
        page_of_all(told_by("handlers", status()), told_by(WORKER, worker, "billing")) as port,
    ):
        for number in range(7):
            sink.send(b"%d" % number, key="k").result(deadline(60))
        tab = Tab(chromium, port)
        tab.shows("#sources", "s", "handlers")
        tab.shows("#open-sinks", HOSTILE, "sink, 0 unconfirmed")
        tab.shows("#host-workers", "billing", "worker, pid 1")
        tab.shows("#arcs", "2 ranges")
        assert tab.count("#other[hidden]") == 1

        tab.click("#open-sinks button")
        tab.shows("#other-facts", "running", "sink", "total 7", HOSTILE, "exactly-once", "memory")
        tab.shows("#topics li", "orders")
        assert tab.count("#main[hidden]") == 1, "parts of sources are hidden"
        assert tab.count("#hosted[hidden]") == 1
        assert tab.browser.title == f"{HOSTILE} - keyshard"
        topic.hold()
        sent = sink.send(b"held", key="k")
        tab.shows("#open-sinks", "sink, 1 unconfirmed")
        tab.shows("#other-facts", "messages, ", "oldest")
        topic.release()
        sent.result(deadline(60))
        tab.shows("#other-facts", "total 8")
        tab.shot("sink")

        tab.click("#host-workers button")
        tab.shows("#other-facts", "1 in trouble", "pid 2", "on there", "9 entries, 56,789 bytes")
        tab.shows("#consumers tbody tr:nth-child(1)", "32768-65535", HOSTILE)
        tab.shows("#consumers tbody tr:nth-child(2)", "0-32767", "1,234")
        assert tab.count("#published[hidden]") == 1
        assert tab.count("img") == 0, "a name and a problem are text"
        tab.shot("worker")

        tab.click("#sources button")
        tab.shows("#main:not([hidden]) #arcs", "2 ranges")
        assert tab.count("#other[hidden]") == 1
        assert tab.errors() == []


def test_a_status_that_cannot_be_drawn_leaves_the_page_alive(chromium: Any) -> None:
    told = sink_status(name="odd", rates="none", unconfirmed=7, topics=None)
    with page_of_all(told_by("handlers", status()), told_by(SINK, told, "odd")) as port:
        tab = Tab(chromium, port)
        tab.shows("#open-sinks", "odd")
        tab.click("#open-sinks button")
        tab.shows("#other-facts", "cannot be shown")
        assert tab.count("#published[hidden]") == 1
        tab.shows("#link", "live")
        tab.click("#sources button")
        tab.shows("#arcs", "2 ranges")


def test_a_sink_without_a_status_is_listed_with_its_error(chromium: Any) -> None:
    with page_of_all(told_by(SINK, {}, "bills")) as port:
        tab = Tab(chromium, port)
        tab.shows("#open-sinks", "bills", "cannot be understood")
        assert tab.text("#sources") == ""
        assert tab.count("main:not([hidden])") == 0


def test_tables_are_sorted_by_a_click_and_long_ones_are_cut(chromium: Any) -> None:
    parts = split_ring(1_000)
    ranges = [range_status(n, hashRanges=[str(part)]) for n, part in enumerate(parts)]
    with Board(ranges=ranges) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#arcs", "1,000 ranges")
        tab.shows("#all-owners", "Show all 1,000")
        assert tab.count("#arcs path") == 1_000
        assert tab.count("#owners tbody tr") == 20
        tab.click("#owners th[data-name='index'] button")
        wait_until(lambda: tab.text("#owners tbody tr").startswith("999"))
        tab.click("#owners th[data-name='index'] button")
        wait_until(lambda: tab.text("#owners tbody tr").startswith("0"))
        tab.click("#all-owners")
        wait_until(lambda: tab.count("#owners tbody tr") == 1_000)
        assert "null" not in tab.text("#main")


def test_the_age_by_the_broker_is_text_of_the_page(chromium: Any) -> None:
    known = lag(rows=7, seconds=12.0, brokerSeconds=90.0)
    with Board(lag=known, partitions=[partition_status(0, lag=known)]) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#facts", "broker: 1 min 30 s")
        tab.shows("#partitions tbody", "12 s", "broker: 1 min 30 s")
        board.status["partitions"] = [partition_status(0)]
        wait_until(lambda: "broker" not in tab.text("#partitions tbody"))
        assert tab.errors() == []


def test_stalls_name_their_kind_and_link_to_the_runbook(chromium: Any) -> None:
    stalled = {"forSeconds": 9.0, "kind": "handler", "reason": "the handler has not returned"}
    stuck = {"forSeconds": 90.0, "kind": "look-ahead", "reason": "the broker reads nothing"}
    hung = range_status(0, state="stalled", stalled=stalled, reason="the handler has not returned")
    with Board(ranges=[hung], partitions=[partition_status(0, stalled=stuck)]) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#owners tbody a", "runbook: handler")
        tab.shows("#partitions tbody a", "runbook: look-ahead")
        find = "return [...document.querySelectorAll('tbody a')].map((one) => one.href)"
        handler, look_ahead = tab.browser.execute_script(find)
        for url, alert in (
            (handler, "KeyshardStalledHandler"), (look_ahead, "KeyshardStalledLookAhead"),
        ):  # fmt: skip
            tab.browser.get(url)
            assert tab.text("body").startswith(alert)


def test_a_job_shows_its_counts_and_a_stalled_actor(chromium: Any) -> None:
    stalled = {"forSeconds": 9.0, "kind": "actor", "reason": "a call has not returned for 9.0 s"}
    busy = handler_slots(0, state="busy", used=1, inFlight=4, runningSeconds=9.0, stalled=stalled)
    slots = [busy, handler_slots(1)]
    with Board(kind="ray", executor="ray", circuit=None, handlerSlots=slots) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#workers tbody .bad", "stalled: a call has not returned for 9.0 s")
        tab.shows("#workers tbody a", "runbook: actor")
        tab.shows("#facts", "Completed", "Failed attempts")
        assert "Parked keys" not in tab.text("#facts")
        tab.browser.get(tab.browser.find_element("css selector", "#workers a").get_property("href"))
        assert tab.text("body").startswith("KeyshardStalledActor")


def test_a_range_is_chosen_by_keys_and_has_a_name(chromium: Any) -> None:
    stalled = {"forSeconds": 9.0, "kind": "handler", "reason": "it has not returned"}
    parts = split_ring(5)
    ranges = [range_status(n, hashRanges=[str(part)]) for n, part in enumerate(parts)]
    ranges[0]["hashRanges"] = [str(parts[0]), str(parts[4])]
    ranges[4] |= {"hashRanges": []}
    ranges[1] |= {"state": "stalled", "stalled": stalled, "reason": "it has not returned"}
    with Board(ranges=ranges) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#arcs", "5 ranges")
        assert tab.count("#arcs [tabindex='0']") == 1, "one stop for the tab key, however many arcs"
        tab.tab_to("#arcs path")
        for keys, wanted in (
            ([], "0"), ([Keys.ARROW_RIGHT], "1"), ([Keys.ARROW_DOWN], "2"), ([Keys.END], "0"),
            ([Keys.ARROW_UP], "3"), ([Keys.HOME, Keys.ARROW_LEFT], "0"), ([Keys.ARROW_LEFT], "3"),
            ([Keys.HOME, Keys.ARROW_RIGHT], "1"),
        ):  # fmt: skip
            tab.press(*keys)
            assert tab.is_focused(f"#arcs path[data-range='{wanted}']:focus-visible"), keys
        focused = tab.browser.switch_to.active_element
        name = f"Range 1 ({parts[1]}) of here:1: stalled (handler), 0 waiting, 0 in flight"
        assert focused.accessible_name.startswith(name)
        assert focused.value_of_css_property("stroke-width") == "5px"
        tab.press(Keys.ENTER)
        tab.shows("#arc", name)
        assert focused.get_attribute("aria-selected") == "true"
        tab.press(Keys.ARROW_RIGHT, " ")
        tab.shows("#arc", "Range 2")
        board.status["ranges"] = [range_status(0, hashRanges=["0-65535"])]
        tab.shows("#arcs", "1 ranges")
        assert tab.is_focused("#arcs path[data-range='0']"), "the arc that had the focus is gone"
        assert tab.errors() == []


def test_drawings_have_their_numbers_as_names(chromium: Any) -> None:
    shares = {"busy": 0.5, "waiting": 0.3, "heldBack": 0.2}
    with Board(
        ranges=[range_status(0, hashRanges=["0-65535"], shares=shares)],
        handlerSlots=shared_slots(4, 1),
        partitions=[partition_status(0, lag=lag(rows=7))],
    ) as board:
        tab = Tab(chromium, board.port)
        for css, name in (
            ("#owners tbody svg", "busy 50 %, waiting 30 %, held back 20 %"),
            ("#partitions tbody svg", "7 now, at most 7"),
            ("#workers tbody svg", "1 used, 3 free"),
        ):
            wait_until(lambda css=css: tab.count(css))  # type: ignore[misc]
            script = "return document.querySelector(arguments[0]).ariaLabel"
            assert tab.browser.execute_script(script, css) == name
        assert tab.errors() == []


def test_tables_dialogs_and_actions_are_used_by_keys_alone(chromium: Any) -> None:
    with ShownRun() as run:
        tab = Tab(chromium, run.port)
        run.publish(("order-17", b"hang"))
        tab.shows("#runs", "order-17")
        head = "#owners th[data-name='index']"
        tab.tab_to(f"{head} button")
        tab.press(Keys.ENTER)
        wait_until(lambda: tab.text("#owners tbody tr").startswith("7"))
        assert tab.is_focused(f"{head}[aria-sort='descending'] button")
        tab.press(" ")
        wait_until(lambda: tab.text("#owners tbody tr").startswith("0"))
        tab.tab_to("#runs td button")
        tab.press(Keys.ENTER)
        tab.shows("#stack[open]", "in _handle")
        ages = {tab.text("#runs td:nth-child(5)")}
        wait_until(lambda: tab.text("#runs td:nth-child(5)") not in ages)  # it is drawn again
        tab.press(Keys.ESCAPE)
        wait_until(lambda: tab.count("#stack[open]") == 0)
        wait_until(lambda: tab.is_focused("#runs td button"))
        tab.tab_to("#pause")
        tab.press(Keys.ENTER)
        tab.shows("#plan[open]", "receives nothing until it is resumed")
        assert tab.is_focused("#plan button[value='no']"), "a second Enter changes nothing"
        tab.press(Keys.ESCAPE)
        tab.shows("#receiving-note", "Nothing was changed")
        wait_until(lambda: tab.is_focused("#pause"))
        tab.press(Keys.ENTER)
        tab.shows("#plan[open]", "receives nothing")
        tab.press_with_shift(Keys.TAB)
        assert tab.is_focused("#yes")
        tab.press(Keys.ENTER)
        tab.shows("#receiving-note", "The source is paused.")
        assert run.source.status()["state"] == "paused"
        assert tab.errors() == []


def test_a_range_whose_number_is_unknown_is_hatched_and_not_cold(chromium: Any) -> None:
    """Issue: ranges without handlers looked as if they had nothing to do."""
    first, second = split_ring(2)
    unknown = dict.fromkeys(("waiting", "inFlight", "handled"))
    mixed = status(
        ranges=[
            range_status(0, hashRanges=[str(first)], shares=None),
            range_status(1, hashRanges=[str(second)], **unknown),
        ]
    )
    shown = ControlServer("s", "pulsar://a", "t", {"status": lambda _: mixed})
    served = serve_page(PageOptions("127.0.0.1", 0), lambda: [shown.path])
    fills = "return [...document.querySelectorAll('#arcs path')].map(one => one.style.fill)"

    def hatched(heat: str) -> list[bool]:
        tab.select("#heat", heat)
        return ["#unknown" in fill for fill in chromium.execute_script(fills)]

    try:
        tab = Tab(chromium, served.port)
        tab.shows("#arcs", "2 ranges")
        assert hatched("messages") == hatched("oldest") == [False, True]
        tab.shot("ring-unknown")
        assert hatched("busy") == hatched("held") == [True, True], "there are no samples"
    finally:
        served.close()
        shown.close()


def test_unknown_numbers_of_the_broker_have_their_reason(chromium: Any) -> None:
    refused = f"The role may not ask. {HOSTILE}"
    parts = [partition_status(0, unknown=refused), partition_status(1)]
    with Board(partitions=parts) as board:
        tab = Tab(chromium, board.port)
        text = "Numbers of the broker for 1 of 2 topic partitions are unknown (\u2013): {}."
        tab.shows("#partitions-note", *map(text.format, (refused, "no admin_url")))
        tab.shows("#facts", f"unknown: {refused}")
        for column in range(2, 8):
            if column not in (4, 5):
                dash = f"#partitions tbody tr:nth-child(1) td:nth-child({column}) [title]"
                assert tab.count(dash) == 1, column
        board.status["partitions"] = [partition_status(0, unknown="")]
        wait_until(lambda: not tab.text("#partitions-note"))
        assert tab.count("img") == 0
        assert tab.errors() == []


def test_segments_that_wait_for_their_parents_are_shown(chromium: Any) -> None:
    waiting = {**progress(), "segmentsWaiting": 2}
    with Board(window=waiting) as board:
        tab = Tab(chromium, board.port)
        tab.shows("#facts", "Segments waiting", "2 for their parents")
        waiting["segmentsWaiting"] = 0
        wait_until(lambda: "Segments waiting" not in tab.text("#facts"))
        assert tab.errors() == []


def test_a_server_of_another_release_is_named_and_asks_for_a_reload(
    chromium: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Board() as board:
        tab = Tab(chromium, board.port)
        tab.shows("#facts", "running")
        assert tab.count("#notice[hidden]") == 1
        monkeypatch.setattr(status_watcher, "VERSION", "9.9.9")
        both = f"This page is of keyshard {VERSION}, and its server runs keyshard 9.9.9."
        tab.shows("#notice", both, "Reload the page.")
        monkeypatch.setattr(
            status_watcher, "GROUPS", {"source": "old", "sink": "sinks", "worker": "workers"}
        )
        tab.shows("#notice", both)
        tab.shows("#link", "live")
        monkeypatch.undo()
        wait_until(lambda: tab.count("#notice[hidden]") == 1)
        assert tab.errors() == []


def test_a_status_of_another_release_that_cannot_be_drawn_names_both(chromium: Any) -> None:
    with Board() as board:
        board.source._who["release"] = "9.9.9"
        del board.status["handlerSlots"]
        tab = Tab(chromium, board.port)
        tab.shows("#notice", "The status of s cannot be shown", "It runs keyshard 9.9.9, and this",
                  f"page is of keyshard {VERSION}. Use the same release for both.")  # fmt: skip
        tab.shows("#link", "live")


def test_a_token_is_asked_for_once_and_kept_in_the_tab(chromium: Any) -> None:
    with ShownRun(ui_token=TOKEN) as run:
        tab = Tab(chromium, run.port)
        tab.shows("#link", "a token is required")
        assert tab.count("#main[hidden]") == 1
        field = tab.browser.find_element("css selector", "#token input")
        field.send_keys("wrong-wrong-wrong")
        field.submit()
        tab.shows("#link", "a token is required")
        field.clear()
        field.send_keys(TOKEN)
        field.submit()
        tab.shows("#link", "live")
        tab.browser.refresh()
        tab.shows("#facts", "running")
        tab.browser.execute_script("sessionStorage.clear()")
        tab.browser.get(f"about:blank#{time.monotonic_ns()}")
        tab.browser.get(f"{tab.url}#token={TOKEN}")
        tab.shows("#facts", "running")
        assert TOKEN not in tab.browser.current_url


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_phone_shows_the_page_without_scrolling_sideways(chromium: Any, scheme: str) -> None:
    with ShownRun() as run:
        run.publish(*((f"k{n}", b"1") for n in range(100)))
        chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        chromium.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
        )
        try:
            tab = Tab(chromium, run.port)
            tab.shows("#facts", "running")
            width = tab.browser.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390
            colour = tab.browser.execute_script("return getComputedStyle(document.body).color")
            assert (colour == "rgb(227, 232, 239)") is (scheme == "dark")
            tab.shot(f"phone-{scheme}")
        finally:
            chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
            chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
