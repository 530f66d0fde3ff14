"""What does one process that coordinates pay for 10,000 ranges over 1,000 topic partitions?

The real code decides, without a broker, a network or content: the window of a source, its cuts,
commits and checkpoint, the planner of assignments, and the supervisor of a worker process. Messages
are entries of one message each. Times are processor time of the process that runs the source: the
shortest of ``TURNS``, with the garbage collector off.

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
from functools import partial
from random import Random
from typing import Any, NamedTuple

from bench.embedded import peak_rss_kb
from keyshard.broker.port import StartPosition, SubscriptionSpec
from keyshard.consumers.receiver import OwnedRange, RangeConsumer
from keyshard.core.ack_gaps import GapEvidence
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
from keyshard.core.window.admission import Budget
from keyshard.core.window.receiver_queue_size import ReceiverQueueSize
from keyshard.core.window.window import Window
from keyshard.errors import WorkerUnreachableError
from keyshard.workers.consumer import EntryHolders, RemoteConsumer
from keyshard.workers.encoding import DeliveredTotals, WorkerDelivery
from keyshard.workers.supervisor import WorkerSupervisor
from keyshard.workers.worker import Worker

RANGES, PARTITIONS, WORKERS = 10_000, 1_000, 1_000
TURNS = 5
CUT_RANGES, CUT_MESSAGES = 16, 3
"""Ranges, and messages of an entry, of :func:`cut`."""
FEW, MANY, HOLES = 1, 10, 10
"""Entries per topic partition in a small and in a large cut, and ack gaps in each."""
HELD = 200
"""Entries per topic partition that are in flight when a worker dies; enough to fill a window."""
DEATHS = 100
"""Owners that leave one after the other."""
BACK_S = 120.0
"""Longest wait for the consumers of a dead worker to be back, seconds."""
BUDGET = Budget(200_000, 256 * 1024 * 1024, checkpoint_bytes_max=2**30)
"""The default window, with a checkpoint of any size."""
LEDGER = 1_000_000
SEED = 13


def _block(entry: int, slot: int, messages: int = 1) -> EntryBlock:
    return EntryBlock(
        EntryId(LEDGER, entry), batch_size=messages, batched=messages > 1, indices=range(messages),
        slot=slot, mixed_slots=None, publish_ms=1_700_000_000_000, payload_bytes=100 * messages,
        content=None, start=0,
    )  # fmt: skip


class Steps(NamedTuple):
    """Seconds of the steps of a batch."""

    receive: float
    cut: float
    release: float


class Topic:
    """A window over topic partitions, and entries that arrive in it.

    Args:
        ranges: Number of ranges.
        partitions: Number of topic partitions.
        messages: Messages of each entry.
    """

    def __init__(self, ranges: int, partitions: int, messages: int = 1) -> None:
        self._messages = messages
        self.where = [TopicPartition("persistent://public/default/t", i) for i in range(partitions)]
        self.window = Window(Checkpoint("cluster", "billing", ranges), ranges, BUDGET)
        self._ranges = ranges
        self._random = Random(SEED)
        self._next = dict.fromkeys(self.where, 0)
        for one in self.where:
            self.window.add_partition(one)
            # As after an audit of the broker's cursor: no entry is missing before this one.
            self.window.prove(one, GapEvidence(base=EntryId(LEDGER, 0)))

    def arrive(self, where: Sequence[TopicPartition], count: int, *, every: int = 1) -> float:
        """Let ``count`` entries arrive in each topic partition; ``every`` 2 leaves ack gaps.

        Returns:
            The seconds that the window takes.
        """
        came: list[tuple[TopicPartition, int, EntryBlock]] = []
        for one in self._random.sample(where, len(where)):
            for _ in range(count):
                slot = self._random.randrange(RING_SIZE)
                index = range_index(slot, self._ranges)
                came.append((one, index, _block(self._next[one], slot, self._messages)))
                self._next[one] += every

        def receive() -> None:
            for one, index, block in came:
                self.window.receive(one, index, [block])

        return _timed(receive)[0]

    def batch_s(self, where: Sequence[TopicPartition], count: int) -> Steps:
        """Return the seconds of each step of a batch of ``count`` entries per topic partition."""
        received = self.arrive(where, count)
        cut, end = _timed(self.window.cut)
        assert end is not None
        return Steps(received, cut, _timed(lambda: self.window.release(end))[0])

    def cut_s(self, where: Sequence[TopicPartition], count: int) -> float:
        """Return the seconds of a cut of ``count`` entries per topic partition."""
        return self.batch_s(where, count).cut

    def commit_s(self, where: Sequence[TopicPartition], count: int) -> float:
        """Return the seconds of a commit of completed entries, with the checkpoint's text."""
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
    """Return the processor seconds of this process, and the result."""
    began = time.process_time()
    result = what()
    return time.process_time() - began, result


