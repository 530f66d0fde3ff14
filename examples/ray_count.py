"""Count the messages of each key, with actors of Ray.

::

    keyshard broker start
    keyshard produce orders --messages 20000 --keys 500
    python -m examples.ray_count orders --messages 20000

Actors count their messages, and this program adds up. Without ``--messages`` it goes on until
Ctrl-C. What it has counted is acknowledged: the next run counts what comes then.
"""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import suppress

import pyarrow as pa

import ray_adapter
from keyshard import KeyShardSource


def count(rows: pa.RecordBatch) -> pa.Table:
    """Count the rows of each key in a batch."""
    return pa.Table.from_batches([rows]).group_by("__key").aggregate([([], "count_all")])


def main() -> None:
    """Print each key with its number of messages, the most frequent first."""
    parser = argparse.ArgumentParser(prog="python -m examples.ray_count", description=__doc__)
    parser.add_argument("topic")
    parser.add_argument("--service-url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--subscription", default="ray-count")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--messages", type=int, help="end after this number of messages")
    arguments = parser.parse_args()
    source = KeyShardSource(
        arguments.topic,
        subscription=arguments.subscription,
        service_url=arguments.service_url,
        starting_position="earliest",
    )
    counts: Counter[str] = Counter()
    job = ray_adapter.run(
        source, count, takes="arrow", parallelism=arguments.actors, max_rows=5_000
    )
    with job, suppress(KeyboardInterrupt):
        for table in job:
            for key, number in zip(*(column.to_pylist() for column in table), strict=True):
                counts[key] += number
            if counts.total() == arguments.messages:
                job.drain()
    for key, number in counts.most_common():
        print(key, number)


if __name__ == "__main__":
    main()
