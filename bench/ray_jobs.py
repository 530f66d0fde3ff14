"""What does a Ray job cost, and what does it gain for handlers that compute?

Each figure is measured in a separate process on one broker, after all messages are published.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from rich.console import Console

import ray_adapter
from bench.child import child
from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.workloads import Workload, create_partitioned_topic, produce

MESSAGES, KEYS, PARTITIONS, RANGES, ACTORS = 100_000, 1_000, 5, 10, 2
CALLS = 500
COMPUTING = 1_500
COMPUTE_S = 0.005
DEADLINE_S = 200.0

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return all figures."""
    figures: dict[str, float] = {}
    with DevBroker(PULSAR) as broker:
        for topic, messages in (("rows", MESSAGES), ("few", COMPUTING)):
            create_partitioned_topic(broker.admin_url, topic, PARTITIONS)
            produce(Workload(messages, keys=KEYS, entry_messages=2), broker.service_url, topic)
        for name, topic, messages in (
            ("batches", "rows", MESSAGES),
            ("ray_arrow", "rows", MESSAGES),
            ("ray_messages", "rows", MESSAGES),
            ("ray_calls", "few", CALLS),
            ("computing_threads", "few", COMPUTING),
            ("computing_processes", "few", COMPUTING),
            ("computing_ray", "few", COMPUTING),
        ):
            seconds = child(
                "bench.ray_jobs", json.dumps([name, broker.service_url, topic, messages])
            )["seconds"]
            if name == "ray_calls":
                figures["ray_call_ms"] = seconds / messages * 1e3
            else:
                figures[f"{name}_per_s"] = messages / seconds
            _console.print(f"{name}: {messages / seconds:,.0f} per second")
    figures["ray_over_threads"] = (
        figures["computing_ray_per_s"] / figures["computing_threads_per_s"]
    )
    return figures


def computes(_message: object) -> int:
    """Use 5 ms of processor time."""
    end_s = time.thread_time() + COMPUTE_S
    while time.thread_time() < end_s:
        pass
    return 1


def one(_message: object) -> int:
    """Return a result for each message, without other work."""
    return 1


def rows_of(rows: Any) -> int:
    """Return the number of rows of an Arrow batch."""
    return int(rows.num_rows)


class Measured:
    """Ways to consume a topic. Each returns the seconds for all messages, without startup."""

    def __init__(
        self, service_url: str, topic: str, messages: int, workers: str = "embedded"
    ) -> None:
        self._messages = messages
        self._source = KeyShardSource(
            topic, service_url=service_url, subscription=f"ray-{uuid.uuid4().hex[:8]}",
            parallelism=RANGES, starting_position="earliest", workers=workers,
        )  # fmt: skip

    def batches(self) -> float:
        batches = self._source.batches(max_rows=5_000, max_wait_s=0.02)
        first = next(batches)
        began_s, rows = time.perf_counter(), -first.records.num_rows
        batch, left = first, self._messages
        while True:
            rows += batch.records.num_rows
            left -= batch.records.num_rows
            batch.ack()
            if left <= 0:
                seconds = time.perf_counter() - began_s
                batches.close()
                return float(seconds * self._messages / rows)
            batch = next(batches)

    def ray_arrow(self) -> float:
        return self._job(rows_of, takes="arrow", max_rows=5_000)

    def ray_messages(self) -> float:
        return self._job(one, max_rows=5_000)

    def ray_calls(self) -> float:
        return self._job(one, max_rows=1, parallelism=1)

    def computing_ray(self) -> float:
        return self._job(computes)

    def computing_threads(self) -> float:
        return self._handled(executor="threads", lanes=2)

    def computing_processes(self) -> float:
        return self._handled(executor="processes", workers=ACTORS)

    def _job(self, handler: Callable[..., int], **options: Any) -> float:
        left = self._messages
        with ray_adapter.run(self._source, handler, **({"parallelism": ACTORS} | options)) as job:
            # Actors and consumers are ready.
            began_s = time.perf_counter()
            for number in job:
                left -= number
                if left <= 0:
                    seconds = time.perf_counter() - began_s
                    job.stop()
        return seconds

    def _handled(self, **options: Any) -> float:
        ends: list[float] = []
        done = threading.Event()

        class Observer:
            def started(self, _message: Any) -> None: ...

            def completed(self, _message: Any, _seconds: float) -> None:
                ends.append(time.perf_counter())

            def failed(self, _message: Any, _seconds: float, _error: BaseException) -> None: ...

        def stop() -> None:
            end_s = time.monotonic() + DEADLINE_S
            while len(ends) < self._messages and time.monotonic() < end_s:
                done.wait(0.05)
            self._source.stop()

        threading.Thread(target=stop, daemon=True).start()
        self._source.run(computes, observers=[Observer()], **options)
        return (ends[-1] - ends[0]) * self._messages / (len(ends) - 1)


if __name__ == "__main__":
    # By default Ray's processes have lower priority than all others, also than the broker.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - its name
    name, *given = json.loads(sys.argv[1])
    print(json.dumps({"seconds": getattr(Measured(*given), name)()}))
