"""How long do the keys of a segment wait at its split?

A producer publishes to a topic of one segment, which is split after a few seconds. The figures are
the longest times from the publication of a message to its handler or to the cut of its batch:
before the split, and around it. Handlers are measured while one key of the parent takes long, and
batches with a trigger of two seconds, which releases a batch before it cuts the next one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import httpx

from keyshard import KeyShardSource, Message
from keyshard.broker.port import Producer
from keyshard.broker.wire.broker import WireBroker
from keyshard.config.connection import Connection
from keyshard.core.position.entry import TopicPartition
from keyshard.errors import BrokerError
from keyshard.testing.devbroker import DevBroker

VERSION = "5.0.1"
"""Release of Pulsar; earlier ones have no scalable topics."""
KEYS = 40
PAUSE_S = 0.02
"""Time between two messages, seconds."""
SLOW, SLOW_S = "slow", 8.0
"""The key that takes long, and how long, seconds."""
TRIGGER_S = 2.0
CALM_S, AFTER_S = 5.0, 10.0
"""Times of publication before and after the split, seconds."""
END_S = 120.0
"""Longest wait for the last messages, seconds."""


def run() -> dict[str, float]:
    """Return the longest times, seconds."""
    figures: dict[str, float] = {}
    with DevBroker(VERSION) as broker:
        for name, consume in (("handlers", _handlers), ("batches", _batches)):
            calm_s, split_s = _measured(broker, name, consume)
            figures |= {f"{name}_before_s": calm_s, f"{name}_at_split_s": split_s}
    return figures


Arrived = Callable[[bytes], None]
"""Called with the value of each message that is handled or cut."""
Consume = Callable[[KeyShardSource, Arrived, threading.Event], None]


def _measured(broker: DevBroker, name: str, consume: Consume) -> tuple[float, float]:
    topic = f"topic://public/default/{name}"
    path = topic.replace("topic://", "/admin/v2/scalable/")
    source = KeyShardSource(
        topic, subscription="bench", service_url=broker.service_url, admin_url=broker.admin_url,
        starting_position="earliest", parallelism=4,
    )  # fmt: skip
    sent: list[float] = []
    arrived: dict[int, float] = {}
    stopping = threading.Event()

    def note(value: bytes) -> None:
        if value != b"slow":
            arrived[int(value)] = time.monotonic()

    with httpx.Client(base_url=broker.admin_url, timeout=30) as http:
        http.put(path).raise_for_status()
        consumer = threading.Thread(target=consume, args=(source, note, stopping))
        consumer.start()
        with _sender(broker, topic) as send:
            send(SLOW, b"slow")
            split_at = None
            began_s = time.monotonic()
            for number in itertools.count():
                sent.append(time.monotonic())
                send(f"k{number % KEYS}", b"%d" % number)
                time.sleep(PAUSE_S)
                since_s = time.monotonic() - began_s
                if split_at is None and since_s > CALM_S:
                    send(SLOW, b"slow")
                    http.post(f"{path}/split/0").raise_for_status()
                    split_at = number
                if since_s > CALM_S + AFTER_S:
                    break
        end_s = time.monotonic() + END_S
        while len(arrived) < len(sent) and time.monotonic() < end_s:
            time.sleep(PAUSE_S)
        stopping.set()
        consumer.join()
    assert split_at is not None
    assert len(arrived) == len(sent), f"{len(sent) - len(arrived)} messages did not arrive"
    took = [arrived[number] - at for number, at in enumerate(sent)]
    # The first half also has the start of the source.
    return max(took[split_at // 2 : split_at - KEYS]), max(took[split_at - KEYS :])


def _handlers(source: KeyShardSource, arrived: Arrived, stopping: threading.Event) -> None:
    """Handle messages; those of one key take long."""

    def handle(message: Message) -> None:
        if message.key == SLOW:
            stopping.wait(SLOW_S)
        arrived(message.value or b"")

    with source.running(handle, lanes=4):
        stopping.wait()


def _batches(source: KeyShardSource, arrived: Arrived, stopping: threading.Event) -> None:
    """Cut a batch at each trigger, after the previous one is released."""
    coordinator = source.coordinator()
    coordinator.start()
    before = None
    due_s = time.monotonic()
    try:
        while not stopping.is_set():
            due_s += TRIGGER_S
            stopping.wait(due_s - time.monotonic())
            if before is not None:
                coordinator.batches.release(before)
            before = coordinator.batches.cut()
            if before is None:
                continue
            for index in coordinator.batches.plan(before):
                for rows in coordinator.batches.read(before.batch_id, index, ["value"]):
                    for value in rows.column("value").to_pylist():
                        arrived(value)
    finally:
        coordinator.stop()


@contextmanager
def _sender(broker: DevBroker, topic: str) -> Iterator[Callable[[str, bytes], None]]:
    """Yield a function that publishes to the open segment of a key."""
    producers: dict[TopicPartition, Producer] = {}
    with closing(WireBroker(Connection(broker.service_url))) as client:
        watch = client.watch_segments(topic, lambda: None)

        def send(key: str, value: bytes) -> None:
            while True:
                graph = watch.graph
                where = graph.partition(graph.segment_of(key).number)
                try:
                    if where not in producers:
                        producers[where] = client.producer(where, send_timeout_ms=20_000)
                    producers[where].send(value, key=key)
                    return
                except BrokerError as exc:
                    if "Terminated" not in str(exc):
                        raise
                time.sleep(PAUSE_S)  # the next graph names the successor

        yield send
