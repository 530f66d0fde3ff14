"""What does a live rescale cost: how long do moved ranges pause, are there duplicates?

4 ranges become 8, then 3, then 4 again and so on, while handlers work. Their load is published
meanwhile by a producer in another process, or (figures with ``_backlog``) before. A pause is the
time that the rescale reports for a range that moved. A gap is measured from outside: the longest
time around a rescale in which no handler ran for a part of the ring that moved. The checkers of
:mod:`keyshard.testing.verify` check order, and that one handler at a time works on a key.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from bench.release import PULSAR
from keyshard import KeyShardSource
from keyshard.core.ring.assignment import Assignment, assign, reassign
from keyshard.core.ring.hash_range import HashRange
from keyshard.testing.devbroker import DevBroker
from keyshard.testing.verify.checkers import key_order, mutual_exclusion
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.workloads import (
    Workload,
    create_partitioned_topic,
    parse_value,
    produce,
)

FIRST = 4
STEPS = (8, 3, 4, 8, 3, 4, 8, 3, 4, 8, 3)
SETTLE_S = 1.0
"""Time under load before each rescale and after the last, seconds."""
MESSAGES, KEYS, PARTITIONS = 60_000, 1_000, 5
RATE_PER_S = 1_500.0
LANES, HANDLER_S = 8, 0.005
PART_SLOTS_MIN = 1_024
"""Smallest part of the ring with a figure, slots; smaller parts have too few messages."""
DEADLINE_S = 180.0

_console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of a handler."""

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
    """A part of the ring that changed its owner, with start and end of the rescale."""

    hash_range: HashRange
    from_s: float
    to_s: float


@dataclass
class Recorder:
    """A handler that takes 5 ms and records its calls."""

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
    """Return the parts of the ring that changed their owner, each from one owner to one."""
    return sorted(
        HashRange(max(before.start, after.start), min(before.end, after.end))
        for owner, had in enumerate(old)
        for new_owner, has in enumerate(new)
        for before in had
        for after in has
        if owner != new_owner and max(before.start, after.start) <= min(before.end, after.end)
    )


def pause_s(move: Move, handled: Iterable[Handled]) -> float | None:
    """Return the gap of a move: the longest time around it without a handler for its part.

    ``None`` if no message of the part was handled before or after.
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
    """Return ``started`` and ``completed`` of each call, by time."""
    return sorted(itertools.chain.from_iterable(map(_events, handled)), key=lambda event: event.t)


def _events(one: Handled) -> Iterator[Event]:
    ledger, entry, index = one.position
    for kind, t in (("started", one.start_s), ("completed", one.end_s)):
        yield Event(
            t, kind, topic=one.topic, partition=one.partition, ledger=ledger, entry=entry,
            index=index, key=one.key, seq=one.seq, worker=one.thread,
        )  # fmt: skip


def duplicates(handled: Sequence[Handled]) -> int:
    """Count the handler calls of a message beyond its first."""
    return len(handled) - len({(one.topic, one.partition, one.position) for one in handled})


def measure(broker: DevBroker, topic: str) -> tuple[list[Handled], list[Move], list[float]]:
    """Rescale repeatedly under load; return calls, moves and reported pauses (ms)."""
    source = KeyShardSource(
        topic,
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
    pauses: list[float] = []
    try:
        wait_for_more(recorder, 1_000)
        now = assign(FIRST)
        for count in STEPS:
            time.sleep(SETTLE_S)
            following = reassign(now, count)
            from_s = time.perf_counter()
            report = source.rescale(count)
            to_s = time.perf_counter()
            pauses += [pause.pause_ms for pause in report.pauses]
            moves += [
                Move(part, from_s, to_s)
                for part in moved(now, following)
                if len(part) >= PART_SLOTS_MIN
            ]
            _console.print(
                f"{topic}, {len(now)} to {count}: {(to_s - from_s) * 1e3:.0f} ms, "
                f"{len(recorder.handled):,} messages handled"
            )
            now = following
        time.sleep(SETTLE_S)
        wait_for_more(recorder, 1_000)
    finally:
        source.stop()
        runner.join(DEADLINE_S)
    return recorder.handled, moves, pauses


def live(broker: DevBroker) -> dict[str, float]:
    """Measure while a producer publishes 1,500 messages per second."""
    create_partitioned_topic(broker.admin_url, "live", PARTITIONS)
    with subprocess.Popen(
        [sys.executable, "-m", "bench.rescale", broker.service_url, "live"],
    ) as producer:
        try:
            return figures("", *measure(broker, "live"))
        finally:
            producer.terminate()


def backlog(broker: DevBroker) -> dict[str, float]:
    """Measure with everything published before."""
    create_partitioned_topic(broker.admin_url, "backlog", PARTITIONS)
    load = Workload(MESSAGES, KEYS, batching="none")
    produce(load, broker.service_url, "backlog")
    return figures("_backlog", *measure(broker, "backlog"))


def wait_for_more(recorder: Recorder, messages: int) -> None:
    """Wait until the handler has handled ``messages`` more messages."""
    deadline, wanted = time.monotonic() + 60, len(recorder.handled) + messages
    while len(recorder.handled) < wanted:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {len(recorder.handled):,} messages were handled")
        time.sleep(0.01)


def figures(
    suffix: str, handled: Sequence[Handled], moves: Sequence[Move], pauses: Sequence[float]
) -> dict[str, float]:
    """Return all figures of one load."""
    gaps = [gap * 1e3 for move in moves if (gap := pause_s(move, handled)) is not None]
    events = history(handled)
    return {
        f"rescale_pause_p50_ms{suffix}": statistics.median(pauses),
        f"rescale_pause_p99_ms{suffix}": _p99(pauses),
        f"rescale_gap_p50_ms{suffix}": statistics.median(gaps),
        f"rescale_gap_p99_ms{suffix}": _p99(gaps),
        f"rescale_violations{suffix}": float(
            key_order(events).violations + mutual_exclusion(events).violations
        ),
        f"rescale_duplicates{suffix}": float(duplicates(handled)),
        f"rescale_pauses{suffix}": float(len(pauses)),
        f"rescale_handled{suffix}": float(len(handled)),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def run() -> dict[str, float]:
    """Return all figures."""
    with DevBroker(PULSAR) as broker:
        return live(broker) | backlog(broker)


if __name__ == "__main__":
    produce(Workload(10**6, KEYS, batching="none", rate_per_s=RATE_PER_S), sys.argv[1], sys.argv[2])
