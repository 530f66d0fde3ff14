"""The process that is measured: ``python -m tests.memory.subject URL SHAPE``."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any, cast

from keyshard import KeyShardSource
from keyshard.broker.admin.port import Admin
from keyshard.broker.wire.broker import WireBroker
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.connection import Connection
from keyshard.coordinator.batch_reading import read_batch
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.ledger import Ledger
from keyshard.core.position.split import Span, Split
from keyshard.reading.split_reader import read_split
from tests.memory.gauge import ENOUGH_S, memory, wait
from tests.memory.shape import Shape
from tests.support.frame_broker.topics import LEDGER

ENTRIES = 100_000


def main() -> None:
    """Read, and tell the peak of each process."""
    url, shape = sys.argv[1], Shape(**json.loads(sys.argv[2]))
    Path("/proc/self/clear_refs").write_text("5")
    base = memory("VmRSS", "self")
    output = {"batch": batch, "spark": spark, "ray": on_ray}.get(shape.way, stream)(url, shape)
    print(json.dumps({"peak": memory("VmHWM", "self") - base, "base": base} | output))


def source_of(url: str, shape: Shape) -> KeyShardSource:
    """A source that is limited by bytes."""
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
    from spark_adapter.task_rows import Rows  # noqa: PLC0415

    Path("/proc/self/clear_refs").write_text("5")
    reader = KeyShardStreamReader(source_of(url, shape), Rows(SCHEMA.names))
    start, found = reader.initialOffset(), 0
    for _ in range(3):
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        runtime = reader._runtime
        assert runtime is not None
        wait(runtime.coordinator.status)
        if end == start:  # nothing came in time: Spark runs no batch
            continue
        for partition in reader.partitions(start, end):
            found += sum(part.num_rows for part in read_batch(partition.ticket))  # type: ignore[attr-defined]
        reader.commit(end)
        start = end
    reader.stop()
    return {"rows": found, "workers": 0}


def on_ray(url: str, shape: Shape) -> dict[str, Any]:
    """Run a job and a read on Ray; Ray is imported on use."""
    from tests.memory.on_ray import on_ray  # noqa: PLC0415

    return on_ray(source_of(url, shape), shape)


class OneLedger:
    """An admin interface that knows one ledger, in which there is everything."""

    def ledgers(self, _: TopicPartition) -> tuple[Ledger, ...]:
        return (Ledger(LEDGER, ENTRIES, ENTRIES * 200),)

    def created(self, _: TopicPartition) -> str:
        return ""


def batch(url: str, shape: Shape) -> dict[str, Any]:
    """Read two splits with sizes that suggest small entries, into a slow sink."""
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


if __name__ == "__main__":
    main()
