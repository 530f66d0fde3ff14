"""What does writing cost: by a sink, by pulsar-client, from Spark; and what do readers gain?

All figures are of one broker that deduplicates, each measured in a separate process. The kinds take
turns; ratios are medians of the ratios of each turn, because other work disturbs turns alike. The
first turn only warms up the broker's JIT compiler.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time

from rich.console import Console

from bench.child import child
from bench.release import PULSAR
from bench.writers import PARTITIONS, stored
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import create_partitioned_topic

ROWS = 100_000
SPARK_ROWS = 1_000_000
RUNS = 5
STALLED_MB = 400
"""Size of the rows that a sink is given while its broker takes nothing."""
PENDING_MB = 64
GOALS = {
    "batch_over_client": 5.0,
    "batch_messages_per_entry": 50.0,
    "send_over_client": 1.0,
    "spark_over_batch": 0.8,
    "pipeline_small_over_read": 0.6,
    "pipeline_large_over_read": 0.6,
}
"""Least value of a figure."""
LIMITS = {"stalled_send_mb": PENDING_MB + 100.0, "stalled_batch_mb": PENDING_MB + 100.0}
"""Largest value of a figure."""
Turn = dict[str, dict[str, float]]

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return all figures, and say which goals are met."""
    settings = {"brokerDeduplicationEnabled": "true"}
    with DevBroker(PULSAR, optimised=True, settings=settings) as broker:
        figures = _one_by_one(broker)
        figures |= _from_spark(broker)
        figures |= _pipelines(broker)
        figures |= _read(broker)
        figures |= {f"stalled_{kind}_mb": _stalled(broker, kind) for kind in ("send", "batch")}
    for name, goal in (GOALS | LIMITS).items():
        met = figures[name] >= goal if name in GOALS else figures[name] <= goal
        verdict = "met" if met else "MISSED"
        _console.print(f"{name}: {figures[name]:,.2f}, goal {goal:g}: {verdict}")
    return figures


def _written(broker: DevBroker, kind: str, topic: str, rows: int) -> dict[str, float]:
    """Write rows to a new topic in a separate process."""
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    arguments = {
        "service_url": broker.service_url, "admin_url": broker.admin_url,
        "broker_pid": broker.pid, "topic": topic, "rows": rows,
    }  # fmt: skip
    found: dict[str, float] = child("bench.writers", kind, json.dumps(arguments))
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in found.items())
    _console.print(f"{topic}: {shown}")
    return found


def _medians(turns: list[Turn]) -> dict[str, float]:
    return {
        f"{kind}_{name}": statistics.median(turn[kind][name] for turn in turns)
        for kind, found in turns[0].items()
        for name in found
    }


def _ratio(turns: list[Turn], kind: str, of: str, name: str) -> float:
    return statistics.median(turn[kind][name] / turn[of][name] for turn in turns)


def _one_by_one(broker: DevBroker) -> dict[str, float]:
    kinds = ("client", "send", "batch")
    turns: list[Turn] = [
        {kind: _written(broker, kind, f"{kind}-{turn}", ROWS) for kind in kinds}
        for turn in range(RUNS + 1)
    ][1:]
    figures = _medians(turns)
    for kind in ("send", "batch"):
        figures[f"{kind}_over_client"] = _ratio(turns, kind, "client", "rows_per_s")
        for name in ("cpu_us", "broker_us"):
            figures[f"client_over_{kind}_{name}"] = _ratio(turns, "client", kind, name)
    return figures


def _from_spark(broker: DevBroker) -> dict[str, float]:
    turns: list[Turn] = [
        {
            f"{kind}_1m": _written(broker, kind, f"{kind}-1m-{turn}", SPARK_ROWS)
            for kind in ("batch", "spark")
        }
        for turn in range(3)
    ]
    over = _ratio(turns, "spark_1m", "batch_1m", "rows_per_s")
    return _medians(turns) | {"spark_over_batch": over}


def _pipelines(broker: DevBroker) -> dict[str, float]:
    """Measure a pipeline that reads, changes and writes a topic, and a read of the topic alone.

    One topic has small entries, the other large ones.
    """
    figures: dict[str, float] = {}
    for shape, kind in (("small", "client"), ("large", "batch")):
        topic = f"from-{shape}"
        rows = ROWS if shape == "small" else SPARK_ROWS
        _written(broker, kind, topic, rows)
        turns: list[Turn] = []
        for turn in range(3):
            create_partitioned_topic(broker.admin_url, f"copy-{shape}-{turn}", PARTITIONS)
            asked = {
                "service_url": broker.service_url, "broker_pid": broker.pid, "topic": topic,
                "rows": rows,
            }  # fmt: skip
            to = {"to": f"copy-{shape}-{turn}"}
            turns.append({
                f"read_{shape}": child("bench.writers", "copy", json.dumps(asked)),
                f"pipeline_{shape}": child("bench.writers", "copy", json.dumps(asked | to)),
            })  # fmt: skip
            _console.print(f"pipeline {shape}: {turns[-1]}")
        over = _ratio(turns, f"pipeline_{shape}", f"read_{shape}", "rows_per_s")
        figures |= _medians(turns) | {f"pipeline_{shape}_over_read": over}
    return figures


def _read(broker: DevBroker) -> dict[str, float]:
    """Read the messages of the client, and those of a sink."""
    kinds = ("client", "send", "batch")
    turns: list[Turn] = []
    for turn in range(4):
        found: dict[str, dict[str, float]] = {}
        for kind in kinds:
            asked = {"service_url": broker.service_url, "topic": f"{kind}-1", "messages": ROWS}
            found[f"reading_{kind}"] = child("bench.embedded", "ingest", json.dumps(asked))
        if turn:
            turns.append(found)
    _console.print(f"reading: {turns}")
    figures = _medians(turns)
    for kind in kinds[1:]:
        of = ("reading_client", "rows_per_s")
        figures[f"reading_{kind}_over_client"] = _ratio(turns, f"reading_{kind}", *of)
    return figures


def _stalled(broker: DevBroker, kind: str) -> float:
    """Return the memory that a sink adds while the broker is stopped, MB."""
    topic = f"stalled-{kind}"
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    asked = {
        "service_url": broker.service_url, "topic": topic, "megabytes": STALLED_MB, "kind": kind,
    }  # fmt: skip
    assert broker.pid is not None
    with subprocess.Popen(
        [sys.executable, "-m", "bench.writers", "stalled", json.dumps(asked)],
        stdout=subprocess.PIPE, text=True,
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        writer.stdout.readline()
        before = stored(broker.admin_url, topic)
        while stored(broker.admin_url, topic) == before and writer.poll() is None:
            time.sleep(0.01)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            answer, _ = writer.communicate(timeout=180)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    _console.print(f"stalled, {kind}: {found}")
    return found["added_mb"]
