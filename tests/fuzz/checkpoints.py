"""Damaged checkpoints: each is refused by a clear error, or read as one whose JSON is stable."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

from keyshard import KeyShardSource
from keyshard.broker.memory import Message
from keyshard.core.position.checkpoint import Checkpoint
from keyshard.errors import KeyShardError
from tests.fuzz.promises import Cluster, Ended, promise, refused
from tests.fuzz.values import text, value
from tests.support.deadlines import deadline

_RUNS = (
    "7:0-99999999999999", "0:0", "1:5-2", "1:0-3,1:2-9", "9:1,8:1", "-1:0", "1:-1", "1:0:0", "a:b",
    "1:0-1 ", "1:" + "9" * 5_000, ",".join(f"1:{2 * i}" for i in range(3_000)), "¹:²", "1_0:0",
)  # fmt: skip


def damaged(random: Random, good: str) -> str:
    """A text near a good checkpoint, or far from one."""
    if random.random() < 0.3:
        data = bytearray(good.encode())
        for _ in range(random.randint(1, 4)):
            where = random.randrange(len(data))
            data[where : where + random.randint(0, 3)] = random.randbytes(random.randint(0, 3))
        return data.decode(errors="replace")
    if random.random() < 0.15:
        return random.choice((text(random), "[" * 100_000, '{"a":' * 50_000, "9" * 10_000, "null"))
    tree = json.loads(good)
    for _ in range(random.randint(1, 3)):
        _damage(random, tree)
    return json.dumps(tree)


def _damage(random: Random, tree: Any) -> None:
    while True:
        names = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not names:
            return
        name = random.choice(names)
        if isinstance(tree[name], (dict, list)) and random.random() < 0.8:
            tree = tree[name]
            continue
        how = random.random()
        if how < 0.2 and isinstance(tree, dict):
            del tree[name]
        elif how < 0.3 and isinstance(tree, dict):
            tree[text(random)[:1_000]] = tree[name]
        elif how < 0.7 and isinstance(tree[name], str) and ":" in tree[name]:
            tree[name] = random.choice(_RUNS)
        else:
            tree[name] = _plain(value(random))
        return


def _plain(one: Any) -> Any:
    """Return the JSON value nearest to a value."""
    try:
        json.dumps(one)
    except (TypeError, ValueError, RuntimeError):
        return deepcopy(INSTEAD)
    return deepcopy(one)


INSTEAD = {"a": [None, -1, 1e308, "x"]}
"""Stands for what JSON cannot say."""


def checkpoints(random: Random, name: str) -> None:
    """A damaged checkpoint is refused and nothing is acknowledged, or it is a checkpoint."""
    with Cluster(name, partitions=2) as cluster:
        for i in range(random.randint(2, 12)):
            cluster.memory.publish(cluster.topic, Message(b"%d" % i, key=f"k{i % 3}"))
        source = KeyShardSource(
            "orders", subscription="keyshard",
            service_url=cluster.url, parallelism=2, starting_position="earliest",
            replay_timeout_ms=2_000, admin_url=random.choice((None, cluster.url)),
        )  # fmt: skip
        with source.open() as stream:
            batch = stream.next_batch(timeout_s=deadline(30), rows_max=random.randint(1, 12))
            assert batch is not None
            good = batch.checkpoint
            if random.random() < 0.5:
                stream.commit(batch)
        before = cluster.backlog()
        bad = damaged(random, good)
        says = f"checkpoint {bad[:300]!r}"
        read = refused(lambda: Checkpoint.from_json(bad), says)
        if not isinstance(read, KeyShardError):
            again = read.to_json()
            promise(
                Checkpoint.from_json(again).to_json() == again, f"{says}: is not canonical: {again}"
            )

        def go_on() -> None:
            with source.open(bad) as stream:
                stream.next_batch(timeout_s=0.3)

        result = Ended(go_on, says).join()
        if isinstance(read, KeyShardError):
            promise(isinstance(result, KeyShardError), f"{says}: open took what nobody can read")
        if isinstance(result, KeyShardError):
            promise(cluster.backlog() == before, f"{says}: refused, and something was acknowledged")
