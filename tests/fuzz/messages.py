"""Messages with hostile content and metadata: each arrives once, as it was sent, by every way."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from random import Random
from typing import Any

from keyshard import KeyShardSource
from keyshard.broker.memory import Batching, Message
from tests.fuzz.promises import Cluster, Ended, promise
from tests.fuzz.values import text
from tests.support.deadlines import deadline, in_time

_EVENTS_MS = (
    0, 1, -1, 1_700_000_000_000, 1_700_000_000_000_000, 1_700_000_000_000_000_000, 2**63 - 1,
    2**64 - 1, 253_402_300_799_999, 253_402_300_800_000, -62_135_596_800_001,
)  # fmt: skip
_WAIT_S = deadline(10)


def _drawn(random: Random, number: int) -> Message:
    keys = (None, "", "a2V5", "k1", "k2", text(random)[:5_000])
    return Message(
        b"%d:" % number + random.randbytes(random.choice((0, 1, 100, 40_000))),
        key=random.choice(keys),
        ordering_key=random.choice((None, None, None, "", "o1", text(random)[:100])),
        event_ms=random.choice(_EVENTS_MS),
        properties={
            text(random)[:200]: text(random)[:200] for _ in range(random.choice((0, 0, 1, 3)))
        }
        | random.choice(({}, {"keyshard.original": "x"}, {"keyshard.letter": text(random)[:50]})),
    )


def messages(random: Random, name: str) -> None:
    """Check that every stored message is read once, in the order of its key."""
    with Cluster(name, partitions=random.choice((0, 1, 3))) as cluster:
        sent: list[Message] = []
        for _ in range(random.randint(1, 6)):
            some = [_drawn(random, len(sent) + i) for i in range(random.randint(1, 5))]
            sent += some
            cluster.memory.publish(
                cluster.topic, *some, batching=random.choice((Batching.NONE, Batching.BY_KEY))
            )
        source = KeyShardSource(
            "orders", subscription="keyshard",
            service_url=cluster.url, parallelism=random.choice((1, 2, 7)),
            starting_position="earliest",
        )  # fmt: skip
        way = random.choice((_opened, _batched, _handled))
        got = Ended(lambda: way(source, len(sent), random), f"{len(sent)} messages").join()
        promise(isinstance(got, list), f"{way.__name__}: {got}")
        values = [found[0] for found in got]
        promise(
            Counter(values) == Counter(message.value for message in sent),
            f"{way.__name__}: {len(values)} of {len(sent)} came, {len(set(values))} different",
        )
        known = {message.value: message for message in sent}
        order: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for found, partition, key, properties in got:
            message = known[found]
            promise(key == message.key, f"key {message.key!r:.80} came as {key!r:.80}")
            kept = {name: one for name, one in properties.items() if name != "__eventTime"}
            promise(kept == message.properties, f"properties of {found[:20]!r} changed")
            if message.routing_key is not None:
                order[partition, message.routing_key].append(int(found.split(b":")[0]))
        for where, numbers in order.items():
            promise(numbers == sorted(numbers), f"{way.__name__}: {where} came as {numbers}")
        promise(cluster.backlog() == 0, f"{way.__name__}: a backlog of {cluster.backlog()} is left")


def _rows(records: Any) -> list[tuple[Any, ...]]:
    return [
        (row["value"], row["__partition"], row["__key"], dict(row["__properties"] or ()))
        for row in records.to_pylist()
    ]


def _opened(source: KeyShardSource, count: int, random: Random) -> list[tuple[Any, ...]]:
    got: list[tuple[Any, ...]] = []
    end = time.monotonic() + _WAIT_S
    with source.open() as stream:
        while len(got) < count:
            in_time(end, f"{len(got)} of {count} messages came")
            batch = stream.next_batch(timeout_s=0.5, rows_max=random.choice((None, 1, 3)))
            if batch is not None:
                for records in batch:
                    got += _rows(records)
                stream.commit(batch)
    return got


def _batched(source: KeyShardSource, count: int, random: Random) -> list[tuple[Any, ...]]:
    got: list[tuple[Any, ...]] = []
    for batch in source.batches(max_rows=random.choice((1, 4, 5_000)), max_wait_s=0.05):
        got += _rows(batch.records)
        batch.ack()
        if len(got) >= count:
            break
    return got


def _handled(source: KeyShardSource, count: int, random: Random) -> list[tuple[Any, ...]]:
    got: list[tuple[Any, ...]] = []

    def handle(message: Any) -> None:
        got.append((message.value, message.partition, message.key, dict(message.properties)))
        if len(got) >= count:
            source.stop()

    async def handle_async(message: Any) -> None:
        handle(message)

    source.run(random.choice((handle, handle_async)), lanes=random.choice((1, 3)))
    return got
