"""What does one process that coordinates pay for 10,000 ranges over 1,000 topic partitions?

The real decisions without a broker, a network or content: the window of a source, its cuts, commits
and checkpoint, the planner of assignments, and the side of a worker process that its source has.
Messages are entries of one message each. Times are processor time of the one process that runs the
source, the shortest of some turns, with the garbage collector off.

A worker process that dies is replaced, and the new one gets all its ranges: nothing moves between
the others. Its consumers are asked for again, here from a worker that answers at once.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Any

from bench.embedded import peak_rss_kb
from keyshard.broker.hosted.consumer import Holders, HostedConsumer, Wanted
from keyshard.broker.hosted.hosting import WorkerHosting
from keyshard.broker.hosted.wire import Delivery
from keyshard.broker.hosted.worker import Worker
from keyshard.broker.port import StartPosition
from keyshard.core.holes.settling import Proofs
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.assignment import (
    Assignment,
    assign,
    fewest_moved,
    moved_ranges,
    moved_slots,
    reassign,
    slot_owners,
)
from keyshard.core.ring.hash_range import RING_SIZE, range_index, split_ring
from keyshard.core.window.budget import Budget
from keyshard.core.window.client_queue import ClientQueue
from keyshard.core.window.window import Window
from keyshard.errors import WorkerUnreachableError
from keyshard.worker.receiver import OwnedRange, RangeConsumer

RANGES, PARTITIONS, WORKERS = 10_000, 1_000, 1_000
TURNS = 5
FEW, MANY, HOLES = 1, 10, 10
"""Entries of each topic partition in a small and in a large cut; holes in each."""
HELD = 200
"""Entries of each topic partition that are in hand when a worker dies: as many as fill a window."""
DEATHS = 100
"""Owners that leave one after the other."""
BACK_S = 120.0
"""Longest wait until the consumers of a worker that died are back, seconds."""
BUDGET = Budget(200_000, 256 * 1024 * 1024, checkpoint_bytes_max=2**30)
"""The default window; the checkpoint may become as large as it is."""
LEDGER = 1_000_000
SEED = 13


def _block(entry: int, slot: int) -> EntryBlock:
    return EntryBlock(
        EntryId(LEDGER, entry), batch_size=1, batched=False, indices=range(1), slot=slot,
        mixed_slots=None, publish_ms=1_700_000_000_000, payload_bytes=100, content=None, start=0,
    )  # fmt: skip


class Topic:
    """A window over so many topic partitions, and entries that come into it.

    Args:
        ranges: Number of ranges.
        partitions: Number of topic partitions.
    """

    def __init__(self, ranges: int, partitions: int) -> None:
        self.where = [TopicPartition("persistent://public/default/t", i) for i in range(partitions)]
        self.window = Window(Checkpoint("cluster", "billing", ranges), ranges, BUDGET)
        self._ranges = ranges
        self._random = Random(SEED)
        self._next = dict.fromkeys(self.where, 0)
        for one in self.where:
            self.window.add_partition(one)
            # As an audit of what the broker has tells it: nothing is missing before.
            self.window.prove(one, Proofs(base=EntryId(LEDGER, 0)))

    def arrive(self, where: Sequence[TopicPartition], count: int, *, every: int = 1) -> None:
        """So many entries of each of some topic partitions; ``every`` 2: with holes between."""
        for one in self._random.sample(where, len(where)):
            for _ in range(count):
                slot = self._random.randrange(RING_SIZE)
                index = range_index(slot, self._ranges)
                self.window.receive(one, index, _block(self._next[one], slot))
                self._next[one] += every

    def cut_s(self, where: Sequence[TopicPartition], count: int) -> float:
        """A cut of so many entries of each."""
        self.arrive(where, count)
        seconds, end = _timed(self.window.cut)
        assert end is not None
        self.window.release(end)
        return seconds

    def commit_s(self, where: Sequence[TopicPartition], count: int) -> float:
        """The same entries as handlers complete them, with the text that is written down."""
        self.arrive(where, count)
        completed: dict[TopicPartition, list[EntryId]] = {}
        for one, _, block in self.window.take():
            completed.setdefault(one, []).append(block.id)

        def commit() -> None:
            self.window.plan_completed(completed)
            self.window.newest.to_json()
            self.window.release_completed()

        return _timed(commit)[0]


def _timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of this process, and the result."""
    began = time.process_time()
    result = what()
    return time.process_time() - began, result


