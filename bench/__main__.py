"""``python -m bench ingest --json FILE``: run a benchmark, print and write its figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import (
    batch,
    bounded,
    cold,
    decode,
    growth,
    history,
    idle,
    index,
    ingest,
    lanes,
    peer,
    ray_jobs,
    rescale,
    scale_sim,
    schemas,
    segments,
    sink,
    skew,
    spark_cpu,
    splits,
    stalled,
    starts,
    transport,
    triggers,
    tuning,
    unpark,
    watched,
    wide,
    workers,
)
from bench.release import PULSAR

_OF_MESSAGES = {"ingest": ingest.run, "batch": batch.run}
_WITHOUT_OPTIONS = {
    "idle": idle.run, "lanes": lanes.run, "skew": skew.run, "rescale": rescale.run,
    "wide": wide.run, "growth": growth.run, "workers": workers.run,
    "scale_sim": scale_sim.run, "cut": scale_sim.cut, "ray": ray_jobs.run, "bounded": bounded.run,
    "transport": transport.run, "spark_cpu": spark_cpu.run, "tuning": tuning.run,
    "schemas": schemas.run, "sink": sink.run,
    "stalled": stalled.run,
    "starts": starts.run,
    "triggers": triggers.run,
    "cold": cold.run,
    "decode": decode.run,
    "segments": segments.run,
    "splits": splits.run,
    "index": index.run,
    "unpark": unpark.run,
    "watched": watched.run,
    "check": history.run,
}  # fmt: skip


def commit() -> str:
    """Return the checked-out commit, with ``+`` if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def machine() -> str:
    """Describe processor, cores, memory and Python version."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("bench", choices=[*_OF_MESSAGES, *_WITHOUT_OPTIONS, "peer"])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--messages",
        type=int,
        default=1_000_000,
        help="messages for each shape of entries; ingest, batch and peer only",
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of each system; peer only")
    parser.add_argument("--part", choices=peer.PARTS, help="measure this alone; peer only")
    parser.add_argument("--jars", type=Path, help="directory of the connector's jars; peer only")
    arguments = parser.parse_args()
    if arguments.bench in _OF_MESSAGES:
        figures = _OF_MESSAGES[arguments.bench](arguments.messages)
    elif arguments.bench == "peer":
        figures = peer.run(arguments.messages, arguments.turns, arguments.jars, arguments.part)
    else:
        figures = _WITHOUT_OPTIONS[arguments.bench]()
    result = {
        "bench": arguments.bench,
        "commit": commit(),
        "machine": machine(),
        "pulsar": PULSAR,
        "figures": figures,
    }
    table = Table(title=f"bench {arguments.bench} on {result['machine']}, Pulsar {PULSAR}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if value < 100 else f"{value:,.0f}")
    Console().print(table)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
