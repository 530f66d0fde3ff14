"""A job or a bounded read on a real Ray, which the measured process starts for each shape.

The process of the job holds the window, and copies of the rows of its calls. Its actors hold the
rows of a call. The task of the read holds the blocks that it makes. The memory of each process
before that, with Ray and the imports, is subtracted. Memory that a process maps of Ray's object
store does not count, because the store has its own limit (``object_store_memory``). ``VmHWM``
counts it, so the memory is sampled every 10 ms instead. Results are small here: the handler decides
what they take.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, read_datasource

import ray_adapter
from keyshard import KeyShardSource, Message
from keyshard.columns.record_batches import SCHEMA
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.core.position.split import Span, Split
from ray_adapter.datasource import KeyShardDatasource
from ray_adapter.options import Takes
from tests.memory.gauge import ENOUGH_S, memory, wait
from tests.memory.shape import Shape
from tests.support.frame_broker.topics import LEDGER

ACTORS = 2
STORE_BYTES = 256 << 20
ENTRIES = 100_000
BLOCKS = 4
"""Blocks of the read for each window."""
SLOW_S = 0.1
"""How long a handler takes, and the sink of the read for a block, seconds."""


class Slow:
    """Returns what its process takes without Ray's store; slow with its first calls."""

    def __init__(self) -> None:
        self._sampled = Sampled()
        self._sleeps = int(ENOUGH_S / SLOW_S)

    def __call__(self, _given: Message | pa.RecordBatch) -> int:
        if self._sleeps:
            self._sleeps -= 1
            time.sleep(SLOW_S)
        return self._sampled.peak


class Sampled:
    """The peak of this process from now on, without what it maps of Ray's store; every 10 ms."""

    def __init__(self) -> None:
        self._base = own_memory()
        self.peak = 0
        threading.Thread(target=self._sample, name="sampled", daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, own_memory() - self._base)
            time.sleep(0.01)


def own_memory(pid: str = "self") -> int:
    """Resident memory of a process now, without what it maps of Ray's store, bytes."""
    return memory("VmRSS", pid) - memory("RssShmem", pid)


def on_ray(source: KeyShardSource, shape: Shape) -> dict[str, Any]:
    """Run a read, or a job with a slow handler."""
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=STORE_BYTES,
    )  # fmt: skip
    try:
        return read(source.service_url, shape) if shape.reads else job(source, shape)
    finally:
        ray.shutdown()


def job(source: KeyShardSource, shape: Shape) -> dict[str, Any]:
    """The caller takes results twice, each time once nothing more is received."""
    here, actor = Sampled(), 0
    takes: Takes = "arrow" if shape.arrow else "messages"
    with ray_adapter.run(source, Slow, parallelism=ACTORS, takes=takes, num_cpus=0) as running:
        results = iter(running)
        for _ in range(2):
            wait(lambda: running.status()["source"]["window"] or {"rowsReceived": 0})
            end_s = time.monotonic() + ENOUGH_S
            for output in results:
                actor = max(actor, output)
                if time.monotonic() > end_s:
                    break
        window = running.status()["source"]["window"]
        assert window is not None, "the source has started"
        rows = window["rowsReceived"]
        running.stop()
    return {"peak": here.peak, "rows": rows, "workers": actor}


def read(url: str, shape: Shape) -> dict[str, Any]:
    """A slow sink of a bounded read; the peak of a task, above what it takes with its imports."""
    # Ray collects a block, copies it, and slices the copy.
    DataContext.get_current().target_max_block_size = shape.window_bytes // BLOCKS
    base: int = ray.get(ray.remote(prepare).remote())
    rows, peak, ended = 0, 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            for pid in pids:
                with suppress(OSError, StopIteration):  # it has ended
                    peak = max(peak, own_memory(pid) - base)

    with OneLedger() as admin_url:
        splits = [
            Split(
                TopicPartition("persistent://public/default/t", number),
                (Span(LEDGER, 0, ENTRIES, ENTRIES * 200),),
            )
            for number in range(shape.partitions)
        ]
        source = KeyShardDatasource(Connection(url, admin_url=admin_url), splits, SCHEMA.names)
        dataset = read_datasource(source, override_num_blocks=shape.partitions)
        pids = list(ray_processes())
        threading.Thread(target=sample, daemon=True).start()
        end_s = time.monotonic() + 2 * ENOUGH_S
        for part in dataset.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        ):
            rows += part.num_rows
            time.sleep(SLOW_S)
            if time.monotonic() > end_s:
                break
        ended.set()
    return {"peak": 0, "rows": rows, "workers": peak}


def prepare() -> int:
    """Memory of a task that has imported what a read imports, bytes."""
    for name in ("keyshard.broker.wire.broker", "ray_adapter.datasource"):
        import_module(name)
    return own_memory()


def ray_processes() -> Iterator[str]:
    """Processes of Ray below this one that run actors and tasks."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            pid, _, rest = each.read_text().partition(" (")
            parents[pid] = rest.rpartition(") ")[2].split()[1]
    for pid in parents:
        above = pid
        while above in parents and above != str(os.getpid()):
            above = parents[above]
        with suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
            if above == str(os.getpid()) and name.startswith(b"ray::"):
                yield pid


class OneLedger:
    """An admin interface that knows one ledger of each topic partition, in which there is all."""

    def __enter__(self) -> str:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Ledgers)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Ledgers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        stored = {"ledgerId": LEDGER, "entries": ENTRIES, "size": ENTRIES * 200}
        last = f"{LEDGER}:{ENTRIES - 1}"
        body = json.dumps({"ledgers": [stored], "lastConfirmedEntry": last}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