def _shortest(what: Callable[[], float]) -> float:
    """Of some turns; the first is none of them, because it ends what the one before left."""
    what()
    gc.collect()
    gc.disable()
    try:
        return min(what() for _ in range(TURNS))
    finally:
        gc.enable()


def cuts(ranges: int, partitions: int) -> dict[str, float]:
    """Cuts and commits, of all topic partitions and of one, and the checkpoint."""
    topic = Topic(ranges, partitions)
    few, many, one, commit, commit_one = (
        _shortest(lambda how=how, where=where, count=count: how(where, count))  # type: ignore[misc]
        for how, where, count in (
            (topic.cut_s, topic.where, FEW),
            (topic.cut_s, topic.where, MANY),
            (topic.cut_s, topic.where[:1], FEW),
            (topic.commit_s, topic.where, FEW),
            (topic.commit_s, topic.where[:1], FEW),
        )
    )
    topic.cut_s(topic.where, FEW)
    text = len(topic.window.newest.to_json())
    topic.arrive(topic.where, HOLES + 1, every=2)
    assert topic.window.cut() is not None
    with_holes = len(topic.window.newest.to_json())
    return {
        "cut_all_ms": few * 1e3,
        "cut_one_ms": one * 1e3,
        "cut_entry_us": (many - few) / (MANY - FEW) / partitions * 1e6,
        "commit_all_ms": commit * 1e3,
        "commit_one_ms": commit_one * 1e3,
        "checkpoint_bytes": text,
        "checkpoint_hole_bytes": (with_holes - text) / HOLES / partitions,
    }


def moves(ranges: int, partitions: int, workers: int) -> dict[str, float]:
    """One owner of so many goes: planned, and adopted by a window with entries."""
    figures: dict[str, float] = {}
    for name, owners in (("workers", workers), ("ranges", ranges)):
        before = assign(owners)
        seconds = _shortest(lambda a=before: _timed(lambda: reassign(a, len(a) - 1))[0])  # type: ignore[misc]
        after = reassign(before, owners - 1)
        figures[f"plan_{name}_ms"] = seconds * 1e3
        figures[f"plan_{name}_moved_slots"] = moved_slots(before, after)
        figures[f"plan_{name}_fewest_slots"] = fewest_moved(before, owners - 1)
    left = assign(workers)
    deaths = min(DEATHS, workers - 1)
    for _ in range(deaths):
        left = reassign(left, len(left) - 1)
    figures["plan_deaths_pieces"] = sum(map(len, left)) / len(left)
    topic = Topic(ranges, partitions)
    topic.arrive(topic.where, MANY)

    def adopt(assignment: Assignment) -> float:
        def all_of_it() -> None:
            new = reassign(assignment, len(assignment) - 1)
            moved_ranges(assignment, new)
            topic.window.reassign(slot_owners(new), BUDGET)

        return _timed(all_of_it)[0]

    figures["reassign_ms"] = _shortest(lambda: adopt(assign(workers))) * 1e3
    return figures


class InstantWorker(Worker):
    """Answers everything at once, until it is killed."""

    def __init__(self, name: str) -> None:
        self.kind = self.name = name
        self._dead = threading.Event()
        self._new: deque[int] = deque()
        self.subscribed = 0

    def ask(self, command: str, _timeout_s: float, **arguments: Any) -> Any:
        if command == "subscribe":
            self.subscribed += 1
            self._new.append(arguments["number"])

    def take(self, _taken: Mapping[int, int]) -> list[Delivery]:
        if self._dead.wait(0.0 if self._new else 0.02):
            raise WorkerUnreachableError(f"{self.name} was killed.")
        new = [self._new.popleft() for _ in range(len(self._new))]
        return [Delivery(number, (), connected=True) for number in new]

    def kill(self) -> None:
        self._dead.set()

    def leave(self) -> None:
        self._dead.set()

    def end(self, _timeout_s: float) -> None:
        self._dead.set()


