"""How fast is a topic read with 10 ranges: by the bare client, by keyshard, by Spark?

The figures are measured three times in turn, each in a separate process, on one broker.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

from rich.console import Console

from bench.child import child
from bench.release import PULSAR
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

PARTITIONS = 5
RUNS = 3
WARM_ROWS = 200_000
"""Rows that a Spark session reads before the measurement, to warm up the JVM."""

_console = Console(stderr=True)


def load(broker: DevBroker, topic: str, workload: Workload) -> None:
    """Publish a workload to a new topic."""
    create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
    report = produce(workload, broker.service_url, topic)
    _console.print(f"{topic}: {report.sent:,} messages at {report.rate_per_s:,.0f}/s")


def throughput(broker: DevBroker, topic: str, messages: int) -> dict[str, float]:
    """Return median rows per second of the bare client, the embedded runtime and Spark, in turn.

    The program ``bare`` reads data, key, id and publish time of each message, ``bare_touchless``
    does not.
    """
    url = broker.service_url
    bare = {"service_url": url, "topic": topic, "partitions": PARTITIONS, "messages": messages}
    embedded = {"service_url": url, "topic": topic, "messages": messages}
    spark = embedded | {"warm_topic": "warm", "warm": WARM_ROWS}
    found: dict[str, list[float]] = {}
    for turn in range(RUNS):
        rates = {
            "bare_touchless": child("bench.bare", json.dumps(bare | {"touching": False})),
            "bare": child("bench.bare", json.dumps(bare | {"touching": True})),
            "runtime": child("bench.embedded", "ingest", json.dumps(embedded))["rows_per_s"],
            "spark": child("bench.spark_run", "ingest", json.dumps(spark)),
        }
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        _console.print(f"{topic} run {turn + 1} of {RUNS}: {shown} rows/s")
        for name, rate in rates.items():
            found.setdefault(name, []).append(rate)
    return {name: statistics.median(rates) for name, rates in found.items()}


def shape(broker: DevBroker, workload: Workload, suffix: str) -> dict[str, float]:
    """Return all figures of one shape of entries."""
    topic = f"ingest{suffix}"
    load(broker, topic, workload)
    rates = throughput(broker, topic, workload.messages)
    arguments = {
        "service_url": broker.service_url, "topic": topic, "messages": workload.messages,
    }  # fmt: skip
    size = child("bench.embedded", "checkpoint", json.dumps(arguments))
    stalled = child("bench.embedded", "stalled", json.dumps(arguments))
    return {
        f"runtime_over_bare{suffix}": rates["runtime"] / rates["bare"],
        f"spark_over_bare{suffix}": rates["spark"] / rates["bare"],
        f"spark_rows_per_s{suffix}": rates["spark"],
        f"runtime_rows_per_s{suffix}": rates["runtime"],
        f"bare_rows_per_s{suffix}": rates["bare"],
        f"bare_touchless_rows_per_s{suffix}": rates["bare_touchless"],
        f"checkpoint_bytes_per_message{suffix}": size["bytes_per_message"],
        f"stalled_sink_peak_mb{suffix}": stalled["peak_mb"],
    }


def run(messages: int) -> dict[str, float]:
    """Return all figures, for small entries (about 2 messages) and large ones (1,000)."""
    small = Workload(messages, keys=1_000, size_bytes=100)
    figures: dict[str, float] = {}
    with DevBroker(PULSAR, optimised=True) as broker:
        load(broker, "warm", replace(small, messages=WARM_ROWS))
        figures |= shape(broker, small, "")
        figures |= shape(broker, replace(small, entry_messages=1_000), "_large")
        load(broker, "heavy", Workload(20_000, keys=1_000, size_bytes=100_000, batching="none"))
        heavy = {"service_url": broker.service_url, "topic": "heavy", "messages": 20_000}
        figures["stalled_sink_peak_mb_100kb"] = child(
            "bench.embedded", "stalled", json.dumps(heavy)
        )["peak_mb"]
    return figures
