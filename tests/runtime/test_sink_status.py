"""An open sink: its status, its control socket, the commands that show it, and its metrics."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families

from keyshard import KeyShardSink, KeyShardSource
from keyshard.broker import connect
from keyshard.broker.memory import MemoryBroker
from keyshard.cli import connecting
from keyshard.cli import main as main_module
from keyshard.control import (
    SINK,
    ControlServer,
    RunningSource,
    answering_sources,
    running_sources,
)
from keyshard.core.position.entry import TopicPartition
from keyshard.core.publishing import key_partition
from keyshard.errors import BrokerError, BrokerUnavailableError, ConfigError, NotRunningError
from keyshard.observe import sink_status
from keyshard.observe.metrics import SINK_METRICS
from keyshard.publishing.counts import Attempt, SinkCounts
from keyshard.publishing.message_writer import MessageWriter
from tests.helpers import present, wait_until
from tests.support.control_folder import own_control_folder
from tests.support.copied_topic import SinkTopic
from tests.support.deadlines import deadline

PARTITIONS = 2
ROWS = pa.record_batch({"value": [b"1", b"2", b"3"], "__key": ["a", "b", "a"]})


class World(SinkTopic):
    """A topic with sinks, whose control sockets are in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(PARTITIONS)
        self.folder = folder

    def sink(self, sink_id: str | None = "billing", **options: Any) -> KeyShardSink:
        return super().sink(sink_id=sink_id, **options)


@pytest.fixture
def world() -> Iterator[World]:
    with own_control_folder() as folder:
        made = World(folder)
        yield made
        made.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main_module(list(arguments))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def found() -> list[RunningSource]:
    sinks, errors = answering_sources(20.0, SINK)
    assert errors == []
    return sinks


def test_the_status_counts_published_and_confirmed_messages(world: World) -> None:
    sink = world.sink(linger_ms=0)
    with pytest.raises(NotRunningError, match="connects with its first message"):
        sink.status()
    for number in range(10):
        sink.send(b"12345", key=f"k{number % 3}")
    sink.flush()
    sink.write_batch(ROWS, 0)
    status = sink.status()
    counters = status["counters"]
    assert (counters["published"], counters["confirmed"], counters["failed"]) == (13, 13, 0)
    assert (counters["batches"], counters["alreadyStored"]) == (1, 0)
    assert 5 <= counters["entries"] <= 13
    assert counters["bytes"] >= 10 * 5 + 3
    assert status["unconfirmed"] == {
        "messages": 0, "entries": 0, "bytes": 0, "oldestSeconds": None,
    }  # fmt: skip
    assert (status["version"], status["kind"], status["name"]) == (1, "sink", "billing")
    assert (status["topic"], status["topics"]) == (world.topic, [world.topic])
    assert (status["serviceUrl"], status["pid"]) == (world.url, os.getpid())
    assert (status["state"], status["newestError"]) == ("running", None)
    again = pickle.loads(pickle.dumps(sink))
    with pytest.raises(NotRunningError, match="not connected"):
        again.status()
    sink.write_batch(ROWS, 0)
    assert sink.status()["counters"]["alreadyStored"] == 3
    sink.close()
    with pytest.raises(NotRunningError, match="is closed"):
        sink.status()


def test_rates_are_those_of_the_samples(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_status, "LOOK_S", 0.01)
    sink = world.sink(linger_ms=0)

    def published() -> bool:
        sink.send(b"1", key="a")
        sink.flush()
        rates = sink.status()["rates"]
        return all((rates["published"], rates["confirmed"], rates["bytes"]))

    wait_until(published)


def test_unconfirmed_messages_have_an_age_and_then_an_error(world: World) -> None:
    sink = world.sink(send_timeout_ms=30_000, linger_ms=0)
    sink.send(b"0", key="a").result(deadline(60))
    world.hold()
    late = sink.send(b"1", key="a")
    wait_until(lambda: sink.status()["unconfirmed"]["entries"] == 1)
    wait_until(lambda: present(sink.status()["unconfirmed"]["oldestSeconds"]) > 0)
    unconfirmed = sink.status()["unconfirmed"]
    assert unconfirmed["messages"] == 1
    assert unconfirmed["bytes"] > 0
    sink._state.close()
    assert isinstance(late.exception(deadline(60)), BrokerError)

    hasty = world.sink("hasty", send_timeout_ms=100, linger_ms=0)
    failed = hasty.send(b"2", key="a")
    with pytest.raises(BrokerUnavailableError):
        hasty.flush()
    assert isinstance(failed.exception(deadline(60)), BrokerUnavailableError)
    wait_until(lambda: hasty.status()["counters"]["failed"] == 1)
    status = hasty.status()
    assert status["counters"]["confirmed"] == 0
    assert status["unconfirmed"]["messages"] == 0
    newest = present(status["newestError"])
    assert newest["error"] in str(failed.exception(0))
    assert present(newest["secondsAgo"]) >= 0
    with pytest.raises(BrokerUnavailableError):
        hasty.write_batch(ROWS, 0)
    assert "confirmed" in present(hasty.status()["newestError"])["error"]


