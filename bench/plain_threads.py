"""The yardstick of :mod:`bench.lanes`: threads that handle messages of a plain client.

There is one Shared consumer, one queue, and as many threads as lanes. A message is acknowledged
when its handler returns. There is no order, no checkpoint and no retry. The same threads also run
without a client.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pulsar

from bench.loads import handler_s

RECEIVE_MS = 10_000


def run(
    service_url: str, topic: str, messages: int, *, threads: int, low_ms: float, high_ms: float
) -> dict[str, float]:
    """Handle everything once with a client and once without.

    Returns:
        ``plain_s`` and ``sleeping_s``, from the first handler's start to the last one's end.
    """
    client = pulsar.Client(service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        consumer = client.subscribe(
            topic,
            f"plain-{uuid.uuid4().hex[:8]}",
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
        )
        values: list[bytes] = []

        def handle(message: Any) -> None:
            values.append(message.data())
            time.sleep(handler_s(values[-1], low_ms, high_ms))
            consumer.acknowledge(message)

        def received() -> Any:
            return consumer.receive(RECEIVE_MS)

        plain_s = _run(threads, messages, received, handle)
    finally:
        client.close()
    asleep = iter([handler_s(value, low_ms, high_ms) for value in values])
    return {"plain_s": plain_s, "sleeping_s": _run(threads, messages, asleep.__next__, time.sleep)}


def _run(
    threads: int, messages: int, following: Callable[[], Any], handle: Callable[[Any], None]
) -> float:
    """Return the seconds that threads take for messages that one more thread hands out."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    starts: list[float] = []
    ends: list[float] = []

    def hand_out() -> None:
        for _ in range(messages):
            waiting.put(following())
        for _ in range(threads):
            waiting.put(None)

    def work() -> None:
        while (one := waiting.get()) is not None:
            starts.append(time.perf_counter())
            handle(one)
            ends.append(time.perf_counter())

    workers = [threading.Thread(target=target) for target in [*[work] * threads, hand_out]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(ends) - min(starts)


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
