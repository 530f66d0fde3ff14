"""How does the cost of operations in memory grow, from size 1,000 to 1,000,000?

Each figure is the processor time for all elements of a size, in seconds. There are two exponents of
the size: one fitted to all sizes, and one from the second largest to the largest. 1 is linear; n
log n shows as 1.1. Data larger than the processor's caches also raises the exponent. The yardstick
shows by how much: it only walks through as many messages. The garbage collector is off during the
measurement. It walks through all objects whenever a share of them is new, which would hide the cost
of the code. Its share at the largest size is a separate figure. No broker is needed.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

from rich.console import Console

from keyshard.core.lanes.lanes import Lanes
from keyshard.core.message import Message, MessageId
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.core.position.entry import EntryBlock, EntryId, TopicPartition
from keyshard.core.ring.assignment import assign, moved_ranges, reassign, slot_owners
from keyshard.core.ring.hash_range import RING_SIZE
from keyshard.core.ring.key_slot import key_slot
from keyshard.core.window.admission import Budget
from keyshard.core.window.window import Window
from keyshard.dead_letters.topic_state import TopicState

SIZES = (1_000, 10_000, 100_000, 1_000_000)
LONGEST_S = 60.0
"""A size is skipped if the smaller sizes predict a longer time, seconds."""
ALL_S = 480.0
"""Processor time after which no measurement starts, including preparation, seconds."""
AGAIN_S = 0.2
"""Shorter measurements are repeated ``TURNS`` times, and the shortest counts, seconds."""
TURNS = 5
RANGES, PARTITIONS, COMMITS, TEXTS, PER_KEY = 10, 5, 100, 10, 10

_console = Console(stderr=True)
_WHEN = datetime(2024, 1, 1, tzinfo=timezone.utc)


def _message(number: int, key: str) -> Message:
    return Message(
        b"", key, None, MessageId(1, number, 0), "t", 0, publish_time=_WHEN, event_time=None,
        properties={}, slot=key_slot(key), redelivered=False,
    )  # fmt: skip


def _block(entry: int) -> EntryBlock:
    return EntryBlock(
        EntryId(1, entry), batch_size=1, batched=False, indices=range(1), slot=entry % RING_SIZE,
        mixed_slots=None, publish_ms=1, payload_bytes=100, content=None, start=0,
    )  # fmt: skip


def _partitions(count: int) -> list[TopicPartition]:
    return [TopicPartition("persistent://public/default/t", i) for i in range(count)]


def _window(partitions: list[TopicPartition]) -> Window:
    window = Window(Checkpoint("c", "s", RANGES), RANGES, Budget(10**9, 2**50))
    for where in partitions:
        window.add_partition(where)
    return window


def _filled(entries: int) -> Window:
    """Return a window with entries of a few topic partitions."""
    where = _partitions(PARTITIONS)
    window = _window(where)
    for number in range(entries):
        at, entry = number % PARTITIONS, number // PARTITIONS
        window.receive(where[at], number % RANGES, [_block(entry)])
    return window


def _lanes(keys: int) -> Lanes:
    owners = slot_owners(assign(RANGES))
    lanes = Lanes(RANGES, 16, owners.__getitem__)
    where = _partitions(1)[0]
    for number in range(keys):
        message = _message(number, f"k{number}")
        lanes.add(where, 0, EntryId(1, number), [message])
    return lanes


Measured = Iterator[None]
"""Prepares, then yields when the measurement starts, and again when it ends."""


def yardstick(size: int) -> Measured:
    """Distribute ``size`` messages of different keys; linear, so its exponent shows the caches."""
    messages = {f"k{number}": _message(number, f"k{number}") for number in range(size)}
    owners = slot_owners(assign(RANGES))
    yield
    found: list[list[tuple[str, int, Message]]] = [[] for _ in range(RANGES)]
    for key, message in messages.items():
        assert message.slot is not None
        found[owners[message.slot]].append((key, message.message_id.entry, message))
    yield


def lanes(size: int) -> Measured:
    """Run ``size`` keys through the lanes, one message each."""
    full = _lanes(size)
    yield
    while (work := full.next(0.0)) is not None:
        full.completed(work)
    full.pop_completed()
    yield


def lanes_reassign(size: int) -> Measured:
    """Move ranges while ``size`` keys wait in lanes."""
    full = _lanes(size)
    owners = slot_owners(reassign(assign(RANGES), RANGES + 1))
    yield
    full.reassign(RANGES + 1, owners.__getitem__)
    yield


def window_reassign(size: int) -> Measured:
    """Move ranges while ``size`` entries wait in the window."""
    full = _filled(size)
    owners = slot_owners(assign(RANGES + 1))
    yield
    full.reassign(owners, full.budget)
    yield


def assignment(size: int) -> Measured:
    """Add one range to ``size`` ranges, at most as many as the ring has slots."""
    count = min(size, RING_SIZE - 1)
    before = assign(count)
    yield
    moved_ranges(before, reassign(before, count + 1))
    yield


def cut(size: int) -> Measured:
    """Cut ``size`` entries into batches."""
    full = _filled(size)
    yield
    while (end := full.cut()) is not None:
        full.release(end)
    yield


def commit(size: int) -> Measured:
    """Commit ``size`` entries in a hundred commits."""
    full = _filled(size)
    taken = [(where, block.id) for where, _, block in full.take()]
    yield
    for number in range(COMMITS):
        completed: dict[TopicPartition, list[EntryId]] = {}
        for where, entry_id in taken[number * size // COMMITS : (number + 1) * size // COMMITS]:
            completed.setdefault(where, []).append(entry_id)
        assert not full.plan_completed(completed)
        full.release_completed()
    yield


def _beside(window: Window, where: TopicPartition, commits: int, *, text: bool) -> None:
    """Make ``commits`` commits of one entry in one topic partition."""
    for entry in range(10, 10 + commits):
        window.receive(where, 0, [_block(entry)])
        window.plan_completed({where: [block.id for _, _, block in window.take()]})
        if text:
            window.newest.to_json()
        window.release_completed()


def _many(size: int) -> tuple[Window, TopicPartition]:
    partitions = _partitions(size)
    window = _window(partitions)
    for where in partitions:
        window.receive(where, 0, [_block(0)])
    window.plan_completed({where: [EntryId(1, 0)] for where, _, _ in window.take()})
    window.release_completed()
    window.receive(partitions[0], 0, [_block(1)])
    window.plan_completed({where: [block.id] for where, _, block in window.take()})
    window.release_completed()
    return window, partitions[0]


def commit_beside_partitions(size: int) -> Measured:
    """Make a hundred commits in one of ``size`` topic partitions, without a checkpoint file."""
    window, where = _many(size)
    yield
    _beside(window, where, COMMITS, text=False)
    yield


def commit_text_beside_partitions(size: int) -> Measured:
    """Make ten commits with the checkpoint's text, which grows with ``size``."""
    window, where = _many(size)
    yield
    _beside(window, where, TEXTS, text=True)
    yield


