"""Handlers over the in-memory broker: order per key, lanes, retries, commits, the end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tenacity

from keyshard import Message, RetryLater, RetryPolicy
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.consumers.range_consumers import RangeConsumers
from keyshard.errors import (
    CheckpointError,
    CheckpointInUseError,
    ConfigError,
    HandlerFailedError,
    WindowFullError,
)
from tests.helpers import DEADLINE_S, present, wait_until
from tests.support.deadlines import deadline
from tests.support.handled_topic import AT_ONCE, HandledTopic
from tests.support.process_handlers import to_file


def in_order(orders: HandledTopic, per_key: int) -> bool:
    return all(values == [b"%d" % n for n in range(per_key)] for values in orders.seen.values())


def test_threads_handle_every_message_once_in_key_order_and_acknowledge(
    orders: HandledTopic,
) -> None:
    count = orders.publish(keys=20, per_key=50)
    with orders.running(orders.source(), orders.note):
        wait_until(lambda: orders.backlog() == 0 and orders.count == count)
    assert len(orders.seen) == 20
    assert in_order(orders, 50)
    assert not orders.errors


def test_coroutines_run_in_one_loop_with_at_most_the_lanes_and_one_per_key(
    orders: HandledTopic,
) -> None:
    count = orders.publish(keys=20, per_key=20)
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
        orders.note(message)

    with orders.running(orders.source(parallelism=2), handle, lanes=3):
        wait_until(lambda: orders.backlog() == 0 and orders.count == count)
    assert in_order(orders, 20)
    assert len(threads) == 1
    assert most[1] == 1
    assert 2 <= most[0] <= 6


def test_processes_handle_in_key_order_and_outside_this_process(
    orders: HandledTopic, tmp_path: Path
) -> None:
    for n in range(10):
        orders.cluster.publish(
            orders.topic, *[Stored(f"{tmp_path}|{n}".encode(), key=f"key-{k}") for k in range(4)]
        )
    with orders.running(orders.source(), to_file, executor="processes", workers=2):
        wait_until(lambda: orders.backlog() == 0)
    pids = set()
    for k in range(4):
        lines = (tmp_path / f"key-{k}").read_text().splitlines()
        assert [line.split()[0] for line in lines] == [str(n) for n in range(10)]
        pids |= {line.split()[1] for line in lines}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


def test_a_failed_message_is_tried_again_in_place(orders: HandledTopic) -> None:
    orders.publish(keys=5, per_key=10)
    failed: list[float] = []

    def handle(message: Message) -> None:
        if message.key == "key-0" and message.value == b"3" and len(failed) < 3:
            failed.append(time.monotonic())
            raise RetryLater(0.2)
        orders.note(message)

    with orders.running(orders.source(), handle):
        wait_until(lambda: orders.backlog() == 0)
    assert len(failed) == 3
    assert in_order(orders, 10)
    assert all(b - a >= 0.2 for a, b in pairwise(failed))


def test_only_the_key_of_a_failed_message_waits_for_its_retry(orders: HandledTopic) -> None:
    orders.publish(keys=5, per_key=10)

    def handle(message: Message) -> None:
        if message.key == "key-0" and message.value == b"3":
            raise RetryLater(4 * DEADLINE_S)
        orders.note(message)

    with orders.running(orders.source(), handle, drain_timeout_s=0.1) as run:
        wait_until(lambda: orders.errors or (orders.count == 43 and orders.backlog() == 7))
        assert run.source.status()["counters"]["failedAttempts"] == 1
    assert orders.seen.pop("key-0") == [b"0", b"1", b"2"]
    assert in_order(orders, 10)
    assert not orders.errors


def test_the_last_failed_attempt_ends_the_source_by_name_and_acknowledges_nothing_of_it(
    orders: HandledTopic,
) -> None:
    orders.cluster.publish(orders.topic, Stored(b"bad", key="key-0"))
    attempts: list[int] = []

    def handle(message: Message) -> None:
        attempts.append(1)
        raise ValueError("no such account")

    with orders.running(orders.source(), handle, retry=AT_ONCE, on_failure="stop") as run:
        run.thread.join(DEADLINE_S)
    (error,) = orders.errors
    assert isinstance(error, HandlerFailedError)
    assert "ValueError: no such account" in str(error)
    assert error.facts["key"] == "key-0"
    assert len(attempts) == 3
    assert orders.backlog() == 1


def test_an_entry_is_acknowledged_when_all_its_messages_are_done(orders: HandledTopic) -> None:
    messages = [Stored(b"%d" % n, key="key-0") for n in range(3)]
    orders.cluster.publish(orders.topic, *messages, batching=Batching.BY_KEY)
    release = threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"2":
            release.wait(4 * DEADLINE_S)
        orders.note(message)

    with orders.running(orders.source(), handle):
        wait_until(lambda: orders.count == 2)
        assert orders.backlog() > 0
        release.set()
        wait_until(lambda: orders.backlog() == 0)


def test_a_stop_waits_for_running_handlers_and_commits_them(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=3)
    entered, release = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        entered.set()
        release.wait(4 * DEADLINE_S)
        orders.note(message)

    source = orders.source()
    with orders.running(source, handle):
        assert entered.wait(DEADLINE_S)
        source.stop()
        release.set()
    assert orders.seen["key-0"] == [b"0"]
    assert orders.backlog() == 2


@pytest.mark.parametrize("executor", ["threads", "async"])
def test_a_stop_waits_for_the_retry_of_a_started_entry(orders: HandledTopic, executor: str) -> None:
    messages = [Stored(b"%d" % n, key="key-0") for n in range(3)]
    orders.cluster.publish(orders.topic, *messages, batching=Batching.BY_KEY)
    orders.publish(keys=1, per_key=1)
    failed = threading.Event()

    def handle(message: Message) -> None:
        if message.value == b"1" and not failed.is_set():
            failed.set()
            raise RetryLater(0.5)
        orders.note(message)

    async def coroutine(message: Message) -> None:
        handle(message)

    source = orders.source()
    with orders.running(source, handle if executor == "threads" else coroutine):
        assert failed.wait(DEADLINE_S)
        source.stop()
    assert orders.seen["key-0"] == [b"0", b"1", b"2"]
    assert orders.backlog() == 1, "the entry that had begun is done, the other one did not begin"


@pytest.mark.parametrize("after_s", [0.5, 60.0])
@pytest.mark.simulated
def test_a_stop_does_not_stay_longer_than_its_deadline_for_a_retry(
    orders: HandledTopic, after_s: float
) -> None:
    orders.publish(keys=1, per_key=1)
    failed = threading.Event()

    def handle(message: Message) -> None:
        failed.set()
        raise RetryLater(after_s)

    source = orders.source()
    began = time.monotonic()
    with orders.running(
        source, handle, drain_timeout_s=3.0, retry=RetryPolicy(stop=tenacity.stop_never)
    ):
        assert failed.wait(DEADLINE_S)
        source.stop()
    assert time.monotonic() - began < deadline(15)
    assert orders.backlog() == 1


def test_coroutines_that_are_left_behind_leave_no_loop_in_disorder(
    orders: HandledTopic, caplog: pytest.LogCaptureFixture
) -> None:
    orders.publish(keys=4, per_key=1)
    cancelled: list[bytes] = []

    async def handle(message: Message) -> None:
        orders.note(message)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cancelled.append(present(message.value))

    source = orders.source()
    with orders.running(source, handle, drain_timeout_s=0.1):
        wait_until(lambda: orders.count == 4)
        source.stop()
    assert len(cancelled) == 4, "each had time to clean up"
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_handler_that_never_returns_is_left_behind_at_the_deadline(orders: HandledTopic) -> None:
    orders.publish(keys=1, per_key=1)
    entered, release = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        entered.set()
        release.wait(deadline(60))

    source = orders.source()
    began = time.monotonic()
    with orders.running(source, handle, drain_timeout_s=0.3):
        assert entered.wait(DEADLINE_S)
        source.stop()
    assert time.monotonic() - began < deadline(15)
    assert orders.backlog() == 1
    release.set()


@pytest.mark.simulated
def test_nothing_completed_comes_again_after_a_broker_crash_with_a_checkpoint(
    orders: HandledTopic, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/orders.json"
    orders.cluster.now_ms = lambda: 0
    with orders.running(orders.source(), orders.note, checkpoint=url):
        # The broker writes its cursors at the first acknowledgement, and the next write is due
        # after 10 s by its clock, which stands still.
        orders.publish(keys=10, per_key=1)
        wait_until(lambda: orders.backlog() == 0 and orders.count == 10)
        count = 10 + orders.publish(keys=10, per_key=20)
        wait_until(lambda: orders.backlog() == 0 and orders.count == count)
    orders.cluster.crash()
    assert orders.backlog() > 0, "the broker forgot acknowledgements"
    with orders.running(orders.source(), orders.note, checkpoint=url):
        wait_until(lambda: orders.backlog() == 0)
    assert orders.count == count


def test_batches_return_rows_and_unacknowledged_ones_come_again(
    orders: HandledTopic,
) -> None:
    count = orders.publish(keys=10, per_key=20)
    source = orders.source()
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
    wait_until(lambda: orders.backlog() == kept)
    again = 0
    for batch in source.batches(max_wait_s=0.1):
        again += batch.records.num_rows
        batch.ack()
        if again == kept:
            source.stop()
    assert orders.backlog() == 0


@pytest.mark.simulated
def test_a_window_full_of_unacknowledged_batches_is_named(orders: HandledTopic) -> None:
    orders.publish(keys=10, per_key=40)
    source = orders.source(window_rows_max=100, operation_timeout_ms=1_000)
    with pytest.raises(WindowFullError, match="ack") as full:
        for _ in source.batches(max_rows=20, max_wait_s=0.05):
            pass
    # By default, the limits in bytes and those of the broker are reached before that of rows.
    for limit in ("window_bytes_max", "window_rows_max", "unacknowledged messages"):
        assert limit in full.value.remedy


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lanes": 0}, "lanes is 0; it must be an integer from 1 to 10000"),
        ({"lane": 1}, "run\\(\\) has no option 'lane'"),
        ({"on_failure": "drop"}, "Write 'park', 'dead_letter' or 'stop'"),
        ({"executor": "async"}, "plain function"),
        ({"checkpoint": "file:///tmp/"}, "not a folder"),
        ({"checkpoint": "nosuch://x/y"}, "fsspec URL"),
        ({"executor": "processes", "handle": lambda _: None}, "top level of a module"),
    ],
)
def test_a_wrong_option_is_refused_at_once(
    orders: HandledTopic, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        orders.source().run(**({"handle": print} | options))


def test_a_checkpoint_that_cannot_be_written_is_refused_before_anything_connects(
    orders: HandledTopic, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot be written"):
        orders.source().run(print, checkpoint=f"{tmp_path}/file/orders.json")
    with pytest.raises(CheckpointError, match="cannot be written"):
        next(orders.source().batches(checkpoint=f"{tmp_path}/file/orders.json"))
    assert orders.backlog() == -1


def test_two_sources_do_not_share_a_checkpoint(orders: HandledTopic, tmp_path: Path) -> None:
    url = f"{tmp_path}/orders.json"
    orders.publish(keys=1, per_key=1)
    with orders.running(orders.source(), orders.note, checkpoint=url):
        wait_until(lambda: orders.count == 1)
        other = orders.source(subscription="other")
        with pytest.raises(CheckpointInUseError, match="in use"):
            other.run(print, checkpoint=url)
    with orders.running(orders.source(), orders.note, checkpoint=url):
        orders.publish(keys=1, per_key=1)
        wait_until(lambda: orders.count == 2)
    assert not orders.errors


def test_a_source_runs_once_at_a_time(orders: HandledTopic) -> None:
    source = orders.source()
    with orders.running(source, orders.note):
        wait_until(lambda: "_running" in source.__dict__)
        with pytest.raises(ConfigError, match="already runs"):
            source.run(orders.note)


@pytest.mark.simulated
def test_a_stop_lets_a_rescale_end_so_that_acknowledgements_have_consumers(
    orders: HandledTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = orders.source(parallelism=1)
    taking, reports = threading.Event(), []
    subscribe = RangeConsumers.subscribe

    def slowly(consumers: RangeConsumers, *args: Any, **options: Any) -> Any:
        if taking.is_set():
            time.sleep(0.5)  # No range has an owner now.
        return subscribe(consumers, *args, **options)

    def handle(message: Message) -> None:
        orders.note(message)
        if orders.count == 20:
            taking.set()
            rescaling.start()

    rescaling = threading.Thread(target=lambda: reports.append(source.rescale(2)))
    monkeypatch.setattr(RangeConsumers, "subscribe", slowly)
    orders.publish(keys=4, per_key=5)
    with orders.running(source, handle):
        wait_until(lambda: orders.count == 20 and rescaling.is_alive())
        source.stop()
    rescaling.join(DEADLINE_S)
    assert orders.backlog() == 0
    assert [report.ranges_after for report in reports] == [2]
