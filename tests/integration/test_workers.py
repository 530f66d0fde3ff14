"""Consumers in worker processes, on a real broker, while the processes are killed and stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

from keyshard import KeyShardSource
from keyshard.handlers.batches import Batch
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    produce,
)
from tests.helpers import keyshard_threads, wait_until
from tests.support.deadlines import deadline, joined
from tests.support.observed import is_live_worker
from tests.support.stream_rows import StreamRows

pytestmark = pytest.mark.broker

PARTITIONS = 5
GONE_S = deadline(5)
"""Longest time until a worker that is dead, or does not answer, is noticed."""


@pytest.fixture
def topic(dev_broker: DevBroker, topic_name: str) -> str:
    create_partitioned_topic(dev_broker.admin_url, topic_name, PARTITIONS)
    return topic_name


def source(broker: DevBroker, topic: str, workers: str = "processes:2") -> KeyShardSource:
    return KeyShardSource(
        topic, subscription="workers", service_url=broker.service_url, admin_url=broker.admin_url,
        starting_position="earliest", workers=workers,
    )  # fmt: skip


def worker_processes() -> list[psutil.Process]:
    """Those of this process that live."""
    return [one for one in psutil.Process().children() if is_live_worker(one)]


@contextmanager
def struck(every_s: float, signals: list[signal.Signals]) -> Iterator[list[int]]:
    """Send signals to worker processes until the block ends; those that were hit."""
    ended, hit = threading.Event(), []
    chosen = random.Random(7)

    def strike() -> None:
        while not ended.wait(every_s):
            alive = worker_processes()
            if alive:
                victim = chosen.choice(alive)
                victim.send_signal(chosen.choice(signals))
                hit.append(victim.pid)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield hit
    finally:
        ended.set()
        thread.join()


def test_ranges_are_received_by_processes_which_end_with_the_source(
    dev_broker: DevBroker, topic: str
) -> None:
    load = Workload(messages=2_000, keys=50)
    before = keyshard_threads()
    produce(load, dev_broker.service_url, topic)
    taken = StreamRows()
    with source(dev_broker, topic, "processes:3").open() as stream:
        children = worker_processes()
        assert len(children) == 3
        output = stream.status()["sourceWorkers"]
        assert {one["pid"] for one in output} == {one.pid for one in children}
        assert sum(one["consumers"] for one in output) == 10 * PARTITIONS
        taken.take(stream, 2_000)
    assert not any(one.is_running() for one in children)
    assert not keyshard_threads() - before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_is_lost_repeated_or_out_of_order_when_workers_die(
    dev_broker: DevBroker, topic: str, how: signal.Signals
) -> None:
    messages, taken = 30_000, StreamRows()
    load = Workload(messages=messages, keys=200, rate_per_s=2_500.0)
    with source(dev_broker, topic).open() as stream:
        publisher = threading.Thread(target=produce, args=(load, dev_broker.service_url, topic))
        publisher.start()
        with struck(3.0 if how is signal.SIGKILL else 8.0, [how]) as hit:
            taken.take(stream, messages)
        publisher.join()
        assert hit
        wait_until(lambda: len(worker_processes()) == 2, deadline(30))
    assert taken.rows == messages


def test_acknowledged_entries_of_a_dead_worker_hold_up_no_range(topic_name: str) -> None:
    """1. Two workers receive 60,000 messages. 2. One is killed. 3. All messages are acknowledged.

    Pulsar 4.2 and 5.0 drop such entries only as fast as the replacement has permits, and send
    nothing meanwhile: new messages came after 22 to 48 s.
    """
    held, new = 60_000, 5_000
    batches: list[Batch] = []
    rows, release = 0, threading.Event()
    with DevBroker("5.0.1") as broker:
        create_partitioned_topic(broker.admin_url, topic_name, 1)
        load = Workload(messages=held, keys=1_000, batching="none")
        produce(load, broker.service_url, topic_name)
        made = replace(source(broker, topic_name), parallelism=2)

        def take() -> None:
            nonlocal rows
            for batch in made.batches(max_wait_s=0.2):
                rows += batch.records.num_rows
                batches.append(batch)
                if release.is_set():
                    batch.ack()

        thread = threading.Thread(target=take)
        thread.start()
        try:
            wait_until(lambda: rows == held, deadline(60))
            worker_processes()[1].kill()
            release.set()
            for batch in batches[:]:
                batch.ack()
            began = time.monotonic()
            produce(replace(load, messages=new, seed=1), broker.service_url, topic_name)
            wait_until(lambda: rows >= held + new, deadline(10))
            print(f"\nnew messages came within {time.monotonic() - began:.1f} s")
        finally:
            made.stop()
            joined(thread, deadline(30))
    assert rows == held + new


def test_a_worker_that_wakes_after_its_lease_ends_itself(dev_broker: DevBroker, topic: str) -> None:
    taken = StreamRows()
    with source(dev_broker, topic).open() as stream:
        first, other = worker_processes()
        first.send_signal(signal.SIGSTOP)
        wait_until(lambda: first not in worker_processes(), 2 * GONE_S)
        produce(Workload(messages=500, keys=20), dev_broker.service_url, topic)
        taken.take(stream, 500)
        assert other in worker_processes()


def test_workers_end_without_their_source(dev_broker: DevBroker, topic: str) -> None:
    program = (
        "import sys, time; from keyshard import KeyShardSource\n"
        f"s = KeyShardSource({topic!r}, subscription='workers', workers='processes:2',\n"
        f"    service_url={dev_broker.service_url!r}, starting_position='earliest').open()\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        os.kill(process.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, GONE_S)
        assert len(gone) == 2
        assert not alive
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
