"""How long do other keys wait while many parked keys are unparked at once? No broker needed.

The dead-letter topic of the in-memory broker has one dead letter per parked key. After
``unpark(all)``, messages of other keys arrive one after the other. Their latency is from publish to
handler.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from statistics import quantiles
from typing import Any

from rich.console import Console

from keyshard import KeyShardSource
from keyshard.broker.memory import MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.core.dead_letter import DeadLetter, DeadLetterKind
from keyshard.core.message import Message, MessageId
from keyshard.errors import NotRunningError

KEYS = (5_000, 20_000, 100_000)
GOOD_KEYS = 20
EVERY_S = 0.01
MEASURED_S = 10.0
"""Shortest time in which messages of other keys are published, seconds."""

_console = Console(stderr=True)


def run() -> dict[str, float]:
    """Return latencies of other keys in seconds, by number of parked keys."""
    figures: dict[str, float] = {}
    for keys in KEYS:
        found = measure(keys)
        figures |= {f"{name}_{keys}": value for name, value in found.items()}
        _console.print(f"{keys:,} keys: {found}")
    return figures


def measure(keys: int, measured_s: float = MEASURED_S) -> dict[str, float]:
    """Unpark ``keys`` keys, and measure the latency of others."""
    cluster = MemoryCluster.named(f"unpark-{keys}")
    topic = cluster.create_topic("orders", partitions=2)
    dead_letters = cluster.create_topic("orders-keyshard-DLQ")
    cluster.publish(dead_letters, *[_dead_letter(topic, n) for n in range(keys)])
    published: dict[bytes, float] = {}
    waited: list[float] = []

    def handle(message: Message) -> None:
        if message.value:
            waited.append(time.monotonic() - published[message.value])

    source = KeyShardSource(
        topic, service_url=f"memory://unpark-{keys}", parallelism=4, starting_position="earliest"
    )
    thread = threading.Thread(target=source.run, args=(handle,), daemon=True)
    thread.start()
    while not _runs(source):
        time.sleep(0.01)
    began_s = time.monotonic()
    assert source.unpark(all=True) == keys
    unparked_s = time.monotonic() - began_s
    number = 0
    while time.monotonic() - began_s < measured_s or len(waited) < len(published):
        if time.monotonic() - began_s < measured_s:
            number += 1
            value = b"%d" % number
            published[value] = time.monotonic()
            cluster.publish(topic, Stored(value, key=f"good-{number % GOOD_KEYS}"))
        time.sleep(EVERY_S)
    left = source.status()["parkedKeys"] or 0
    let_out = (keys - left) / (time.monotonic() - began_s)
    source.stop()
    thread.join()
    return {
        "unpark_s": round(unparked_s, 3),
        "latency_max_s": round(max(waited), 3),
        "latency_p99_s": round(quantiles(waited, n=100)[98], 3),
        "keys_per_s": round(let_out, 1),
    }


def _dead_letter(topic: str, number: int) -> Stored:
    key = f"bad-{number}"
    original = Message(
        b"", key, None, MessageId(10**6, number, 0), topic, 0, datetime.now(timezone.utc), None, {},
        None, redelivered=False,
    )  # fmt: skip
    dead_letter = DeadLetter(original, "keyshard", DeadLetterKind.PARKED, 3, "broken")
    return Stored(b"", key=key, properties=dead_letter.properties())


def _runs(source: KeyShardSource) -> bool:
    try:
        status: Any = source.status()
    except NotRunningError:
        return False
    return bool(status["state"] == "running")
