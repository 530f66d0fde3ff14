"""Keys that were set as bytes: their range, their order through rescales, and their batches."""

from __future__ import annotations

import time
from base64 import b64encode
from collections import Counter

import pyarrow as pa

from handler_world import HandlerWorld
from helpers import config, wait_until
from keyshard import Message
from keyshard.broker.memory import Batching, MemoryBroker, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.coordinator.coordinator import Coordinator
from keyshard.core.ring.key_slot import key_slot
from keyshard.source import SourceBatch
from parking_place import Place

KEYS = [b64encode(b"customer-%d" % number).decode() for number in range(40)]


class BytesWorld(HandlerWorld):
    """A world whose producers set keys as bytes."""

    def publish(self, *keys: str) -> None:
        for key in keys:
            value = f"{key}:{self.per_key[key]}:".encode()
            self.cluster.publish(self.topic, Stored(value, key=key, key_is_base64=True))
            self.per_key[key] += 1


def coordinator_of(cluster: MemoryCluster, topic: str, parallelism: int) -> Coordinator:
    source = config(topic, parallelism=parallelism, on_misrouted="fail")
    return Coordinator(source, lambda: MemoryBroker(cluster))


def test_they_are_not_misrouted_and_a_batch_read_again_is_the_same() -> None:
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


def test_order_holds_while_ranges_that_left_it_open_become_ranges_that_tell() -> None:
    slots: Counter[int] = Counter()

    def handle(message: Message) -> None:
        assert message.slot is not None
        slots[message.slot] += 1
        time.sleep(0.000_5)

    world = BytesWorld(handle, parallelism=1, options={"lanes": 8})
    try:
        for count in (16, 5, 1, 9, 16):
            for _ in range(10):
                world.publish(*KEYS)
            world.rescale(count)
            for _ in range(10):
                world.publish(*KEYS)
        world.check()
    finally:
        world.end()
    of_bytes = {key_slot(b"customer-%d" % number) for number in range(len(KEYS))}
    assert len(of_bytes & set(slots)) > len(KEYS) / 2
    world.cluster.validate()


def test_a_key_of_bytes_parks_and_is_let_out_by_its_text_in_order() -> None:
    place = Place("parked-keys-of-bytes")
    bad, good = KEYS[0], KEYS[1]

    def publish(count: int) -> None:
        for key in [bad, good] * count:
            value = b"%d" % place.published[key]
            place.published[key] += 1
            place.cluster.publish(place.topic, Stored(value, key=key, key_is_base64=True))

    place.broken = {bad}
    publish(3)
    with place.run():
        wait_until(lambda: place.resting() == 3)
    # They are known again after a restart, with other ranges, which tell the slot of the bytes.
    with place.run(parallelism=64) as run:
        publish(2)
        wait_until(lambda: place.resting() == 5)
        assert place.handled[bad] == []
        run.source.rescale(5)
        place.broken = set()
        assert run.source.unpark(bad)
        publish(2)
        wait_until(lambda: len(place.handled[bad]) == 7)
        wait_until(lambda: len(place.handled[good]) == 7)
        wait_until(lambda: place.backlog() == 0 and place.resting() == 0)
    assert place.handled[bad] == place.handled[good] == list(range(7))