def test_a_message_that_waits_for_others_is_unconfirmed_and_in_no_entry(world: World) -> None:
    sink = world.sink(linger_ms=60_000)
    sink.send(b"1", key="a")
    unconfirmed = sink.status()["unconfirmed"]
    assert (unconfirmed["messages"], unconfirmed["entries"]) == (1, 0)
    assert unconfirmed["oldestSeconds"] is None


def test_batches_settle_in_order_once_all_entries_are_confirmed_or_failed() -> None:
    counts, where = SinkCounts(), TopicPartition("t", 0)
    first, second, third = [Future[None]() for _ in range(3)]
    counts.add(where, [2, 5], 50, [first, second])
    counts.add(where, [1], 10, [third])
    counts.add(TopicPartition("u", 0), [1], 7, [Future()])
    first.set_result(None)
    third.set_result(None)
    pending = counts.look().pending
    assert (pending.messages, pending.entries, pending.bytes) == (7, 4, 67)
    second.set_exception(BrokerError("no"))
    looked = counts.look()
    assert (looked.totals.confirmed, looked.totals.failed) == (3, 3)
    assert (looked.pending.messages, looked.pending.entries) == (1, 1)
    assert looked.topics == ("t", "u")
    assert list(counts._pieces) == [TopicPartition("u", 0)]


def test_failures_of_a_batch_count_unless_its_rows_are_published_again() -> None:
    counts, where = SinkCounts(), TopicPartition("t", 0)
    for repeated, failed in ((True, 0), (False, 2)):
        attempt, stored, lost = Attempt(), Future[None](), Future[None]()
        counts.add(where, [3, 5], 50, [stored, lost], attempt)
        stored.set_result(None)
        lost.set_exception(BrokerError("lost"))
        looked = counts.look()
        assert (looked.totals.failed, looked.pending.messages) == (0, 5)
        attempt.repeated = repeated
        looked = counts.look()
        assert (looked.totals.failed, looked.pending.messages) == (failed, 0)
    assert (looked.totals.published, looked.totals.confirmed) == (10, 6)


class Stop:
    """Holds calls until :meth:`go`."""

    def __init__(self) -> None:
        self.reached, self._go = threading.Event(), threading.Event()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self._go.wait(deadline(60))
            return call(*arguments)

        return held

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def stop(world: World) -> Iterator[Stop]:
    assert world, "it closes its sinks after this"
    made = Stop()
    yield made
    made.go()


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread of its own, which may last."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - the future has it
            done.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return done


