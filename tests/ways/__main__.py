"""``python -m tests.ways``: random topics, read in every way, compared with their messages."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import SparkSession

import spark_adapter
from tests.streams.cluster import Broker
from tests.ways.check import disagreement, verdict
from tests.ways.draw import WAYS, Publisher, readings
from tests.ways.kinds import KINDS
from tests.ways.produce import JavaProducers
from tests.ways.read import Reader

TOGETHER = 2
"""Ways in which a topic is read."""
SHOWN_MAX = 5
"""Most defects of a seed that are shown."""


def session() -> SparkSession:
    """A local session that knows the formats."""
    os.environ["RAY_ADDRESS"] = "local"  # not another one that runs here
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    # The progress without rows at the end of a query has the counts of its last batch.
    builder = builder.config("spark.sql.streaming.noDataProgressEventInterval", "0")
    builder = builder.config("spark.python.authenticate.socketTimeout", "60s")
    spark = builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    spark_adapter.register(spark)
    return spark


class Run(NamedTuple):
    """One run of the program."""

    broker: Broker
    reader: Reader
    java: JavaProducers
    kind: str | None
    way: str | None
    done: Counter[str]
    """Number of readings by way and outcome."""

    def hold(self, seed: int) -> list[str]:
        """Publish a topic and read it; returns the defects."""
        drawn = random.Random(seed)
        made = Publisher(drawn, self.broker, self.java).published(f"ways-{seed}", self.kind)
        found, read = [], []
        try:
            whole = made.read_as == made.topic.name
            possible = [way for way in WAYS if whole or not way.startswith("table")]
            for how in readings(drawn, [self.way] if self.way else possible, made, TOGETHER):
                out = self.reader.read(made, how)
                self.done[f"{how.way}, {how.transport}: {out.code or 'whole'}"] += 1
                found += [f"{how}\n    {one}" for one in verdict(made, how, out)]
                read.append((how, out))
            found += [one for pair in combinations(read, 2) for one in disagreement(*pair)]
        finally:
            self.broker.delete(made.topic.name, made.topic.partitions)
        self.done[f"{made.kind} by {made.producer}"] += 1
        # The first defects of a seed tell the others.
        return [f"BAD seed {seed}: {made.text()}\n    {one}" for one in found[:SHOWN_MAX]]


def main() -> int:
    """Run the draws; return 0 if every message came, or an error named its absence."""
    parser = argparse.ArgumentParser(prog="python -m tests.ways", description=__doc__)
    parser.add_argument("--draws", type=int, default=20, help="number of topics (default: 20)")
    parser.add_argument("--seed", type=int, help="of the first; default: another each time")
    parser.add_argument("--kind", choices=tuple(KINDS), help="of all values; default: drawn")
    parser.add_argument("--way", choices=WAYS, help="the only one; default: two of them are drawn")
    given = parser.parse_args()
    first = random.SystemRandom().randrange(10**9) if given.seed is None else given.seed
    print(f"{given.draws} draws from seed {first}", flush=True)
    ways: Counter[str] = Counter()
    bad, began = [], time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        Broker(Path(folder) / "broker") as broker,
        closing(JavaProducers(broker.service_url, Path(folder))) as java,
    ):
        spark = session()
        reader = Reader(broker, spark, Path(folder))
        run = Run(broker, reader, java, given.kind, given.way, ways)
        for seed in range(first, first + given.draws):
            problems = run.hold(seed)
            for problem in problems:
                print(problem, flush=True)
            bad += [seed] if problems else []
            if not (seed + 1 - first) % 20:
                print(f"{seed + 1 - first} draws, {time.monotonic() - began:.0f} s", flush=True)
        spark.stop()
    for name, times in sorted(ways.items()):
        print(f"{times:6,} {name}")
    print(f"{given.draws} draws from seed {first}: {len(bad)} bad {bad}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