def death(ranges: int, partitions: int, workers: int, held: int = HELD) -> dict[str, float]:
    """A worker process dies that has its share of the ranges, in every topic partition.

    Args:
        ranges: Number of ranges.
        partitions: Number of topic partitions.
        workers: How many share the ranges.
        held: Entries of each topic partition that are in hand, over all workers.
    """
    started: list[InstantWorker] = []
    replaced = threading.Event()
    replaced_s: list[float] = []

    def start(_stop: threading.Event) -> Worker:
        if started:
            replaced_s.append(time.process_time())
            replaced.set()
        started.append(InstantWorker(f"worker {len(started)}"))
        return started[-1]

    mine = split_ring(ranges)[: max(1, ranges // workers)]
    where = [TopicPartition("persistent://public/default/t", i) for i in range(partitions)]
    hosting = WorkerHosting(start, 1.0, "keyshard-worker-0")
    kept: list[RangeConsumer] = []
    tracemalloc.start()
    try:
        for one in where:
            holders = Holders()
            for index, hash_range in enumerate(mine):
                wanted = Wanted(one, "billing", hash_range, f"range-{index}", 20)
                consumer = hosting.subscribe(wanted, StartPosition.EARLIEST, holders)
                owned = OwnedRange(one, index, hash_range)
                kept.append(RangeConsumer(owned, consumer, ClientQueue(1_000_000, 1_000)))
        size = tracemalloc.get_traced_memory()[0] / len(kept)
        tracemalloc.stop()
        _take_in_hand([one.consumer for one in kept], held, workers)
        gc.collect()
        gc.disable()
        began = time.process_time()
        started[0].kill()
        _wait(replaced.is_set)
        _wait(lambda: all(one.consumer.is_connected() for one in kept))
        back_s = time.process_time() - began
    finally:
        gc.enable()
        tracemalloc.stop()
        hosting.close(time.monotonic() + 5)
    return {
        "death_consumers": len(kept),
        "death_lost_ms": (replaced_s[0] - began) * 1e3,
        "death_back_ms": back_s * 1e3,
        "death_subscribed_again": started[1].subscribed,
        "consumer_bytes": size,
    }


def _take_in_hand(consumers: Collection[Any], held: int, workers: int) -> None:
    """Each topic partition has so many entries in hand; a share of the worker's, by all others."""
    for consumer in consumers:
        assert isinstance(consumer, HostedConsumer)
        holders = consumer._holders
        if holders._holders:
            continue
        others = HostedConsumer(consumer.wanted, consumer._hosting, -1, holders)
        own = max(1, held // workers)
        holders.took(others, [_block(entry, 0).id for entry in range(own, held)])
        holders.took(consumer, [_block(entry, 0).id for entry in range(own)])


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BACK_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the consumers are not back within {BACK_S:.0f} s")
        time.sleep(0.01)


def run(
    ranges: int = RANGES, partitions: int = PARTITIONS, workers: int = WORKERS
) -> dict[str, float]:
    """All figures of one size."""
    figures: dict[str, float] = {"ranges": ranges, "partitions": partitions, "workers": workers}
    figures |= cuts(ranges, partitions)
    figures |= moves(ranges, partitions, workers)
    figures |= death(ranges, partitions, workers)
    return figures | {"memory_mb": peak_rss_kb() / 1024}


def main() -> None:
    """Print the figures of a size as JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale_sim", description=__doc__)
    for name, default in ("ranges", RANGES), ("partitions", PARTITIONS), ("workers", WORKERS):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default:,}")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
