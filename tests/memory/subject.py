"""The process that is measured: ``python -m tests.memory.subject URL SHAPE``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

from keyshard import KeyShardSource
from keyshard.arrow.columns import SCHEMA
from keyshard.broker.port import Admin
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import Span, Split
from keyshard.reading.split_reader import read_split
from keyshard.worker.flight import read_batch
from tests.memory.served import LEDGER
from tests.memory.shape import Shape

ENOUGH_S = 2.5
"""Longest time in which something is received, seconds."""
STILL_S = 0.4
"""Time without anything received after which the window counts as full, seconds."""
ENTRIES = 100_000


def main() -> None:
    """Read, and tell the peak of each process."""
    url, shape = sys.argv[1], Shape(**json.loads(sys.argv[2]))
    Path("/proc/self/clear_refs").write_text("5")
    base = memory("VmRSS", "self")
    told = {"batch": batch, "spark": spark}.get(shape.way, stream)(url, shape)
    print(json.dumps({"peak": memory("VmHWM", "self") - base, "base": base} | told))


def source_of(url: str, shape: Shape) -> KeyShardSource:
    """A source whose budget in bytes is what counts."""
    return KeyShardSource(
        "t", service_url=url, subscription="s", parallelism=shape.ranges,
        starting_position="earliest", window_rows_max=10_000_000,
        window_bytes_max=shape.window_bytes,
        workers="processes:2" if shape.way == "hosted" else "embedded",
    )  # fmt: skip


def stream(url: str, shape: Shape) -> dict[str, Any]:
    """A sink that takes two batches, each once nothing more is received."""
    workers = 0
    with source_of(url, shape).open() as opened:
        for _ in range(2):
            wait(opened.status)
            taken = opened.next_batch(10)
            assert taken is not None, "nothing came"
            wait(opened.status)
            for partition in taken.partitions:
                for _ in taken.read(partition):
                    pass
            opened.commit(taken)
        status = opened.status()
        for one in status["sourceWorkers"]:
            if one["kind"] != "embedded" and one["pid"]:
                workers = max(workers, memory("VmHWM", str(one["pid"])))
        return {"rows": status["rowsReceived"], "workers": workers}


def spark(url: str, shape: Shape) -> dict[str, Any]:
    """The stream process of a query: its reader as Spark calls it, and tasks that read it."""
    from spark_adapter.stream_reader import KeyShardStreamReader  # noqa: PLC0415
    from spark_adapter.structure import Rows  # noqa: PLC0415

    Path("/proc/self/clear_refs").write_text("5")
    reader = KeyShardStreamReader(source_of(url, shape), Rows(SCHEMA.names))
    start, found = reader.initialOffset(), 0
    for _ in range(3):
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        runtime = reader._runtime
        assert runtime is not None
        wait(runtime.coordinator.status)
        for partition in reader.partitions(start, end):
            found += sum(part.num_rows for part in read_batch(partition.ticket))  # type: ignore[attr-defined]
        reader.commit(end)
        start = end
    reader.stop()
    return {"rows": found, "workers": 0}


def wait(status: Callable[[], dict[str, Any]]) -> None:
    """Until nothing more is received."""
    end_s = time.monotonic() + ENOUGH_S
    rows, since_s = -1, time.monotonic()
    while time.monotonic() < end_s and time.monotonic() - since_s < STILL_S:
        found = status()["rowsReceived"]
        if found != rows:
            rows, since_s = found, time.monotonic()
        time.sleep(0.02)


class OneLedger:
    """An admin interface that knows one ledger, in which there is everything."""

    def ledgers(self, _: TopicPartition) -> tuple[Ledger, ...]:
        return (Ledger(LEDGER, ENTRIES, ENTRIES * 200),)

    def created(self, _: TopicPartition) -> str:
        return ""


def batch(url: str, shape: Shape) -> dict[str, Any]:
    """A bounded read of two splits, whose sizes say that entries are small; a slow sink."""
    broker = WireBroker(Connection(url))
    rows = size = 0
    end_s = time.monotonic() + ENOUGH_S
    for number in range(shape.partitions):
        where = TopicPartition("persistent://public/default/t", number)
        split = Split(where, (Span(LEDGER, 0, ENTRIES, ENTRIES * 200),))
        read = read_split(broker, cast("Admin", OneLedger()), split, SCHEMA.names, 10.0)
        for part in islice(read, 40):
            rows += part.num_rows
            size = max(size, part.nbytes)
            time.sleep(0.03)
            if time.monotonic() > end_s:
                break
    return {"rows": rows, "workers": 0, "batch": size}


def memory(name: str, pid: str) -> int:
    """Resident memory of a process, bytes: ``VmRSS`` now, ``VmHWM`` its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