def _shortest(what: Callable[[], float]) -> float:
    """Return the shortest of some turns. A turn before them completes the previous work."""
    what()
    gc.collect()
    gc.disable()
    try:
        return min(what() for _ in range(TURNS))
    finally:
        gc.enable()


def cuts(ranges: int, partitions: int) -> dict[str, float]:
    """Measure cuts and commits, of all topic partitions and of one, and the checkpoint."""
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
    with_ack_gaps = len(topic.window.newest.to_json())
    return {
        "cut_all_ms": few * 1e3,
        "cut_one_ms": one * 1e3,
        "cut_entry_us": (many - few) / (MANY - FEW) / partitions * 1e6,
        "commit_all_ms": commit * 1e3,
        "commit_one_ms": commit_one * 1e3,
        "checkpoint_bytes": text,
        "checkpoint_gap_bytes": (with_ack_gaps - text) / HOLES / partitions,
    }


def cut() -> dict[str, float]:
    """Measure the steps of a batch: cost per topic partition, and per additional entry in it."""
    topic = Topic(CUT_RANGES, PARTITIONS, CUT_MESSAGES)
    figures: dict[str, float] = {}
    for step in Steps._fields:

        def seconds(count: int, step: str = step) -> float:
            return float(getattr(topic.batch_s(topic.where, count), step))

        few, many = (_shortest(partial(seconds, count)) for count in (FEW, MANY))
        figures[f"{step}_partition_us"] = few / PARTITIONS * 1e6
        figures[f"{step}_entry_us"] = (many - few) / (MANY - FEW) / PARTITIONS * 1e6
    return figures


def moves(ranges: int, partitions: int, workers: int) -> dict[str, float]:
    """Measure the loss of one owner: the plan, and its adoption by a window with entries."""
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
    """A worker that answers everything at once, until it is killed."""

    def __init__(self, name: str) -> None:
        self.kind = self.name = name
        self._dead = threading.Event()
        self._new: deque[int] = deque()
        self.subscribed = 0

    def request(self, command: str, timeout_s: float, **arguments: Any) -> Any:  # noqa: ARG002
        if command == "subscribe":
            self.subscribed += 1
            self._new.append(arguments["number"])

    def take(self, taken: Mapping[int, DeliveredTotals]) -> list[WorkerDelivery]:  # noqa: ARG002
        if self._dead.wait(0.0 if self._new else 0.02):
            raise WorkerUnreachableError(f"{self.name} was killed.")
        new = [self._new.popleft() for _ in range(len(self._new))]
        return [WorkerDelivery(number, (), connected=True) for number in new]

    def kill(self) -> None:
        self._dead.set()

    def leave(self) -> None:
        self._dead.set()

    def end(self, _timeout_s: float) -> None:
        self._dead.set()


def death(ranges: int, partitions: int, workers: int, held: int = HELD) -> dict[str, float]:
    """Measure the death of a worker process with its share of ranges, in all topic partitions.

    Args:
        ranges: Number of ranges.
        partitions: Number of topic partitions.
        workers: Number of workers that share the ranges.
        held: Entries of each topic partition that are in flight, over all workers.
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
    supervisor = WorkerSupervisor(start, 1.0, "keyshard-worker-0")
    kept: list[RangeConsumer] = []
    tracemalloc.start()
    try:
        for one in where:
            holders = EntryHolders()
            for index, hash_range in enumerate(mine):
                wanted = SubscriptionSpec(one, "billing", hash_range, f"range-{index}", 20)
                consumer = supervisor.subscribe(wanted, StartPosition.EARLIEST, holders)
                owned = OwnedRange(one, index, hash_range)
                kept.append(RangeConsumer(owned, consumer, ReceiverQueueSize(1_000_000, 1_000)))
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
        supervisor.close(time.monotonic() + 5)
    return {
        "death_consumers": len(kept),
        "death_lost_ms": (replaced_s[0] - began) * 1e3,
        "death_back_ms": back_s * 1e3,
        "death_subscribed_again": started[1].subscribed,
        "consumer_bytes": size,
    }


def _take_in_hand(consumers: Collection[Any], held: int, workers: int) -> None:
    """Put ``held`` entries per topic partition in flight: the worker's share, and the others'."""
    for consumer in consumers:
        assert isinstance(consumer, RemoteConsumer)
        holders = consumer._holders
        if holders._holders:
            continue
        others = RemoteConsumer(consumer.spec, consumer._supervisor, -1, holders)
        own = max(1, held // workers)
        holders.took(others, [_block(entry, 0).id for entry in range(own, held)])
        holders.took(consumer, [_block(entry, 0).id for entry in range(own)])


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + BACK_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the consumers did not return within {BACK_S:.0f} s")
        time.sleep(0.01)


def run(
    ranges: int = RANGES, partitions: int = PARTITIONS, workers: int = WORKERS
) -> dict[str, float]:
    """Return all figures of one size."""
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
