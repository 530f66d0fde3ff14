"""However a program ends while its broker is frozen: soon, and with the status that it chose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce
from tests.support.deadlines import deadline

pytestmark = pytest.mark.broker

STATUS = 3
END_S = deadline(60)
"""Less than the client's own timeouts take together."""

PROGRAM = """
import sys, threading, time
import tenacity
from keyshard import KeyShardSource, RetryPolicy
from keyshard.errors import KeyShardError, NotRunningError

url, topic, how = sys.argv[1:]
source = KeyShardSource(
    topic, subscription=how, parallelism=4, service_url=url, starting_position="earliest"
)

def frozen():
    print("ready", flush=True)
    sys.stdin.readline()

def once_it_runs():
    while True:
        try:
            if source.status()["state"] == "running":
                break
        except NotRunningError:
            pass
        time.sleep(0.05)

def left_open():
    stream = source.open()
    assert stream.next_batch(60)
    frozen()

def batches_broken_off():
    for batch in source.batches(max_rows=100):
        batch.ack()
        frozen()
        sys.exit(3)

def run_in_a_daemon_thread():
    threading.Thread(target=source.run, args=[lambda _: time.sleep(0.001)], daemon=True).start()
    once_it_runs()
    frozen()

def moving_ranges():
    def move():
        while True:
            try:
                source.rescale(len(source.status()["ranges"]) % 5 + 2)
            except KeyShardError:
                time.sleep(0.05)
    def told():
        once_it_runs()
        frozen()
        time.sleep(0.5)
        source.stop()
    threading.Thread(target=move, daemon=True).start()
    threading.Thread(target=told, daemon=True).start()
    source.run(lambda _: time.sleep(0.001))

def raising():
    def handle(_):
        frozen()
        raise ValueError("no more")
    once = RetryPolicy(stop=tenacity.stop_after_attempt(1))
    try:
        source.run(handle, on_failure="stop", workers=1, retry=once)
    except KeyShardError as exc:
        print(exc)

globals()[how]()
sys.exit(3)
"""
WAYS = ("left_open", "batches_broken_off", "run_in_a_daemon_thread", "moving_ranges", "raising")


@contextmanager
def running(how: str, broker: DevBroker, topic: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, broker.service_url, topic, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", WAYS)
def test_a_program_ends_as_it_chose_though_its_broker_is_frozen(
    how: str, dev_broker: DevBroker, topic_name: str
) -> None:
    create_partitioned_topic(dev_broker.admin_url, topic_name, 2)
    produce(Workload(messages=2_000, keys=50), dev_broker.service_url, topic_name)
    group = dev_broker.pid
    assert group is not None
    with running(how, dev_broker, topic_name) as process:
        assert process.stdout is not None
        output = ""
        while "ready" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        os.killpg(group, signal.SIGSTOP)
        try:
            output += process.communicate("frozen\n", timeout=END_S)[0]
        finally:
            os.killpg(group, signal.SIGCONT)
        assert process.returncode == STATUS, output
