"""Histories that programs which keep every promise could have written."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from keyshard.core.ring.hash_range import split_ring
from keyshard.core.ring.key_slot import key_slot
from keyshard.testing.verify.history import Event
from keyshard.testing.verify.workloads import Workload

TOPIC = "persistent://public/default/t"


class Script:
    """Writes events one after the other, a millisecond apart."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0.0

    def add(self, kind: str, message: dict[str, Any] | None = None, **fields: Any) -> Event:
        """One more event, about a message when one is given."""
        self.now += 0.001
        event = Event(self.now, kind, **{**(message or {}), **fields})
        self.events.append(event)
        return event


def messages(count: int, keys: int, partitions: int = 2) -> list[dict[str, Any]]:
    """Messages in publish order: one entry holds two of a key where they are neighbours."""
    result: list[dict[str, Any]] = []
    entries: defaultdict[int, int] = defaultdict(int)
    load = Workload(count, keys, entry_messages=2)
    for key, seq in load.sequence():
        partition = key_slot(f"home of {key}") % partitions
        if seq % 2 == 0:
            entries[partition] += 1
        result.append({
            "topic": TOPIC,
            "partition": partition,
            "ledger": 7,
            "entry": entries[partition],
            "index": seq % 2,
            "key": key,
            "seq": seq,
        })  # fmt: skip
    return result


def entries_of(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of messages, each once."""
    names = ("topic", "partition", "ledger", "entry")
    found = {tuple(row[name] for name in names) for row in rows}
    return [dict(zip(names, values, strict=True)) for values in sorted(found)]


def batch_host(seed: int = 0, count: int = 60, keys: int = 6, ranges: int = 3) -> list[Event]:
    """Micro-batches of a host that is killed at random steps, and starts batches again."""
    chance = random.Random(seed)
    script = Script()
    load = messages(count, keys)
    for message in load:
        script.add("sent", message)
    ring = [str(one) for one in split_ring(ranges)]
    start_host(script, ring)
    left, batch = load, 0
    while left:
        # Entries are not torn apart: a batch ends between two pairs.
        size = 2 * chance.randint(1, 10)
        rows, left = left[:size], left[size:]
        laid_out = [
            {**row, "part": part, "range": ring[part]}
            for part in range(ranges)
            for row in rows
            if key_slot(row["key"]) * ranges // 65_536 == part
        ]
        for _ in range(chance.choice([0, 0, 1, 2])):
            run(script, batch, by_tasks(laid_out, chance, broken_off=True))
            script.add("crashed", worker="host")
            start_host(script, ring)
        run(script, batch, by_tasks(laid_out, chance, broken_off=False))
        script.add("completed", batch=f"b{batch}", worker="host")
        script.add("checkpointed", batch=f"b{batch}", worker="host")
        for entry in entries_of(rows):
            script.add("acked", entry, worker="host")
        batch += 1
    script.add("faults_stopped")
    for one in ring:
        script.add("range_lost", range=one, worker="host")
    return script.events


def by_tasks(
    laid_out: Iterable[dict[str, Any]], chance: random.Random, *, broken_off: bool
) -> list[dict[str, Any]]:
    """Return rows in the order of tasks that run at the same time; each part keeps its order.

    Args:
        laid_out: The rows of a batch.
        chance: Decides whose turn it is.
        broken_off: Whether each part ends early.
    """
    parts: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in laid_out:
        parts[row["part"]].append(row)
    if broken_off:
        parts.update({i: rows[: chance.randint(0, len(rows))] for i, rows in parts.items()})
    turns = [i for i, rows in parts.items() for _ in rows]
    chance.shuffle(turns)
    left = {i: iter(rows) for i, rows in parts.items()}
    return [next(left[i]) for i in turns]


def start_host(script: Script, ring: Iterable[str]) -> None:
    for one in ring:
        script.add("range_gained", range=one, worker="host")


def run(script: Script, batch: int, rows: Iterable[dict[str, Any]]) -> None:
    script.add("started", batch=f"b{batch}", worker="host")
    for row in rows:
        script.add("delivered", row, batch=f"b{batch}", worker="host")


def handlers(seed: int = 0, count: int = 60, keys: int = 6) -> list[Event]:
    """Workers with one handler per key; ranges move, workers crash and go on from what is done."""
    chance = random.Random(seed)
    script = Script()
    load = messages(count, keys)
    queues: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for message in load:
        script.add("sent", message)
        queues[message["key"]].append(message)
    ranges, epoch = 2, 1
    assign(script, ranges, epoch)
    while any(queues.values()):
        key = chance.choice([key for key, queue in queues.items() if queue])
        at = key_slot(key) * ranges // 65_536
        where = {"worker": f"w{at}", "range": str(split_ring(ranges)[at]), "epoch": epoch}
        message = queues[key][0]
        script.add("delivered", message, **where)
        script.add("started", message, **where)
        fate = chance.random()
        if fate < 0.1:
            script.add("failed", message, **where)
        elif fate < 0.2:
            script.add("crashed", worker=where["worker"])
            epoch += 1
            script.add("range_gained", worker=where["worker"], range=where["range"], epoch=epoch)
        else:
            queues[key].pop(0)
            script.add("completed", message, **where)
            if message["index"] == 1:
                script.add("acked", entries_of([message])[0], worker=where["worker"])
            if fate < 0.3:
                for i, one in enumerate(split_ring(ranges)):
                    script.add("range_lost", worker=f"w{i}", range=str(one))
                ranges, epoch = chance.randint(1, 5), epoch + 1
                assign(script, ranges, epoch)
    script.add("faults_stopped")
    return script.events


def assign(script: Script, ranges: int, epoch: int) -> None:
    for i, one in enumerate(split_ring(ranges)):
        script.add("range_gained", worker=f"w{i}", range=str(one), epoch=epoch)
