"""Handlers over the in-memory broker: order per key, lanes, retries, commits, the end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tenacity

from handler_place import AT_ONCE, Place
from helpers import wait_until
from keyshard import Message, RetryLater, RetryPolicy
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.errors import (
    CheckpointError,
    CheckpointInUseError,
    ConfigError,
    HandlerFailedError,
    WindowFullError,
)
from keyshard.worker.range_consumers import RangeConsumers


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


def in_order(place: Place, per_key: int) -> bool:
    return all(values == [b"%d" % n for n in range(per_key)] for values in place.seen.values())


def test_threads_handle_every_message_once_in_key_order_and_acknowledge(place: Place) -> None:
    count = place.publish(keys=20, per_key=50)
    with place.running(place.source(), place.note):
        wait_until(lambda: place.backlog() == 0 and place.count == count)
    assert len(place.seen) == 20
    assert in_order(place, 50)
    assert not place.errors


def test_coroutines_run_in_one_loop_with_at_most_the_lanes_and_one_per_key(place: Place) -> None:
    count = place.publish(keys=20, per_key=20)
    running: dict[str | None, int] = defaultdict(int)
    most = [0, 0]
    threads = set()

    async def handle(message: Message) -> None:
        threads.add(threading.get_ident())
        running[message.routing_key] += 1
        most[0] = max(most[0], sum(running.values()))
        most[1] = max(most[1], running[message.routing_key])
        await asyncio.sleep(0.001)
        running[message.routing_key] -= 1
        place.note(message)

    with place.running(place.source(parallelism=2), handle, lanes=3):
        wait_until(lambda: place.backlog() == 0 and place.count == count)
    assert in_order(place, 20)
    assert len(threads) == 1
    assert most[1] == 1
    assert 2 <= most[0] <= 6


def to_file(message: Message) -> None:
    folder, number = message.value.decode().split("|")
    with Path(folder, message.key or "").open("a") as file:
        file.write(f"{number} {os.getpid()}\n")


def test_processes_handle_in_key_order_and_outside_this_process(
    place: Place, tmp_path: Path
) -> None:
    for n in range(10):
        place.cluster.publish(
            place.topic, *[Stored(f"{tmp_path}|{n}".encode(), key=f"key-{k}") for k in range(4)]
        )
    with place.running(place.source(), to_file, executor="processes", workers=2):
        wait_until(lambda: place.backlog() == 0)
    pids = set()
    for k in range(4):
        lines = (tmp_path / f"key-{k}").read_text().splitlines()
        assert [line.split()[0] for line in lines] == [str(n) for n in range(10)]
        pids |= {line.split()[1] for line in lines}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


def test_a_failed_message_is_tried_again_in_place_and_only_its_key_waits(place: Place) -> None:
    place.publish(keys=5, per_key=10)
    failed: list[float] = []

    def handle(message: Message) -> None:
        if message.key == "key-0" and message.value == b"3" and len(failed) < 3:
            failed.append(time.monotonic())
            raise RetryLater(0.2)
        place.note(message)

    with place.running(place.source(), handle):
        wait_until(lambda: len(failed) == 1 and place.count == 43)
        wait_until(lambda: place.backlog() == 0)
    assert in_order(place, 10)
    assert all(b - a >= 0.2 for a, b in pairwise(failed))


def test_the_last_failed_attempt_ends_the_source_by_name_and_acknowledges_nothing_of_it(
    place: Place,
) -> None:
    place.cluster.publish(place.topic, Stored(b"bad", key="key-0"))
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(1)
        raise ValueError("no such account")

    with place.running(place.source(), handle, retry=AT_ONCE, on_failure="stop") as run:
        run.thread.join(20)
    (error,) = place.errors
    assert isinstance(error, HandlerFailedError)
    assert "ValueError: no such account" in str(error)
    assert error.facts["key"] == "key-0"
    assert len(attempts) == 3
    assert place.backlog() == 1


def test_an_entry_is_acknowledged_when_all_its_messages_are_done(place: Place) -> None:
    messages = [Stored(b"%d" % n, key="key-0") for n in range(3)]
    place.cluster.publish(place.topic, *messages, batching=Batching.BY_KEY)
    release = threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"2":
            release.wait(20)
        place.note(message)

    with place.running(place.source(), handle):
        wait_until(lambda: place.count == 2)
        assert place.backlog() > 0
        release.set()
        wait_until(lambda: place.backlog() == 0)


def test_a_stop_waits_for_running_handlers_and_commits_them(place: Place) -> None:
    place.publish(keys=1, per_key=3)
    entered, release = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        entered.set()
        release.wait(20)
        place.note(message)

    source = place.source()
    with place.running(source, handle):
        assert entered.wait(20)
        source.stop()
        release.set()
    assert place.seen["key-0"] == [b"0"]
    assert place.backlog() == 2


@pytest.mark.parametrize("executor", ["threads", "async"])
def test_a_stop_stays_for_the_retry_of_an_entry_that_has_begun(place: Place, executor: str) -> None:
    messages = [Stored(b"%d" % n, key="key-0") for n in range(3)]
    place.cluster.publish(place.topic, *messages, batching=Batching.BY_KEY)
    place.publish(keys=1, per_key=1)
    failed = threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"1" and not failed.is_set():
            failed.set()
            raise RetryLater(0.5)
        place.note(message)

    async def coroutine(message: Message) -> None:
        handle(message)

    source = place.source()
    with place.running(source, handle if executor == "threads" else coroutine):
        assert failed.wait(20)
        source.stop()
    assert place.seen["key-0"] == [b"0", b"1", b"2"]
    assert place.backlog() == 1, "the entry that had begun is done, the other one did not begin"


@pytest.mark.parametrize("after_s", [0.5, 60.0])
def test_a_stop_does_not_stay_longer_than_its_deadline_for_a_retry(
    place: Place, after_s: float
) -> None:
    place.publish(keys=1, per_key=1)
    failed = threading.Event()

    def handle(message: Message) -> None:
        failed.set()
        raise RetryLater(after_s)

    source = place.source()
    began = time.monotonic()
    with place.running(
        source, handle, drain_timeout_s=3.0, retry=RetryPolicy(stop=tenacity.stop_never)
    ):
        assert failed.wait(20)
        source.stop()
    assert time.monotonic() - began < 15
    assert place.backlog() == 1


def test_coroutines_that_are_left_behind_leave_no_loop_in_disorder(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.publish(keys=4, per_key=1)
    cancelled: list[bytes] = []

    async def handle(message: Message) -> None:
        place.note(message)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cancelled.append(message.value)

    source = place.source()
    with place.running(source, handle, drain_timeout_s=0.1):
        wait_until(lambda: place.count == 4)
        source.stop()
    assert len(cancelled) == 4, "each had time to clean up"
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_handler_that_never_returns_is_left_behind_at_the_deadline(place: Place) -> None:
    place.publish(keys=1, per_key=1)
    entered, release = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        entered.set()
        release.wait(60)

    source = place.source()
    began = time.monotonic()
    with place.running(source, handle, drain_timeout_s=0.3):
        assert entered.wait(20)
        source.stop()
    assert time.monotonic() - began < 15
    assert place.backlog() == 1
    release.set()


def test_nothing_completed_comes_again_after_a_broker_crash_with_a_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/orders.json"
    with place.running(place.source(), place.note, checkpoint=url):
        # The broker writes its cursors at the first acknowledgement, and then not for 10 s.
        place.publish(keys=10, per_key=1)
        wait_until(lambda: place.backlog() == 0 and place.count == 10)
        count = 10 + place.publish(keys=10, per_key=20)
        wait_until(lambda: place.backlog() == 0 and place.count == count)
    place.cluster.crash()
    assert place.backlog() > 0, "the broker forgot acknowledgements"
    with place.running(place.source(), place.note, checkpoint=url):
        wait_until(lambda: place.backlog() == 0)
    assert place.count == count


def test_batches_hand_out_rows_and_what_is_left_unacknowledged_comes_again(place: Place) -> None:
    count = place.publish(keys=10, per_key=20)
    source = place.source()
    rows = 0
    for number, batch in enumerate(source.batches(max_rows=50, max_wait_s=0.1)):
        assert batch.records.num_rows <= 50
        rows += batch.records.num_rows
        if number:
            batch.ack()
            batch.ack()
        else:
            kept = batch.records.num_rows
        if rows == count:
            source.stop()
    wait_until(lambda: place.backlog() == kept)
    again = 0
    for batch in source.batches(max_wait_s=0.1):
        again += batch.records.num_rows
        batch.ack()
        if again == kept:
            source.stop()
    assert place.backlog() == 0


def test_a_window_full_of_unacknowledged_batches_is_named(place: Place) -> None:
    place.publish(keys=10, per_key=40)
    source = place.source(window_rows_max=100, operation_timeout_ms=1_000)
    with pytest.raises(WindowFullError, match="ack"):
        for _ in source.batches(max_rows=20, max_wait_s=0.05):
            pass


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lanes": 0}, "lanes is 0; it must be an integer from 1 to 10000"),
        ({"lane": 1}, "run\\(\\) has no option 'lane'"),
        ({"on_failure": "drop"}, "write 'park', 'dead_letter' or 'stop'"),
        ({"executor": "async"}, "plain function"),
        ({"checkpoint": "file:///tmp/"}, "not a folder"),
        ({"checkpoint": "nosuch://x/y"}, "fsspec URL"),
        ({"executor": "processes", "handle": lambda _: None}, "top of a module"),
    ],
)
def test_a_wrong_option_is_refused_at_once(
    place: Place, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        place.source().run(**({"handle": print} | options))


def test_a_checkpoint_that_cannot_be_written_is_refused_before_anything_connects(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot be written"):
        place.source().run(print, checkpoint=f"{tmp_path}/file/orders.json")
    with pytest.raises(CheckpointError, match="cannot be written"):
        next(place.source().batches(checkpoint=f"{tmp_path}/file/orders.json"))
    assert place.backlog() == -1


def test_two_sources_do_not_share_a_checkpoint(place: Place, tmp_path: Path) -> None:
    url = f"{tmp_path}/orders.json"
    place.publish(keys=1, per_key=1)
    with place.running(place.source(), place.note, checkpoint=url):
        wait_until(lambda: place.count == 1)
        other = place.source(subscription="other")
        with pytest.raises(CheckpointInUseError, match="in use"):
            other.run(print, checkpoint=url)
    with place.running(place.source(), place.note, checkpoint=url):
        place.publish(keys=1, per_key=1)
        wait_until(lambda: place.count == 2)
    assert not place.errors


def test_a_source_runs_once_at_a_time(place: Place) -> None:
    source = place.source()
    with place.running(source, place.note):
        wait_until(lambda: "_running" in source.__dict__)
        with pytest.raises(ConfigError, match="runs already"):
            source.run(place.note)


def test_a_stop_lets_a_rescale_end_so_that_acknowledgements_have_consumers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = place.source(parallelism=1)
    taking, reports = threading.Event(), []
    subscribe = RangeConsumers.subscribe

    def slowly(consumers: RangeConsumers, *args: Any) -> Any:
        if taking.is_set():
            time.sleep(0.5)  # Nobody owns anything now.
        return subscribe(consumers, *args)

    def handle(message: Message) -> None:
        place.note(message)
        if place.count == 20:
            taking.set()
            rescaling.start()

    rescaling = threading.Thread(target=lambda: reports.append(source.rescale(2)))
    monkeypatch.setattr(RangeConsumers, "subscribe", slowly)
    place.publish(keys=4, per_key=5)
    with place.running(source, handle):
        wait_until(lambda: place.count == 20 and rescaling.is_alive())
        source.stop()
    rescaling.join(10)
    assert place.backlog() == 0
    assert [report.ranges_after for report in reports] == [2]