def test_a_producer_that_opens_slowly_holds_up_neither_the_status_nor_others(
    world: World, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = world.sink(linger_ms=0)
    first, second = (
        next(key for key in "abcdefgh" if key_partition(key, PARTITIONS) == number)
        for number in range(PARTITIONS)
    )
    sink.send(b"1", key=first).result(deadline(60))
    monkeypatch.setattr(MemoryBroker, "entry_producer", stop.before(MemoryBroker.entry_producer))
    slow = in_thread(lambda: sink.send(b"2", key=second).result(deadline(60)))
    assert stop.reached.wait(deadline(60))
    assert in_thread(sink.status).result(deadline(30))["counters"]["confirmed"] == 1
    in_thread(lambda: sink.send(b"3", key=first).result(deadline(30))).result(deadline(30))
    in_thread(sink.flush).result(deadline(30))
    (here,) = found()
    assert here.ask("status")["counters"]["confirmed"] == 2
    stop.go()
    slow.result(deadline(60))
    assert sink.status()["counters"]["confirmed"] == 3


def test_a_sink_that_closes_while_a_producer_opens_leaves_none(
    world: World, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    open_producer = MemoryBroker.entry_producer

    def opening(*arguments: Any) -> Any:
        opened.append(open_producer(*arguments))
        return stop.before(lambda: opened[0])()

    monkeypatch.setattr(MemoryBroker, "entry_producer", opening)
    sink = world.sink(linger_ms=0)
    sent = in_thread(lambda: sink.send(b"1", key="a"))
    assert stop.reached.wait(deadline(60))
    in_thread(present(sink._state._writer).close).result(deadline(30))
    stop.go()
    with pytest.raises(BrokerError, match="is closed"):
        sent.result(deadline(60))
    with pytest.raises(BrokerError, match="is closed"):
        opened[0].flush()


def test_a_sink_that_connects_has_no_status_yet(
    world: World, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "connect", stop.before(connect.connect))
    sink = world.sink()
    sent = in_thread(lambda: sink.send(b"1", key="a").result(deadline(60)))
    assert stop.reached.wait(deadline(60))
    with pytest.raises(NotRunningError, match="not connected"):
        in_thread(sink.status).result(deadline(30))
    stop.go()
    sent.result(deadline(60))
    assert sink.status()["state"] == "running"


@pytest.mark.parametrize("failing", [MessageWriter, MemoryBroker])
def test_a_sink_that_fails_to_close_is_not_shown(
    world: World, failing: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no")

    sink = world.sink()
    sink.send(b"1", key="a").result(deadline(60))
    with monkeypatch.context() as patched:
        patched.setattr(failing, "close", fail)
        with pytest.raises(RuntimeError, match="no"):
            sink.close()
    assert list(world.folder.iterdir()) == []


def test_the_commands_find_a_sink_until_it_closes(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = world.sink()
    assert not world.folder.exists()
    sink.write_batch(ROWS, 0)
    code, out, _ = run(capsys, "status", "billing", "--json")
    assert code == 0
    assert json.loads(out)["counters"] == sink.status()["counters"]
    for named in (["billing"], ["--pid", str(os.getpid())], []):
        code, out, _ = run(capsys, "status", *named)
        assert code == 0
        assert f"running: sink 'billing' to {world.topic}" in out
        assert "published 3 messages in 2 entries" in out
        assert "confirmed 3, failed 0; 1 batch, already stored 0" in out
    other = world.sink(None)
    other.send(b"1", key="a").result(deadline(60))
    code, out, err = run(capsys, "status")
    assert code == 0
    assert "billing" in out
    assert world.topic in out
    assert "keyshard status NAME" in err
    code, out, _ = run(capsys, "ps", "--json")
    assert {(one["kind"], one["name"], one["subscription"]) for one in json.loads(out)} == {
        ("sink", "billing", None), ("sink", world.topic, None),
    }  # fmt: skip
    code, _, err = run(capsys, "status", "--json")
    assert code == 1
    assert "2 sinks match" in err
    assert run(capsys, "status", "nothing")[0] == 1
    with sink, other:
        pass
    assert list(world.folder.iterdir()) == []
    assert run(capsys, "ps")[1] == "No source runs, and no sink is open.\n"


def test_a_sink_is_listed_below_a_source_and_ignored_by_commands_for_sources(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.sink().write_batch(ROWS, 0)
    source = KeyShardSource(
        [world.topic], subscription="billing", service_url=world.url, parallelism=1
    )
    with source.open():
        assert [one.kind for one in running_sources()] == ["stream"]
        code, out, _ = run(capsys, "status")
        assert code == 0
        assert "running: 'billing' on" in out
        assert "billing" in out.rpartition("published/s")[2]
        assert json.loads(run(capsys, "status", "--json")[1])["kind"] == "stream"
        assert run(capsys, "pause")[0] == 0
        assert [one.kind for one in answering_sources(20.0)[0]] == ["stream"]
    assert "running: sink 'billing'" in run(capsys, "status", "billing")[1]


PROGRAM = """
import sys, time
from keyshard import KeyShardSink
from keyshard.broker.memory import MemoryCluster
topic = MemoryCluster.named("other").create_topic("t", 1)
sink = KeyShardSink(topic, sink_id="other", service_url="memory://other")
sink.send(b"1", key="a").result(600)
print(sink.status()["pid"], flush=True)
time.sleep(600)
"""


def test_the_socket_of_a_killed_process_is_removed_and_a_suspended_one_is_named(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert int(present(other.stdout).readline()) == other.pid
            (sink,) = found()
            assert (sink.pid, sink.name) == (other.pid, "other")
            assert sink.ask("status")["counters"]["confirmed"] == 1
            world.sink().write_batch(ROWS, 0)
            other.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(connecting, "OTHER_S", deadline(0.5))
            code, out, err = run(capsys, "status")
            assert (code, "sink 'billing'" in out) == (0, True)
            assert f"Process {other.pid} has a control socket, but does not answer" in err
        finally:
            other.kill()
        other.wait(deadline(60))
    assert sink.path.exists()
    wait_until(lambda: [one.name for one in found()] == ["billing"])
    assert not sink.path.exists()


def test_hostile_and_slow_clients_hold_no_sink_up(world: World) -> None:
    sink = world.sink(linger_ms=0)
    sink.send(b"1", key="a").result(deadline(60))
    (here,) = found()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.connect(str(here.path))
        slow.sendall(b'{"do"')
        for sent in (b"\x00\xff\n", b"[]\n", b'{"do": "rescale", "ranges": 1}\n', b"x" * 70_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hostile:
                hostile.settimeout(60)
                hostile.connect(str(here.path))
                hostile.sendall(sent)
                assert json.loads(hostile.makefile().readline())["ok"] is False
        sink.send(b"2", key="a").result(deadline(60))
        assert here.ask("status")["counters"]["confirmed"] == 2
        sink.close()
    assert list(world.folder.iterdir()) == []


def test_metrics_are_served_while_the_sink_is_open(world: World) -> None:
    sink = world.sink(metrics_port=0)
    sink.write_batch(ROWS, 0)
    port = present(present(sink._state._monitor).metrics_port)
    at = f"http://127.0.0.1:{port}"
    text = httpx.get(f"{at}/metrics", trust_env=False).text
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["sink"] == "billing"
    }
    assert samples["keyshard_sink_messages_confirmed_total"] == 3
    assert samples["keyshard_sink_entries_published_total"] == 2
    assert samples["keyshard_sink_batches_total"] == 1
    assert samples["keyshard_sink_unconfirmed_messages"] == 0
    missing = {metric.name for metric in SINK_METRICS} - set(samples)
    assert missing == {"keyshard_sink_oldest_unconfirmed_seconds"}
    for probe in ("livez", "readyz"):
        assert httpx.get(f"{at}/{probe}", trust_env=False).text == "ok\n"

    second = world.sink("second", metrics_port=port)
    with pytest.raises(ConfigError, match="Set another metrics_port"):
        second.write_batch(ROWS, 0)
    assert [one.name for one in found()] == ["billing"]
    sink.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{at}/livez", trust_env=False)
    second.write_batch(ROWS, 0)


def test_a_sink_without_a_control_socket_publishes(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.folder.write_text("not a folder")
    sink = world.sink()
    sink.write_batch(ROWS, 0)
    assert sink.status()["counters"]["confirmed"] == 3
    assert "cannot reach this sink" in caplog.text


def test_the_sink_of_a_run_has_no_metrics_port(world: World) -> None:
    source = KeyShardSource([world.topic], subscription="jobs", service_url=world.url)
    with pytest.raises(ConfigError, match="Set metrics_port of the source instead"):
        source.run(print, sink=world.sink(metrics_port=9465))
    for wrong in (-1, 65_536, "9464"):
        with pytest.raises(ConfigError, match="metrics_port"):
            world.sink(metrics_port=wrong)
    with pytest.raises(ConfigError, match="metrics_host"):
        world.sink(metrics_host="")


def test_a_sink_that_waits_for_confirmations_is_stopping(world: World) -> None:
    sink = world.sink(send_timeout_ms=30_000, linger_ms=0)
    sink.send(b"0", key="a").result(deadline(60))
    monitor = present(sink._state._monitor)
    monitor.stopping()
    assert monitor.status()["state"] == "stopping"
    assert monitor._not_ready() == "The sink is stopping."


def test_samples_are_taken_while_a_sink_waits_for_confirmations(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_status, "LOOK_S", 0.01)
    sink = world.sink(linger_ms=0)
    sink.send(b"0", key="a").result(deadline(60))
    present(sink._state._monitor).stopping()
    looks = threading.Semaphore(0)
    sink._state.counts.collected = lambda: (looks.release(), (0, 0))[1]  # type: ignore[func-returns-value]
    for _ in range(3):
        assert looks.acquire(timeout=deadline(60))


def test_an_answer_of_another_release_is_named(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ControlServer(
        "odd", world.url, "t", {"status": lambda _request: {"version": 9}}, kind=SINK, name="odd"
    )
    try:
        code, _, err = run(capsys, "status", "odd")
        assert code == 1
        assert "The answer of the sink 'odd'" in err
        assert "Use the same release of keyshard as the sink" in err
        world.sink().write_batch(ROWS, 0)
        code, out, _ = run(capsys, "status")
        assert code == 0
        assert "cannot be understood" in out
    finally:
        server.close()
