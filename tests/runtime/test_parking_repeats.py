"""Messages of a parked key that come again: dropped once replayed, whenever they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import wait_until
from keyshard import Message
from keyshard.broker.memory import Batching
from keyshard.broker.memory import Message as Stored
from keyshard.core.position.entry import EntryId, TopicPartition
from parking_place import Place, numbers

LETTERS = 5


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(f"{request.node.originalname}-{time.monotonic_ns()}")
    yield made
    made.cluster.validate()


class Repeating:
    """A key of which letters rest, some of whose originals the broker will deliver again.

    Args:
        place: Where.
        forgotten: How many of the originals a crash of the broker brings back.
        moved: Whether newer messages of the key lie in the other topic partition.
    """

    def __init__(self, place: Place, forgotten: int, *, moved: bool) -> None:
        self.place = place
        self.stops_at = -1
        """Before which message the handler waits."""
        self.waits, self.go_on = threading.Event(), threading.Event()
        old, new = place.cluster.partitions(place.topic)
        self._partitions = {False: old, True: new if moved else old}
        self._forgotten = forgotten
        self._originals: list[EntryId] = []

    def handle(self, message: Message) -> None:
        if not self.place.broken and int(message.value) == self.stops_at and message.key == "b":
            self.waits.set()
            assert self.go_on.wait(20)
        self.place.handle(message)

    def publish(self, count: int, *, newer: bool = False) -> None:
        for _ in range(count):
            seq = self.place.published["b"]
            self.place.published["b"] += 1
            where = self._partitions[newer]
            ((_, entry),) = self.place.cluster.publish(where, Stored(b"%d" % seq, "b"))
            self._originals.append(entry)

    def park(self) -> None:
        """A process gives the key letters, and ends; the next one has never seen the originals.

        The acknowledgements of the last ones are not written yet.
        """
        place, kept = self.place, LETTERS - self._forgotten
        place.broken = {"b"}
        with place.run(self.handle):
            self.publish(kept)
            wait_until(lambda: len(place.letters()) == kept and place.backlog() == 0)
            place.cluster.unload(place.topic)
            self.publish(self._forgotten)
            wait_until(lambda: len(place.letters()) == LETTERS and place.backlog() == 0)
        place.broken = set()

    def come_again(self) -> None:
        """The last originals are delivered once more; they have come when this returns."""
        where = self._partitions[False]
        # What is newer has come before.
        self._mark(self._partitions[True])
        entries = self._originals[LETTERS - self._forgotten : LETTERS]
        count = self.place.cluster.deliver_again(where, "keyshard", *entries)
        assert count == self._forgotten
        self._mark(where)

    def _mark(self, where: TopicPartition) -> None:
        seq = self.place.published["a"]
        self.place.published["a"] += 1
        self.place.cluster.publish(where, Stored(b"%d" % seq, "a"))
        wait_until(lambda: seq in self.place.handled["a"])

    def end(self) -> None:
        """Everything is done, once and in order."""
        place = self.place
        self.publish(1, newer=True)
        wait_until(lambda: place.published["b"] - 1 in place.handled["b"])
        wait_until(lambda: place.backlog() == 0)
        assert place.handled["b"] == list(range(place.published["b"])), "each once, in order"
        assert numbers(place.letters())[:LETTERS] == list(range(LETTERS))


@pytest.fixture(params=[False, True], ids=["stays", "moves"])
def moved(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("forgotten", [2, LETTERS])
def test_what_comes_again_before_its_key_is_let_out_runs_once(
    place: Place, forgotten: int, moved: bool
) -> None:
    key = Repeating(place, forgotten, moved=moved)
    key.park()
    with place.run(key.handle) as run:
        key.come_again()
        run.source.unpark("b")
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
def test_what_comes_again_during_the_replay_behind_newer_ones_runs_once(
    place: Place, forgotten: int, moved: bool
) -> None:
    key = Repeating(place, forgotten, moved=moved)
    key.stops_at = LETTERS - 1
    key.park()
    with place.run(key.handle) as run:
        run.source.unpark("b")
        assert key.waits.wait(20)
        key.publish(3, newer=True)
        key.come_again()
        key.go_on.set()
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
def test_what_comes_again_behind_the_replay_and_a_newer_one_runs_once(
    place: Place, forgotten: int, moved: bool
) -> None:
    key = Repeating(place, forgotten, moved=moved)
    key.stops_at = LETTERS + 1
    key.park()
    with place.run(key.handle) as run:
        run.source.unpark("b")
        wait_until(lambda: not run.source.status()["parked"])
        key.publish(3, newer=True)
        assert key.waits.wait(20)
        key.come_again()
        key.go_on.set()
        key.end()


@pytest.mark.parametrize("forgotten", [2, LETTERS])
def test_what_comes_again_after_a_restart_that_lets_its_key_out_runs_once(
    place: Place, forgotten: int, moved: bool
) -> None:
    key = Repeating(place, forgotten, moved=moved)
    key.park()
    place.cluster.crash()
    key.publish(3, newer=True)
    with place.run(key.handle) as run:
        run.source.unpark("b")
        key.end()


def test_a_newer_letter_runs_behind_what_came_again_also_when_the_process_ends_between(
    place: Place,
) -> None:
    where = place.cluster.partitions(place.topic)[0]
    bad, waits, go_on = {1}, threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if int(message.value) in bad:
            raise ValueError("cannot handle it")
        if int(message.value) == 1 and place.handled["b"].count(0) == 2 and not go_on.is_set():
            waits.set()
            assert go_on.wait(20)
            return
        place.handle(message)

    with place.run(handle):
        # What is acknowledged behind this one is not written for a while.
        place.cluster.publish(where, Stored(b"7", "a"))
        wait_until(lambda: place.handled["a"] and place.backlog() == 0)
        for number in range(2):
            place.cluster.publish(where, Stored(b"%d" % number, "b"))
        wait_until(lambda: len(place.letters()) == 1 and place.backlog() == 0)
    bad.clear()
    with place.run(handle, drain_timeout_s=0.1) as run:
        run.source.unpark("b")
        wait_until(lambda: place.handled["b"] == [0, 1])
        wait_until(lambda: not run.source.status()["parked"])
        # 1. The broker forgets both: the older one runs behind the newer one.
        place.cluster.crash()
        assert waits.wait(20)
        # 2. It is acknowledged, and the process ends before the newer one ran again.
        wait_until(lambda: place.backlog() == 1)
    go_on.set()
    with place.run(handle):
        wait_until(lambda: place.backlog() == 0)
    assert place.handled["b"] == [0, 1, 0, 1]


def test_a_letter_that_is_done_is_known_to_the_next_start_while_its_original_is_in_no_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    """Found by the simulation, seed 2554813133985.

    1. A message parks, and another one of its entry is with a handler: no checkpoint has the entry.
    2. Its letter is replayed, the marker is stored, and the process stops.
    3. The entry comes again to the next process, which must know of the letter.
    """
    where = place.cluster.partitions(place.topic)[0]
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        if message.key == "slow" and not go_on.is_set():
            begun.set()
            assert go_on.wait(20)
            return
        place.handle(message)

    checkpoint = str(tmp_path / "checkpoint.json")
    place.broken = {"b"}
    with place.run(handle, checkpoint=checkpoint, drain_timeout_s=0.1) as run:
        both = Stored(b"0", "b"), Stored(b"0", "slow")
        place.cluster.publish(where, *both, batching=Batching.MIXED)
        wait_until(lambda: len(place.letters()) == 1 and begun.is_set())
        place.broken = set()
        run.source.unpark("b")
        wait_until(lambda: not run.source.status()["parked"])
    go_on.set()
    with place.run(handle, checkpoint=checkpoint):
        wait_until(lambda: place.backlog() == 0)
    assert place.handled == {"b": [0], "slow": [0]}
