"""The end of a program, of its main thread, and of a start that a signal meets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers import wait_until
from tests.support.deadlines import deadline

REPOSITORY = Path(__file__).parents[2]
ENDS_S = deadline(15)
"""Longest time until a program must have ended, seconds; most of it is for a busy machine."""
HEAD = """
import faulthandler, pathlib, threading, time
from keyshard import KeyShardSource, Reject
from keyshard.broker.memory import MemoryCluster, MemoryBroker, Message
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.core.ring.hash_range import split_ring

faulthandler.enable()
folder = pathlib.Path(".")
cluster = MemoryCluster.named("ends")
topic = cluster.create_topic("orders", partitions=2)
source = KeyShardSource(
    topic, subscription="keyshard", service_url="memory://ends", parallelism=2,
    starting_position="earliest", subscribe_timeout_ms=60_000, discovery_interval_ms=20,
)
"""


class Program:
    """A program in a process of its own."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        (folder / "program.py").write_text(HEAD + text)
        self.process = subprocess.Popen(
            [sys.executable, "program.py"], cwd=folder, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def reached(self, name: str) -> None:
        """Wait until the program has written a file."""
        wait_until(
            lambda: (self._folder / name).exists() or self.process.poll() is not None, deadline(30)
        )

    def end(self) -> str:
        """Its output; it has to end in time, with status 0."""
        try:
            self.process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
        result = self.process.communicate(timeout=ENDS_S)[0]
        assert self.process.returncode == 0, result
        return result


START_THAT_WAITS = """
other = MemoryBroker(cluster)
for where in cluster.partitions(topic):
    other.subscribe(SubscriptionSpec(where, "keyshard", split_ring(1)[0], "other", 1),
                    StartPosition.EARLIEST)

def watch():
    while not any(one.name.startswith("keyshard-subscribe") for one in threading.enumerate()):
        time.sleep(0.01)
    starts()

threading.Thread(target=watch).start()
source.run(print)
print("ended in order")
"""
"""Calls ``starts()`` while the source waits for ranges that another consumer holds."""


def test_sigterm_during_the_start_ends_the_run_in_order(tmp_path: Path) -> None:
    program = Program(tmp_path, """
def starts():
    (folder / "starts").touch()
""" + START_THAT_WAITS)  # fmt: skip
    program.reached("starts")
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == "ended in order\n"


def test_a_signal_that_does_not_wake_the_main_thread_ends_the_start(tmp_path: Path) -> None:
    """As if the signal came just before the main thread began to wait."""
    program = Program(tmp_path, """
import signal

def starts():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
""" + START_THAT_WAITS)  # fmt: skip
    assert program.end() == "ended in order\n"


def test_a_run_continues_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """It finds new topics, parks, and gives its ranges back, though each takes threads."""
    program = Program(tmp_path, """
handled = []

def handle(message):
    if message.key == "bad":
        raise Reject("bad")
    handled.append(message.value)

def handles(count):
    while len(handled) < count:
        time.sleep(0.01)

def watch():
    threading.main_thread().join()
    time.sleep(0.1)
    cluster.grow_topic(topic, 4)
    while len(source.status()["partitions"]) < 4:
        time.sleep(0.01)
    cluster.publish(topic, Message(b"", key="bad"))
    cluster.publish(topic, *[Message(b"2", key=f"k{n}") for n in range(20)])
    handles(21)
    while not source.status()["counters"]["rejected"]:
        time.sleep(0.01)
    source.stop()

def run():
    source.run(handle)
    print("ended in order")

cluster.publish(topic, Message(b"1", key="k"))
threading.Thread(target=run).start()
threading.Thread(target=watch).start()
handles(1)
""")  # fmt: skip
    assert program.end().splitlines()[-1] == "ended in order"


def test_a_run_after_the_end_of_the_main_thread_starts_or_names_the_reason(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path, """
def run():
    threading.main_thread().join()
    time.sleep(0.1)
    try:
        source.run(lambda message: source.stop())
    except Exception as exc:
        print(exc)
    print("ended")

cluster.publish(topic, Message(b"1", key="k"))
threading.Thread(target=run).start()
""")  # fmt: skip
    result = program.end()
    if sys.version_info >= (3, 12):
        assert "KEYSHARD_THREAD_START" in result
    else:
        assert result == "ended\n"


def test_a_program_that_does_not_close_its_stream_ends(tmp_path: Path) -> None:
    program = Program(tmp_path, """
from keyshard.threads import Pool
stream = source.open()
cluster.publish(topic, Message(b"1", key="k"))
assert stream.next_batch(10)
Pool(1, "keyshard-hangs").submit(threading.Event().wait)
print("main ends")
""")  # fmt: skip
    began = time.monotonic()
    assert program.end().splitlines()[0] == "main ends"
    assert time.monotonic() - began < ENDS_S
