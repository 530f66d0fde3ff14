"""AUTO_SPLIT with a skewed load: plain consumers, one thread each, in one process."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid

import pulsar

from bench.loads import handler_s

DEADLINE_S = 240.0
_POLL_MS = 200


def run(
    service_url: str,
    topic: str,
    messages: int,
    *,
    clients: int,
    consumers: int,
    low_ms: float,
    high_ms: float,
) -> dict[str, float]:
    """Handle everything with ``clients`` times ``consumers`` consumers.

    Returns:
        ``seconds`` from the first handler's start to the last one's end, and ``handled``, which is
        larger than ``messages`` if the broker redelivered some.
    """
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    connections = [pulsar.Client(service_url, logger=quiet) for _ in range(clients)]
    subscription = f"split-{uuid.uuid4().hex[:8]}"
    handles = [
        connection.subscribe(
            topic,
            subscription,
            consumer_type=pulsar.ConsumerType.KeyShared,
            initial_position=pulsar.InitialPosition.Earliest,
            key_shared_policy=pulsar.ConsumerKeySharedPolicy(pulsar.KeySharedMode.AutoSplit),
        )
        for connection in connections
        for _ in range(consumers)
    ]
    starts: list[float] = []
    ends: list[float] = []
    seen: set[tuple[int, int, int]] = set()
    done = threading.Event()

    def loop(consumer: pulsar.Consumer) -> None:
        while not done.is_set():
            try:
                message = consumer.receive(timeout_millis=_POLL_MS)
            except pulsar.Timeout:
                continue
            starts.append(time.perf_counter())
            time.sleep(handler_s(message.data(), low_ms, high_ms))
            ends.append(time.perf_counter())
            message_id = message.message_id()
            seen.add((message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()))
            consumer.acknowledge(message)
            if len(seen) >= messages:
                done.set()

    threads = [threading.Thread(target=loop, args=(handle,), daemon=True) for handle in handles]
    for thread in threads:
        thread.start()
    if not done.wait(DEADLINE_S):
        sys.exit(f"received only {len(seen)} of {messages} messages within {DEADLINE_S:.0f} s")
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()
    return {"seconds": max(ends) - min(starts), "handled": float(len(ends))}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
