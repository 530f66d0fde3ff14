"""Keys that were set as bytes: their range, their order through rescales, and their batches."""

from __future__ import annotations

import time
from base64 import b64encode
from collections import Counter

import pyarrow as pa
import pytest

from keyshard import Message
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.ring.key_slot import key_slot
from keyshard.source_stream import SourceBatch
from tests.helpers import config, wait_until
from tests.support.parking_topic import ParkingTopic
from tests.support.recorded_handler import RecordedHandler

pytestmark = pytest.mark.simulated(seeds=1)

KEYS = [b64encode(b"customer-%d" % number).decode() for number in range(40)]


class BytesWorld(RecordedHandler):
    """A topic whose producers set keys as bytes."""

    def message(self, value: bytes, key: str) -> Stored:
        return Stored(value, key=key, key_is_base64=True)


def coordinator_of(cluster: MemoryCluster, topic: str, parallelism: int) -> Coordinator:
    source = config(topic, parallelism=parallelism, on_misrouted="fail")
    return Coordinator(source, lambda: MemoryBroker(cluster))


def test_keys_of_bytes_are_not_misrouted_and_a_replayed_batch_is_the_same() -> None:
    cluster = MemoryCluster()
    topic = cluster.create_topic("orders", partitions=2)
    messages = [
        Stored(f"{key}:{n}:".encode(), key=key, key_is_base64=True)
        for n in range(50)
        for key in KEYS
    ]
    cluster.publish(topic, *messages, batching=Batching.BY_KEY, batch_messages_max=7)
    first = coordinator_of(cluster, topic, 8)
    first.start()
    wait_until(lambda: first.status()["rowsReceived"] == len(messages))
    assert first.status()["misrouted"] == 0
    end = first.batches.cut()
    assert end is not None
    assert end.ranges == 8
    rows = rows_by_partition(first, end)
    first.stop()
    homes = {
        key: {part for part in rows for row in rows[part] if row["__key"] == key} for key in KEYS
    }
    assert all(len(found) == 1 for found in homes.values()), "a key has rows in two partitions"
    assert {row["__slot"] for part in rows.values() for row in part} == set(map(key_slot, KEYS))

    again = coordinator_of(cluster, topic, 3)
    again.start(end, planned=True)
    assert rows_by_partition(again, end) == rows
    again.stop()
    cluster.validate()


def rows_by_partition(coordinator: Coordinator, end: object) -> dict[int, list[dict[str, object]]]:
    batch = SourceBatch(coordinator, end)  # type: ignore[arg-type]
    indices = coordinator.batches.plan(batch.end)
    return {index: pa.Table.from_batches(batch.read(index)).to_pylist() for index in indices}


def test_order_holds_while_ranges_become_small_enough_to_tell_the_slot_of_a_key() -> None:
    """The text of a key has two possible slots; a range that holds only one of them decides."""
    slots: Counter[int] = Counter()

    def handle(message: Message) -> None:
        assert message.slot is not None
        slots[message.slot] += 1
        time.sleep(0.002_5)

    recorded = BytesWorld(handle, parallelism=1, options={"lanes": 8})
    try:
        for count in (16, 5, 1, 9, 16):
            for _ in range(2):
                recorded.publish(*KEYS)
            recorded.rescale(count)
            for _ in range(2):
                recorded.publish(*KEYS)
        recorded.check()
    finally:
        recorded.end()
    of_bytes = {key_slot(b"customer-%d" % number) for number in range(len(KEYS))}
    assert len(of_bytes & set(slots)) > len(KEYS) / 2
    recorded.cluster.validate()


def test_a_key_of_bytes_parks_and_is_unparked_by_its_text_in_order(parking: ParkingTopic) -> None:
    bad, good = KEYS[0], KEYS[1]

    def publish(count: int) -> None:
        for key in [bad, good] * count:
            value = b"%d" % parking.published[key]
            parking.published[key] += 1
            parking.cluster.publish(parking.topic, Stored(value, key=key, key_is_base64=True))

    parking.broken = {bad}
    publish(3)
    with parking.run():
        wait_until(lambda: parking.resting() == 3)
    # They are known again after a restart with other ranges. These decide the slot of the bytes.
    with parking.run(parallelism=64) as run:
        publish(2)
        wait_until(lambda: parking.resting() == 5)
        assert parking.handled[bad] == []
        run.source.rescale(5)
        parking.broken = set()
        assert run.source.unpark(bad)
        publish(2)
        wait_until(lambda: len(parking.handled[bad]) == 7)
        wait_until(lambda: len(parking.handled[good]) == 7)
        wait_until(lambda: parking.backlog() == 0 and parking.resting() == 0)
    assert parking.handled[bad] == parking.handled[good] == list(range(7))
