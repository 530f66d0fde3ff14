"""Messages of a parked key that come again: dropped once replayed, whenever they come."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from keyshard import KeyShardSource, Message
from keyshard.broker.memory import Batching, MemoryCluster
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.entry import EntryId, TopicPartition
from tests.helpers import present, wait_until
from tests.support.deadlines import deadline
from tests.support.memory_scalable_topic import KEYS, TOPIC
from tests.support.parking_topic import TWO_ATTEMPTS, ParkingTopic, numbers

LETTERS = 5


class Repeating:
    """A parked key; the broker will redeliver some originals of its dead letters.

    Args:
        orders: The topic.
        forgotten: How many of the originals a crash of the broker brings back.
        moved: Whether newer messages of the key lie in the other topic partition.
    """

    def __init__(self, parking: ParkingTopic, forgotten: int, *, moved: bool) -> None:
        self.orders = parking
        self.stops_at = -1
        """Before which message the handler waits."""
        self.waits, self.go_on = threading.Event(), threading.Event()
        old, new = parking.cluster.partitions(parking.topic)
        self._partitions = {False: old, True: new if moved else old}
        self._forgotten = forgotten
        self._originals: list[EntryId] = []

    def handle(self, message: Message) -> None:
        number = int(present(message.value))
        if not self.orders.broken and number == self.stops_at and message.key == "b":
            self.waits.set()
            assert self.go_on.wait(deadline(20))
        self.orders.handle(message)

    def publish(self, count: int, *, newer: bool = False) -> None:
        for _ in range(count):
            seq = self.orders.published["b"]
            self.orders.published["b"] += 1
            where = self._partitions[newer]
            ((_, entry),) = self.orders.cluster.publish(where, Stored(b"%d" % seq, "b"))
            self._originals.append(entry)

    def park(self) -> None:
        """A process gives the key dead letters, and ends; the next one has never seen the
        originals.

        The acknowledgements of the last ones are not written yet.
        """
        parking, kept = self.orders, LETTERS - self._forgotten
        parking.broken = {"b"}
        with parking.run(self.handle):
            self.publish(kept)
            wait_until(lambda: len(parking.dead_letters()) == kept and parking.backlog() == 0)
            parking.cluster.unload(parking.topic)
            self.publish(self._forgotten)
            wait_until(lambda: len(parking.dead_letters()) == LETTERS and parking.backlog() == 0)
        parking.broken = set()

    def come_again(self) -> None:
        """The last originals are delivered once more; they have come when this returns."""
        where = self._partitions[False]
        # Newer messages have come before.
        self._mark(self._partitions[True])
        entries = self._originals[LETTERS - self._forgotten : LETTERS]
        count = self.orders.cluster.deliver_again(where, "keyshard", *entries)
        assert count == self._forgotten
        self._mark(where)

    def _mark(self, where: TopicPartition) -> None:
        seq = self.orders.published["a"]
        self.orders.published["a"] += 1
        self.orders.cluster.publish(where, Stored(b"%d" % seq, "a"))
        wait_until(lambda: seq in self.orders.handled["a"])

    def end(self) -> None:
        """Everything is done, once and in order."""
        parking = self.orders
        self.publish(1, newer=True)
        wait_until(lambda: parking.published["b"] - 1 in parking.handled["b"])
        wait_until(lambda: parking.backlog() == 0)
        assert parking.handled["b"] == list(range(parking.published["b"])), "each once, in order"
        assert numbers(parking.dead_letters())[:LETTERS] == list(range(LETTERS))


@pytest.fixture(params=[False, True], ids=["stays", "moves"])
def moved(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("forgotten", [2, LETTERS])
@pytest.mark.simulated
def test_a_message_redelivered_before_its_key_is_unparked_runs_once(
    parking: ParkingTopic, forgotten: int, moved: bool
) -> None:
    key = Repeating(parking, forgotten, moved=moved)
    key.park()
    with parking.run(key.handle) as run:
        key.come_again()
        run.source.unpark("b")
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
@pytest.mark.simulated
def test_a_message_redelivered_during_the_replay_behind_newer_ones_runs_once(
    parking: ParkingTopic, forgotten: int, moved: bool
) -> None:
    key = Repeating(parking, forgotten, moved=moved)
    key.stops_at = LETTERS - 1
    key.park()
    with parking.run(key.handle) as run:
        run.source.unpark("b")
        assert key.waits.wait(deadline(20))
        key.publish(3, newer=True)
        key.come_again()
        key.go_on.set()
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
@pytest.mark.simulated
def test_a_message_redelivered_behind_the_replay_and_a_newer_one_runs_once(
    parking: ParkingTopic, forgotten: int, moved: bool
) -> None:
    key = Repeating(parking, forgotten, moved=moved)
    key.stops_at = LETTERS + 1
    key.park()
    with parking.run(key.handle) as run:
        run.source.unpark("b")
        wait_until(lambda: not run.source.status()["parked"])
        key.publish(3, newer=True)
        assert key.waits.wait(deadline(20))
        key.come_again()
        key.go_on.set()
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
@pytest.mark.simulated
def test_a_message_redelivered_after_a_restart_that_unparks_its_key_runs_once(
    parking: ParkingTopic, forgotten: int, moved: bool
) -> None:
    key = Repeating(parking, forgotten, moved=moved)
    key.park()
    parking.cluster.crash()
    key.publish(3, newer=True)
    with parking.run(key.handle) as run:
        run.source.unpark("b")
        key.end()


@pytest.mark.simulated
def test_a_newer_dead_letter_runs_behind_a_redelivery_also_after_a_restart(
    parking: ParkingTopic,
) -> None:
    where = parking.cluster.partitions(parking.topic)[0]
    bad, waits, go_on = {1}, threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        number = int(present(message.value))
        if number in bad:
            raise ValueError("cannot handle it")
        if number == 1 and parking.handled["b"].count(0) == 2 and not go_on.is_set():
            waits.set()
            assert go_on.wait(deadline(20))
            return
        parking.handle(message)

    with parking.run(handle):
        # Later acknowledgements are not written for a while.
        parking.cluster.publish(where, Stored(b"7", "a"))
        wait_until(lambda: parking.handled["a"] and parking.backlog() == 0)
        for number in range(2):
            parking.cluster.publish(where, Stored(b"%d" % number, "b"))
        wait_until(lambda: len(parking.dead_letters()) == 1 and parking.backlog() == 0)
    bad.clear()
    with parking.run(handle, drain_timeout_s=0.1) as run:
        run.source.unpark("b")
        wait_until(lambda: parking.handled["b"] == [0, 1])
        wait_until(lambda: not run.source.status()["parked"])
        # 1. The broker forgets both: the older one runs behind the newer one.
        parking.cluster.crash()
        assert waits.wait(deadline(20))
        # 2. It is acknowledged, and the process ends before the newer one ran again.
        wait_until(lambda: parking.backlog() == 1)
    go_on.set()
    with parking.run(handle):
        wait_until(lambda: parking.backlog() == 0)
    assert parking.handled["b"] == [0, 1, 0, 1]


def test_a_start_knows_a_done_dead_letter_until_its_original_is_in_a_checkpoint(
    parking: ParkingTopic, tmp_path: Path
) -> None:
    """Found by the simulation, seed 2554813133985.

    1. A message parks, and another one of its entry is with a handler: no checkpoint has the entry.
    2. Its dead letter is replayed, the marker is stored, and the process stops.
    3. The entry comes again to the next process. It must know of the dead letter.
    """
    where = parking.cluster.partitions(parking.topic)[0]
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.key == "slow" and not go_on.is_set():
            begun.set()
            assert go_on.wait(deadline(20))
            return
        parking.handle(message)

    checkpoint = str(tmp_path / "checkpoint.json")
    parking.broken = {"b"}
    with parking.run(handle, checkpoint=checkpoint, drain_timeout_s=0.1) as run:
        both = Stored(b"0", "b"), Stored(b"0", "slow")
        parking.cluster.publish(where, *both, batching=Batching.MIXED)
        wait_until(lambda: len(parking.dead_letters()) == 1 and begun.is_set())
        parking.broken = set()
        run.source.unpark("b")
        wait_until(lambda: not run.source.status()["parked"])
    go_on.set()
    with parking.run(handle, checkpoint=checkpoint):
        wait_until(lambda: parking.backlog() == 0)
    assert parking.handled == {"b": [0], "slow": [0]}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_dead_letter_of_a_segment_runs_behind_a_redelivery_of_its_parent(
    tmp_path: Path, checkpointed: bool
) -> None:
    """No entry is completed before the restart, so both messages of the key come again."""
    name = f"parked-in-segments-{checkpointed}"
    cluster, url = MemoryCluster.named(name), f"memory://{name}"
    cluster.scalable.create(TOPIC)
    source = KeyShardSource(
        TOPIC, subscription="s", service_url=url, admin_url=url, starting_position="earliest",
        discovery_interval_ms=50,
    )  # fmt: skip
    got: list[int] = []
    bad, go_on = {1}, threading.Event()

    def handle(message: Message) -> None:
        if message.key != KEYS[0]:
            assert go_on.wait(deadline(20))
        elif (number := int(present(message.value))) in bad:
            raise ValueError("cannot handle it")
        else:
            got.append(number)

    def publish(number: int) -> None:
        graph = cluster.scalable.graph(TOPIC)
        slow = next(key for key in KEYS[1:] if graph.segment_of(key) == graph.segment_of(KEYS[0]))
        both = Stored(b"%d" % number, KEYS[0]), Stored(b"", slow)
        cluster.publish(TOPIC, *both, batching=Batching.MIXED)

    def backlog() -> int:
        return sum(cluster.backlog(one, "s") for one in cluster.scalable.graph(TOPIC).partitions)

    options: dict[str, Any] = {"retry": TWO_ATTEMPTS, "drain_timeout_s": 0.1}
    if checkpointed:
        options["checkpoint"] = str(tmp_path / "checkpoint.json")
    with source.running(handle, **options):
        publish(0)
        wait_until(lambda: got == [0])
        cluster.scalable.split(TOPIC, 0)
        publish(1)
        wait_until(lambda: source.status()["parked"])
        bad.clear()
        source.unpark(KEYS[0])
        wait_until(lambda: got == [0, 1] and not source.status()["parked"])
    go_on.set()
    with source.running(handle, **options):
        wait_until(lambda: not backlog())
    assert got == [0, 1, 0, 1]
