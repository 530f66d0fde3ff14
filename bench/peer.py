"""keyshard beside the JVM connector, in alternating turns on one broker; see ``bench/PEER.md``.

Each turn is a process of its own with a deadline. Figures are medians over the turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.child import child
from bench.ingest import PARTITIONS, load
from bench.loads import TRIGGER_RATE
from bench.peer_spark import START_ROWS
from bench.release import PULSAR
from keyshard.errors import ConfigError
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

SHAPES = {"large": 1_000, "small": 3}
"""Messages an entry."""
PARTS = (*SHAPES, "writes", "triggers")
TURN_S = 180
"""Most time of a turn, seconds."""
BATCH_ROWS = 100_000
TRIGGER_FIRST, TRIGGER_ROWS = 20, 1_000
FORMS = {"keyshard": "keyshard", "connector": "pulsar"}
"""Spark's name of each source. With jars on the class path, ``pulsar`` is theirs."""
_BLOCKING = {"pulsar.producer.blockIfQueueFull": "true"}
"""Otherwise the connector's write fails as soon as its client's memory limit is reached."""
WRITES = {
    "keyshard": {
        "exactly_once": {"sinkId": "peer"},
        "at_least_once": {"deliveryGuarantee": "at-least-once"},
    },
    "connector": {
        "lz4": _BLOCKING | {"pulsar.producer.compressionType": "LZ4"},
        "default": _BLOCKING,
    },
}  # fmt: skip
"""Options of the writers."""

_console = Console(stderr=True)


class Peer:
    """The two systems on one broker."""

    def __init__(self, broker: DevBroker, jars: Path, messages: int, turns: int) -> None:
        self._broker, self._messages, self._turns = broker, messages, turns
        self._jars = {"keyshard": "", "connector": str(jars)}
        self._found: dict[str, list[float]] = {}

    def figures(self) -> dict[str, float]:
        """Return medians of all that was measured."""
        return {name: statistics.median(values) for name, values in self._found.items()}

    def measure(self, part: str) -> None:
        """Measure one of :data:`PARTS`, both systems in turn."""
        if part in SHAPES:
            workload = Workload(self._messages, keys=1_000, size_bytes=100)
            load(self._broker, f"start-{part}", replace(workload, messages=START_ROWS))
            load(self._broker, part, replace(workload, entry_messages=SHAPES[part]))
        for turn in range(self._turns):
            for system in FORMS:
                if part in SHAPES:
                    self._reads(part, system)
                elif part == "writes":
                    self._writes(turn, system)
                else:
                    self._triggers(turn, system)

    def _reads(self, shape: str, system: str) -> None:
        """Measure streams and batch reads of a topic."""
        found = self._child(system, "read", {
            "topic": shape, "messages": self._messages, "small_topic": f"start-{shape}",
            "streams": self._streams(shape)[system],
        })  # fmt: skip
        for kind, costs in found.items():
            self._keep(f"{shape}_{kind}_{system}", costs)

    def _writes(self, turn: int, system: str) -> None:
        topics = {f"{name}-{system}-{turn}": how for name, how in WRITES[system].items()}
        for topic in topics:
            create_partitioned_topic(self._broker.admin_url, topic, PARTITIONS)
        found = self._child(system, "write", {"topics": topics, "rows": self._messages})
        for topic, costs in found.items():
            self._keep(f"write_{topic.partition('-')[0]}_{system}", costs)

    def _triggers(self, turn: int, system: str) -> None:
        """Measure micro-batches at a low publish rate."""
        topic = f"trigger-{system}-{turn}"
        create_partitioned_topic(self._broker.admin_url, topic, PARTITIONS)
        rate = Workload(TRIGGER_ROWS, 100, rate_per_s=TRIGGER_RATE, batching="none")
        produce(replace(rate, messages=TRIGGER_FIRST), self._broker.service_url, topic)
        asked = {
            "topic": topic, "first": TRIGGER_FIRST, "rows": TRIGGER_ROWS,
            "side": self._side(system),
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-m", "bench.peer_spark", "trigger", json.dumps(asked)],
            stdout=subprocess.PIPE, text=True,
        ) as query:  # fmt: skip
            assert query.stdout is not None
            query.stdout.readline()
            produce(rate, self._broker.service_url, topic)
            answer, _ = query.communicate(timeout=TURN_S)
        self._keep(f"trigger_{system}", json.loads(answer.splitlines()[-1]))

    def _streams(self, shape: str) -> dict[str, dict[str, dict[str, str]]]:
        """Return the options of each kind of stream: batches of all rows or of 100,000."""
        path = f"/admin/v2/persistent/public/default/{shape}/partitioned-internalStats"
        answer = httpx.get(self._broker.admin_url + path, timeout=20).raise_for_status()
        stored = sum(one["totalSize"] for one in answer.json()["partitions"].values())
        limit = int(stored / self._messages * BATCH_ROWS)
        window = {"windowMaxRows": str(2 * self._messages), "windowMaxBytes": str(2**30)}
        return {
            "keyshard": {"one_batch": window, "100k": {"maxOffsetsPerTrigger": str(BATCH_ROWS)}},
            "connector": {"one_batch": {}, "100k": {"maxBytesPerTrigger": str(limit)}},
        }

    def _side(self, system: str) -> dict[str, Any]:
        urls = {"service.url": self._broker.service_url, "admin.url": self._broker.admin_url}
        return {
            "jars": self._jars[system], "form": FORMS[system], "urls": urls,
            "broker_pid": self._broker.pid,
        }  # fmt: skip

    def _child(self, system: str, task: str, asked: dict[str, Any]) -> dict[str, dict[str, float]]:
        arguments = json.dumps(asked | {"side": self._side(system)})
        found: dict[str, dict[str, float]] = child(
            "bench.peer_spark", task, arguments, timeout_s=TURN_S
        )
        return found

    def _keep(self, kind: str, costs: dict[str, float]) -> None:
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in costs.items())
        _console.print(f"{kind}: {shown}")
        for name, value in costs.items():
            self._found.setdefault(f"{kind}_{name}", []).append(value)


def run(messages: int, turns: int, jars: Path | None, part: str | None) -> dict[str, float]:
    """Return all figures.

    Args:
        messages: Messages of each topic that is read, and rows that are written.
        turns: Turns of each system.
        jars: Directory with the connector's jar and those that it needs.
        part: One of :data:`PARTS`; default: all.

    Raises:
        ConfigError: The directory has no jar.
    """
    if jars is None or not any(jars.glob("*.jar")):
        raise ConfigError("Name the directory of the JVM connector's jars: --jars DIRECTORY.")
    settings = {"brokerDeduplicationEnabled": "true"}
    figures: dict[str, float] = {}
    for one in (part,) if part else PARTS:
        with DevBroker(PULSAR, optimised=True, settings=settings) as broker:
            peer = Peer(broker, jars.resolve(), messages, turns)
            peer.measure(one)
            figures |= peer.figures()
    return figures
