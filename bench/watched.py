"""What does being watched cost: a source whose metrics and page are read, against neither?

Both are measured in turn, each in a separate process: reading a topic of a broker, and idle on the
in-memory broker. The idle figures are processor times, so other work on the machine changes them
little.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

MESSAGES = 1_000_000
RUNS = 3
IDLE_S = 6.0
SCRAPE_S = 1.0
"""Interval of scrapes of the metrics, seconds; Prometheus scrapes less often."""

_console = Console(stderr=True)


class Watcher:
    """A browser that has the page open, and a Prometheus that scrapes, until :meth:`close`."""

    def __init__(self, metrics_port: int, ui_port: int) -> None:
        self.looks = self.scrapes = 0
        self._closed = threading.Event()
        self._events = f"http://127.0.0.1:{ui_port}/api/events"
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._look, self._scrape)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(10)

    def _look(self) -> None:
        with _client() as client:
            while not self._closed.wait(0.05):
                with suppress(httpx.HTTPError), client.stream("GET", self._events) as answer:
                    for line in answer.iter_lines():
                        self.looks += line.startswith("data: ")

    def _scrape(self) -> None:
        with _client() as client:
            while not self._closed.wait(SCRAPE_S):
                with suppress(httpx.HTTPError):
                    self.scrapes += client.get(self._metrics).status_code == 200


def _client() -> httpx.Client:
    """Return a client without TLS, whose preparation would take the source's processor time."""
    return httpx.Client(timeout=5, trust_env=False, verify=False)


def free_port() -> int:
    """Return a port of the loopback interface on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        found: int = one.getsockname()[1]
        return found


def watched_settings(*, watched: bool) -> dict[str, Any]:
    """Return the options of a source that can be watched, or none."""
    return {"metrics_port": free_port(), "ui_port": free_port()} if watched else {}


def measure(
    module: str, task: str, arguments: dict[str, Any], *, watched: bool
) -> dict[str, float]:
    """Run a task of a module in a process, and watch its source."""
    settings = watched_settings(watched=watched)
    watcher = Watcher(settings["metrics_port"], settings["ui_port"]) if watched else None
    found: dict[str, float] = child(module, task, json.dumps(arguments | settings))
    if watcher is not None:
        watcher.close()
        found |= {"looks": watcher.looks, "scrapes": watcher.scrapes}
    return found


def in_turn(module: str, task: str, arguments: dict[str, Any]) -> dict[bool, dict[str, float]]:
    """Return medians of watched and of unwatched runs."""
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(RUNS):
        for watched in (False, True) if turn % 2 else (True, False):
            one = measure(module, task, arguments, watched=watched)
            found[watched].append(one)
            _console.print(f"{task} {turn + 1} of {RUNS}, watched {watched}: {one}")
    return {
        watched: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        for watched, runs in found.items()
    }


def idle(seconds: float, **settings: Any) -> dict[str, float]:
    """Return the processor time of a source of 10 ranges over 5 partitions without messages."""
    topic = MemoryCluster.named("watched").create_topic("orders", partitions=5)
    source = KeyShardSource(
        topic, subscription="watched", service_url="memory://watched", admin_url="memory://watched",
        parallelism=10, **settings,
    )  # fmt: skip
    with source.running(lambda _message: None):
        time.sleep(2.0)  # until the browser has its first look
        began_s, busy_s = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        busy_s, took_s = time.process_time() - busy_s, time.perf_counter() - began_s
    return {"cpu_ms_per_s": busy_s / took_s * 1e3}


def figures_of_idle() -> dict[str, float]:
    """Return what watching costs, milliseconds of processor time a second. Needs no broker."""
    found = in_turn("bench.watched", "idle", {"seconds": IDLE_S})
    on, off = found[True]["cpu_ms_per_s"], found[False]["cpu_ms_per_s"]
    return {
        "idle_watched_cpu_ms_per_s": on, "idle_unwatched_cpu_ms_per_s": off,
        "watching_cpu_ms_per_s": on - off,
        "idle_looks": found[True]["looks"], "idle_scrapes": found[True]["scrapes"],
    }  # fmt: skip


def run() -> dict[str, float]:
    """Return the figures of an idle source, and rates of watched runs over unwatched ones."""
    figures = figures_of_idle()
    with DevBroker(PULSAR, optimised=True) as broker:
        load(broker, "watched", Workload(MESSAGES, keys=1_000, size_bytes=100))
        arguments = {
            "service_url": broker.service_url, "admin_url": broker.admin_url, "topic": "watched",
            "messages": MESSAGES,
        }  # fmt: skip
        # The first reader of a broker is slow, and would be a watched one.
        measure("bench.embedded", "ingest", arguments, watched=False)
        found = in_turn("bench.embedded", "ingest", arguments)
    on, off = found[True], found[False]
    return figures | {
        "watched_over_unwatched": on["rows_per_s"] / off["rows_per_s"],
        "watched_rows_per_s": on["rows_per_s"],
        "unwatched_rows_per_s": off["rows_per_s"],
        "watched_cpu_us_per_row": on["cpu_us_per_row"],
        "unwatched_cpu_us_per_row": off["cpu_us_per_row"],
        "looks": on["looks"],
        "scrapes": on["scrapes"],
    }


if __name__ == "__main__":
    if sys.argv[1] == "idle":
        print(json.dumps(idle(**json.loads(sys.argv[2]))))
    else:
        print(json.dumps(figures_of_idle(), indent=2))
