"""What does a live rescale cost: how long does a moved range pause, what comes twice or wrong?

4 ranges become 8, then 3, then 4 again and so on, while handlers work through a backlog. All is
judged from outside, by when handlers ran: by the checkers of :mod:`keyshard.verify`, and a pause is
the longest time around a rescale in which no handler ran for a part of the ring that moved.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench.loads import publish
from keyshard import KeyShardSource
from keyshard.core.assignment import Assignment, assign, reassign
from keyshard.core.hash_range import HashRange
from keyshard.devbroker import DevBroker
from keyshard.verify.checkers import key_order, mutual_exclusion
from keyshard.verify.history import Event
from keyshard.verify.workloads import Workload, create_partitioned_topic, parse_value

FIRST = 4
STEPS = (8, 3, 4, 8, 3, 4, 8, 3, 4, 8, 3)
SETTLE_S = 1.0
"""Time under load before each rescale and after the last, seconds."""
MESSAGES, KEYS, PARTITIONS = 100_000, 1_000, 5
LANES, HANDLER_S = 4, 0.005
DEADLINE_S = 180.0

_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Handled:
    """One run of a handler."""

    start_s: float
    end_s: float
    slot: int
    thread: str
    key: str
    seq: int
    topic: str
    partition: int
    position: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Move:
    """A part of the ring that changed hands, and from when to when it was about to."""

    hash_range: HashRange
    from_s: float
    to_s: float


@dataclass
class Recorder:
    """A handler that takes 5 ms and remembers when it ran for what."""

    handled: list[Handled] = field(default_factory=list)

    def __call__(self, message: Any) -> None:
        start = time.perf_counter()
        time.sleep(HANDLER_S)
        key, seq = parse_value(message.value)
        self.handled.append(
            Handled(
                start, time.perf_counter(), message.slot, threading.current_thread().name, key, seq,
                message.topic, message.partition, tuple(message.message_id),
            )
        )  # fmt: skip


def moved(old: Assignment, new: Assignment) -> list[HashRange]:
    """The parts of the ring that changed hands, each from one owner to one."""
    return sorted(
        HashRange(max(before.start, after.start), min(before.end, after.end))
        for owner, had in enumerate(old)
        for new_owner, has in enumerate(new)
        for before in had
        for after in has
        if owner != new_owner and max(before.start, after.start) <= min(before.end, after.end)
    )


def pause_s(move: Move, handled: Iterable[Handled]) -> float | None:
    """The longest time around a move in which no handler ran for its part of the ring.

    ``None`` when nothing of it was handled before or after.
    """
    runs = sorted((one.start_s, one.end_s) for one in handled if one.slot in move.hash_range)
    if not any(end < move.to_s for _, end in runs):
        return None
    if not any(start > move.from_s for start, _ in runs):
        return None
    longest, busy_until = 0.0, runs[0][1]
    for start, end in runs:
        if busy_until < move.to_s and start > move.from_s:
            longest = max(longest, start - busy_until)
        busy_until = max(busy_until, end)
    return longest


def history(handled: Sequence[Handled]) -> list[Event]:
    """``started`` and ``completed`` of each run, in the order of time."""
    return sorted(itertools.chain.from_iterable(map(_events, handled)), key=lambda event: event.t)


def _events(one: Handled) -> Iterator[Event]:
    ledger, entry, index = one.position
    for kind, t in (("started", one.start_s), ("completed", one.end_s)):
        yield Event(
            t, kind, topic=one.topic, partition=one.partition, ledger=ledger, entry=entry,
            index=index, key=one.key, seq=one.seq, worker=one.thread,
        )  # fmt: skip


def duplicates(handled: Sequence[Handled]) -> int:
    """Handler runs of a message beyond its first."""
    return len(handled) - len({(one.topic, one.partition, one.position) for one in handled})


def measure(broker: DevBroker) -> tuple[list[Handled], list[Move]]:
    """Rescale under load again and again."""
    create_partitioned_topic(broker.admin_url, "rescale", PARTITIONS)
    load = [key for key, _ in Workload(MESSAGES, KEYS).sequence()]
    publish(broker.service_url, "rescale", load)
    source = KeyShardSource(
        "rescale",
        service_url=broker.service_url,
        subscription="rescale",
        parallelism=FIRST,
        starting_position="earliest",
    )
    recorder = Recorder()
    runner = threading.Thread(
        target=lambda: source.run(recorder, lanes=LANES, executor="threads"), daemon=True
    )
    runner.start()
    moves: list[Move] = []
    try:
        wait_for_more(recorder, 1_000)
        now = assign(FIRST)
        for count in STEPS:
            time.sleep(SETTLE_S)
            following = reassign(now, count)
            from_s = time.perf_counter()
            source.rescale(count)
            to_s = time.perf_counter()
            of_step = [Move(part, from_s, to_s) for part in moved(now, following)]
            _console.print(
                f"{len(now)} to {count}: {(to_s - from_s) * 1e3:.0f} ms, {len(of_step)} parts "
                f"moved, {len(recorder.handled):,} messages handled"
            )
            moves += of_step
            now = following
        time.sleep(SETTLE_S)
        wait_for_more(recorder, 1_000)
        if len(recorder.handled) > MESSAGES - 5_000:
            raise RuntimeError("the backlog ended before the last rescale: nothing was measured")
    finally:
        source.stop()
        runner.join(DEADLINE_S)
    return recorder.handled, moves


def wait_for_more(recorder: Recorder, messages: int) -> None:
    """Wait until some more messages were handled."""
    deadline, wanted = time.monotonic() + 60, len(recorder.handled) + messages
    while len(recorder.handled) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(recorder.handled):,} messages were handled")
        time.sleep(0.01)


def run() -> dict[str, float]:
    """All figures."""
    with DevBroker() as broker:
        handled, moves = measure(broker)
    pauses = [pause * 1e3 for move in moves if (pause := pause_s(move, handled)) is not None]
    events = history(handled)
    cuts = statistics.quantiles(pauses, n=100, method="inclusive")
    return {
        "rescale_pause_p50_ms": statistics.median(pauses),
        "rescale_pause_p99_ms": cuts[98],
        "rescale_pauses": float(len(pauses)),
        "rescale_violations": float(
            key_order(events).violations + mutual_exclusion(events).violations
        ),
        "rescale_duplicates": float(duplicates(handled)),
        "rescale_handled": float(len(handled)),
    }