def fold(size: int) -> Measured:
    """Add ``size`` dead letters, ten of each key, to the topic state, and mark them as replayed."""
    where = _partitions(1)[0]
    yield
    parked = TopicState()
    for number in range(size):
        key = f"k{number % max(1, size // PER_KEY)}"
        parked.dead_letter(EntryId(9, number), key, where, MessageId(1, number, 0))
    for number in range(size):
        key = f"k{number % max(1, size // PER_KEY)}"
        parked.replayed(EntryId(9, size + number), key, where, MessageId(1, number, 0))
    yield


def fold_one_key(size: int) -> Measured:
    """Add ``size`` dead letters of one key to the topic state, and mark them as replayed."""
    where = _partitions(1)[0]
    yield
    parked = TopicState()
    for number in range(size):
        parked.dead_letter(EntryId(9, number), "k", where, MessageId(1, number, 0))
    for number in range(size):
        parked.replayed(EntryId(9, size + number), "k", where, MessageId(1, number, 0))
    yield


ALL: tuple[tuple[Callable[[int], Measured], int], ...] = (
    (yardstick, 10**6), (lanes, 10**6), (lanes_reassign, 10**6), (window_reassign, 10**6),
    (assignment, 10**5),
    (cut, 10**6), (commit, 10**6), (commit_beside_partitions, 10**5),
    (commit_text_beside_partitions, 10**5), (fold, 10**6), (fold_one_key, 10**6),
)  # fmt: skip
"""Measurements and their largest sizes; a million topic partitions may not fit in memory."""


def exponent(seconds: dict[int, float]) -> float:
    """Return the slope of a line fitted to the logarithms of sizes and seconds."""
    points = [(math.log(size), math.log(max(one, 1e-6))) for size, one in seconds.items()]
    if len(points) < 2:
        return math.nan
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return float(above / sum((x - mean_x) ** 2 for x, _ in points))


def measure(what: Callable[[int], Measured], size: int, *, collector: bool = False) -> float:
    """Return the processor time of the measured part, seconds."""
    seconds = _measured(what, size, collector)
    if seconds >= AGAIN_S:
        return seconds
    return min(seconds, *(_measured(what, size, collector) for _ in range(TURNS - 1)))


def _measured(what: Callable[[int], Measured], size: int, collector: bool) -> float:
    steps = what(size)
    next(steps)
    gc.collect()
    if not collector:
        gc.disable()
    try:
        began = time.process_time()
        next(steps)
        return time.process_time() - began
    finally:
        gc.enable()


def run() -> dict[str, float]:
    """Return the seconds of every size and the exponents, as far as there is time."""
    found: dict[str, dict[int, float]] = {what.__name__: {} for what, _ in ALL}
    figures: dict[str, float] = {}
    began = time.process_time()
    for size in SIZES:
        for what, size_max in ALL:
            seconds = found[what.__name__]
            if size > size_max:
                continue
            foreseen_s = 10 ** exponent(seconds) * max(seconds.values()) if seconds else 0.0
            if foreseen_s > LONGEST_S or time.process_time() - began > ALL_S:
                _console.print(f"{what.__name__}: left out {size:,}, which would take too long")
                continue
            seconds[size] = measure(what, size)
            with_collector = measure(what, size, collector=True)
            figures[f"growth_{what.__name__}_with_collector_s"] = with_collector
            _console.print(
                f"{what.__name__}: {size:,} in {seconds[size]:.3f} s ({with_collector:.3f} s "
                "with the garbage collector)"
            )
    for name, seconds in found.items():
        figures |= {f"growth_{name}_s_{size}": one for size, one in seconds.items()}
        figures[f"growth_{name}_exponent"] = exponent(seconds)
        last = dict(list(seconds.items())[-2:])
        figures[f"growth_{name}_exponent_last"] = exponent(last)
        _console.print(f"{name}: exponent {exponent(seconds):.2f}, at the end {exponent(last):.2f}")
    return figures
