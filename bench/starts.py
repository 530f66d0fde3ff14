"""How long does a query take to its first batch, and how much processor time of Python?

The broker holds 1,000 messages and has no other load. Environment variables choose the compared
installation or setting, such as ``SPARK_HOME``, or
``PYSPARK_SUBMIT_ARGS="--conf NAME=VALUE pyspark-shell"``.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from contextlib import suppress

import psutil

from bench.child import child
from bench.ingest import load
from bench.release import PULSAR
from bench.spark_run import start
from examples.parquet_query import session
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload

SESSIONS, QUERIES = 3, 4
LOOK_S = 0.03
"""Polling interval of the processes, seconds. Some of them live for half a second."""


def run() -> dict[str, float]:
    """Return medians of the first query of a session, and of its later ones."""
    with DevBroker(PULSAR, optimised=True) as broker:
        load(broker, "start", Workload(1_000, keys=100, batching="none"))
        arguments = {"service_url": broker.service_url, "topic": "start"}
        found = [child("bench.starts", json.dumps(arguments)) for _ in range(SESSIONS)]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def starts(service_url: str, topic: str) -> dict[str, float]:
    """Start queries in one session, one after the other."""
    session()
    times, costs = zip(*(_start(service_url, topic) for _ in range(QUERIES)), strict=True)
    return {
        "first_s": times[0], "first_python_s": costs[0], "later_s": statistics.median(times[1:]),
        "later_python_s": statistics.median(costs[1:]),
    }  # fmt: skip


def _start(service_url: str, topic: str) -> tuple[float, float]:
    """Return the time to the first batch and the processor time of Python processes, seconds."""
    spent: dict[int, float] = {}
    stop = threading.Event()
    before = _look({})

    def watch() -> None:
        while not stop.wait(LOOK_S):
            _look(spent)

    watching = threading.Thread(target=watch)
    watching.start()
    began_s = time.monotonic()
    try:
        query = start(service_url, topic, "earliest")
        while not any(one["numInputRows"] for one in query.recentProgress):
            if not query.isActive:
                sys.exit(f"the query ended: {query.exception()}")
            time.sleep(LOOK_S)
        took_s = time.monotonic() - began_s
    finally:
        stop.set()
        watching.join()
    query.stop()
    return took_s, sum(used - before.get(pid, 0.0) for pid, used in spent.items())


def _look(spent: dict[int, float]) -> dict[int, float]:
    """Note the processor time of each Python process below this one, seconds."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name() != "java":
                spent[process.pid] = sum(process.cpu_times()[:2])
    return spent


if __name__ == "__main__":
    print(json.dumps(starts(**json.loads(sys.argv[1]))))
